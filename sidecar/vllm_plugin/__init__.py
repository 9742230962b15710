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
``core_calls``       calls that a core answers by itself
``core_guard``       holes in the pause and resume of cores in lockstep, closed
``door``             who is let into an engine core
``coordinator``      the gateway in place of vLLM's DP coordinator
``features``         what must be there before anything of vLLM's is replaced
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

from sidecar.vllm_plugin import environment, native_factory
from sidecar.vllm_plugin.compat import BACKEND, unsupported_reason

__all__ = ["BACKEND", "register"]

_log = logging.getLogger("vllm.wavebus")
_registered = False


def register() -> None:
    """Make the plugin known to vLLM; cheap, and harmless when repeated.

    The engine's module is named, not imported: only a worker that uses it loads it.
    On a vLLM that is too old nothing is registered and the log says so, since
    raising here would break every other use of vLLM in the environment.

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
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415
        WeightTransferEngineFactory,
    )

    WeightTransferEngineFactory.register_engine(
        BACKEND, "sidecar.vllm_plugin.worker", "WavebusWeightTransferEngine"
    )
    native_factory.install(WeightTransferEngineFactory)
    _registered = True
    _install(by_bus=by_bus)


def _install(*, by_bus: bool) -> None:
    """Hooks of front ends, cores and workers. Processes that are forked inherit them, and in
    those vLLM loads no plugin again: a front end has them all."""
    front_end = "vllm.engine.arg_utils" in sys.modules
    if front_end or "vllm.v1.engine.core" in sys.modules:
        from vllm.v1.engine import core  # noqa: PLC0415 - of no use elsewhere, and slow

        from sidecar.vllm_plugin import (  # noqa: PLC0415
            core_guard,
            core_hold,
            core_page,
            core_swap,
            door,
        )

        if core_page.install(core):
            core_hold.install(core)
        core_guard.install(core)
        door.install(core)
        core_swap.install(core)
    if front_end and by_bus:
        from sidecar.vllm_plugin import coordinator  # noqa: PLC0415

        coordinator.install()
    from vllm.platforms import current_platform  # noqa: PLC0415 - vLLM has chosen it by now

    if current_platform.is_cpu():
        from sidecar.vllm_plugin import cpu_experts  # noqa: PLC0415

        cpu_experts.install()
    if "vllm.v1.worker.worker_base" in sys.modules:
        from vllm.v1.worker import worker_base  # noqa: PLC0415

        from sidecar.vllm_plugin import facts  # noqa: PLC0415

        facts.install(worker_base)
