"""A sidecar's session that gets whatever a peer may send, in any order, while calls end anyhow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, get_args

from bus._protocol.core.failures import Failure
from bus._protocol.engine.calls import CallEscalate
from bus._protocol.engine.lease import LeaseState
from bus._protocol.engine.pause import EnginePauseState
from bus.messages import (
    Abort,
    Commit,
    NackCode,
    PauseGlobal,
    PauseLocal,
    PauseMode,
    Probe,
    Resume,
    Sleep,
    TransferInit,
    UpdateFinish,
    UpdateStart,
    Wake,
)
from bus.operations import ArmManifest, Done
from tests.sim.makers import make_arm, make_chunk, make_manifest, make_part, make_sent
from tests.unit.bus._session import MANIFEST, ROOM, STAGING, Driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bus._protocol.engine.calls import SessionEffect
    from bus.messages import Message

OPEN: Final = replace(MANIFEST, is_open=True)
PART: Final = make_manifest(("c",))
_PAUSES: Final = ("u1", "p2")
_UPDATES: Final = ("u1", "u2")


class AnyOrder(Driver):
    """Plays named actions; one that cannot happen now, such as a return without a call, is none."""

    def __init__(self, *, dp_size: int) -> None:
        super().__init__(draft=True, dp_size=dp_size)
        self.escalations = 0
        self.now_ms = 0.0

    def take(self, effects: list[SessionEffect]) -> list[SessionEffect]:
        self.escalations += sum(isinstance(each, CallEscalate) for each in effects)
        return super().take(effects)

    def play(self, names: Iterable[str]) -> None:
        for name in names:
            ACTIONS[name](self)

    def end(self, code: NackCode | None = None) -> None:
        """The call under way returns, or raises with this code."""
        if self.running is None:
            return
        if code is None:
            self.returned(Done(room=ROOM) if isinstance(self.running, ArmManifest) else None)
        else:
            self.failed(code)

    def end_escalation(self, failure: Failure | None = None) -> None:
        if self.escalations:
            self.escalations -= 1
            self.take(self.session.on_escalation_done(failure, self.now_ms))

    def pass_time(self) -> None:
        due_ms = self.session.next_deadline_ms()
        if due_ms is not None:
            self.now_ms = max(self.now_ms, due_ms)
            self.tick(self.now_ms)

    def find(self, *, runs: bool, partial: tuple[str, ...] = (), asleep: bool = False) -> None:
        """What the sidecar finds when no call is under way."""
        session = self.session
        if not session.at_rest:
            return
        if not runs:
            session.on_found_paused("p2", 5_000.0, self.now_ms, partial=partial, asleep=asleep)
        elif session.pause.state is not EnginePauseState.RUNNING:
            self.take(session.on_core_resumed(self.now_ms))

    def quarantine(self) -> None:
        """What the engine's core, or all cores of a DP group, have decided."""
        session = self.session
        paused = session.pause.state in (EnginePauseState.PAUSED, EnginePauseState.UNKNOWN)
        if session.at_rest and paused and session.lease.state is not LeaseState.SETTLED:
            self.take(session.on_core_quarantined(self.now_ms))

    def hear_version(self, version: int) -> None:
        self.take(self.session.on_group_version(version, self.now_ms))


def _command(message: Message) -> Callable[[AnyOrder], object]:
    return lambda driver: driver.command(message)


_BROKE: Final = Failure(NackCode.ENGINE_FAILED, "it broke")

ACTIONS: Final[dict[str, Callable[[AnyOrder], object]]] = {
    "return": lambda d: d.end(),
    "fail": lambda d: d.end(NackCode.ENGINE_FAILED),
    "fail, nothing loaded": lambda d: d.end(NackCode.TRANSFER_FAILED),
    "fail, called off": lambda d: d.end(NackCode.CALLED_OFF),
    "escalation returns": lambda d: d.end_escalation(),
    "escalation fails": lambda d: d.end_escalation(_BROKE),
    "time passes": lambda d: d.pass_time(),
    "version 3": lambda d: d.hear_version(3),
    "version 9": lambda d: d.hear_version(9),
    "found running": lambda d: d.find(runs=True),
    "quarantined by cores": lambda d: d.quarantine(),
    "found paused": lambda d: d.find(runs=False),
    "found asleep and partial": lambda d: d.find(runs=False, partial=("model",), asleep=True),
    **{
        f"pause {p} {mode}{', clear' * clear}": _command(
            PauseLocal(p, mode, clear, 5_000, 60_000, 100 if mode == "wait" else 0, "abort")
        )
        for p in _PAUSES
        for mode in get_args(PauseMode)
        for clear in (False, True)
    },
    **{
        f"pause {p} {mode} in one phase": _command(
            PauseLocal(p, mode, True, 5_000, 60_000, 100, "abort", one_phase=True)
        )
        for p in _PAUSES
        for mode in get_args(PauseMode)
    },
    **{f"pause global {p}": _command(PauseGlobal(p)) for p in _PAUSES},
    **{f"resume {p}": _command(Resume(p)) for p in _PAUSES},
    **{f"sleep {p} {level}": _command(Sleep(p, level)) for p in _PAUSES for level in (1, 2)},
    **{f"wake {p}": _command(Wake(p)) for p in _PAUSES},
    **{f"open {t}": _command(TransferInit(t, "sim", b"", 0, 0, {})) for t in ("t1", "t2")},
    "arm u1": _command(make_arm("u1", MANIFEST, version=4, staging=STAGING)),
    "arm u2": _command(make_arm("u2", MANIFEST, version=5, staging=STAGING)),
    "arm u2 draft": _command(make_arm("u2", MANIFEST, version=5, target="draft")),
    **{f"start {u}": _command(UpdateStart(u)) for u in _UPDATES},
    **{f"start {u} staged": _command(UpdateStart(u, staged=True)) for u in _UPDATES},
    **{
        f"chunk {u} {k}": _command(make_chunk(u, MANIFEST, k, 1))
        for u in _UPDATES
        for k in range(MANIFEST.chunks)
    },
    **{
        f"sent {u} {k}": _command(make_sent(u, MANIFEST, k, 1))
        for u in _UPDATES
        for k in range(MANIFEST.chunks)
    },
    "arm u1 open": _command(make_arm("u1", OPEN, version=4, staging=STAGING)),
    **{f"part {u}": _command(make_part(u, OPEN, PART)) for u in _UPDATES},
    **{f"finish {u}": _command(UpdateFinish(u)) for u in _UPDATES},
    **{f"probe {u}": _command(Probe(u, ((1, 2),), 2, "s")) for u in _UPDATES},
    **{f"commit {u}": _command(Commit(u, v, "", ())) for u, v in (("u1", 4), ("u2", 5))},
    **{f"abort {u}": _command(Abort(u, "")) for u in _UPDATES},
}

# From where most of the machines' states are near.
BEGINNINGS: Final[dict[str, Callable[[AnyOrder], object]]] = {
    "new": lambda d: d,
    "paused": lambda d: d.paused(),
    "armed": lambda d: d.armed().paused(),
    "started": lambda d: d.started(),
    "loaded": lambda d: d.loaded(),
    "all sent": lambda d: d.loaded(MANIFEST.chunks),
    "finished": lambda d: d.loaded(MANIFEST.chunks).command(UpdateFinish("u1")),
    "staging": lambda d: d.may_stage().command(UpdateStart("u1", staged=True)),
    "staged": lambda d: d.stages(),
    "asleep": lambda d: d.paused().command(Sleep("u1", 2)),
}
