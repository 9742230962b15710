"""The part of wavebus that runs inside vLLM's own processes.

vLLM loads :func:`register` from the entry point group ``vllm.general_plugins`` in every process
that it starts. The function registers the weight transfer backend ``wavebus``, which is chosen at
boot with ``--weight-transfer-config '{"backend": "wavebus"}'``. If one of vLLM's own backends (such
as ``nccl``) is chosen instead, a sidecar can drive that one. The plugin also gives engine cores a
status page, and fixes the pause and resume of cores in lockstep. With
``WAVEBUS_DP_COORDINATOR=bus``, the bus coordinates data parallel ranks.

==================== ===============================================================
module               responsible for
==================== ===============================================================
``patches``          lists everything that is wrapped inside vLLM, and in which order; each
                     wrapper's module declares what vLLM must look like there
``kv_connectors``    how updates treat each KV connector
``vllm_calls``       what wavebus expects of vLLM functions that it calls as they are
``vllm_names``       names inside vLLM, and the features that depend on them
``installation``     installs the patches, and reports which do not fit
``operations``       the operations of workers, and their answers
``worker_rpc``       the methods that a sidecar calls by ``collective_rpc``
``agreement``        lets the workers of one engine agree on one outcome
``environment``      environment variables
``compat``           differences between versions of vLLM
``front_end``        inside front ends: versions of streamed tokens, checks of token ids, access
``core``             inside engine cores: status page, lease guard, pause, admission, swap,
                     coordinator
``worker``           inside workers: the weight transfer engine, vLLM's own engines, LoRA, drafts
``staging``          staged updates in a worker, and its staging channel
``loading``          manifests, copy plans and the memory in which updates are staged
==================== ===============================================================

Importing this package imports neither vllm nor torch.
"""

from __future__ import annotations

import logging
import sys

from bus._vllm.versions import unsupported_reason
from sidecar._vllm.plugin import environment, installation
from sidecar._vllm.plugin.compat import BACKEND

__all__ = ["BACKEND", "register"]

_log = logging.getLogger("vllm.wavebus")
_registered = False


def register() -> None:
    """Installs wavebus's plugin in this vLLM process; repeated calls do nothing.

    vLLM calls this function in each of its processes. With a vLLM that is too old, it installs
    nothing and logs a warning, because an exception here would break every other use of vLLM in the
    environment.

    Raises:
        RuntimeError: the environment asks for the bus's DP coordinator, which this vLLM can't use.
    """
    global _registered  # noqa: PLW0603 - vLLM's registry is global and refuses a second entry
    if _registered:
        return
    import vllm  # noqa: PLC0415 - only ever called by vLLM

    try:
        by_bus = environment.dp_coordinator() == "bus"
    except ValueError as error:
        raise RuntimeError(f"wavebus: {error}") from error
    reason = unsupported_reason(vllm.__version__)
    if reason and by_bus:
        raise RuntimeError(f"wavebus: {environment.DP_COORDINATOR}=bus: {reason}")
    if reason:
        _log.warning("wavebus: the plugin is off: %s", reason)
        return
    _registered = True
    _install(by_bus=by_bus)


def _install(*, by_bus: bool) -> None:
    """Installs the seams of this process.

    Forked processes inherit them, and vLLM loads no plugin again there. So a front end also
    installs the seams of engine cores.
    """
    installation.install("any")
    front_end = "vllm.engine.arg_utils" in sys.modules
    if front_end or "vllm.v1.engine.core" in sys.modules:
        installation.install("core")
    if front_end and by_bus:
        from sidecar._vllm.plugin.core import dp_coordinator as coordinator  # noqa: PLC0415 - of no use elsewhere

        why = installation.install_seam("dp coordinator")
        if why:
            raise coordinator.refusal(why)
        form = installation.report().forms["dp coordinator"]
        _log.info("wavebus: the bus's DP coordinator replaces vLLM's; in this vLLM %s", form)
    if "vllm.v1.worker.worker_base" in sys.modules:
        installation.install("worker")
