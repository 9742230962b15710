"""Makes a LoRA adapter ready to be sent: checks its config, and names its tensors as PEFT does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from bus._lora import MAX_CONFIG_BYTES, AdapterInit, adapter_backend
from bus._weight_transfer.formats import encode
from bus.errors import UsageError
from trainer_agent._weights.any_source import as_source
from trainer_agent._weights.source import PairSource

if TYPE_CHECKING:
    from trainer_agent._weights.source import Weights

REQUIRED_KEYS: Final = ("r", "lora_alpha", "target_modules")
# Trained beside lora_A and lora_B: whole modules, DoRA's magnitudes, embeddings, biases.
_LOST: Final = re.compile(r"\.(?:modules_to_save|lora_(?:magnitude_vector|embedding_[AB]|bias))\.")
# A module has every tensor under the name of PEFT's own adapter; a checkpoint leaves that out.
_OF_MODULE: Final = re.compile(r"(\.lora_[AB])\.[^.]+\.weight\Z")


class Adapter:
    """One version of an adapter, checked by the trainer.

    Args:
        name: the adapter's name at engines and their clients.
        source: its tensors by PEFT's names, or a module with LoRA parameters.
        config: PEFT's ``adapter_config``.

    Attributes:
        backend: the transfer backend that brings this adapter, such as ``lora:NAME``.
        config: PEFT's ``adapter_config``, as JSON.
        source: the tensors by the names that PEFT gives them in a checkpoint.

    Raises:
        UsageError: the name, the config or the source can't be an adapter's.
    """

    def __init__(self, name: str, source: Weights, config: Mapping[str, Any]) -> None:
        self.backend = adapter_backend(name)
        self.config = config_text(config)
        self.source = PairSource(adapter_tensors(source))

    def opens_like(self, other: Adapter | None) -> bool:
        """Returns whether a transport that was opened for ``other`` can bring this adapter."""
        return other is not None and (self.backend, self.config) == (other.backend, other.config)

    def init(self, backend: str, params: bytes) -> bytes:
        """Returns the params of :attr:`backend`, which name the backend that carries the tensors.

        Args:
            params: the parameters of its sender.
        """
        return encode(AdapterInit(backend, params, self.config))


def adapter_tensors(source: Weights) -> dict[str, torch.Tensor]:
    """Returns a source's LoRA tensors by the names that PEFT gives them in a checkpoint.

    Raises:
        UsageError: the source has no LoRA tensors, or those of two adapters.
    """
    pairs: Any = as_source(source)
    if isinstance(source, torch.nn.Module):
        lost = next((name for name, _ in source.named_parameters() if _LOST.search(name)), "")
        if lost:
            raise UsageError(
                f"source: {lost} is a part of the adapter that engines can't take, and would be "
                "lost: merge the adapter and send the model with update_weights()"
            )
        pairs = [(name, tensor) for name, tensor in pairs if _OF_MODULE.search(name)]
    found: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        stored = _OF_MODULE.sub(r"\1.weight", name)
        if stored in found:
            raise UsageError(
                f"source: {stored} appears twice ({name}): give the tensors of one adapter, as "
                "peft.get_peft_model_state_dict(model, adapter_name=...) does"
            )
        found[stored] = tensor
    if not found:
        raise UsageError("source: there are no lora_A and lora_B in it, as PEFT names them")
    return found


def config_text(config: Mapping[str, Any]) -> bytes:
    """Returns the content of PEFT's ``adapter_config.json``.

    Raises:
        UsageError: a key is missing or wrong; the text names it.
    """
    if not isinstance(config, Mapping):
        raise UsageError(
            f"config={type(config).__name__}: a dict, such as PEFT's LoraConfig.to_dict() gives"
        )
    missing = [key for key in REQUIRED_KEYS if not config.get(key)]
    if missing:
        raise UsageError(f"config: {', '.join(missing)} must be given")
    rank = config["r"]
    if type(rank) is not int or rank < 1:
        raise UsageError(f"config: r={rank!r}: a positive integer")
    alpha = config["lora_alpha"]
    if type(alpha) not in (int, float):
        raise UsageError(f"config: lora_alpha={alpha!r}: a number")
    try:
        text = json.dumps(dict(config), indent=2, sort_keys=True, default=_listed).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"config: {error}") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise UsageError(f"config: has {len(text)} bytes; the limit is {MAX_CONFIG_BYTES}")
    return text


def _listed(value: object) -> list[Any]:
    """Converts the sets in PEFT's config to sorted lists, for JSON."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} has no place in JSON")
