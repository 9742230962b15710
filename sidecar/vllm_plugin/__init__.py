"""What runs inside vLLM's own processes.

vLLM loads :func:`register` from the entry point group ``vllm.general_plugins`` in
every process it starts. It registers one weight transfer backend, ``wavebus``,
chosen at boot with ``--weight-transfer-config '{"backend": "wavebus"}'``.

==================== ==========================================================
module               what
==================== ==========================================================
``wire``             the operations, as typed payloads of vLLM's own calls
``worker``           the weight transfer engine inside each worker
``manifest_check``   does this manifest fill this model, exactly?
``ranks``            the workers of one engine agree on one outcome
``client``           the order of calls, for both adapters
``compat``           which vLLM
``guard``            the process between a sidecar and the server it started
==================== ==========================================================

Importing this package imports neither vllm nor torch.
"""

from __future__ import annotations

import logging

from sidecar.vllm_plugin.compat import BACKEND, unsupported_reason

__all__ = ["BACKEND", "register"]

_log = logging.getLogger("vllm.wavebus")
_registered = False


def register() -> None:
    """Make the backend ``wavebus`` known to vLLM; cheap, and harmless when repeated.

    The engine's module is named, not imported: only a worker that uses it loads it.
    On a vLLM that is too old nothing is registered and the log says so, since
    raising here would break every other use of vLLM in the environment.
    """
    global _registered  # noqa: PLW0603 - vLLM's registry is global and refuses a second entry
    if _registered:
        return
    import vllm  # noqa: PLC0415 - only ever called by vLLM

    reason = unsupported_reason(vllm.__version__)
    if reason:
        _log.warning("wavebus: not registered: %s", reason)
        return
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415
        WeightTransferEngineFactory,
    )

    WeightTransferEngineFactory.register_engine(
        BACKEND, "sidecar.vllm_plugin.worker", "WavebusWeightTransferEngine"
    )
    _registered = True
