"""Hides differences between versions of vLLM, and checks an engine's transfer backend."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from bus._vllm.payloads import UNSUPPORTED
from bus.errors import EngineError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

BACKEND: Final = "wavebus"
BACKEND_OPTION: Final = f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\''


def shared_communicators() -> AbstractContextManager[None]:
    """Lets a worker join NCCL communicators with processes outside vLLM, during a block.

    In some modes vLLM sets environment variables of NCCL for its own use. NCCL applies them to
    every communicator, and hangs if only one end has them. vLLM 0.32 and later can remove the
    variables for the length of a block.
    """
    try:
        from vllm.utils.nccl import unpinned_nccl_env  # noqa: PLC0415 - not every vLLM has it
    except ImportError:
        return contextlib.nullcontext()
    lifted: AbstractContextManager[None] = unpinned_nccl_env()
    return lifted


def deferred_layers(model: Any) -> list[Any]:
    """Returns the layers that vLLM post-processes only at the end of a whole load.

    These are attention layers, whose derived tensors need the weights of other layers.
    """
    from vllm.model_executor.layers import attention  # noqa: PLC0415 - only inside a worker

    is_deferred = getattr(attention, "is_deferred_attention_layer", None)
    if is_deferred is None:  # older than 0.32
        kinds = (attention.Attention, attention.MLAAttention)
        return [layer for layer in model.modules() if isinstance(layer, kinds)]
    return [layer for layer in model.modules() if is_deferred(layer)]


def reloading_layers(model: Any) -> list[Any]:
    """Returns vLLM's records of layers that have received only some of their weights."""
    from vllm.model_executor.model_loader.reload.layerwise import (  # noqa: PLC0415 - as above
        get_layerwise_info,
    )

    infos = map(get_layerwise_info, model.modules())
    return [info for info in infos if info.can_load()]


def check_backend(backend: str, who: str) -> None:
    """Refuses an engine if the bus can't update its weights.

    Args:
        backend: the backend chosen at boot, wavebus's or vLLM's; empty for none.
        who: the engine's name, for the error's text.

    Raises:
        EngineError: says why, and how to start the engine instead.
    """
    if not backend:
        raise EngineError(f"{who} has no weight transfer backend: start it with {BACKEND_OPTION}")
    if backend in UNSUPPORTED:
        raise EngineError(
            f"{who} has vLLM's weight transfer backend {backend!r}, which the bus can't drive: "
            f"{UNSUPPORTED[backend]}. Start it with {BACKEND_OPTION}, or with "
            "vLLM's 'nccl', 'ipc' or 'sparse_nccl'"
        )
