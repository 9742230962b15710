"""Where vLLM's worker engines are made: whichever is chosen at boot, a sidecar can drive it.

vLLM's registry is read when an engine is created, and not before: other plugins may register
theirs after this one. Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from bus.vllm_payloads import UNSUPPORTED
from sidecar.vllm.plugin.compat import BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("vllm.wavebus")


def register() -> None:
    """Name wavebus's worker engine to vLLM's factory: only a worker that uses it imports it."""
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415 - only called in vLLM
        WeightTransferEngineFactory,
    )

    WeightTransferEngineFactory.register_engine(
        BACKEND, "sidecar.vllm.plugin.worker.engine", "WavebusWeightTransferEngine"
    )


def create_engine(
    original: Callable[..., Any],
    factory: Any,
    config: Any,
    vllm_config: Any,
    device: Any,
    model: Any,
) -> Any:
    """Make a worker engine of vLLM's that a sidecar can drive; around ``create_engine``."""
    engine = _guarded(factory, config.backend)
    if engine is None:
        return original(factory, config, vllm_config, device, model)
    return engine(config, vllm_config, device, model)


def _guarded(factory: Any, backend: str) -> type[Any] | None:
    """The class to be made in place of the registered one; None where that one is to be."""
    registered = factory._registry.get(backend)  # noqa: SLF001 - there is no other way in
    if backend == BACKEND or backend in UNSUPPORTED or registered is None:
        return None
    theirs: type[Any] = registered()
    try:
        from sidecar.vllm.plugin.worker.native_engine import guarded  # noqa: PLC0415 - only in a worker, and slow

        return guarded(backend, theirs)
    except Exception:  # noqa: BLE001 - it is logged
        # The engine may be booted for other uses than the bus.
        _log.exception("wavebus: can't drive vLLM's worker engine %r", backend)
        return None
