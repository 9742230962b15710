"""The lease page says what would have to be undone, before it is done; and is believed."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from bus._protocol.core.effects import Note
from bus._protocol.engine.calls import CallAbortRequests, CallCommit, CallPause, CallResume
from bus._protocol.engine.pause import EnginePauseState
from bus.errors import EngineError
from bus.messages import Commit, NackCode, Resume, Sleep, UpdateFinish, UpdateStart
from bus.operations import (
    Done,
    Finish,
    LoadChunk,
    Operation,
    ReceiveChunk,
    Restore,
    Start,
)
from sidecar._pause_lease import PauseLeaseWriter
from sidecar._shared_pages.pause_lease import AbandonedPause, LeaseOutcome, PauseLease, deadline_ns
from tests.sim.makers import make_chunk, make_sent
from tests.unit.bus._session import MANIFEST, PAUSE, Driver

if TYPE_CHECKING:
    from bus._protocol.engine.calls import SessionEffect
    from sidecar._shared_pages.pause_lease import Begun, OutcomeState

_S = EnginePauseState
LEFT_MS = 7_000.0  # the lease's 5 s, and how long a living sidecar may take to end it
NOBODY = 2**22 + 1  # no process has this number


class Page:
    """An engine, as far as a owner has to do with it."""

    def __init__(self) -> None:
        self.held: PauseLease | None = None
        self.end: LeaseOutcome | None = None
        self.done: list[str] = []
        self.fails = False

    def write_pause_lease(self, lease: PauseLease | None) -> LeaseOutcome | None:
        if lease is not None and self.end is not None and self.end.serial == lease.serial:
            return self.end
        self.held = lease
        return None

    async def perform(self, operation: Restore) -> Done:
        self.done.append(f"restore {operation.target}")
        if self.fails:
            raise EngineError("it broke")
        return Done()

    async def admit(self, *, open: bool) -> None:  # noqa: A002 - the engine's
        self.done.append("open" if open else "shut")

    async def abort_requests(self) -> int:
        self.done.append("abort")
        return 0


class Kept(Driver):
    """A session whose every call is made under a hold, as a sidecar makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self.now_ms = 0.0
        self.owner = PauseLeaseWriter(self.page, self.session, "e0")  # type: ignore[arg-type]

    def take(self, effects: list[SessionEffect]) -> list[SessionEffect]:
        """As a driver's. A pause call begins a lease of its own."""
        if any(isinstance(each, CallPause) for each in effects):
            self.owner.begin_pause()
        return super().take(effects)

    def keep(self) -> list[SessionEffect]:
        return self.owner.write(self.now_ms)

    @property
    def held(self) -> PauseLease:
        self.keep()
        assert self.page.held is not None
        return self.page.held

    def ends(self, state: OutcomeState) -> None:
        """The core has ended what it is held by."""
        self.page.end = LeaseOutcome(self.held.serial, state, "no sidecar renewed the lease")


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_who_runs_is_held_by_nobody(kept: Kept) -> None:
    kept.keep()
    assert kept.page.held is None
    kept.armed()
    kept.keep()
    assert kept.page.held is None


def test_a_pause_is_held_before_it_is_called_and_until_its_resume_has_returned(kept: Kept) -> None:
    kept.command(PAUSE)
    assert isinstance(kept.running, CallPause)
    held = kept.held
    assert (held.pause_id, held.version, held.dp_group) == ("u1", 3, "e0")
    assert held.writer_pid == os.getpid()
    assert (held.begun, held.partial, held.asleep, held.resuming) == ("", (), False, False)
    left_ms = (held.until_ns - time.monotonic_ns()) / 1e6
    assert 0 < left_ms <= LEFT_MS
    kept.returned()
    assert kept.held.serial == held.serial
    kept.command(Resume("u1"))
    assert isinstance(kept.running, CallResume)
    assert kept.held.resuming
    kept.returned()
    kept.keep()
    assert kept.page.held is None


def test_each_pause_has_a_hold_of_its_own(kept: Kept) -> None:
    """But for one that takes over from another: nobody has called the engine for that."""
    kept.paused()
    first = kept.held.serial
    assert kept.held.serial == first
    kept.command(Resume("u1"))
    kept.returned()
    kept.command(PAUSE)
    assert kept.held.serial != first


def test_what_an_update_has_begun_is_held_before_it_is_called(kept: Kept) -> None:
    """From its start to its commit; what can't be restored any more from the first load on."""
    kept.armed().paused()
    assert kept.held.begun == ""
    kept.command(UpdateStart("u1"))
    assert isinstance(kept.running, Start)
    assert (kept.held.begun, kept.held.partial) == ("model", ())
    kept.returned()
    kept.command(make_chunk("u1", MANIFEST, 0, 1))
    kept.command(make_sent("u1", MANIFEST, 0, 1))
    assert isinstance(kept.running, ReceiveChunk)
    assert kept.held.partial == ()
    kept.returned()
    assert isinstance(kept.running, LoadChunk)
    assert (kept.held.begun, kept.held.partial) == ("model", ("model",))
    kept.returned()
    kept.command(make_chunk("u1", MANIFEST, 1, 1))
    kept.command(make_sent("u1", MANIFEST, 1, 1))
    for _ in ("received", "loaded"):
        assert kept.held.partial == ("model",)
        kept.returned()
    kept.command(UpdateFinish("u1"))
    assert isinstance(kept.running, Finish)
    assert kept.held.partial == ("model",)
    kept.returned()
    kept.command(Commit("u1", 4, "", ()))
    assert isinstance(kept.running, CallCommit)
    assert kept.held.partial == ("model",)
    kept.returned()
    assert (kept.held.begun, kept.held.partial, kept.held.version) == ("", (), 4)


def test_a_sleep_is_held(kept: Kept) -> None:
    """One that discards weights leaves parts missing, before it is called."""
    kept.paused()
    kept.command(Sleep("u1", 2))
    assert (kept.held.asleep, kept.held.partial) == (True, ("model",))


@pytest.mark.parametrize("state", ["resumed", "quarantined", "waiting"])
def test_under_a_hold_that_is_void_no_update_is_called(kept: Kept, state: OutcomeState) -> None:
    kept.armed().paused()
    kept.ends(state)
    kept.command(UpdateStart("u1"))
    assert isinstance(kept.running, Start)
    kept.keep()
    with pytest.raises(EngineError, match="the pause's lease was over, and the engine is") as found:
        kept.owner.require_held()
    assert found.value.code is NackCode.WRONG_STATE
    kept.failed()
    kept.command(Resume("u1"))
    assert not isinstance(kept.running, Operation)


def test_an_engine_that_another_living_sidecar_holds_is_not_taken_over(kept: Kept) -> None:
    """What it has begun is not undone under it."""
    kept.started()
    left = AbandonedPause(replace(kept.held, writer_pid=os.getppid()), None)
    with pytest.raises(EngineError, match=f"another sidecar, process {os.getppid()}") as found:
        asyncio.run(kept.owner.take_over(left, 0.0))
    assert found.value.code is NackCode.NAME_TAKEN
    assert kept.page.done == []


def test_an_engine_that_has_resumed_by_itself_runs(kept: Kept) -> None:
    kept.started()
    kept.ends("resumed")
    (note,) = kept.keep()
    assert isinstance(note, Note)
    assert (note.event, note.fields["state"]) == ("engine_decided", "resumed")
    assert (kept.session.phase, kept.session.version) == ("running", 3)
    assert not kept.session.update.is_mixed
    kept.keep()
    assert kept.page.held is None


@pytest.mark.parametrize("loaded", [0, 1])
def test_an_engine_that_was_quarantined_inside_is_so_here(kept: Kept, loaded: int) -> None:
    """Also when it was for a peer rank's sake; and the next update may begin."""
    kept.loaded(loaded)
    kept.ends("quarantined")
    before = kept.held.serial if kept.page.end is None else kept.page.end.serial
    effects = kept.keep()
    assert isinstance(effects[-1], CallAbortRequests)
    kept.take([each for each in effects if isinstance(each, CallAbortRequests)])
    kept.returned()
    assert kept.session.phase == "quarantined"
    assert kept.session.pause.state is _S.PAUSED
    assert kept.held.serial != before
    assert kept.held.partial == ("model",)


def test_one_that_waits_is_held_anew_when_the_broker_is_heard_again(kept: Kept) -> None:
    """Not before: the others of its DP group may have counted on its vote."""
    kept.paused()
    kept.ends("waiting")
    assert kept.page.end is not None
    kept.now_ms = kept.session.lease.over_ms or 0.0
    (note,) = kept.keep()
    assert isinstance(note, Note)
    assert note.event == "lease_undecided"
    assert kept.keep() == []  # that is logged once
    kept.now_ms -= 1.0
    assert kept.page.held is not None
    assert kept.page.held.serial == kept.page.end.serial
    assert kept.session.phase == "paused"
    kept.keep()
    assert kept.held.serial != kept.page.end.serial
    assert kept.session.phase == "paused"


def test_nothing_is_followed_while_a_call_is_under_way(kept: Kept) -> None:
    kept.started()
    kept.ends("resumed")
    kept.command(make_chunk("u1", MANIFEST, 0, 1))
    assert isinstance(kept.running, ReceiveChunk)
    assert kept.keep() == []
    assert kept.session.phase == "updating"


def left(
    *,
    begun: Begun = "",
    partial: tuple[str, ...] = (),
    state: OutcomeState | None = None,
    asleep: bool = False,
) -> AbandonedPause:
    until_ns = deadline_ns(60_000)
    hold = PauseLease(7, "u9", until_ns, NOBODY, "e0", 3, begun, partial, asleep, resuming=False)
    return AbandonedPause(hold, LeaseOutcome(7, state, "") if state else None)


@pytest.mark.parametrize(
    ("found", "done", "phase"),
    [
        (left(), [], "paused"),
        (left(state="waiting"), [], "paused"),
        (left(asleep=True), [], "asleep"),
        (left(begun="model"), ["restore model"], "paused"),
        (left(begun="adapter"), [], "paused"),
        (left(begun="model", partial=("model",)), ["shut", "abort"], "quarantined"),
        (left(state="quarantined"), ["shut", "abort"], "quarantined"),
    ],
)
def test_a_pause_that_was_left_behind_is_taken_over(
    kept: Kept, found: AbandonedPause, done: list[str], phase: str
) -> None:
    note = asyncio.run(kept.owner.take_over(found, 0.0))
    assert (note.event, note.fields["phase"]) == ("found_paused", phase)
    assert kept.page.done == done
    assert kept.session.phase == phase
    assert kept.session.shown_id == "u9"
    over_ms = kept.session.lease.over_ms
    assert over_ms is not None
    assert 0 < over_ms <= 60_000
    assert kept.held.partial == found.partial
    assert kept.held.serial != 7


def test_what_can_not_be_restored_lacks_a_part(kept: Kept) -> None:
    kept.page.fails = True
    asyncio.run(kept.owner.take_over(left(begun="draft"), 0.0))
    assert kept.page.done == ["restore draft", "shut", "abort"]
    assert kept.session.update.partial == {"draft"}


@pytest.mark.parametrize(("runs_on", "done"), [(True, ["open"]), (False, [])])
def test_a_closed_engine_is_opened_by_a_sidecar_that_leaves_if_it_runs_on(
    kept: Kept, runs_on: bool, done: list[str]
) -> None:
    """One that ends with its sidecar would serve old weights until it has ended."""
    kept.session.admission.closed = True
    asyncio.run(kept.owner.release(runs_on=runs_on))
    assert kept.page.done == done
