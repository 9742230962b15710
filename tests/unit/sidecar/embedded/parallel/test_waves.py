"""One rank's view of the waves: every transition, without a clock or a socket."""

from __future__ import annotations

import pytest

from sidecar._dp_coordinator.frames import CoreReport
from sidecar._embedded.parallel.waves import RankWaves


def _stepped(waves: RankWaves, count: int = 1) -> list[bool]:
    due: list[bool] = []
    for _ in range(count):
        waves.on_step_begin()
        due.append(waves.on_step_end())
    return due


def _paused(rank: int = 0) -> RankWaves:
    """Globally paused, which took wave 0."""
    waves = RankWaves(rank, 2)
    waves.pause()
    _stepped(waves)
    waves.on_agreement(0, 2)
    return waves


def test_ranks_confer_at_the_first_step_and_then_every_sixteenth() -> None:
    """So that a wave nobody needs ends soon, and others cost little."""
    due = _stepped(RankWaves(0, 2), 48)
    assert [step for step, now in enumerate(due, 1) if now] == [1, 16, 32, 48]


def test_a_wave_ends_when_no_rank_has_work() -> None:
    """Its number goes up on every rank, and rank 0 tells."""
    for rank, told in ((0, CoreReport(0, complete=0)), (1, None)):
        waves = RankWaves(rank, 2)
        _stepped(waves)
        assert waves.on_agreement(0, 0) == told
        assert (waves.number, waves.step, waves.running) == (1, 0, False)


def test_rank_0_tells_once_that_a_wave_runs() -> None:
    """After the ranks have conferred, so all of them run it."""
    waves = RankWaves(0, 2)
    _stepped(waves)
    assert waves.on_agreement(1, 0) == CoreReport(0, started=0)
    _stepped(waves, 15)
    assert waves.on_agreement(1, 0) is None
    other = RankWaves(1, 2)
    _stepped(other)
    assert other.on_agreement(1, 0) is None


def test_a_request_that_the_front_end_took_for_the_last_wave_s_wakes_the_others() -> None:
    """It told nobody, so the core does; not if it runs, or is paused."""
    waves = RankWaves(1, 2)
    _stepped(waves)
    waves.on_agreement(0, 0)
    assert waves.on_request(1) is None
    assert not waves.running
    assert waves.on_request(0) == CoreReport(1, started=1)
    assert waves.running
    assert waves.on_request(0) is None
    assert _paused().on_request(0) is None


@pytest.mark.parametrize("wave", [0, 1, 7])
def test_a_start_wakes_an_idle_rank(wave: int) -> None:
    """A greater number is adopted, a smaller one is over, and the excluded rank knows."""
    waves = RankWaves(1, 2)
    _stepped(waves)
    waves.on_agreement(0, 0)
    assert not waves.on_start_wave(wave, 1)
    assert waves.on_start_wave(wave, None) is (wave >= 1)
    assert waves.running is (wave >= 1)
    assert waves.number == max(wave, 1)


def test_no_number_is_adopted_in_the_middle_of_a_wave() -> None:
    """The others, who have not heard it yet, would end this wave under another number."""
    waves = RankWaves(1, 2)
    waves.on_step_begin()
    assert waves.on_start_wave(5, None)
    assert waves.number == 0


def test_a_start_is_obeyed_while_locally_paused() -> None:
    """Only after all have agreed, it is not."""
    waves = RankWaves(1, 2)
    waves.pause()
    assert waves.on_start_wave(0, None)
    assert waves.running
    _stepped(waves)
    waves.on_agreement(1, 2)
    assert waves.agreed
    assert not waves.on_start_wave(0, None)


def test_a_pause_of_an_idle_group_makes_a_wave_and_ends_it() -> None:
    """Rank 0 tells of its end, not of its beginning."""
    waves = RankWaves(0, 2)
    waves.pause()
    assert waves.running
    _stepped(waves)
    assert waves.on_agreement(0, 1) is None
    assert waves.running, "the other rank has not been asked"
    _stepped(waves, 15)
    assert waves.on_agreement(0, 2) == CoreReport(0, complete=0)
    assert waves.is_globally_paused
    assert waves.number == 1


def test_a_pause_that_drains_is_complete_when_all_have_drained() -> None:
    """Agreed before, it is global only then."""
    waves = RankWaves(0, 2)
    waves.pause()
    _stepped(waves)
    waves.on_agreement(1, 2)
    assert waves.agreed
    assert not waves.is_globally_paused
    waves.pause()
    _stepped(waves, 15)
    waves.on_agreement(0, 2)
    assert waves.is_globally_paused


def test_a_second_pause_of_a_paused_rank_changes_nothing() -> None:
    """It would wait for a second agreement that the others may not be asked for."""
    waves = _paused()
    waves.pause()
    assert waves.is_globally_paused
    assert waves.number == 1


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_resume_starts_a_wave_if_anybody_has_work(unfinished: bool) -> None:
    """Under the number that all ranks have."""
    waves = _paused()
    waves.on_resumed(unfinished=unfinished)
    assert waves.running is unfinished
    assert not waves.paused
    assert not waves.agreed
    assert waves.number == 1


@pytest.mark.parametrize(("wave", "obeyed"), [(0, False), (1, True), (3, True)])
def test_a_start_that_comes_while_globally_paused_is_kept(wave: int, obeyed: bool) -> None:
    """For the resume, unless its wave is over."""
    waves = _paused()
    assert not waves.on_start_wave(wave, None)
    assert waves.is_globally_paused
    waves.on_resumed(unfinished=False)
    assert waves.running is obeyed
    again = _paused()
    again.on_resumed(unfinished=False)
    assert not again.running, "and once only"
