"""Finds parts of a model that vLLM has left out, such as the tower of a text-only engine.

vLLM does not build a part that no request can use: with ``--limit-mm-per-prompt`` of 0 for all of
its modalities, a tower is a placeholder without weights. A trainer's model has the whole tower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.vllm.plugin.loading.loader_trace import refused

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from bus.errors import EngineError

_PLACEHOLDER = "StageMissingLayer"


def left_out_refusal(model: torch.nn.Module, name: str, names: Iterable[str]) -> EngineError | None:
    """Returns the refusal of a tensor that belongs to a part that vLLM has left out.

    Args:
        model: the model, or its meta model.
        name: the trainer's name of the tensor.
        names: the trainer's names of all tensors of the update.

    Returns:
        The error, which says what to leave out; None if the tensor belongs to no such part.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    own = name if mapper is None else mapper._map_name(name)  # noqa: SLF001 - there is no other
    for path, module in model.named_modules():
        inside = own is not None and own.startswith(f"{path}.")
        if type(module).__name__ != _PLACEHOLDER or not inside:
            continue
        rest = own.removeprefix(f"{path}.")
        prefix = name.removesuffix(rest) if name.endswith(rest) else name
        count = sum(each.startswith(prefix) for each in names)
        stage = getattr(module, "stage_name", path)
        return refused(
            name,
            f"this engine was started without its {stage}, as with --limit-mm-per-prompt of 0: "
            f"leave out the {count} tensors whose names begin with {prefix}, or start the engine "
            "with it",
        )
    return None
