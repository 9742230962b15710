"""One engine's pause: a resume only after a pause has returned, and only one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from bus._protocol.core.effects import Send
from bus._protocol.core.failures import Declined, Failure
from bus._protocol.engine.admission import Admission
from bus._protocol.engine.calls import (
    CallEscalate,
    CallPause,
    CallQueue,
    CallResume,
    CallStrengthenPause,
    Job,
)
from bus._protocol.engine.lease import EngineLease
from bus._protocol.engine.memory import EngineMemory
from bus._protocol.engine.pause import EnginePause, EnginePauseState
from bus.messages import Ack, Nack, NackCode, PauseGlobal, PauseLocal, PauseMode, Resume, Step
from tests.unit.bus._builders import messages, only

if TYPE_CHECKING:
    from collections.abc import Iterable

BROKEN = Failure(NackCode.ENGINE_FAILED, "it broke")
_S = EnginePauseState


class Driver:
    """The machine with its queue, as a session drives them."""

    def __init__(self) -> None:
        self.queue = CallQueue()
        self.lease = EngineLease()
        self.pause = EnginePause(self.queue, EngineMemory(self.queue), self.lease, Admission())
        self.now_ms = 1000.0
        self.calls: list[object] = []

    def local(self, update_id: str = "u1", msg_id: int = 1, lease_ms: int = 5000) -> list[object]:
        return self.ask(PauseLocal(update_id, "keep", True, lease_ms, 60_000, 0, "keep"), msg_id)

    def once(self, update_id: str = "u1", msg_id: int = 1, lease_ms: int = 5000) -> list[object]:
        """The same in one phase."""
        asked = PauseLocal(update_id, "keep", True, lease_ms, 60_000, 0, "keep", one_phase=True)
        return self.ask(asked, msg_id)

    def ask(self, message: PauseLocal, msg_id: int = 1) -> list[object]:
        return self._issue(self.pause.local(msg_id, message, self.now_ms))

    def globally(self, update_id: str = "u1", msg_id: int = 2) -> list[object]:
        return self._issue(self.pause.globally(msg_id, PauseGlobal(update_id)))

    def resume(self, update_id: str = "u1", msg_id: int = 3) -> list[object]:
        return self._issue(self.pause.resume(msg_id, Resume(update_id)))

    def returned(self) -> list[object]:
        job = self._end()
        if isinstance(job.call, CallPause):
            return self._issue(self.pause.on_paused(4.0))
        if isinstance(job.call, CallStrengthenPause):
            return self._issue(self.pause.on_strengthened(4.0))
        return self._issue(self.pause.on_resumed(job, 4.0, self.now_ms))

    def failed(self) -> list[object]:
        job = self._end()
        if isinstance(job.call, CallPause):
            return self._issue(self.pause.on_pause_failed(job.reply_to, BROKEN))
        if isinstance(job.call, CallStrengthenPause):
            return self._issue(self.pause.on_strengthen_failed(job.reply_to, BROKEN))
        return self._issue(self.pause.on_resume_failed(job, BROKEN, self.now_ms))

    def to(self, state: EnginePauseState) -> Driver:
        """Bring it there the long way."""
        if state is not _S.RUNNING:
            self.local()
        if state in (_S.PAUSED, _S.RESUMING):
            self.returned()
        if state is _S.RESUMING:
            self.resume()
        if state is _S.UNKNOWN:
            self.failed()
        assert self.pause.state is state
        return self

    def _end(self) -> Job:
        call = self.queue.running()
        assert call is not None
        return self.queue.end(call)

    def _issue(self, effects: Iterable[object]) -> list[object]:
        self.calls += self.queue.issue(0.0)
        return list(effects)


def test_a_pause_is_acked_twice_when_issued_and_when_it_has_returned() -> None:
    """Phase 1 at once; phase 2 by the return of the call, and not before."""
    driver = Driver()
    assert only(driver.local(), Ack).step is Step.PAUSE_LOCAL
    assert driver.calls == [CallPause("keep", True)]
    assert driver.globally() == []
    acked = only(driver.returned(), Ack)
    assert (acked.step, acked.update_id) == (Step.PAUSE_GLOBAL, "u1")
    assert driver.pause.state is _S.PAUSED


def test_a_phase_two_that_comes_after_the_return_is_acked_at_once() -> None:
    """The engine is idle already."""
    driver = Driver().to(_S.PAUSED)
    assert only(driver.globally(), Ack).step is Step.PAUSE_GLOBAL


@pytest.mark.parametrize("state", EnginePauseState)
def test_a_doubled_pause_local_calls_nothing(state: EnginePauseState) -> None:
    """It is acked again; the engine is called once, unless that has failed."""
    driver = Driver().to(state)
    before = list(driver.calls)
    effects = driver.local(msg_id=9)
    if state in (_S.RUNNING, _S.UNKNOWN):
        assert driver.calls == [*before, CallPause("keep", True)]
    else:
        assert driver.calls == before
    assert bool(messages(effects)) is (state is not _S.RESUMING)


@pytest.mark.parametrize("state", EnginePauseState)
@pytest.mark.parametrize("update_id", ["u1", "u0"])
def test_pause_global_is_for_the_pause_under_way(state: EnginePauseState, update_id: str) -> None:
    """In any other state, or for another pause, it is refused and changes nothing."""
    driver = Driver().to(state)
    calls = list(driver.calls)
    if update_id == "u1" and state in (_S.PAUSING, _S.PAUSED):
        driver.globally(update_id)
    else:
        with pytest.raises(Declined) as declined:
            driver.globally(update_id)
        assert declined.value.failure.code is NackCode.WRONG_STATE
    assert driver.pause.state is state
    assert driver.calls == calls


@pytest.mark.parametrize("state", EnginePauseState)
@pytest.mark.parametrize("update_id", ["u1", "u0"])
def test_resume_is_for_the_pause_under_way(state: EnginePauseState, update_id: str) -> None:
    """Only a completed pause of this id is resumed; a pending one remembers it."""
    driver = Driver().to(state)
    calls = list(driver.calls)
    if state in (_S.RUNNING, _S.UNKNOWN) or update_id == "u0":
        with pytest.raises(Declined):
            driver.resume(update_id)
        assert driver.pause.state is state
        assert driver.calls == calls
        return
    driver.resume(update_id)
    resumes = [call for call in driver.calls if isinstance(call, CallResume)]
    assert len(resumes) == (0 if state is _S.PAUSING else 1)


def test_a_resume_that_comes_too_early_waits_for_the_pause() -> None:
    """No engine gets a resume without a completed pause."""
    driver = Driver().to(_S.PAUSING)
    driver.globally()
    assert driver.resume() == []
    assert driver.calls == [CallPause("keep", True)]
    assert only(driver.returned(), Ack).step is Step.PAUSE_GLOBAL
    assert driver.calls[1:] == [CallResume()]
    assert only(driver.returned(), Ack).step is Step.RESUME
    assert driver.pause.state is _S.RUNNING


def test_a_doubled_resume_calls_once_and_is_acked_again() -> None:
    """While it runs and after it has returned."""
    driver = Driver().to(_S.RESUMING)
    assert driver.resume(msg_id=8) == []
    driver.returned()
    again = only(driver.resume(msg_id=9), Ack)
    assert again.step is Step.RESUME
    assert driver.calls.count(CallResume()) == 1


def test_a_pause_that_fails_is_made_anew() -> None:
    """Whoever waits for phase 2 hears why; nobody knows if it was made: no resume follows, and
    the next pause is a new call."""
    driver = Driver().to(_S.PAUSING)
    driver.globally(msg_id=22)
    driver.resume()
    effects = driver.failed()
    nack = only(effects, Nack)
    assert (nack.step, nack.code) == (Step.PAUSE_GLOBAL, NackCode.ENGINE_FAILED)
    assert driver.pause.state is _S.UNKNOWN
    driver.local("u2")
    driver.returned()
    assert CallResume() not in driver.calls


def test_a_resume_that_fails_leaves_the_engine_paused() -> None:
    """It may be resumed again."""
    driver = Driver().to(_S.RESUMING)
    assert only(driver.failed(), Nack).step is Step.RESUME
    assert driver.pause.state is _S.PAUSED
    driver.resume(msg_id=7)
    assert driver.calls.count(CallResume()) == 2


def test_a_pause_during_a_resume_follows_it() -> None:
    """Two calls never overlap, and the second pause is a new one."""
    driver = Driver().to(_S.RESUMING)
    assert driver.local("u2") == []
    acks = [each for each in messages(driver.returned()) if isinstance(each, Ack)]
    assert [(each.step, each.update_id) for each in acks] == [
        (Step.RESUME, "u1"),
        (Step.PAUSE_LOCAL, "u2"),
    ]
    assert driver.pause.state is _S.PAUSING


def test_a_pause_during_a_resume_that_fails_takes_the_old_pause_over() -> None:
    """The engine is paused already: no second call."""
    driver = Driver().to(_S.RESUMING)
    driver.local("u2")
    driver.failed()
    assert driver.pause.state is _S.PAUSED
    assert driver.pause.update_id == "u2"
    assert [type(call) for call in driver.calls] == [CallPause, CallResume]


@pytest.mark.parametrize("state", [_S.PAUSING, _S.PAUSED])
def test_a_pause_left_behind_is_taken_over_by_the_next(state: EnginePauseState) -> None:
    """What was to follow the old one does not."""
    driver = Driver().to(state)
    if state is _S.PAUSING:
        driver.globally("u1", msg_id=2)
        driver.resume("u1")
    driver.local("u2", msg_id=5, lease_ms=7000)
    assert driver.lease.over_ms == driver.now_ms + 7000.0
    if state is _S.PAUSING:
        assert driver.returned() == []
    assert only(driver.globally("u2"), Ack).update_id == "u2"
    assert [type(call) for call in driver.calls] == [CallPause]


def told(effects: list[object]) -> list[tuple[Step, str, int]]:
    """Of each ack its step, its pause, and what it answers."""
    sent = [each for each in effects if isinstance(each, Send)]
    return [
        (each.message.step, each.message.update_id, each.reply_to)
        for each in sent
        if isinstance(each.message, Ack)
    ]


def test_a_pause_in_one_phase_is_acked_once_when_it_has_returned() -> None:
    """And not before, however often it is asked."""
    driver = Driver()
    for msg_id in (1, 2, 3):
        assert driver.once(msg_id=msg_id) == []
    assert driver.calls == [CallPause("keep", True)]
    assert told(driver.returned()) == [(Step.PAUSE_GLOBAL, "u1", 3)]
    assert driver.pause.state is _S.PAUSED


@pytest.mark.parametrize("state", EnginePauseState)
@pytest.mark.parametrize("update_id", ["u1", "u2"])
def test_a_pause_in_one_phase_is_answered_from_every_state(
    state: EnginePauseState, update_id: str
) -> None:
    """Asked again, or by another owner. Paused: at once. Else when the pause has returned, for
    which a resume, or a pause that has failed, is followed by a new one."""
    driver = Driver().to(state)
    before = list(driver.calls)
    effects = driver.once(update_id, msg_id=9)
    paused = (Step.PAUSE_GLOBAL, update_id, 9)
    if state is _S.PAUSED:
        assert told(effects) == [paused]
    else:
        assert effects == []
        resumed = [(Step.RESUME, "u1", 3)] if state is _S.RESUMING else []
        assert told([*driver.returned(), *(driver.returned() if resumed else [])]) == [
            *resumed,
            paused,
        ]
    anew = [] if state in (_S.PAUSING, _S.PAUSED) else [CallPause("keep", True)]
    assert driver.calls == [*before, *anew]
    assert driver.pause.state is _S.PAUSED
    assert driver.pause.update_id == update_id


@pytest.mark.parametrize("update_id", ["u1", "u2"])
def test_a_resume_that_fails_leaves_the_pause_to_who_asked_in_one_phase(update_id: str) -> None:
    """It is paused already: no second call."""
    driver = Driver().to(_S.RESUMING)
    assert driver.once(update_id, msg_id=9) == []
    assert told(driver.failed()) == [(Step.PAUSE_GLOBAL, update_id, 9)]
    assert [type(call) for call in driver.calls] == [CallPause, CallResume]


def test_what_was_to_follow_a_pause_taken_over_in_one_phase_does_not() -> None:
    """Neither its ack, nor its resume."""
    driver = Driver()
    driver.once("u1", msg_id=2)
    driver.resume("u1")
    driver.once("u2", msg_id=5)
    assert told(driver.returned()) == [(Step.PAUSE_GLOBAL, "u2", 5)]
    assert [type(call) for call in driver.calls] == [CallPause]


def test_a_resume_that_comes_too_early_waits_for_the_one_phase() -> None:
    """As for two."""
    driver = Driver()
    driver.once(msg_id=2)
    assert driver.resume() == []
    assert told(driver.returned()) == [(Step.PAUSE_GLOBAL, "u1", 2)]
    assert driver.calls[1:] == [CallResume()]


def test_a_pause_in_one_phase_that_fails_is_refused_and_made_anew_when_it_is_asked_again() -> None:
    """Whose refusal is lost, may still hear that it has paused: by a call that returned."""
    driver = Driver()
    driver.once(msg_id=7)
    (sent,) = [each for each in driver.failed() if isinstance(each, Send)]
    assert isinstance(sent.message, Nack)
    assert (sent.message.step, sent.reply_to) == (Step.PAUSE_GLOBAL, 7)
    assert driver.pause.state is _S.UNKNOWN
    assert driver.once(msg_id=8) == []
    assert told(driver.returned()) == [(Step.PAUSE_GLOBAL, "u1", 8)]


@pytest.mark.parametrize("state", [_S.PAUSING, _S.PAUSED])
def test_a_pause_in_one_phase_that_is_asked_again_begins_its_lease_anew(
    state: EnginePauseState,
) -> None:
    """It may be the first ask of another broker, after which nobody renews what is left."""
    driver = Driver()
    driver.once(lease_ms=7000)
    if state is _S.PAUSED:
        driver.returned()
    for update_id, lease_ms in (("u1", 7000), ("u2", 9000)):
        driver.now_ms += 400.0
        driver.once(update_id, lease_ms=lease_ms)
        assert driver.lease.over_ms == driver.now_ms + lease_ms


@pytest.mark.parametrize("made", [False, True])
def test_a_pause_taken_over_in_one_phase_is_acked_when_it_drops_as_much(made: bool) -> None:
    """And by the ack that stands for both phases."""
    driver = Driver()
    driver.ask(weak())
    if made:
        driver.returned()
    assert driver.ask(replace(strong("abort"), one_phase=True), 7) == []
    if not made:
        assert driver.returned() == []
    assert driver.calls[-1] == CallStrengthenPause(aborts=True, clears=True)
    assert told(driver.returned()) == [(Step.PAUSE_GLOBAL, "u1", 7)]


@pytest.mark.parametrize("one_phase", [False, True])
def test_a_pause_that_ends_requests_says_how_many_there_were(one_phase: bool) -> None:
    """They are gone when it has returned."""
    driver = Driver()
    driver.pause.in_flight = 6
    driver.ask(PauseLocal("u1", "abort", True, 5000, 60_000, 0, "keep", one_phase=one_phase))
    driver.pause.in_flight = 0
    effects = [*driver.returned(), *([] if one_phase else driver.globally())]
    assert only(effects, Ack).in_flight == 6
    driver.pause.in_flight = 2
    driver.ask(replace(strong("abort", "u2"), one_phase=True))
    assert only(driver.globally("u2"), Ack).in_flight == 2


WAIT = PauseLocal("u1", "wait", True, 5_000, 60_000, 300, "abort")


def test_a_wait_that_drains_in_time_does_not_escalate() -> None:
    """And says so."""
    driver = Driver()
    driver.ask(WAIT)
    assert driver.pause.escalate_ms == 1300.0
    driver.globally()
    done = only(driver.returned(), Ack)
    assert (done.step, done.outcome, done.waited_for) == (Step.PAUSE_GLOBAL, "drained", ())
    assert driver.pause.escalate_ms is None


@pytest.mark.parametrize("one_phase", [False, True])
@pytest.mark.parametrize("first", ["wait", "escalation"])
def test_of_two_pauses_the_later_return_counts(first: str, one_phase: bool) -> None:
    """An old `wait` may come back while the engine still aborts, and the other way round."""
    driver = Driver()
    driver.ask(replace(WAIT, one_phase=one_phase))
    if not one_phase:
        driver.globally()
    assert driver.pause.escalate() == [CallEscalate("abort", clear_cache=True)]
    driver.pause.on_escalated(("r1", "r2"))
    second = driver.pause.on_paused
    assert not (driver.returned() if first == "wait" else second(0.0))
    assert driver.pause.state is _S.PAUSING
    done = only(second(0.0) if first == "wait" else driver.returned(), Ack)
    assert (done.outcome, done.waited_for) == ("escalated", ("r1", "r2"))
    assert driver.pause.state is _S.PAUSED


@pytest.mark.parametrize("first", ["wait", "escalation"])
def test_of_two_pauses_one_may_fail(first: str) -> None:
    """The other one has paused the engine."""
    driver = Driver()
    driver.ask(WAIT)
    driver.globally()
    driver.pause.escalate()
    if first == "wait":
        assert not driver.failed()
        assert only(driver.pause.on_paused(1.0), Ack).step is Step.PAUSE_GLOBAL
    else:
        assert not driver.pause.on_pause_failed(0, BROKEN)
        assert only(driver.returned(), Ack).step is Step.PAUSE_GLOBAL
    assert driver.pause.state is _S.PAUSED


def test_of_two_pauses_both_may_fail() -> None:
    """Then there is none, and the next one may try."""
    driver = Driver()
    driver.ask(WAIT)
    driver.globally()
    driver.pause.escalate()
    assert not driver.failed()
    assert only(driver.pause.on_pause_failed(0, BROKEN), Nack).code is NackCode.ENGINE_FAILED
    assert driver.pause.state is _S.UNKNOWN


def test_a_resume_waits_for_both_pauses() -> None:
    """No engine gets one while a pause is pending."""
    driver = Driver()
    driver.ask(WAIT)
    driver.pause.escalate()
    driver.resume()
    driver.returned()
    assert driver.calls == [CallPause("wait", clear_cache=True)]
    driver.pause.on_paused(1.0)
    driver._issue([])
    assert driver.calls[-1] == CallResume()


def test_without_a_deadline_a_wait_waits() -> None:
    """Zero says so."""
    driver = Driver()
    driver.ask(PauseLocal("u1", "wait", True, 5_000, 60_000, 0, "abort"))
    assert driver.pause.escalate_ms is None


def weak(update_id: str = "u0") -> PauseLocal:
    """A pause that keeps all, of somebody who is gone."""
    return PauseLocal(update_id, "keep", False, 5000, 60_000, 0, "keep")


def strong(mode: PauseMode = "keep", update_id: str = "u1") -> PauseLocal:
    return PauseLocal(update_id, mode, True, 5000, 60_000, 0, "keep")


def acked(effects: list[object], step: Step) -> list[int]:
    """The ids that an ack of this step answers."""
    sent = [each for each in effects if isinstance(each, Send)]
    return [
        each.reply_to
        for each in sent
        if isinstance(each.message, Ack) and each.message.step is step
    ]


@pytest.mark.parametrize(
    ("asked", "lacks"),
    [
        (strong(), CallStrengthenPause(aborts=False, clears=True)),
        (strong("abort"), CallStrengthenPause(aborts=True, clears=True)),
        (strong("wait"), CallStrengthenPause(aborts=False, clears=True)),
    ],
)
def test_a_pause_that_is_taken_over_drops_what_the_next_one_wants_dropped(
    asked: PauseLocal, lacks: CallStrengthenPause
) -> None:
    """Paused is said when it has: the next tokens would come of the last version's keys."""
    driver = Driver()
    driver.ask(weak())
    driver.returned()
    assert acked(driver.ask(asked, 7), Step.PAUSE_LOCAL) == [7]
    assert driver.calls[-1] == lacks
    assert acked(driver.globally(msg_id=8), Step.PAUSE_GLOBAL) == []
    assert driver.pause.state is _S.PAUSING
    assert acked(driver.returned(), Step.PAUSE_GLOBAL) == [8]
    assert driver.pause.state is _S.PAUSED
    assert driver.pause.clears_cache
    driver.ask(asked, 9)
    assert driver.calls[-1] == lacks
    assert len(driver.calls) == 2, "once"


def test_a_pause_under_way_is_followed_by_what_it_lacks() -> None:
    """And is acked behind that."""
    driver = Driver()
    driver.ask(weak())
    driver.ask(strong(), 7)
    driver.globally(msg_id=8)
    assert driver.calls == [CallPause("keep", False)]
    assert acked(driver.returned(), Step.PAUSE_GLOBAL) == []
    assert driver.calls[-1] == CallStrengthenPause(aborts=False, clears=True)
    assert acked(driver.returned(), Step.PAUSE_GLOBAL) == [8]


@pytest.mark.parametrize("made", [False, True])
def test_what_several_pauses_want_dropped_is_dropped(made: bool) -> None:
    """Taken over twice, while the first one is being made, or while what it lacks is."""
    driver = Driver()
    driver.ask(weak())
    if made:
        driver.returned()
    driver.ask(strong(), 7)
    driver.ask(strong("abort", "u2"), 8)
    driver.globally("u2", msg_id=9)
    acks: list[int] = []
    while driver.queue.running() is not None:
        acks += acked(driver.returned(), Step.PAUSE_GLOBAL)
    strengthened = [call for call in driver.calls if isinstance(call, CallStrengthenPause)]
    assert any(call.clears for call in strengthened)
    assert any(call.aborts for call in strengthened)
    assert acks == [9]
    assert driver.pause.state is _S.PAUSED


def test_the_same_pause_that_was_half_made_as_a_weaker_one() -> None:
    """Whoever completed it did not know what its trainer had asked for."""
    driver = Driver()
    driver.ask(weak("u1"))
    driver.returned()
    driver.ask(strong(), 7)
    assert driver.calls[-1] == CallStrengthenPause(aborts=False, clears=True)


def test_a_pause_that_does_enough_is_taken_over_as_it_is() -> None:
    """No call is made."""
    driver = Driver()
    driver.ask(strong("abort", "u0"))
    driver.returned()
    for message in (weak("u1"), strong("keep", "u2"), strong("abort", "u3")):
        driver.ask(message)
    assert driver.calls == [CallPause("abort", True)]
    assert driver.pause.state is _S.PAUSED


def test_what_could_not_be_dropped_is_no_pause() -> None:
    """Nobody knows what is there still: it is made once more, as it was asked for."""
    driver = Driver()
    driver.ask(weak())
    driver.returned()
    driver.ask(strong("abort"), 7)
    driver.globally(msg_id=8)
    (sent,) = [each for each in driver.failed() if isinstance(each, Send)]
    assert isinstance(sent.message, Nack)
    assert (sent.message.step, sent.reply_to) == (Step.PAUSE_GLOBAL, 8)
    assert driver.pause.state is _S.UNKNOWN
    driver.pause.pause_again()
    assert driver.queue.running() == CallPause("abort", True)


def test_a_pause_that_failed_drops_nothing() -> None:
    """The engine may run: what was to follow does not."""
    driver = Driver()
    driver.ask(weak())
    driver.ask(strong(), 7)
    driver.failed()
    assert driver.pause.state is _S.UNKNOWN
    assert driver.calls == [CallPause("keep", False)]
