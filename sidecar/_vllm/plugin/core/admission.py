"""Admission of vLLM's engine cores: while it is closed, new requests end at once.

Clients send requests to a server directly, so the core itself must reject them. A request whose id
contains a text set by the sidecar is admitted, so that probes can run. An in-process client gets
no tokens, as for an aborted request. A client of an API server gets an error: the core sends the
reason as the request's stop reason, and the front end raises the error that vLLM answers with HTTP
503.

The sidecar sets admission by vLLM's ``collective_rpc``, with a method that the core answers by
itself. Workers and peer ranks are not involved, so admission outlives a restart of the sidecar.
With ``WAVEBUS_BOOT_CLOSED`` a core boots with closed admission: it has the weights of its
checkpoint, and its group may serve others.

A request for a LoRA adapter of the bus that the workers no longer hold is rejected as well: it left
the front end before the adapter was removed there.

Where front ends start the waves of lockstep cores (``wavebus_joins_asked_waves``), a core that
rejects a request still joins the wave that the front end has asked for: the other ranks start it,
and can't step without this one. Where cores start waves by themselves, a rejected request starts
none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bus._vllm.seams import Has, Ref, Says, Seam, Takes
from bus.rejection import closed_message, is_closed_message
from sidecar._vllm.plugin.core import adapters, kv_versions
from sidecar._vllm.plugin.environment import BOOT_CLOSED, CLOSED_ANSWER
from sidecar._vllm.plugin.vllm_names import (
    CORE_MODULE,
    LOCKSTEP_CORE,
    OUTPUTS,
    PLAIN_CORE,
    REQUEST_TYPES,
    TAKES_ABORTS,
    TAKES_RPC,
    WAVES_BY_CORES,
    WAVES_BY_FRONT_ENDS,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# The method of ``collective_rpc``; it takes the arguments of :func:`set_admission`.
SET_ADMISSION: Final = "wavebus_admission"

ADMISSION: Final = Seam(
    "admission",
    ("admission", "lockstep_admission"),
    (
        TAKES_RPC,
        TAKES_ABORTS,
        Says(f"{PLAIN_CORE}._handle_client_request", "req, request_wave = request"),
        Has(REQUEST_TYPES, "ADD"),
        Has("vllm.v1.request:Request", "num_output_tokens"),
    ),
    process="core",
)
LOCKSTEP_ADMISSION: Final = Seam(
    "lockstep admission",
    ("lockstep_admission",),
    (Says(f"{LOCKSTEP_CORE}._handle_client_request", "self.ignore_start_dp_wave"),),
    forms=(WAVES_BY_FRONT_ENDS, WAVES_BY_CORES),
    process="core",
    needs=("admission",),
)
ANSWER: Final = Seam(
    "closed answer",
    ("closed_answer",),
    (
        Has(CORE_MODULE, "EngineCoreOutput, EngineCoreOutputs, FinishReason"),
        Says(f"{OUTPUTS}:OutputProcessor.process_outputs", "req_state.queue.put(request_output)"),
        Says(
            f"{OUTPUTS}:RequestOutputCollector.put",
            "self.output is None or isinstance(output, Exception)",
        ),
        Says("vllm.v1.engine.async_llm:AsyncLLM.generate", "raise e.cause from e"),
        Takes("vllm.v1.engine.async_llm:InputStreamError.__init__", "self, cause"),
        Takes("vllm.exceptions:RetryableRequestError.__init__", "self, message"),
    ),
    process="core",
    needs=("admission",),
    sets=(
        (PLAIN_CORE, "wavebus_aborts", Ref(f"{CORE_MODULE}:FinishReason.ABORT")),
        (PLAIN_CORE, "wavebus_output", Ref(f"{CORE_MODULE}:EngineCoreOutput")),
        (PLAIN_CORE, "wavebus_outputs", Ref(f"{CORE_MODULE}:EngineCoreOutputs")),
    ),
    off=CLOSED_ANSWER,
)


@dataclass(slots=True)
class CoreAdmission:
    """The admission state of one engine core.

    Attributes:
        admits: whether admission is open; None in a core that booted closed, until a sidecar opens
            it. None counts as closed.
        passes: while a canary runs, only requests whose ids contain this text are admitted. Empty:
            no canary runs.
        why: why admission is closed, for clients.
        served: whether clients reach the engine through an API server, which shows them the reason.
    """

    admits: bool | None = True
    passes: str = ""
    why: str = "it has not joined its group yet"
    served: bool = True

    def is_admitted(self, request_id: str) -> bool:
        if self.passes:
            return self.passes in request_id
        return bool(self.admits)


def _of(core: Any) -> CoreAdmission:
    admission = getattr(core, "wavebus_admission", None)
    if admission is None:
        closed = os.environ.get(BOOT_CLOSED) == "1" and not _has_unknown_waves(core)
        admission = core.wavebus_admission = CoreAdmission(None if closed else True)
    return admission


def _has_unknown_waves(core: Any) -> bool:
    """Returns whether it is unknown if front ends or cores start a lockstep core's waves.

    The admission of such a core can't be closed.
    """
    return hasattr(core, "current_wave") and not hasattr(core, "wavebus_joins_asked_waves")


@ADMISSION.wrap(f"{PLAIN_CORE}._handle_client_request", "self, request_type, request")
def handle_client_request(
    original: Callable[..., Any], core: Any, request_type: Any, request: Any
) -> None:
    """Ends a new request at once if admission is closed to it."""
    if request_type.name == "ADD":
        asked, wave = request
        if not _of(core).is_admitted(asked.request_id):
            _reject(core, asked, wave)
            return
        if missing := adapters.missing(core, asked):
            _reject(core, asked, wave, missing)
            return
    original(core, request_type, request)


def _reject(core: Any, request: Any, wave: int, why: str = "") -> None:
    kv_versions.release(core, request)
    _end_empty(core, request, why)
    if not getattr(core, "wavebus_joins_asked_waves", False):
        return
    if core.ignore_start_dp_wave:  # paused: starts when it resumes, as in other ranks
        core.wavebus_pending_wave = max(wave, getattr(core, "wavebus_pending_wave", None) or 0)
    elif wave >= core.current_wave and not core.engines_running:
        core.current_wave = wave
        core.engines_running = True


def _end_empty(core: Any, request: Any, why: str = "") -> None:
    """Ends a request that has no tokens yet; behind an API server, with the reason."""
    admission, name = _of(core), request.request_id
    is_shown = admission.served and hasattr(core, "wavebus_output")
    if not is_shown or (admission.is_admitted("") and not why):
        core._send_abort_outputs_to_client([name], request.client_index)  # noqa: SLF001
        return
    why = closed_message(why or admission.why)
    ended = core.wavebus_output(name, [], finish_reason=core.wavebus_aborts, stop_reason=why)
    outputs = core.wavebus_outputs(finished_requests={name}, outputs=[ended])
    core.output_queue.put_nowait((request.client_index, outputs))


@ANSWER.wrap(f"{OUTPUTS}:OutputProcessor.process_outputs", "")
def process_outputs(
    original: Callable[..., Any], processor: Any, outputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Raises an error in the front end for a request that a core has rejected.

    The core marks a rejected request by its stop reason, which becomes the error's text.
    """
    refused = len(outputs) == 1 and is_closed_message(outputs[0].stop_reason)
    state = processor.request_states.get(outputs[0].request_id) if refused else None
    processed = original(processor, outputs, *args, **kwargs)
    if state is not None and state.queue is not None:
        from vllm.exceptions import RetryableRequestError  # noqa: PLC0415 - loaded in a front end
        from vllm.v1.engine.async_llm import InputStreamError  # noqa: PLC0415

        # Replaces the empty output. `AsyncLLM.generate` raises the cause of this error.
        state.queue.put(InputStreamError(RetryableRequestError(outputs[0].stop_reason)))
    return processed


@ADMISSION.answer(SET_ADMISSION)
def set_admission(core: Any, *, ends: bool = False, **how: Any) -> list[dict[str, Any] | None]:
    """Changes a core's admission state, and reports it.

    Args:
        core: the engine core.
        ends: whether to end every request of the core, whichever front end it came from.
        how: new values, by the names of fields of :class:`CoreAdmission`; the other fields keep
            theirs.

    Returns:
        A list of one item, because vLLM joins the lists of all cores. The item is a dict of the
            state's ``admits`` and ``passes``, as in :class:`CoreAdmission`, and with ``ends`` also
            ``ended``: how many requests were ended. It is None if the core has no admission
            control.
    """
    if _has_unknown_waves(core):
        return [None]
    admission = _of(core)
    for name, value in how.items():
        setattr(admission, name, value)
    state: dict[str, Any] = {"admits": admission.admits, "passes": admission.passes}
    if ends and hasattr(core, "wavebus_aborted"):  # set by the pause lease's seam
        ended = core.scheduler.finish_requests(None, core.wavebus_aborted)
        core._send_abort_outputs([each for each in ended if each.num_output_tokens])  # noqa: SLF001
        for each in ended:
            if not each.num_output_tokens:
                _end_empty(core, each)
        state["ended"] = len(ended)
    return [state]
