"""The pause that a trainer holds, as far as it is told."""

from __future__ import annotations

import pytest

from bus._protocol.trainer.pause_window import PauseWindow, PauseWindowState
from bus.errors import UpdateFailed
from bus.messages import NackCode, PauseLocal, Resume, Sleep, UpdateStart, Wake

PAUSE = PauseLocal("p1", "keep", True, 6000, 60_000, 0, "keep")


def held() -> PauseWindow:
    window = PauseWindow()
    window.on_asked(PAUSE, 1)
    assert not window.is_open
    window.on_acked(PAUSE, 1)
    assert window.pause == PAUSE
    return window


def test_a_pause_is_held_from_its_answer_to_the_end_of_its_resume() -> None:
    """Whatever that is answered with."""
    window = held()
    window.on_asked(Resume("p1"), 1)
    assert window.is_open
    window.on_over(Resume("p1"))
    assert (window.is_open, window.pause) == (False, None)
    window.on_over(Resume("p1"))  # of a pause whose answer never came


def test_weights_sleep_from_when_it_is_asked_for() -> None:
    """Until they are woken, or the pause ends."""
    window = held()
    window.on_asked(Sleep("p1", 2), 1)
    assert window.state is PauseWindowState.ASLEEP
    window.on_acked(Wake("p1"), 1)
    assert window.state is PauseWindowState.HELD
    window.on_asked(Sleep("p1", 2), 1)
    window.on_over(Resume("p1"))
    assert window.state is PauseWindowState.NONE


def test_a_pause_without_engines_is_over() -> None:
    """Only that one; a sleep that comes too late is left to the broker to refuse."""
    window = held()
    window.on_no_engines("p0")
    assert window.is_open
    window.on_no_engines("p1")
    window.on_asked(Sleep("p1", 1), 1)
    assert window.state is PauseWindowState.NONE
    window.on_no_engines("p1")


def test_in_another_epoch_nothing_is_asked_for_in_the_pause() -> None:
    """The broker took the trainer for dead, and has resumed its engines. What comes next begins
    anew."""
    window = held()
    window.require_epoch(1, "u1")
    with pytest.raises(UpdateFailed):
        window.require_epoch(2, "u1")  # of a chunk
    window = held()
    with pytest.raises(UpdateFailed) as caught:
        window.on_asked(UpdateStart("u1"), 2)
    assert (caught.value.code, caught.value.nack.update_id) == (NackCode.FENCED, "u1")
    assert not window.is_open
    window.require_epoch(2, "u1")
    window.on_asked(PAUSE, 2)
    window.on_acked(PAUSE, 2)
    window.on_asked(UpdateStart("u1"), 2)


def test_a_wake_that_comes_late_wakes_nobody() -> None:
    """The pause is over by then."""
    window = held()
    window.on_over(Resume("p1"))
    window.on_acked(Wake("p1"), 1)
    assert window.state is PauseWindowState.NONE


def test_an_answer_that_comes_after_the_resumes_opens_no_window() -> None:
    """It was lost at first, and the pause that it tells of is over."""
    window = PauseWindow()
    window.on_asked(PAUSE, 1)
    window.on_asked(Resume("p1"), 1)
    window.on_over(Resume("p1"))
    window.on_acked(PAUSE, 1)
    assert not window.is_open
    again = PauseLocal("p2", "keep", True, 6000, 60_000, 0, "keep")
    window.on_asked(again, 1)
    window.on_acked(again, 1)
    assert window.is_open
