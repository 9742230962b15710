"""The waves of one DP group at the broker: every state and event, and what must always hold."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus._protocol.core.state_table import IllegalTransition
from bus._protocol.dp.wave import TRANSITIONS, WaveEvent, WaveMachine, WaveState

if TYPE_CHECKING:
    from collections.abc import Callable

_S, _E = WaveState, WaveEvent

WAVE = 5
MAY_STEP = (_S.IDLE, _S.RUNNING, _S.LOCAL)
OFF = (_S.GLOBAL, _S.DOWN)

# How each event is told, by the method that stands for it.
TELL: dict[WaveEvent, Callable[[WaveMachine], object]] = {
    _E.FIRST_REQ: lambda wave: wave.first_req(WAVE),
    _E.STARTED: lambda wave: wave.on_started(WAVE),
    _E.COMPLETE: lambda wave: wave.complete(WAVE),
    _E.PAUSE: lambda wave: wave.on_pause_asked(),
    _E.PAUSED: lambda wave: wave.on_paused(),
    _E.RESUMED: lambda wave: wave.on_resumed(),
    _E.LOST: lambda wave: wave.on_rank_lost(),
    _E.WHOLE: lambda wave: wave.whole(),
}
# Said of a group that can't have it: no news, and no defect either.
NO_NEWS = {
    (_S.IDLE, _E.RESUMED),
    (_S.RUNNING, _E.RESUMED),
    (_S.DOWN, _E.RESUMED),
    (_S.DOWN, _E.PAUSE),
    (_S.DOWN, _E.PAUSED),
    *((state, _E.WHOLE) for state in _S if state is not _S.DOWN),
}


def machine(state: WaveState, wave: int = WAVE) -> WaveMachine:
    """A machine brought to this state the long way, with wave ``wave``."""
    waves = WaveMachine()
    waves.complete(wave - 1)
    if state is _S.RUNNING:
        waves.on_started(wave)
    if state in (_S.LOCAL, _S.GLOBAL):
        waves.on_pause_asked()
    if state is _S.GLOBAL:
        waves.on_paused()
    if state is _S.DOWN:
        waves.on_rank_lost()
    assert (waves.state, waves.wave, waves.kept) == (state, wave, False)
    return waves


def snapshot(waves: WaveMachine) -> tuple[object, ...]:
    return waves.state, waves.wave, waves.kept


# -- the table -------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "event"), list(product(_S, _E)))
def test_the_table_says_what_follows_and_refuses_the_rest(
    state: WaveState, event: WaveEvent
) -> None:
    """An event that the table does not have in a state raises, and the state stays."""
    waves = machine(state)
    before = snapshot(waves)
    following = TRANSITIONS.get((state, event))
    if following is not None:
        waves._go(event)
        assert waves.state is following
        return
    with pytest.raises(IllegalTransition, match=f"{event.value} in state {state.value}"):
        waves._go(event)
    assert snapshot(waves) == before


@pytest.mark.parametrize(("state", "event"), list(product(_S, _E)))
def test_what_is_told_goes_by_the_table(state: WaveState, event: WaveEvent) -> None:
    """The methods lead where the table does; the rest is no news, or raises, and changes
    nothing."""
    waves = machine(state)
    before = snapshot(waves)
    following = TRANSITIONS.get((state, event))
    if following is not None:
        TELL[event](waves)
        assert waves.state is following
    elif (state, event) in NO_NEWS:
        TELL[event](waves)
        assert snapshot(waves) == before
    else:
        with pytest.raises(IllegalTransition):
            TELL[event](waves)
        assert snapshot(waves) == before


def test_a_new_machine_is_idle() -> None:
    assert snapshot(WaveMachine()) == (_S.IDLE, 0, False)


# -- START_DP_WAVE ---------------------------------------------------------------------


@pytest.mark.parametrize("state", MAY_STEP)
def test_a_group_that_may_step_is_started(state: WaveState) -> None:
    """Again, too: the START before may have been lost on its way."""
    waves = machine(state)
    assert waves.first_req(WAVE)
    assert waves.first_req(WAVE)
    assert not waves.kept


@pytest.mark.parametrize("state", OFF)
def test_a_group_that_may_not_step_is_not_started(state: WaveState) -> None:
    """A rank that is paused for good must not be asked into a wave that others don't join."""
    waves = machine(state)
    assert not waves.first_req(WAVE)
    assert waves.state is state


def test_between_the_phases_a_wave_is_joined_and_nothing_is_kept() -> None:
    """What was started then is not started a second time by the resume."""
    waves = machine(_S.LOCAL)
    assert waves.first_req(WAVE)
    waves.on_paused()
    assert not waves.on_resumed()
    assert waves.state is _S.IDLE


def test_a_first_request_after_paused_starts_on_resume_once() -> None:
    """However often it was sent, and however often the resume is told."""
    waves = machine(_S.GLOBAL)
    for _ in range(3):
        assert not waves.first_req(WAVE)
    assert waves.kept
    assert waves.on_resumed()
    assert snapshot(waves) == (_S.RUNNING, WAVE, False)
    assert not waves.on_resumed()
    waves.on_pause_asked()
    waves.on_paused()
    assert not waves.on_resumed()


@pytest.mark.parametrize("event", [_E.PAUSE, _E.PAUSED, _E.STARTED, _E.COMPLETE])
def test_what_is_kept_outlives_what_else_is_told_in_a_pause(event: WaveEvent) -> None:
    """Only the resume starts it, and only a lost rank ends it."""
    waves = machine(_S.GLOBAL)
    waves.first_req(WAVE)
    TELL[event](waves)
    assert waves.kept
    assert waves.on_resumed()


def test_what_is_kept_starts_with_the_number_of_now() -> None:
    """A wave that was over only when all were paused has made it grow."""
    waves = machine(_S.GLOBAL)
    waves.first_req(WAVE)
    waves.complete(WAVE)
    assert waves.on_resumed()
    assert waves.wave == WAVE + 1


def test_without_a_first_request_a_resume_starts_nothing() -> None:
    """The group is idle until somebody asks."""
    for state in (_S.LOCAL, _S.GLOBAL):
        waves = machine(state)
        assert not waves.on_resumed()
        assert snapshot(waves) == (_S.IDLE, WAVE, False)


# -- what is under way ------------------------------------------------------------------


def test_a_wave_is_under_way_from_its_start_to_its_end() -> None:
    """And it is known which rank began it."""
    waves = machine(_S.IDLE)
    assert waves.on_started(WAVE, 1)
    assert (waves.under_way, waves.started_by) == (True, 1)
    assert not waves.on_started(WAVE - 1, 0)
    assert waves.started_by == 1
    assert waves.complete(WAVE)
    assert (waves.under_way, waves.started_by) == (False, None)


def test_a_wave_that_a_resume_begins_runs_when_all_ranks_have_acked_it() -> None:
    """Its start may be here before the last ack."""
    waves = machine(_S.GLOBAL)
    assert waves.on_started(WAVE, 0)
    assert waves.state is _S.GLOBAL
    assert not waves.on_resumed()
    assert (waves.state, waves.started_by) == (_S.RUNNING, 0)


def test_a_wave_that_ends_before_the_last_ack_of_the_resume_does_not_run() -> None:
    waves = machine(_S.GLOBAL)
    waves.on_started(WAVE, 0)
    waves.complete(WAVE)
    assert not waves.on_resumed()
    assert snapshot(waves) == (_S.IDLE, WAVE + 1, False)


def test_a_pause_ends_what_is_under_way() -> None:
    """All ranks are idle; the notice of the end may come later, or with the next number."""
    waves = machine(_S.RUNNING)
    waves.on_pause_asked()
    assert waves.under_way
    waves.on_paused()
    assert not waves.under_way
    assert not waves.on_resumed()
    assert waves.state is _S.IDLE


def test_a_group_that_falls_out_of_its_pause_while_a_wave_runs_runs() -> None:
    waves = machine(_S.RUNNING)
    waves.on_pause_asked()
    assert not waves.on_resumed()
    assert waves.state is _S.RUNNING


def test_nothing_is_under_way_in_a_group_that_is_down() -> None:
    """Its peer ranks step no more, whatever notice was on its way."""
    waves = machine(_S.RUNNING)
    waves.on_rank_lost()
    waves.on_started(WAVE, 1)
    assert (waves.under_way, waves.started_by) == (False, None)
    waves.whole()
    assert not waves.under_way


# -- the number ------------------------------------------------------------------------


@pytest.mark.parametrize("state", _S)
@pytest.mark.parametrize("wave", [0, WAVE - 1])
def test_old_notices_change_nothing(state: WaveState, wave: int) -> None:
    """They were under way while the wave was over."""
    waves = machine(state)
    before = snapshot(waves)
    waves.on_started(wave)
    waves.complete(wave)
    waves.mirror(wave, running=True)
    waves.mirror(wave, running=False)
    assert snapshot(waves) == before


@pytest.mark.parametrize("state", _S)
def test_a_first_request_of_an_old_wave_is_one_of_this_wave(state: WaveState) -> None:
    """Its front end has not heard yet that the wave before is over; the request is real."""
    waves = machine(state)
    assert waves.first_req(WAVE - 1) is (state in MAY_STEP)
    assert waves.wave == WAVE


@pytest.mark.parametrize("state", _S)
def test_the_number_is_the_greatest_that_was_told(state: WaveState) -> None:
    """By whichever of the three words, and in whichever state."""
    waves = machine(state)
    waves.first_req(WAVE + 2)
    assert waves.wave == WAVE + 2
    waves.on_started(WAVE + 4)
    assert waves.wave == WAVE + 4
    waves.complete(WAVE + 6)
    assert waves.wave == WAVE + 7


def test_where_a_coordinator_stands_when_it_joins_is_taken_over() -> None:
    """It may have begun and ended waves while nobody heard."""
    waves = machine(_S.RUNNING)
    waves.mirror(WAVE, running=False)  # it was asked to start, and no core has said so yet
    assert snapshot(waves) == (_S.RUNNING, WAVE, False)
    waves.mirror(WAVE + 3, running=False)
    assert snapshot(waves) == (_S.IDLE, WAVE + 3, False)
    waves.mirror(WAVE + 3, running=True)
    assert snapshot(waves) == (_S.RUNNING, WAVE + 3, False)


# -- DOWN ------------------------------------------------------------------------------


@pytest.mark.parametrize("state", _S)
def test_a_rank_that_dies_takes_what_was_kept_along(state: WaveState) -> None:
    """The requests were in its peer ranks, and those restart too."""
    waves = machine(state)
    waves.first_req(WAVE)
    waves.on_rank_lost()
    assert (waves.state, waves.kept) == (_S.DOWN, False)


def test_a_group_is_down_until_it_is_whole() -> None:
    """Nothing else brings it back, and nothing is kept for it: its clients ask anew."""
    waves = machine(_S.DOWN)
    for event in _E:
        if event is not _E.WHOLE:
            TELL[event](waves)
            assert (waves.state, waves.kept) == (_S.DOWN, False), event
    waves.whole()
    assert snapshot(waves) == (_S.IDLE, 0, False)
    waves.on_pause_asked()
    waves.on_paused()
    assert not waves.on_resumed()


# -- invariants ------------------------------------------------------------------------

# A lost rank ends all that was under way, so it is rare, and mended soon.
OFTEN = [e for e in _E if e is not _E.LOST] * 3 + [_E.FIRST_REQ, _E.PAUSE, _E.WHOLE, _E.LOST]
EVENTS = st.lists(st.tuples(st.sampled_from(OFTEN), st.integers(-2, 2)), min_size=30, max_size=80)


class Played:
    """A machine, and what a group must have seen of it."""

    def __init__(self, reached: Counter[str]) -> None:
        self.reached = reached
        self.waves = WaveMachine()
        self.owed = False  # somebody waits for the resume

    def play(self, event: WaveEvent, offset: int) -> None:
        waves = self.waves
        before, wave_before = waves.state, waves.wave
        started = self.tell(event, max(0, waves.wave + offset))
        self.reached[waves.state.value] += 1
        assert event is _E.WHOLE or waves.wave >= wave_before
        assert not started or waves.state in MAY_STEP
        if before is _S.GLOBAL and waves.state is _S.IDLE:
            assert not self.owed, "a first request was forgotten over a pause"
        if started and event is _E.RESUMED:
            assert self.owed, "a wave was started for nobody"
            self.reached["started on resume"] += 1
        if event is _E.FIRST_REQ and before is _S.GLOBAL:
            self.owed = True
        elif event in (_E.RESUMED, _E.LOST):
            self.owed = False
        assert waves.kept == self.owed
        assert not waves.under_way or waves.state is not _S.DOWN
        assert not waves.under_way or waves.state is not _S.IDLE

    def tell(self, event: WaveEvent, wave: int) -> bool:
        waves = self.waves
        match event:
            case _E.FIRST_REQ:
                return waves.first_req(wave)
            case _E.STARTED:
                waves.on_started(wave)
            case _E.COMPLETE:
                waves.complete(wave)
            case _E.PAUSED if waves.state in (_S.IDLE, _S.RUNNING):
                pass  # nobody has asked: the table refuses it
            case _E.RESUMED:
                return waves.on_resumed()
            case _:
                TELL[event](waves)
        return False


def test_whatever_happens_the_invariants_hold() -> None:
    """The number never falls in one life, only a group that may step is started, and what
    came during a pause starts on resume, once.

    Every state was seen, and waves were kept and started; an empty play proves nothing.
    """
    reached: Counter[str] = Counter()

    @settings(max_examples=300, deadline=None)
    @given(EVENTS)
    def play(events: list[tuple[WaveEvent, int]]) -> None:
        played = Played(reached)
        for event, offset in events:
            played.play(event, offset)

    play()
    assert set(reached) == {state.value for state in _S} | {"started on resume"}
    assert min(reached.values()) > 20, reached
