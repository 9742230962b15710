"""Makes vLLM create weight transfer engines that a sidecar can drive.

The module handles wavebus's engine and vLLM's own engines, whichever is chosen at boot. vLLM's
registry is read only when an engine is created, because other plugins may register engines later.
Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from bus._vllm.payloads import UNSUPPORTED
from sidecar._vllm.plugin.compat import BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("vllm.wavebus")


def register() -> None:
    """Registers wavebus's weight transfer engine with vLLM's factory.

    Its module is imported only in workers that use the engine.
    """
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415 - only called in vLLM
        WeightTransferEngineFactory,
    )

    WeightTransferEngineFactory.register_engine(
        BACKEND, "sidecar._vllm.plugin.worker.engine", "WavebusWeightTransferEngine"
    )


def create_engine(
    original: Callable[..., Any],
    factory: Any,
    config: Any,
    vllm_config: Any,
    device: Any,
    model: Any,
) -> Any:
    """Creates the chosen weight transfer engine so that a sidecar can drive it."""
    engine = _guarded(factory, config.backend)
    if engine is None:
        return original(factory, config, vllm_config, device, model)
    return engine(config, vllm_config, device, model)


def _guarded(factory: Any, backend: str) -> type[Any] | None:
    """Returns a class to create instead of the registered class, or None."""
    registered = factory._registry.get(backend)  # noqa: SLF001 - there is no other way in
    if backend == BACKEND or backend in UNSUPPORTED or registered is None:
        return None
    theirs: type[Any] = registered()
    try:
        from sidecar._vllm.plugin.worker.native_engine import guarded  # noqa: PLC0415 - only in a worker, and slow

        return guarded(backend, theirs)
    except Exception:  # noqa: BLE001 - it is logged
        # The engine may be booted for other uses than the bus.
        _log.exception("wavebus: can't drive vLLM's worker engine %r", backend)
        return None
