"""The guard: what a rank does with a second resume, a dropped START, a second pause."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.seams import install

UNPAUSED, PAUSED_NEW, PAUSED_ALL = 0, 1, 2


@pytest.fixture
def guarded(core_module: Any) -> Any:
    install(core_module, "lockstep pause fixes")
    return core_module


def start(core: Any, module: Any, wave: int, excluded: int | None = None) -> None:
    kind = module.EngineCoreRequestType.START_DP_WAVE
    core._handle_client_request(kind, (wave, excluded))


def a_paused_rank(module: Any, mode: str = "keep") -> Any:
    """One that has agreed with all others, in wave 0."""
    core = module.DPEngineCoreProc()
    assert core.pause_scheduler(mode, clear_cache=False) == "future"
    core.turn()
    assert core.ignore_start_dp_wave
    assert core.current_wave == 1
    return core


def test_a_resume_without_a_pause_reaches_no_barrier(guarded: Any) -> None:
    core = guarded.DPEngineCoreProc()
    core.resume_scheduler()
    assert guarded.ParallelConfig.barriers == 0


def test_a_second_resume_reaches_no_second_barrier(guarded: Any) -> None:
    core = a_paused_rank(guarded)
    core.resume_scheduler()
    core.resume_scheduler()
    assert guarded.ParallelConfig.barriers == 1
    assert core.scheduler.pause_state == UNPAUSED


def test_without_the_guard_it_does(core_module: Any) -> None:
    """Which is what hangs a real rank."""
    core = a_paused_rank(core_module)
    core.resume_scheduler()
    core.resume_scheduler()
    assert core_module.ParallelConfig.barriers == 2


def test_a_start_that_was_dropped_is_obeyed_after_the_resume(guarded: Any) -> None:
    core = a_paused_rank(guarded)
    start(core, guarded, 1)
    assert not core.engines_running
    core.resume_scheduler()
    assert core.engines_running
    assert core.current_wave == 1


@pytest.mark.parametrize(("wave", "excluded"), [(0, None), (1, 0)])
def test_a_start_of_an_old_wave_or_for_others_is_not(
    guarded: Any, wave: int, excluded: int | None
) -> None:
    core = a_paused_rank(guarded)
    start(core, guarded, wave, excluded)
    core.resume_scheduler()
    assert not core.engines_running


def test_it_is_obeyed_once(guarded: Any) -> None:
    core = a_paused_rank(guarded)
    start(core, guarded, 1)
    core.resume_scheduler()
    core.turn()
    assert not core.engines_running
    core.pause_scheduler("keep", clear_cache=False)
    core.turn()
    core.resume_scheduler()
    assert not core.engines_running


def test_a_refused_resume_forgets_nothing(guarded: Any) -> None:
    """vLLM refuses one while a pause is pending; the START is still owed afterwards."""
    core = a_paused_rank(guarded)
    start(core, guarded, 1)
    core.pause_scheduler("wait", clear_cache=False)
    with pytest.raises(RuntimeError):
        core.resume_scheduler()
    assert core.wavebus_pending_wave == 1


def test_ranks_do_not_share_what_is_owed(guarded: Any) -> None:
    core, other = a_paused_rank(guarded), guarded.DPEngineCoreProc(1)
    start(core, guarded, 5)
    assert (core.wavebus_pending_wave, other.wavebus_pending_wave) == (5, None)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_paused_group_needs_no_second_agreement(guarded: Any, mode: str) -> None:
    """It answers at once, and does what the mode says."""
    core = a_paused_rank(guarded)
    core.scheduler.running = 1
    assert core.pause_scheduler(mode, clear_cache=True) is None
    assert core.finished_pauses == 1
    assert not core.engines_running
    assert not core.pending_pause
    assert core.scheduler.pause_state == (PAUSED_ALL if mode == "keep" else PAUSED_NEW)
    assert core.scheduler.running == (1 if mode == "keep" else 0)


@pytest.mark.parametrize("how", ["wait", "pending", "resumed"])
def test_a_pause_that_must_be_agreed_upon_is(guarded: Any, how: str) -> None:
    """A `wait` may have frozen requests to drain; and what is not agreed is not agreed."""
    core = guarded.DPEngineCoreProc() if how == "pending" else a_paused_rank(guarded)
    if how == "pending":
        core.pause_scheduler("wait", clear_cache=False)
    if how == "resumed":
        core.resume_scheduler()
    assert core.pause_scheduler("wait" if how == "wait" else "keep", clear_cache=False) == "future"
    assert core.pending_pause
