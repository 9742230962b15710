"""Finds parts of a model that vLLM has left out, such as a vision tower.

vLLM does not build a part that no request can use: with ``--limit-mm-per-prompt`` of 0 for all of
its modalities, a tower is a placeholder without weights. A trainer's model has the whole tower.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sidecar._transfer.unloaded import refused

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from bus.errors import EngineError

_PLACEHOLDER = "StageMissingLayer"


def left_out_refusal(model: torch.nn.Module, name: str, names: Iterable[str]) -> EngineError | None:
    """Returns the refusal of a tensor whose part of the model vLLM has left out.

    Args:
        model: the model, or its meta model.
        name: the trainer's name of the tensor.
        names: the trainer's names of all tensors of the update.

    Returns:
        The error, which says all that is to be left out; None if the tensor belongs to no such
        part.
    """
    stages = {
        path: getattr(module, "stage_name", path)
        for path, module in model.named_modules()
        if type(module).__name__ == _PLACEHOLDER
    }
    mapper = getattr(model, "hf_to_vllm_mapper", None)

    def left_out(given: str) -> tuple[str, str] | None:
        """Returns the part to which a tensor belongs, and the beginning of the part's names."""
        own = given if mapper is None else mapper._map_name(given)  # noqa: SLF001 - the only way
        path = next((each for each in stages if own is not None and own.startswith(f"{each}.")), "")
        if not path:
            return None
        rest = own.removeprefix(f"{path}.")
        return path, given.removesuffix(rest) if given.endswith(rest) else given

    mine = left_out(name)
    if mine is None:
        return None
    found = Counter(part for part in map(left_out, names) if part is not None)
    prefixes = " or ".join(dict.fromkeys(prefix for _, prefix in found))
    return refused(
        name,
        f"this engine was started without its {stages[mine[0]]}, as with --limit-mm-per-prompt of "
        f"0: leave out the {found.total()} tensors whose names begin with {prefixes}, or start the "
        "engine with it",
    )
