"""Starts the bus's DP coordinator instead of vLLM's, in rank 0's front end.

vLLM creates a ``DPCoordinator`` where it launches engine cores, and reads addresses from it.
:class:`BusCoordinator` replaces that name in vLLM's module, and starts ``python -m
sidecar._dp_coordinator``. It supports external load balancing only: behind vLLM's own balancer,
cores report their request counts through the coordinator at every step, and the bus's DP
coordinator does not pass them on.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any, Final

from bus._vllm.seams import Fields, Has, Ref, Says, Seam, Takes
from sidecar._dp_coordinator.process import DpCoordinatorProcess
from sidecar._vllm.plugin import environment
from sidecar._vllm.plugin.vllm_names import (
    COORDINATOR_MODULE,
    LOCKSTEP_CORE,
    PLAIN_CORE,
    PLUGIN,
    START_WAVE,
    WAVES_BY_CORES,
    WAVES_BY_FRONT_ENDS,
)

__all__ = ["BusCoordinator", "refusal"]

_log = logging.getLogger("vllm.wavebus")
_RESUMES_AT_ONCE: Final = (
    "self.ignore_start_dp_wave = False\n"
    "    has_global_unfinished = ParallelConfig.has_unfinished_dp("
)
COORDINATOR: Final = Seam(
    "dp coordinator",
    ("dp_coordinator",),
    (
        Has(f"{COORDINATOR_MODULE}:DPCoordinator"),
        Has("vllm.v1.engine.utils:DPCoordinator"),
        Takes(
            f"{COORDINATOR_MODULE}:DPCoordinator.__init__",
            "self, parallel_config, enable_wave_coordination, logging_config",
        ),
        Takes(f"{COORDINATOR_MODULE}:DPCoordinator.get_engine_socket_addresses", "self"),
        Takes(f"{COORDINATOR_MODULE}:DPCoordinator.get_stats_publish_address", "self"),
        Takes(f"{COORDINATOR_MODULE}:DPCoordinator.shutdown", "self, timeout"),
        Fields(
            "vllm.v1.engine:EngineCoreOutputs",
            ((0, "engine_index"), (6, "wave_complete"), (7, "start_wave")),
        ),
        Says("vllm.v1.engine:EngineCoreRequestType", "START_DP_WAVE = b'\\x02'"),
        Says(
            f"{COORDINATOR_MODULE}:DPCoordinatorProc",
            "send(b'READY')",
            "outputs.wave_complete",
            "outputs.start_wave",
            "msgspec.msgpack.encode((wave, exclude_engine_index))",
        ),
        Says(f"{LOCKSTEP_CORE}.run_busy_loop", START_WAVE, "not self.pending_pause"),
        # A rank that resumes accepts a START before it waits for the others (docs/waves.md).
        Says(f"{LOCKSTEP_CORE}.resume_scheduler", _RESUMES_AT_ONCE),
        # A core that has received READY ignores a second one.
        Says(f"{PLAIN_CORE}.process_input_sockets", "type_frame.buffer == b'READY'"),
    ),
    forms=(WAVES_BY_FRONT_ENDS, WAVES_BY_CORES),
    process="coordinator",
    needs=("lockstep pause fixes",),
    sets=(
        (
            "vllm.v1.engine.utils",
            "DPCoordinator",
            Ref(f"{PLUGIN}.core.dp_coordinator:BusCoordinator"),
        ),
    ),
)
_OPT_OUT = f"leave {environment.DP_COORDINATOR} unset (sidecar: --dp-coordinator vllm)"


class BusCoordinator:
    """Starts the bus's DP coordinator in place of vLLM's ``DPCoordinator`` class.

    It has the methods of that class that vLLM calls.

    Args:
        parallel_config: vLLM's ``ParallelConfig``.
        enable_wave_coordination: whether the model's ranks run waves, as mixtures of experts do.
        logging_config: ignored; the coordinator logs as wavebus does.

    Raises:
        RuntimeError: the bus can't coordinate this DP group; the text says why, and what to do.
    """

    def __init__(
        self,
        parallel_config: Any,
        enable_wave_coordination: bool = True,
        logging_config: Any = None,
    ) -> None:
        del logging_config  # the DP coordinator logs as wavebus does
        _refuse_other_shapes(parallel_config, enable_wave_coordination)
        try:
            address = environment.bus_address()
        except ValueError as error:
            raise RuntimeError(f"wavebus: {error}") from error
        self.proc = DpCoordinatorProcess(
            dp_group=address.dp_group,
            size=parallel_config.data_parallel_size,
            host=parallel_config.data_parallel_master_ip,
            broker=address.broker,
            group=address.group,
            on_death=_on_death,
        )
        os.environ[environment.DP_COORDINATOR_PID] = str(self.proc.pid)
        self._finalizer = weakref.finalize(self, self.proc.stop)
        _log.info(
            "wavebus: the bus coordinates DP group %s: DP coordinator pid %d, broker %s",
            address.dp_group,
            self.proc.pid,
            address.broker,
        )

    def get_stats_publish_address(self) -> str:
        """Returns the address that front ends subscribe to."""
        return self.proc.addresses.front

    def get_engine_socket_addresses(self) -> tuple[str, str]:
        """Returns where engine cores get messages, and where they send their reports."""
        return self.proc.addresses.core_in, self.proc.addresses.core_out

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the DP coordinator; a second call does nothing."""
        if self._finalizer.detach() is not None:
            self.proc.stop(timeout)


def _on_death(code: int) -> None:
    _log.error(
        "wavebus: the DP coordinator ended with exit code %d: running waves continue, but an idle "
        "DP group may not wake for a request. Restart all ranks of the DP group",
        code,
    )


def _refuse_other_shapes(parallel_config: Any, enable_wave_coordination: bool) -> None:
    if not parallel_config.data_parallel_external_lb:
        raise RuntimeError(
            f"wavebus: {environment.DP_COORDINATOR}=bus needs --data-parallel-external-lb, one "
            "API server per rank: behind vLLM's own load balancer the coordinator passes on "
            f"request counts, which the DP coordinator does not. Add it, or {_OPT_OUT}"
        )
    if not enable_wave_coordination:
        raise RuntimeError(
            f"wavebus: {environment.DP_COORDINATOR}=bus is for mixture-of-experts models; "
            f"the ranks of a dense model run no waves. Please {_OPT_OUT}"
        )
    if getattr(parallel_config, "enable_elastic_ep", False):
        raise RuntimeError(
            f"wavebus: {environment.DP_COORDINATOR}=bus does not support elastic expert "
            f"parallelism, where ranks join and leave. Start without it, or {_OPT_OUT}"
        )


def refusal(why: str) -> RuntimeError:
    """Returns the error that ends a server's boot if the bus can't coordinate it.

    Args:
        why: how this vLLM differs from what the coordinator needs.
    """
    return RuntimeError(
        f"wavebus: {environment.DP_COORDINATOR}=bus can't be used with this vLLM: {why}. "
        f"Please {_OPT_OUT}"
    )
