"""The door of vLLM's engine cores: while it is closed, what comes is ended at once.

Clients talk to a server by themselves, so it is the core that turns them away: a request is
answered as an aborted one is, with no tokens. One that bears the pass, in its id, is let in: the
sidecar's own probes do.

The sidecar turns it by vLLM's ``collective_rpc``, in a method that the core answers by itself.
Nobody else is told, so it stays as it is while sidecars come and go.

A core in lockstep that turns a request away joins the wave all the same that its front end has
asked for: the other ranks start it, and can't step without this one.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any, Final

from sidecar.vllm_plugin import core_calls
from sidecar.vllm_plugin.features import door_gaps

_log = logging.getLogger("vllm.wavebus")

# The method; its arguments are those of Door that are to be changed.
DOOR: Final = "wavebus_door"


@dataclass(slots=True)
class Door:
    """One core's. ``passes``: what the id of a request has in it that is let in all the same; with
    one, nobody else is. Empty: there is none."""

    admits: bool = True
    passes: str = ""

    def lets_in(self, request_id: str) -> bool:
        if self.passes:
            return self.passes in request_id
        return self.admits


def install(core: Any) -> bool:
    """Hang it into the cores of the module ``vllm.v1.engine.core``; False if they are not as
    expected."""
    plain = core.EngineCoreProc
    if hasattr(plain, "wavebus_has_door"):
        return True
    gaps = door_gaps(core)
    if gaps:
        _log.warning("wavebus: no door in this vLLM's engine cores: %s", "; ".join(gaps))
        return False
    plain._handle_client_request = _guarded(  # noqa: SLF001 - what there is to wrap
        plain._handle_client_request,  # noqa: SLF001
        core.EngineCoreRequestType.ADD,
    )
    core_calls.answer(plain, DOOR, _turned)
    plain.wavebus_has_door = True
    return True


def _of(core: Any) -> Door:
    door = getattr(core, "wavebus_door", None)
    if door is None:
        door = core.wavebus_door = Door()
    return door


def _guarded(original: Any, add: Any) -> Any:
    @functools.wraps(original)
    def _handle_client_request(self: Any, request_type: Any, request: Any) -> None:
        if request_type == add and not _of(self).lets_in(request[0].request_id):
            _turn_away(self, *request)
            return
        original(self, request_type, request)

    return _handle_client_request


def _turn_away(core: Any, request: Any, wave: int) -> None:
    core._send_abort_outputs_to_client([request.request_id], request.client_index)  # noqa: SLF001
    if not hasattr(core, "current_wave"):
        return
    if core.ignore_start_dp_wave:  # paused: with its resume, as the others
        core.wavebus_owed_wave = max(wave, getattr(core, "wavebus_owed_wave", None) or 0)
    elif wave >= core.current_wave and not core.engines_running:
        core.current_wave = wave
        core.engines_running = True


def _turned(core: Any, **turned: Any) -> list[dict[str, Any]]:
    door = _of(core)
    for name, value in turned.items():
        setattr(door, name, value)
    return [{"admits": door.admits, "passes": door.passes}]
