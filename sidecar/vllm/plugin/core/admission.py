"""Admission of vLLM's engine cores: while it is closed, new requests are ended at once.

Clients talk to a server by themselves, so it is the core that turns them away: a request is
answered as an aborted one is, with no tokens. One that bears the pass, in its id, is let in: the
sidecar's own probes do.

The sidecar turns it by vLLM's ``collective_rpc``, in a method that the core answers by itself.
Nobody else is told, so it stays as it is while sidecars come and go.

Where front ends start the waves of lockstep cores (``wavebus_joins_asked_waves``), a core that
turns a request away joins the wave that its front end has asked for: the other ranks start it, and
can't step without this one. Where cores start waves by themselves, nobody was asked, and a request
that is turned away starts none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# The method; its arguments are those of `CoreAdmission` that are to be changed.
SET_ADMISSION: Final = "wavebus_admission"


@dataclass(slots=True)
class CoreAdmission:
    """One core's. ``passes``: what the id of a request has in it that is let in all the same; with
    one, nobody else is. Empty: there is none."""

    admits: bool = True
    passes: str = ""

    def is_admitted(self, request_id: str) -> bool:
        if self.passes:
            return self.passes in request_id
        return self.admits


def _of(core: Any) -> CoreAdmission:
    admission = getattr(core, "wavebus_admission", None)
    if admission is None:
        admission = core.wavebus_admission = CoreAdmission()
    return admission


def handle_client_request(
    original: Callable[..., Any], core: Any, request_type: Any, request: Any
) -> None:
    """End a request at once that is not admitted."""
    if request_type.name == "ADD" and not _of(core).is_admitted(request[0].request_id):
        _reject(core, *request)
        return
    original(core, request_type, request)


def _reject(core: Any, request: Any, wave: int) -> None:
    core._send_abort_outputs_to_client([request.request_id], request.client_index)  # noqa: SLF001
    if not getattr(core, "wavebus_joins_asked_waves", False):
        return
    if core.ignore_start_dp_wave:  # paused: with its resume, as the others
        core.wavebus_pending_wave = max(wave, getattr(core, "wavebus_pending_wave", None) or 0)
    elif wave >= core.current_wave and not core.engines_running:
        core.current_wave = wave
        core.engines_running = True


def set_admission(core: Any, **how: Any) -> list[dict[str, Any] | None]:
    """Set what is named of admission; answer its state, or nothing where there is none."""
    if hasattr(core, "current_wave") and not hasattr(core, "wavebus_joins_asked_waves"):
        return [None]  # in lockstep, and nobody knows who starts its waves
    admission = _of(core)
    for name, value in how.items():
        setattr(admission, name, value)
    return [{"admits": admission.admits, "passes": admission.passes}]
