"""Sends a LoRA adapter as a folder on tmpfs, in an update of one chunk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import torch
from safetensors.torch import save_file

from bus.errors import UsageError, WavebusError
from bus.locked_paths import LockedFolder
from bus.lora import (
    CONFIG_FILE,
    FOLDER_PREFIX,
    MAX_CONFIG_BYTES,
    WEIGHTS_FILE,
    AdapterFolder,
    adapter_backend,
)
from bus.messages import ChunkSent, TransferInit
from bus.weight_transfer.formats import SHM_FOLDER, encode
from trainer_agent.update.chunk_stream import do_nothing
from trainer_agent.update.plan import UpdatePlan
from trainer_agent.update.steps import run_to_end
from trainer_agent.weights.any_source import as_source
from trainer_agent.weights.source import meta_of

if TYPE_CHECKING:
    from bus.messages import Verify
    from trainer_agent.report import UpdateReport
    from trainer_agent.update.steps import Steps
    from trainer_agent.update.transport import Transport
    from trainer_agent.update.update import Update
    from trainer_agent.weights.source import Weights

REQUIRED_KEYS: Final = ("r", "lora_alpha", "target_modules")
# Trained beside lora_A and lora_B: whole modules, DoRA's magnitudes, embeddings, biases.
_LOST: Final = re.compile(r"\.(?:modules_to_save|lora_(?:magnitude_vector|embedding_[AB]|bias))\.")
# A module has every tensor under the name of PEFT's own adapter; a checkpoint leaves that out.
_OF_MODULE: Final = re.compile(r"(\.lora_[AB])\.[^.]+\.weight\Z")


class Adapter:
    """One version of an adapter, read and checked by the trainer.

    Args:
        name: the adapter's name at engines and their clients.
        source: its tensors by PEFT's names, or a module with LoRA parameters.
        config: PEFT's ``adapter_config``.

    Attributes:
        backend: the transfer backend that carries this adapter, such as ``lora:NAME``.
        config: the content of ``adapter_config.json``.
        tensors: the tensors by the names that PEFT gives them in a checkpoint.
        plan: their manifest, with one chunk.

    Raises:
        UsageError: the name, the config or the source can't be an adapter's.
    """

    def __init__(self, name: str, source: Weights, config: Mapping[str, Any]) -> None:
        self.backend = adapter_backend(name)
        self.config = config_text(config)
        self.tensors = adapter_tensors(source)
        metas = [meta_of(name, tensor) for name, tensor in self.tensors.items()]
        self.plan = UpdatePlan.of_source(metas, chunk_bytes=sys.maxsize)

    def sums(self, verify: Verify) -> tuple[int, ...]:
        """Returns the checksums of the adapter's tensors; ``verify`` says how much they cover."""
        return self.plan.sums(0, list(self.tensors.values()), verify)


class WrittenAdapter:
    """An adapter written to a folder on tmpfs, which :meth:`close` removes.

    Attributes:
        handle: the encoded :class:`bus.lora.AdapterFolder`, by which engines find the folder.

    Raises:
        WavebusError: tmpfs has too little free space.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._folder = LockedFolder(FOLDER_PREFIX, Path(SHM_FOLDER))
        try:
            own = {
                name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                for name, tensor in adapter.tensors.items()
            }
            (self._folder.path / CONFIG_FILE).write_bytes(adapter.config)
            save_file(own, self._folder.path / WEIGHTS_FILE, metadata={"format": "pt"})
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                raise WavebusError(
                    f"can't write the adapter ({adapter.plan.size_bytes} bytes) to "
                    f"{SHM_FOLDER}: {error}"
                ) from error
            raise
        digest = hashlib.sha256(adapter.config).hexdigest()
        self.handle = encode(AdapterFolder(self._folder.path.name, digest))

    def close(self) -> None:
        """Removes the folder."""
        self._folder.close()


async def send_adapter(
    adapter: Adapter,
    update: Update,
    transport: Transport,
    steps: Steps,
    *,
    label: str,
    verify: Verify,
) -> UpdateReport:
    """Makes every engine load and serve an adapter, and returns the update's report.

    The adapter is written into a folder of shared memory, which engines read. When this returns,
    the folder is gone. If this fails, the caller must call :meth:`Update.end`, which aborts the
    update.

    Args:
        adapter: the adapter.
        update: the update, which has begun.
        transport: the agent's transport. Engines can have only one open: they close it for the
            adapter's, and the next update opens it again.
        steps: sends the update's messages.
        label: the trainer's own name of the adapter's version.
        verify: how much of each tensor is verified by checksum.
    """
    with contextlib.ExitStack() as ended:
        # Entered in the thread: a cancelled caller gets no result that it could close.
        written = await run_to_end(
            lambda: ended.enter_context(contextlib.closing(WrittenAdapter(adapter)))
        )
        ended.callback(transport.invalidate)  # engines have closed the previous transport

        async def open_folder() -> None:
            init = TransferInit(steps.new_id(), adapter.backend, written.handle, 0, 0, {})
            await transport.open_foreign(init)

        await open_folder()
        await transport.arm(update, adapter.plan, label, open_folder)
        sums = await anyio.to_thread.run_sync(adapter.sums, verify)
        await update.release_ranks(do_nothing)
        await update.start()
        async with steps.announce_chunk(adapter.plan.chunk_meta(update.id, 0, written.handle)):
            await steps.send_chunk(ChunkSent(update.id, 0, verify, sums))
        adapter.plan.warn_of_nonfinite(update.id)
        return await update.commit(label, verify)


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
                f"source: {stored} stands twice ({name}): give the tensors of one adapter, as "
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
        raise UsageError(f"config: {len(text)} bytes, and at most {MAX_CONFIG_BYTES}")
    return text


def _listed(value: object) -> list[Any]:
    """Converts the sets in PEFT's config to sorted lists, for JSON."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} has no place in JSON")
