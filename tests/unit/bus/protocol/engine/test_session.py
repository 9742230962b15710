"""The sidecar's machine: pause and update composed, fenced, and resumed by its lease."""

from __future__ import annotations

import pytest
from msgspec import structs

from bus._protocol.core.effects import Note, Send
from bus._protocol.engine.calls import CallAbortRequests, CallPause, CallProbe, CallResume
from bus._protocol.engine.lease import LeaseState
from bus._protocol.engine.pause import EnginePauseState
from bus._protocol.engine.session import EngineSession
from bus._protocol.engine.update_states import EngineUpdateState
from bus.messages import (
    Abort,
    Ack,
    Commit,
    Heartbeat,
    Nack,
    NackCode,
    PauseGlobal,
    PauseLocal,
    Probe,
    Probed,
    ProbeResult,
    Resume,
    Step,
    TransferInit,
    UpdateFinish,
    UpdateStart,
)
from bus.operations import ArmManifest, Restore
from tests.sim.makers import make_arm, make_chunk
from tests.unit.bus._builders import nack_in, only
from tests.unit.bus._session import MANIFEST, PAUSE, Driver


def test_acks_come_before_the_call_they_stand_for() -> None:
    """Phase 1 is acked when the call is issued, in one go."""
    effects = Driver().command(PAUSE)
    assert isinstance(effects[0], Send)
    assert effects[1] == CallPause("keep", True)


def test_an_older_epoch_changes_nothing() -> None:
    """Whatever it asks, it hears that it is fenced, and no call is made."""
    driver = Driver()
    driver.command(TransferInit("t1", "sim", b"", 0, 0, {}), epoch=5)
    driver.returned()
    for message in (PAUSE, Resume("u1"), make_arm("u1", MANIFEST, version=4), Abort("u1", "")):
        nack = nack_in(driver.command(message, epoch=4))
        assert (nack.code, nack.field) == (NackCode.FENCED, "epoch")
    assert len(driver.calls) == 1
    assert driver.session.phase == "running"
    assert driver.session.epoch == 5
    driver.command(PAUSE, epoch=5)
    driver.returned()
    assert driver.session.phase == "paused"


def test_a_newer_epoch_is_taken_over() -> None:
    """Its commands are obeyed, and the one before it is old from then on."""
    driver = Driver()
    driver.command(PAUSE, epoch=2)
    driver.command(PauseGlobal("u1"), epoch=7)
    assert driver.session.epoch == 7
    assert nack_in(driver.command(Resume("u1"), epoch=2)).code is NackCode.FENCED


def test_what_is_no_command_is_forbidden() -> None:
    """An engine takes commands and nothing else."""
    nack = nack_in(Driver().command(Heartbeat("running", 0, 0, "")))
    assert (nack.code, nack.field) == (NackCode.FORBIDDEN, "kind")


def test_a_refusal_names_the_step_and_the_chunk() -> None:
    """So that the broker knows what is off."""
    driver = Driver().started()
    bad = make_chunk("u1", MANIFEST, 1, 1)
    structs.force_setattr(bad, "chunk", 5)
    nack = nack_in(driver.command(bad))
    assert (nack.step, nack.update_id, nack.chunk) == (Step.CHUNK, "u1", 5)


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_no_resume_while_weights_may_be_mixed(chunks: int) -> None:
    """From the start to the commit, RESUME is refused and calls nothing."""
    driver = Driver().loaded(chunks) if chunks else Driver().started()
    calls = list(driver.calls)
    assert nack_in(driver.command(Resume("u1"))).code is NackCode.WRONG_STATE
    if chunks == 2:
        driver.command(UpdateFinish("u1"))
        driver.returned()
        assert nack_in(driver.command(Resume("u1"))).code is NackCode.WRONG_STATE
        calls = list(driver.calls)
    assert driver.calls == calls
    assert driver.session.pause.state is EnginePauseState.PAUSED


def test_a_quarantined_engine_is_not_resumed() -> None:
    """Aborted with a part loaded, it stays paused whoever asks."""
    driver = Driver().loaded()
    driver.command(Abort("u1", ""))
    driver.returned()
    assert driver.session.phase == "quarantined"
    assert nack_in(driver.command(Resume("u1"))).code is NackCode.WRONG_STATE
    assert CallResume() not in driver.calls


@pytest.mark.parametrize(
    ("build", "phase", "shown_id"),
    [
        (lambda d: d, "running", ""),
        (lambda d: d.armed(), "armed", "u1"),
        (lambda d: d.paused(), "paused", "u1"),
        (lambda d: d.armed().paused(), "paused", "u1"),
        (lambda d: d.started(), "updating", "u1"),
        (lambda d: d.loaded(), "updating", "u1"),
    ],
)
def test_the_phase_is_one_word_with_its_id(build: object, phase: str, shown_id: str) -> None:
    """What heartbeats and the status show."""
    assert callable(build)
    driver = build(Driver())
    assert (driver.session.phase, driver.session.shown_id) == (phase, shown_id)


def test_the_number_of_requests_travels_in_the_ack() -> None:
    """As the engine told it when its pause returned."""
    driver = Driver()
    driver.command(PAUSE)
    driver.command(PauseGlobal("u1"))
    acked = only(driver.returned(6), Ack)
    assert (acked.step, acked.in_flight, acked.duration_ms) == (Step.PAUSE_GLOBAL, 6, 10.0)


def test_the_lease_runs_from_when_the_pause_was_last_said_to_be_held() -> None:
    """Not a moment earlier than due; and then the engine resumes by itself, once."""
    driver = Driver().paused()
    assert driver.session.next_deadline_ms() == 5_000.0
    driver.session.on_lease_renewed(1, "u1", 100.0)
    assert driver.session.next_deadline_ms() == 5_100.0
    assert driver.tick(5_099.0) == []
    effects = driver.tick(5_100.0)
    assert [each.event for each in effects if isinstance(each, Note)] == ["lease_expired"]
    assert driver.calls[-1] == CallResume()
    assert driver.session.next_deadline_ms() is None
    driver.returned()
    assert driver.session.phase == "running"
    assert driver.tick(99_999.0) == []


@pytest.mark.parametrize(("epoch", "held"), [(1, ""), (1, "u0"), (0, "u1")])
def test_nobody_else_renews_a_lease(epoch: int, held: str) -> None:
    """Not who holds no pause, holds another one, or was replaced."""
    driver = Driver().paused()
    driver.session.on_lease_renewed(epoch, held, 100.0)
    assert driver.session.next_deadline_ms() == 5_000.0


@pytest.mark.parametrize("build", [lambda d: d, lambda d: d.armed()])
def test_without_a_pause_there_is_no_lease(build: object) -> None:
    """An engine that runs, armed or not, needs nobody."""
    assert callable(build)
    driver = build(Driver())
    assert driver.session.next_deadline_ms() is None
    assert driver.tick(10**9) == []


def test_an_engine_that_is_only_armed_resumes_the_old_version() -> None:
    """What is armed stays so, which touches nothing; it may be of a later pause."""
    driver = Driver().armed().paused()
    driver.tick(5_000.0)
    assert driver.calls[-1] == CallResume()
    driver.returned()
    assert driver.session.pause.state is EnginePauseState.RUNNING
    assert driver.session.phase == "armed"
    assert driver.session.version == 3


def test_an_engine_that_started_and_loaded_nothing_is_restored_then_resumes() -> None:
    """In this order."""
    driver = Driver().started()
    driver.tick(5_000.0)
    assert driver.calls[-1] == Restore("model")
    driver.returned()
    assert driver.session.phase == "paused"
    driver.tick(5_001.0)
    assert driver.calls[-1] == CallResume()


@pytest.mark.parametrize("chunks", [1, 2])
def test_an_engine_that_loaded_a_part_stays_paused_when_its_lease_ends(chunks: int) -> None:
    """Quarantined: its requests are ended, and it never serves mixed weights."""
    driver = Driver().loaded(chunks)
    driver.tick(5_000.0)
    assert driver.calls[-1] == CallAbortRequests()
    driver.returned()
    assert driver.session.phase == "quarantined"
    driver.tick(5_001.0)
    assert driver.session.next_deadline_ms() is None
    assert driver.tick(10**9) == []
    assert driver.calls[-1] == CallAbortRequests()


def test_an_engine_that_is_quarantined_is_armed_again_whenever_it_likes() -> None:
    """Its old pause has a lease that is over, which is nothing to the next update."""
    driver = Driver().loaded(1)
    driver.command(Abort("u1", "it broke off"))
    driver.returned()
    driver.command(make_arm("u2", MANIFEST, version=5))
    driver.returned()
    driver.tick(5_000.0)
    assert driver.session.update.state is EngineUpdateState.ARMED
    assert driver.session.lease.state is LeaseState.SETTLED


def test_a_call_under_way_holds_the_lease() -> None:
    """Nothing is decided in the place of a call that is pending."""
    driver = Driver().loaded()
    driver.command(make_chunk("u1", MANIFEST, 1, 1))
    assert driver.session.next_deadline_ms() is None
    assert driver.tick(10**9) == []


def test_a_pause_behind_an_arm_that_is_refused_is_still_made() -> None:
    """Two things that have nothing to do with each other."""
    driver = Driver()
    driver.command(TransferInit("t1", "sim", b"", 0, 0, {}))
    driver.returned()
    driver.command(make_arm("u1", MANIFEST, version=4))
    assert only(driver.command(PauseLocal("u2", "keep", True, 5_000, 60_000, 0, "keep")), Ack)
    assert isinstance(driver.running, ArmManifest)
    assert only(driver.failed(), Nack).step is Step.ARM
    assert isinstance(driver.running, CallPause)
    driver.returned()
    assert driver.session.phase == "paused"


GIVEN = (ProbeResult((7, 8), (-0.5, -0.25)),)
PROBE = Probe("u1", ((1, 2),), 2, "s")


def finished() -> Driver:
    """All is loaded, nothing committed."""
    driver = Driver().loaded(MANIFEST.chunks)
    driver.command(UpdateFinish("u1"))
    driver.returned()
    return driver


def test_a_quarantined_engine_is_behind_its_door_until_its_resume() -> None:
    """The resume opens it, and no resume before; of an engine that was not, it opens none."""
    driver = finished()
    driver.command(Abort("u1", ""))
    assert driver.calls[-1] == CallAbortRequests()
    driver.returned()
    assert driver.session.admission.closed
    assert driver.session.phase == "quarantined"
    driver.command(make_arm("u2", MANIFEST, version=5))
    driver.returned()
    driver.command(UpdateStart("u2"))
    driver.returned()
    driver.takes("u2")
    driver.command(UpdateFinish("u2"))
    driver.returned()
    driver.command(Commit("u2", 5, "", ()))
    driver.returned()
    assert driver.session.admission.closed
    driver.command(Resume(driver.session.pause.update_id))
    assert driver.calls[-1] == CallResume(opens=True)
    assert driver.session.admission.closed  # until it is done
    driver.failed()
    driver.command(Resume(driver.session.pause.update_id))
    assert driver.calls[-1] == CallResume(opens=True)
    driver.returned()
    assert not driver.session.admission.closed
    assert driver.session.phase == "running"


def test_a_sidecar_that_finds_the_door_closed_has_a_quarantined_engine() -> None:
    """It joins as one, and no lease frees it."""
    session = EngineSession(version=3, closed=True)
    assert session.phase == "quarantined"
    assert session.next_deadline_ms() is None


def test_probes_are_run_as_the_pause_was_made() -> None:
    """And refused where there is none."""
    driver = finished()
    driver.command(PROBE)
    pause = driver.session.pause.effective_call
    call = CallProbe(((1, 2),), 2, "s", pause.mode, pause.clear_cache)
    assert driver.calls[-1] == call
    made, driver.running = driver.running, None
    assert made is not None
    probed = only(driver.take(driver.session.on_call_done(made, 10.0, result=GIVEN)), Probed)
    assert probed.results == GIVEN
    running = Driver().armed()
    assert only(running.command(PROBE), Nack).code is NackCode.WRONG_STATE


def test_after_probes_that_failed_the_engine_is_paused_anew() -> None:
    """They were to resume it and pause it again: nobody knows where it stands."""
    driver = finished()
    driver.command(PROBE)
    assert only(driver.failed(), Nack).step == "probe"
    assert driver.session.pause.state is EnginePauseState.UNKNOWN
    driver.command(Abort("u1", ""))
    driver.returned()
    driver.command(PauseLocal("u2", "keep", True, 5_000, 60_000, 0, "keep"))
    assert driver.calls[-1] == CallPause("keep", clear_cache=True)


def test_a_pause_that_waits_behind_a_probe_is_made_anew_when_that_fails() -> None:
    """It was to be strengthened, and nobody knows whether it is there: its return alone acks."""
    driver = finished()
    driver.command(PROBE)
    driver.command(PauseLocal("u2", "abort", True, 5_000, 60_000, 0, "keep"))
    driver.command(PauseGlobal("u2"))
    driver.failed()
    assert driver.calls[-1] == CallPause("abort", clear_cache=True)
    acked = only(driver.returned(), Ack)
    assert (acked.step, acked.update_id) == (Step.PAUSE_GLOBAL, "u2")
    assert driver.running is None


def test_an_engine_is_not_at_rest_while_an_escalation_runs() -> None:
    """It stands in no queue, and may still pause the engine."""
    driver = Driver()
    driver.command(PauseLocal("u1", "wait", True, 5_000, 60_000, 100, "abort"))
    driver.tick(100.0)
    driver.returned()
    assert not driver.session.at_rest
    driver.session.on_escalation_done(None, 110.0)
    assert driver.session.at_rest
    assert driver.session.pause.state is EnginePauseState.PAUSED


def test_a_step_that_comes_while_an_abort_waits_is_refused() -> None:
    """Else it would be begun, and undone halfway; another ARM is asked again."""
    driver = Driver().armed().paused()
    driver.command(TransferInit("t2", "sim", b"", 0, 0, {}))
    assert driver.command(Abort("u1", "")) == []
    assert nack_in(driver.command(UpdateStart("u1"))).code is NackCode.WRONG_STATE
    assert driver.command(make_arm("u2", MANIFEST, version=5)) == []
    acks = [each.message for each in driver.returned() if isinstance(each, Send)]
    assert [(each.step, each.update_id) for each in acks if isinstance(each, Ack)] == [
        (Step.TRANSFER_INIT, "t2"),
        (Step.ABORT, "u1"),
    ]
    assert driver.running is None


def test_requests_of_a_stale_engine_that_end_are_no_abort() -> None:
    """The ABORT of its staged update is acked by the restore's return."""
    driver = Driver().may_stage()
    driver.command(UpdateStart("u1", staged=True))
    driver.returned()
    driver.take(driver.session.on_group_version(9, 0.0))
    assert driver.running == CallAbortRequests()
    driver.command(Abort("u1", ""))
    assert driver.returned() == [Restore("model", staged=True)]
    assert only(driver.returned(), Ack).step is Step.ABORT
