"""The coordinator of a DP group: what wakes its cores, with the broker or without."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus._protocol.core.effects import Note, Send
from bus._protocol.dp import coordinator as module
from bus._protocol.dp.coordinator import CoordinatorState, DpCoordinator, Publish, Ready, StartCores
from bus.messages import FirstReq, FirstReqHeld, StartDpWave, WaveComplete, WaveStarted

if TYPE_CHECKING:
    from bus._protocol.dp.coordinator import CoordinatorEffect
    from bus.messages import Message

_S = CoordinatorState
GROUP = "moe"


def a_gateway(state: CoordinatorState = _S.IDLE, wave: int = 3) -> DpCoordinator:
    """One of two ready cores, at time 0, brought to ``state`` by what leads there."""
    coordinator = DpCoordinator(GROUP, 2)
    coordinator.on_core_subscribed()
    coordinator.on_core_subscribed()
    if wave:
        coordinator.complete(wave - 1, 0)
    if state in (_S.ASKED, _S.PENDING, _S.HELD):
        coordinator.first_req(1, wave, 0, broker=state is not _S.PENDING)
    if state is _S.HELD:
        coordinator.on_message(FirstReqHeld(GROUP, wave, "paused"), 0)
    if state is _S.RUNNING:
        coordinator.on_started(wave, 0, 0)
    assert (coordinator.state, coordinator.wave) == (state, wave)
    return coordinator


def without_notes(effects: list[CoordinatorEffect]) -> list[CoordinatorEffect]:
    return [effect for effect in effects if not isinstance(effect, Note)]


def sent(effects: list[CoordinatorEffect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


# -- the rows of the table -----------------------------------------------------------


def test_a_first_request_is_asked_of_the_broker() -> None:
    """And front ends hear at once that nothing runs yet, or they would send no other."""
    coordinator = a_gateway()
    effects = coordinator.first_req(1, 3, 100, broker=True)
    assert effects == [Send(FirstReq(GROUP, 1, 3)), Publish(3, False)]
    assert coordinator.state is _S.ASKED
    assert coordinator.next_deadline_ms() == 100 + module.BROKER_PATIENCE_MS


def test_a_first_request_without_a_broker_starts_every_core() -> None:
    coordinator = a_gateway()
    assert coordinator.first_req(1, 3, 0, broker=False) == [StartCores(3), Publish(3, False)]
    assert coordinator.state is _S.PENDING


def test_the_broker_allows() -> None:
    coordinator = a_gateway(_S.ASKED)
    assert coordinator.on_message(StartDpWave(GROUP, 3, None), 1) == [StartCores(3)]
    assert coordinator.state is _S.PENDING
    assert not coordinator.local


def test_the_broker_keeps_it_and_starts_it_later() -> None:
    coordinator = a_gateway(_S.ASKED)
    assert coordinator.on_message(FirstReqHeld(GROUP, 3, "paused"), 1) == []
    assert coordinator.state is _S.HELD
    assert coordinator.on_message(StartDpWave(GROUP, 3, None), 2) == [StartCores(3)]
    assert coordinator.state is _S.PENDING


def test_a_silent_broker_is_waited_for_five_milliseconds() -> None:
    coordinator = a_gateway(_S.ASKED)
    assert coordinator.tick(4.9) == []
    note, start = coordinator.tick(5)
    assert start == StartCores(3)
    assert isinstance(note, Note)
    assert note.event == "first_req_decided_locally"
    assert note.fields["silent_ms"] == 5
    started = coordinator.on_started(3, 0, 6)
    assert WaveStarted(GROUP, 3, local=True, rank=1) in sent(started)


def test_what_is_owed_is_repeated_later_each_time() -> None:
    """A core that is still paused drops a START, and says nothing of it."""
    coordinator = a_gateway(_S.PENDING)
    waits = []
    now_ms = 0.0
    for _ in range(7):
        due_ms = coordinator._due_ms
        assert due_ms is not None
        assert not any(isinstance(e, StartCores) for e in coordinator.tick(due_ms - 0.1))
        assert StartCores(3) in coordinator.tick(due_ms)
        waits.append(due_ms - now_ms)
        now_ms = due_ms
    assert waits == [20, 40, 80, 160, 250, 250, 250]


def test_what_is_held_is_asked_again_in_case_the_broker_is_wrong() -> None:
    coordinator = a_gateway(_S.HELD)
    effects = coordinator.tick(module.HELD_RETRY_MS)
    assert StartCores(3) in effects
    assert sent(effects) == [FirstReq(GROUP, 1, 3)]
    assert coordinator.state is _S.HELD


@pytest.mark.parametrize("state", [_S.IDLE, _S.ASKED, _S.PENDING, _S.HELD])
def test_a_core_says_that_the_wave_runs(state: CoordinatorState) -> None:
    coordinator = a_gateway(state)
    effects = without_notes(coordinator.on_started(3, 1, 9))
    assert effects[:2] == [StartCores(3, 1), Publish(3, True)]
    assert isinstance(sent(effects)[0], WaveStarted)
    assert coordinator.running
    assert coordinator.next_deadline_ms() == 9 + module.PUBLISH_MS


@pytest.mark.parametrize("state", [_S.ASKED, _S.PENDING, _S.HELD])
def test_the_rank_of_the_first_request_began_the_wave(state: CoordinatorState) -> None:
    """Not rank 0, which reports for all."""
    coordinator = a_gateway(state)
    (told,) = sent(coordinator.on_started(3, 0, 9))
    assert isinstance(told, WaveStarted)
    assert (told.rank, coordinator.started_by) == (1, 1)


@pytest.mark.parametrize("state", list(_S))
def test_rank_0_says_that_the_wave_is_over(state: CoordinatorState) -> None:
    coordinator = a_gateway(state)
    assert coordinator.complete(3, 9) == [Publish(4, False), Send(WaveComplete(GROUP, 3))]
    assert (coordinator.state, coordinator.wave) == (_S.IDLE, 4)


# -- waves that engines start by themselves, as in vLLM 0.33 ----------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_starts_a_wave(rank: int) -> None:
    """The others are started first and at once: it steps already, and waits for them. The broker
    is told which rank began, and asked nothing."""
    coordinator = a_gateway()
    effects = coordinator.on_started(3, rank, 9)
    told = WaveStarted(GROUP, 3, local=False, rank=rank)
    assert without_notes(effects) == [StartCores(3, rank), Publish(3, True), Send(told)]
    assert coordinator.started_by == rank
    assert coordinator.on_started(3, 0, 10) == []  # rank 0 has made the first step
    assert not any(isinstance(e, StartCores) for e in coordinator.tick(9 + module.PUBLISH_MS))
    assert coordinator.complete(3, 3000) == [Publish(4, False), Send(WaveComplete(GROUP, 3))]
    assert coordinator.started_by is None


def test_a_second_rank_that_starts_the_same_wave_changes_nothing() -> None:
    """Both got a request; each steps, and both are in the START's wave."""
    coordinator = a_gateway()
    coordinator.on_started(3, 1, 9)
    assert coordinator.on_started(3, 0, 9) == []
    assert coordinator.started_by == 1


def test_a_start_that_overtakes_the_end_of_the_wave_before_tells_that_end() -> None:
    """Rank 1 gets a request before the report of rank 0 is here. The broker gets both waves."""
    coordinator = a_gateway(_S.RUNNING)
    expected = [WaveComplete(GROUP, 3), WaveStarted(GROUP, 4, local=False, rank=1)]
    assert sent(coordinator.on_started(4, 1, 9)) == expected
    assert coordinator.complete(3, 10) == []
    assert (coordinator.wave, coordinator.running) == (4, True)


# -- what changes nothing --------------------------------------------------------------


@pytest.mark.parametrize("state", [_S.ASKED, _S.PENDING, _S.HELD, _S.RUNNING])
def test_a_second_first_request_starts_nothing(state: CoordinatorState) -> None:
    """But its front end hears "not running" again, unless something runs."""
    coordinator = a_gateway(state)
    expected = [] if state is _S.RUNNING else [Publish(3, False)]
    assert coordinator.first_req(0, 3, 1, broker=True) == expected
    assert coordinator.state is state


@pytest.mark.parametrize("state", list(_S))
@pytest.mark.parametrize("wave", [2, 4])
def test_the_brokers_word_about_another_wave_changes_nothing(
    state: CoordinatorState, wave: int
) -> None:
    coordinator = a_gateway(state)
    assert coordinator.on_message(StartDpWave(GROUP, wave, None), 1) == []
    assert coordinator.on_message(FirstReqHeld(GROUP, wave, "paused"), 1) == []
    assert coordinator.state is state


@pytest.mark.parametrize("state", [_S.PENDING, _S.RUNNING])
def test_an_answer_that_nobody_waits_for_changes_nothing(state: CoordinatorState) -> None:
    coordinator = a_gateway(state)
    assert coordinator.on_message(StartDpWave(GROUP, 3, None), 1) == []
    assert coordinator.on_message(FirstReqHeld(GROUP, 3, "paused"), 1) == []
    assert coordinator.state is state


def test_a_start_that_the_broker_kept_alone_is_obeyed() -> None:
    """The DP coordinator may have forgotten it over a wave that a pause made."""
    coordinator = a_gateway()
    assert coordinator.on_message(StartDpWave(GROUP, 3, None), 1) == [StartCores(3)]
    assert coordinator.state is _S.PENDING


@pytest.mark.parametrize("state", list(_S))
def test_old_reports_change_nothing(state: CoordinatorState) -> None:
    coordinator = a_gateway(state)
    assert coordinator.on_started(2, 0, 1) == []
    assert coordinator.complete(2, 1) == []
    assert (coordinator.state, coordinator.wave) == (state, 3)


def test_a_wave_that_runs_and_is_told_twice_starts_once() -> None:
    coordinator = a_gateway(_S.RUNNING)
    assert coordinator.on_started(3, 0, 1) == []


# -- joining, subscribing ----------------------------------------------------------------


@pytest.mark.parametrize("state", [_S.ASKED, _S.HELD])
def test_a_new_broker_is_asked_anew(state: CoordinatorState) -> None:
    coordinator = a_gateway(state)
    assert sent(coordinator.on_joined(50))[1:] == [FirstReq(GROUP, 1, 3)]
    assert coordinator.state is _S.ASKED
    assert StartCores(3) in coordinator.tick(55)


@pytest.mark.parametrize("state", [_S.IDLE, _S.PENDING, _S.RUNNING])
def test_a_new_broker_is_not_asked_what_is_decided(state: CoordinatorState) -> None:
    coordinator = a_gateway(state)
    assert not any(isinstance(each, FirstReq) for each in sent(coordinator.on_joined(50)))
    assert coordinator.state is state


@pytest.mark.parametrize("state", [each for each in _S if each is not _S.RUNNING])
def test_a_wave_that_ended_while_the_broker_was_joined_is_reported(state: CoordinatorState) -> None:
    """The JOIN has the wave before it, and no report is sent before WELCOME."""
    coordinator = a_gateway(state)
    assert sent(coordinator.on_joined(50))[0] == WaveComplete(GROUP, 2)


def test_a_wave_that_began_while_the_broker_was_joined_is_reported() -> None:
    coordinator = a_gateway()
    told = sent(coordinator.on_started(3, 1, 9))
    assert sent(coordinator.on_joined(50)) == told == [WaveStarted(GROUP, 3, local=False, rank=1)]


def test_before_the_first_wave_there_is_nothing_to_report() -> None:
    assert a_gateway(wave=0).on_joined(50) == []


def test_cores_hear_nothing_before_all_have_subscribed() -> None:
    """A core's first frame must be READY; a START that came before is repeated after it."""
    coordinator = DpCoordinator(GROUP, 2)
    assert coordinator.on_core_subscribed() == []
    assert coordinator.first_req(0, 0, 0, broker=False) == [Publish(0, False)]
    assert without_notes(coordinator.tick(20)) == []
    assert without_notes(coordinator.on_core_subscribed()) == [Ready()]
    assert StartCores(0) in coordinator.tick(60)


def test_a_core_that_subscribes_again_gets_ready_again() -> None:
    assert a_gateway().on_core_subscribed() == [Ready()]


def test_a_core_that_subscribes_again_while_a_wave_runs_is_started_again() -> None:
    """Its connection broke, and the START may be lost with it: no core repeats its report. To those
    that step it changes nothing."""
    coordinator = a_gateway()
    coordinator.on_started(3, 0, 9)
    assert coordinator.on_core_subscribed() == [Ready(), StartCores(3)]
    coordinator.complete(3, 10)
    assert coordinator.on_core_subscribed() == [Ready()]


def test_a_front_end_that_comes_late_hears_at_once() -> None:
    assert a_gateway(_S.RUNNING).on_front_subscribed(7) == [Publish(3, True)]


def test_front_ends_hear_every_second() -> None:
    coordinator = a_gateway()
    assert coordinator.next_deadline_ms() == module.PUBLISH_MS
    assert coordinator.tick(module.PUBLISH_MS) == [Publish(3, False)]
    assert coordinator.next_deadline_ms() == 2 * module.PUBLISH_MS


# -- invariants ------------------------------------------------------------------------------

NEAR = st.sampled_from([0, 0, 0, 0, -1, 1])  # of the wave under way
EVENTS = st.one_of(
    st.tuples(st.just("first_req"), st.integers(0, 1), st.integers(-2, 0), st.booleans()),
    st.tuples(st.just("first_req"), st.integers(0, 1), st.just(0), st.just(value=True)),
    st.tuples(st.just("allowed"), NEAR),
    st.tuples(st.just("held"), NEAR),
    st.tuples(st.just("started"), st.integers(-1, 1), st.integers(0, 1)),
    st.tuples(st.just("complete"), st.integers(-1, 1)),
    st.tuples(st.just("joined")),
    st.tuples(st.just("wait"), st.floats(0, 4) | st.floats(0, 400)),
)


class Played:
    """A DP coordinator, and what its group would have heard."""

    def __init__(self, reached: Counter[str]) -> None:
        self.reached = reached
        self.coordinator = DpCoordinator(GROUP, 2)
        self.coordinator.on_core_subscribed()
        self.coordinator.on_core_subscribed()
        self.now_ms = 0.0
        self.told_by_cores = 0  # the greatest wave that a core's words allow
        self.told_running = False
        self.owed = False
        self.over = -1  # the last wave whose end the broker was told
        self.begun = -1  # and whose start

    def play(self, event: tuple[object, ...]) -> None:
        match event:
            case "first_req", int(rank), int(behind), bool(broker):
                wave = max(0, self.coordinator.wave + behind)
                if self.coordinator.state is _S.IDLE:
                    self.owed = True
                self.check(self.coordinator.first_req(rank, wave, self.now_ms, broker=broker))
            case "allowed", int(offset):
                wave = max(0, self.coordinator.wave + offset)
                if wave == self.coordinator.wave and self.coordinator.state is _S.IDLE:
                    self.owed = True
                self.check(self.coordinator.on_message(StartDpWave(GROUP, wave, None), self.now_ms))
            case "held", int(offset):
                wave = max(0, self.coordinator.wave + offset)
                self.check(self.coordinator.on_message(FirstReqHeld(GROUP, wave, "p"), self.now_ms))
            case "started", int(offset), int(rank):
                wave = max(0, self.coordinator.wave + offset)
                if wave >= self.coordinator.wave:
                    self.told_by_cores, self.told_running, self.owed = wave, True, False
                self.check(self.coordinator.on_started(wave, rank, self.now_ms))
            case "complete", int(offset):
                wave = max(0, self.coordinator.wave + offset)
                if wave >= self.coordinator.wave:
                    self.told_by_cores, self.told_running, self.owed = wave + 1, False, False
                self.check(self.coordinator.complete(wave, self.now_ms))
            case ("joined",):
                effects = self.coordinator.on_joined(self.now_ms)
                again = [each.message for each in effects if isinstance(each, Send)]
                over = [each.wave for each in again if isinstance(each, WaveComplete)]
                begun = [each.wave for each in again if isinstance(each, WaveStarted)]
                running = self.coordinator.running
                assert over == ([] if running or self.over < 0 else [self.over])
                assert begun == ([self.begun] if running else [])
                asks = Send(FirstReq(GROUP, self.coordinator.rank, self.coordinator.wave))
                self.check([each for each in effects if each == asks])
            case "wait", float(for_ms):
                end_ms = self.now_ms + for_ms
                while (due_ms := self.coordinator.next_deadline_ms()) <= end_ms:
                    assert due_ms >= self.now_ms - module.PUBLISH_MS
                    self.now_ms = max(self.now_ms, due_ms)
                    self.check(self.coordinator.tick(self.now_ms))
                self.now_ms = end_ms

    def check(self, effects: list[CoordinatorEffect]) -> None:
        coordinator = self.coordinator
        self.reached[coordinator.state.value] += 1
        assert coordinator.wave == self.told_by_cores
        # Of whatever core's word: the broker has it.
        told = [each.message for each in effects if isinstance(each, Send)]
        over = max([self.over, *(m.wave for m in told if isinstance(m, WaveComplete))])
        assert over == coordinator.wave - 1
        assert coordinator.running == self.told_running
        # A request that woke nobody yet is never forgotten, and something will happen.
        assert self.owed == (coordinator.state in (_S.ASKED, _S.PENDING, _S.HELD))
        if self.owed:
            assert coordinator.next_deadline_ms() <= self.now_ms + module.HELD_RETRY_MS
        for effect in effects:
            match effect:
                case StartCores(wave, excluded):
                    self.reached["start"] += 1
                    assert wave == coordinator.wave
                    assert excluded is None or coordinator.running
                case Publish(wave, running):
                    assert (wave, running) == (coordinator.wave, self.told_running)
                case Send(WaveComplete(_, wave)):
                    assert wave > self.over
                    self.over = wave
                case Send(WaveStarted(_, wave, _, rank)):
                    assert wave > max(self.over, self.begun)
                    assert rank == coordinator.started_by
                    self.begun = wave
                case _:
                    pass


def test_whatever_happens_the_invariants_hold() -> None:
    """The number is what cores said, "running" too, and no first request is forgotten.

    Every state was seen, and STARTs were judged; an empty play proves nothing.
    """
    reached: Counter[str] = Counter()

    @settings(max_examples=300, deadline=None)
    @given(st.lists(EVENTS, min_size=20, max_size=60))
    def play(events: list[tuple[object, ...]]) -> None:
        played = Played(reached)
        for event in events:
            played.play(event)

    play()
    assert set(reached) == {state.value for state in _S} | {"start"}
    assert min(reached.values()) > 20, reached
