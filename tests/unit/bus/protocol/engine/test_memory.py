"""One engine's memory: it sleeps in a pause alone, and what ends the pause wakes it."""

from __future__ import annotations

import pytest

from bus._protocol.engine.calls import CallAbortRequests, CallResume, CallSleep, CallWakeWeights
from bus._protocol.engine.memory import MemoryState
from bus._protocol.engine.update_states import EngineUpdateState
from bus.messages import (
    Abort,
    Ack,
    Commit,
    Nack,
    NackCode,
    PauseLocal,
    Resume,
    Sleep,
    SleepLevel,
    Step,
    UpdateFinish,
    UpdateStart,
    Wake,
)
from bus.operations import ArmManifest, Restore, Start
from tests.sim.makers import make_arm, make_chunk, make_sent
from tests.unit.bus._builders import messages, nack_in, only
from tests.unit.bus._session import MANIFEST, PAUSE, Driver

_S = MemoryState


def asleep(level: SleepLevel = 1) -> Driver:
    """An engine that sleeps in the pause u1."""
    driver = Driver().paused()
    driver.command(Sleep("u1", level))
    driver.returned()
    driver.calls.clear()
    return driver


def update(driver: Driver) -> None:
    """A whole one, of what the pause u1 holds."""
    driver.armed()
    driver.command(UpdateStart("u1"))
    driver.returned()
    for k in range(MANIFEST.chunks):
        driver.command(make_chunk("u1", MANIFEST, k, 1))
        driver.command(make_sent("u1", MANIFEST, k, 1))
        for _ in ("received", "loaded"):
            driver.returned()
    driver.command(UpdateFinish("u1"))
    driver.returned()
    driver.command(Commit("u1", 4, "", ()))
    driver.returned()


@pytest.mark.parametrize("level", [1, 2])
def test_it_is_asked_once_and_acked_by_the_return(level: SleepLevel) -> None:
    """However often the bus asks."""
    driver = Driver().paused()
    for _ in range(2):
        assert not [e for e in driver.command(Sleep("u1", level)) if not isinstance(e, CallSleep)]
    assert driver.calls[1:] == [CallSleep(level)]
    told = only(driver.returned(), Ack)
    assert (told.step, told.update_id) == (Step.SLEEP, "u1")
    assert only(driver.command(Sleep("u1", level)), Ack).step is Step.SLEEP
    assert len(driver.calls) == 2
    assert driver.session.phase == ("asleep" if level == 1 else "weights_discarded")


def test_only_a_paused_engine_sleeps() -> None:
    """In the pause that is named."""
    driver = Driver()
    assert nack_in(driver.command(Sleep("u1", 1))).code is NackCode.WRONG_STATE
    driver.command(PauseLocal("u1", "keep", False, 5_000, 60_000, 0, "keep"))
    assert nack_in(driver.command(Sleep("u1", 1))).code is NackCode.WRONG_STATE
    driver.returned()
    assert nack_in(driver.command(Sleep("u2", 1))).field == "update_id"
    assert nack_in(driver.command(Wake("u2"))).field == "update_id"
    assert not [call for call in driver.calls if isinstance(call, CallSleep)]


@pytest.mark.parametrize("kept", [False, True])
def test_a_sleep_drops_the_caches_that_its_pause_has_kept(kept: bool) -> None:
    """Their memory is gone: requests compute keys and values again."""
    driver = Driver()
    driver.command(PauseLocal("u1", "keep", not kept, 5_000, 60_000, 0, "keep"))
    driver.returned()
    assert driver.command(Sleep("u1", 1)) == [CallSleep(1, clears=kept)]
    assert only(driver.returned(), Ack).step is Step.SLEEP


@pytest.mark.parametrize("to", ["armed", "staging", "staged", "started", "loaded"])
def test_an_engine_gives_up_a_forgotten_update_before_it_sleeps(to: str) -> None:
    """The bus asks for a sleep when no update is under way: this rank has missed an ABORT. Its peer
    ranks sleep already, and may have discarded their weights."""
    driver = Driver()
    if to == "staging":
        driver.may_stage().command(UpdateStart("u1", staged=True))
        driver.returned()
        driver.takes("u1", 1).paused()
    elif to == "staged":
        driver.stages().paused()
    elif to == "armed":
        driver.armed().paused()
    else:
        driver.loaded(chunks=int(to == "loaded"))
    effects = driver.command(Sleep("u1", 2))
    assert not [each for each in messages(effects) if isinstance(each, Nack)]
    if driver.running is not None:
        undoing = CallAbortRequests if to == "loaded" else Restore
        assert isinstance(driver.running, undoing)
        assert driver.command(Sleep("u1", 2)) == []
        driver.returned()
    assert driver.session.update.state is EngineUpdateState.NONE
    assert driver.session.memory.awake
    assert driver.command(Sleep("u1", 2)) == [CallSleep(2)]
    assert only(driver.returned(), Ack).step is Step.SLEEP


def test_an_engine_that_commits_does_not_sleep() -> None:
    """Its weights are about to be whole, and of the new version."""
    driver = Driver().loaded(MANIFEST.chunks)
    driver.command(UpdateFinish("u1"))
    driver.returned()
    driver.command(Commit("u1", 4, "", ()))
    assert "commit" in nack_in(driver.command(Sleep("u1", 1))).detail
    assert driver.session.memory.awake


def test_another_level_is_refused() -> None:
    """It sleeps as it does."""
    driver = asleep(1)
    assert nack_in(driver.command(Sleep("u1", 2))).field == "level"
    driver.command(Wake("u1"))
    driver.returned()
    assert nack_in(driver.command(Sleep("u1", 1))).code is NackCode.WRONG_STATE


def test_a_resume_wakes_whatever_sleeps() -> None:
    """In one call; a plain resume is for who is awake."""
    driver = asleep()
    driver.command(Resume("u1"))
    assert driver.calls == [CallResume(asleep=True)]
    assert only(driver.returned(), Ack).step is Step.RESUME
    assert driver.session.memory.awake
    assert driver.session.phase == "running"
    driver.paused()
    driver.command(Resume("u1"))
    assert driver.calls[-1] == CallResume(asleep=False)


def test_a_resume_while_it_falls_asleep_follows_the_sleep() -> None:
    """And wakes it, also if the sleep has failed: nobody knows what sleeps then."""
    for outcome in ("returned", "failed"):
        driver = Driver().paused()
        driver.command(Sleep("u1", 1))
        driver.command(Resume("u1"))
        assert driver.calls[-1] == CallSleep(1)
        getattr(driver, outcome)()
        assert driver.calls[-1] == CallResume(asleep=True)


def test_a_resume_that_fails_may_be_asked_again() -> None:
    """Memory was short, say: what sleeps now is unknown, so all of it is woken."""
    driver = asleep()
    driver.command(Wake("u1"))
    driver.returned()
    driver.command(Resume("u1"))
    assert nack_in(driver.failed()).step == "resume"
    assert driver.session.memory.state is _S.ASLEEP
    driver.command(Wake("u1"))
    assert driver.calls[-1] == CallWakeWeights()
    driver.returned()
    driver.command(Resume("u1"))
    assert driver.calls[-1] == CallResume(asleep=True)
    driver.returned()
    assert driver.session.phase == "running"


def test_nothing_is_armed_while_the_weights_sleep() -> None:
    """By a code that tells what to do; with the weights awake it is."""
    driver = asleep()
    nack = nack_in(driver.command(make_arm("u2", MANIFEST, version=4)))
    assert (nack.code, nack.step) == (NackCode.ENGINE_ASLEEP, "arm")
    for _ in range(2):
        driver.command(Wake("u1"))
    assert driver.calls == [CallWakeWeights()]
    assert only(driver.returned(), Ack).step is Step.WAKE
    assert only(driver.command(Wake("u1")), Ack).step is Step.WAKE
    update(driver)
    assert Start(recover=False, target="model") in driver.calls
    driver.command(Resume("u1"))
    assert driver.calls[-1] == CallResume(asleep=True)


def test_an_engine_that_is_awake_acks_a_wake_at_once() -> None:
    """Engines of a group need not have slept alike."""
    driver = Driver().paused()
    assert only(driver.command(Wake("u1")), Ack).step is Step.WAKE
    assert len(driver.calls) == 1


@pytest.mark.parametrize("outcome", ["returned", "failed"])
def test_discarded_weights_are_not_resumed_until_a_commit(outcome: str) -> None:
    """Gone from the call on, whatever became of it."""
    driver = Driver().paused()
    driver.command(Sleep("u1", 2))
    getattr(driver, outcome)()
    assert driver.session.phase == "weights_discarded"
    assert nack_in(driver.command(Resume("u1"))).code is NackCode.WRONG_STATE
    driver.command(Wake("u1"))
    driver.returned()
    assert nack_in(driver.command(Resume("u1"))).code is NackCode.WRONG_STATE
    update(driver)
    assert Start(recover=True, target="model") in driver.calls
    assert driver.session.phase == "asleep"  # its KV cache
    driver.command(Resume("u1"))
    assert driver.calls[-1] == CallResume(asleep=True)
    driver.returned()
    assert driver.session.phase == "running"


def test_a_sleeper_wakes_when_its_lease_ends() -> None:
    """With its old weights."""
    driver = asleep(1)
    driver.tick(5_001.0)
    assert driver.calls == [CallResume(asleep=True)]


def test_an_emptied_engine_is_quarantined_when_its_lease_ends() -> None:
    """Its requests end; it sleeps on, and no time runs for it any more."""
    driver = asleep(2)
    driver.tick(5_001.0)
    assert driver.calls == [CallAbortRequests()]
    told = only(driver.returned(), Ack)
    assert (told.step, told.outcome) == (Step.ABORT, "partial")
    assert driver.session.phase == "quarantined"
    assert driver.session.next_deadline_ms() is None
    # Whoever comes next pauses it, wakes its weights, and brings others.
    driver.command(PauseLocal("u3", "keep", True, 5_000, 60_000, 0, "keep"))
    driver.command(Wake("u3"))
    assert driver.calls[-1] == CallWakeWeights()


def test_a_late_sleep_of_a_pause_that_is_over_is_refused() -> None:
    """The engine generates."""
    driver = asleep(1)
    driver.command(Resume("u1"))
    driver.returned()
    assert nack_in(driver.command(Sleep("u1", 1))).code is NackCode.WRONG_STATE
    driver.command(PAUSE)
    assert not isinstance(driver.running, CallSleep)


def test_an_update_armed_again_while_the_emptied_end_their_requests_waits_for_that() -> None:
    """It is not taken for armed by its name; the broker repeats ARM."""
    driver = asleep(2)
    driver.command(Wake("u1"))
    driver.returned()
    driver.armed()
    driver.command(Abort("u1", "a peer rank refused"))
    driver.tick(5_001.0)
    assert driver.running == CallAbortRequests()
    again = make_arm("u1", MANIFEST, version=4)
    assert not driver.command(again)
    driver.returned()
    driver.command(again)
    assert isinstance(driver.running, ArmManifest)


def test_a_late_sleep_of_this_pause_does_not_undo_its_wake() -> None:
    """One of another pause does: that trainer is gone."""
    driver = asleep(1)
    driver.command(Wake("u1"))
    driver.returned()
    assert nack_in(driver.command(Sleep("u1", 1))).code is NackCode.WRONG_STATE
    driver.command(PauseLocal("u2", "keep", True, 5_000, 60_000, 0, "keep"))
    driver.command(Sleep("u2", 2))
    assert driver.calls[-1] == CallSleep(2)
