"""Where vLLM's worker engines are made: whichever is chosen at boot, a sidecar can drive it.

vLLM's registry is read when an engine is created, and not before: other plugins may register
theirs after this one. Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

import logging
from typing import Any

from bus.native import UNDRIVEN
from sidecar.vllm_plugin import features
from sidecar.vllm_plugin.compat import BACKEND

_log = logging.getLogger("vllm.wavebus")


def install(factory: Any) -> None:
    """Have vLLM's ``WeightTransferEngineFactory`` make engines that obey a sidecar, too.

    A factory that is not as expected stays as it is, and the log says so: engines work as
    before, and a sidecar refuses them.
    """
    gaps = features.factory_gaps(factory)
    if gaps:
        _log.warning("wavebus: can't drive vLLM's own worker engines: %s", "; ".join(gaps))
        return
    create = factory.create_engine

    def create_engine(config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
        engine = _guarded(factory, config.backend)
        if engine is None:
            return create(config, vllm_config, device, model)
        return engine(config, vllm_config, device, model)

    factory.create_engine = staticmethod(create_engine)


def _guarded(factory: Any, backend: str) -> type[Any] | None:
    """The class to be made in place of the registered one; None where that one is to be."""
    registered = factory._registry.get(backend)  # noqa: SLF001 - there is no other door
    if backend == BACKEND or backend in UNDRIVEN or registered is None:
        return None
    theirs: type[Any] = registered()
    try:
        from sidecar.vllm_plugin.native import guarded  # noqa: PLC0415 - only in a worker, and slow

        return guarded(backend, theirs)
    except Exception:  # noqa: BLE001 - it is logged
        # Whoever boots this engine may have no use for a bus.
        _log.exception("wavebus: can't drive vLLM's worker engine %r", backend)
        return None
