"""What runs inside vLLM's own processes.

vLLM loads :func:`register` from the entry point group ``vllm.general_plugins`` in
every process it starts. It registers one weight transfer backend, ``wavebus``,
chosen at boot with ``--weight-transfer-config '{"backend": "wavebus"}'``, and makes vLLM's
own (such as ``nccl``) obey a sidecar where one of those is chosen; gives engine cores a
status page, and guards the pause and resume of those in lockstep; and, where
``WAVEBUS_DP_COORDINATOR=bus`` says so, coordinates data parallel ranks by the bus.

==================== ==========================================================
module               what
==================== ==========================================================
``wire``             the operations, as typed payloads of one call of vLLM's
``worker``           the weight transfer engine inside each worker
``loadable``         what that one knows of its models, and of the next update
``stager``           its part in a staged update
``lane``             where it is reached while it makes steps
``lanes``            the sidecar's end of that
``session``          that worker's update session
``native``           vLLM's own worker engines, guarded by that one
``ipc``              the handles that one of those is told
``native_factory``   where those are made
``manifest_check``   does this manifest fill this model, exactly?
``adapters``         LoRA adapters that came over the bus, in each worker
``adapter_check``    does this adapter fit this model?
``in_place``         can a patch be written where the model's weights serve?
``loader_trace``     what a model's own loader does with the tensors that it is given
``copy_plan``        a plan to copy by, made of that
``planned``          a plan at work: an update by it, and one that proves it
``plans``            by the plan or by the loader?
``staged``           the next weights beside those that serve
``cpu``              what vLLM's reload forgets on CPUs
``ranks``            the workers of one engine agree on one outcome
``facts``            what a sidecar asks of a worker
``draft``            a worker's draft model, and how it was built
``client``           the order of operations, for both adapters
``core_page``        the status page inside each engine core
``core_hold``        the deadline of a pause, held inside each engine core
``core_swap``        the swap of a staged update between two steps of an engine core
``core_guard``       holes in the pause and resume of cores in lockstep, closed
``door``             who is let into an engine core
``coordinator``      the gateway in place of vLLM's DP coordinator
``registry``         what is wrapped inside vLLM, what it must look like, and what needs it
``called``           what is called inside vLLM: a part of that registry
``installation``     installs that, and says what does not fit
``cpu_experts``      collectives that vLLM's CPU build lacks
``environment``      environment variables
``compat``           which vLLM
``guard``            the process between a sidecar and the server it started
==================== ==========================================================

Importing this package imports neither vllm nor torch.
"""

from __future__ import annotations

import logging
import sys

from bus.vllm_versions import unsupported_reason
from sidecar.vllm_plugin import environment, installation
from sidecar.vllm_plugin.compat import BACKEND

__all__ = ["BACKEND", "register"]

_log = logging.getLogger("vllm.wavebus")
_registered = False


def register() -> None:
    """Make the plugin known to vLLM; cheap, and harmless when repeated.

    On a vLLM that is too old nothing is registered and the log says so, since raising here would
    break every other use of vLLM in the environment.

    Raises:
        RuntimeError: the bus was to coordinate, which it can't do with this vLLM.
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
        _log.warning("wavebus: not registered: %s", reason)
        return
    _registered = True
    _install(by_bus=by_bus)


def _install(*, by_bus: bool) -> None:
    """Install the seams of this process. Processes that are forked inherit them, and vLLM loads no
    plugin again there: so a front end has those of cores, too."""
    installation.install("any")
    front_end = "vllm.engine.arg_utils" in sys.modules
    if front_end or "vllm.v1.engine.core" in sys.modules:
        installation.install("core")
    if front_end and by_bus:
        from sidecar.vllm_plugin import coordinator  # noqa: PLC0415 - of no use elsewhere

        why = installation.install_seam("dp coordinator")
        if why:
            raise coordinator.refusal(why)
        form = installation.report().forms["dp coordinator"]
        _log.info("wavebus: DP coordinator replaced; in this vLLM %s", form)
    if "vllm.v1.worker.worker_base" in sys.modules:
        installation.install("worker")
