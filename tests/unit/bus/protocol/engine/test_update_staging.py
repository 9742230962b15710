"""The sidecar's machine with updates that are staged: nothing changes before the swap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from bus._protocol.engine.calls import CallAbortRequests, CallAdmit, CallCancel, CallPause
from bus._weight_transfer.allocation import StagingCapacity
from bus.messages import (
    Abort,
    Ack,
    Armed,
    Commit,
    NackCode,
    PauseGlobal,
    Probe,
    Resume,
    Step,
    TransferInit,
    UpdateFinish,
    UpdateStart,
)
from bus.operations import Done, ReceiveChunk, Restore, Start, SwapStaged
from tests.sim.makers import make_arm, make_chunk, make_sent
from tests.unit.bus._builders import messages, nack_in, only
from tests.unit.bus._session import MANIFEST, PAUSE, STAGING, Driver

COMMIT = Commit("u1", 4, "", ())


def test_the_engine_runs_from_the_arm_to_the_commit() -> None:
    """It says so, and needs no lease; what it serves has a version at every moment."""
    driver = Driver().may_stage()
    assert driver.session.phase == "armed"
    driver.command(UpdateStart("u1", staged=True))
    assert driver.calls[-1] == Start(recover=False, target="model", staged=True)
    driver.returned()
    for chunks in (0, 1):
        driver.takes("u1", chunks)
        assert (driver.session.phase, driver.session.shown_id) == ("staging", "u1")
        assert driver.session.next_deadline_ms() is None
        assert not driver.session.update.is_mixed
    assert driver.session.version == 3


def test_the_swap_is_the_commit() -> None:
    """Acked when it is made, with the requests in flight; as often as it is asked."""
    driver = Driver().stages()
    assert driver.command(COMMIT) == [SwapStaged(4, clear_cache=True)]
    assert driver.command(COMMIT) == []
    acked = only(driver.returned(Done(in_flight=5)), Ack)
    assert (acked.step, acked.in_flight) == (Step.COMMIT, 5)
    assert (driver.session.version, driver.session.phase) == (4, "running")
    assert only(driver.command(COMMIT), Ack).step is Step.COMMIT
    assert len([call for call in driver.calls if isinstance(call, SwapStaged)]) == 1


@pytest.mark.parametrize("to", ["armed", "started", "staged", "whole"])
def test_given_up_before_the_swap_it_has_changed_nothing(to: str) -> None:
    """Whatever the engine makes of letting it go."""
    for fails in (False, True):
        driver = Driver().stages() if to == "whole" else Driver().may_stage()
        if to in ("started", "staged"):
            driver.command(UpdateStart("u1", staged=True))
            driver.returned()
        if to == "staged":
            driver.takes("u1", 1)
        effects = driver.command(Abort("u1", ""))
        if to != "armed":
            assert isinstance(driver.calls[-1], Restore)
            effects = driver.failed() if fails else driver.returned()
        assert only(effects, Ack).outcome == "untouched"
        assert (driver.session.phase, driver.session.version) == ("running", 3)
        assert not driver.session.is_stale


@pytest.mark.parametrize("code", [NackCode.ENGINE_FAILED, NackCode.CHECKSUM_MISMATCH])
def test_a_chunk_that_fails_leaves_the_engine_as_it_was(code: NackCode) -> None:
    """It is named, and what serves goes on."""
    driver = Driver().may_stage()
    driver.command(UpdateStart("u1", staged=True))
    driver.returned()
    driver.command(make_chunk("u1", MANIFEST, 0, 1))
    driver.command(make_sent("u1", MANIFEST, 0, 1))
    driver.returned()
    assert nack_in(driver.failed(code)).code is code
    driver.command(Abort("u1", ""))
    assert only(driver.returned(), Ack).outcome == "untouched"
    assert not driver.session.update.partial


def test_a_swap_that_waits_is_called_off_by_an_abort() -> None:
    """And if it was made in spite of that, the ack says so."""
    driver = Driver(dp_size=2).stages()
    driver.command(COMMIT)
    assert driver.command(Abort("u1", "")) == [CallCancel()]
    effects = driver.failed(NackCode.CALLED_OFF)
    assert nack_in(effects).step == Step.COMMIT
    assert isinstance(driver.running, Restore)
    assert only(driver.returned(), Ack).outcome == "untouched"
    assert driver.session.version == 3

    driver = Driver(dp_size=2).stages()
    driver.command(COMMIT)
    driver.command(Abort("u1", ""))
    acks = [each for each in messages(driver.returned()) if isinstance(each, Ack)]
    assert [(each.step, each.outcome) for each in acks] == [
        (Step.COMMIT, ""),
        (Step.ABORT, "committed"),
    ]
    assert driver.session.version == 4


def test_a_transport_of_vllms_own_is_staged_as_any_other() -> None:
    """Its receive stages, too: no load follows."""
    driver = Driver().may_stage(backend="vllm:nccl")
    driver.command(UpdateStart("u1", staged=True))
    driver.returned()
    for k in range(MANIFEST.chunks):
        driver.command(make_chunk("u1", MANIFEST, k, 1))
        assert isinstance(driver.running, ReceiveChunk)
        driver.command(
            structs.replace(make_sent("u1", MANIFEST, k, 1), verify="unsupported", sums=())
        )
        assert only(driver.returned(), Ack).chunk == k
        assert not driver.session.update.is_mixed
    driver.command(UpdateFinish("u1"))
    driver.returned()
    assert driver.command(COMMIT) == [SwapStaged(4, clear_cache=True)]


@pytest.mark.parametrize("staged", [True, False])
def test_a_receive_that_waits_for_a_sender_for_good_is_called_off_by_an_abort(staged: bool) -> None:
    """vLLM's collectives have no deadline. In a pause it would leave the weights mixed: there the
    abort waits, and the engine is quarantined after it."""
    driver = Driver().may_stage(backend="vllm:nccl")
    if not staged:
        driver.paused()
    driver.command(UpdateStart("u1", staged=staged))
    driver.returned()
    driver.command(make_chunk("u1", MANIFEST, 0, 1))
    assert driver.command(Abort("u1", "")) == ([CallCancel()] if staged else [])
    effects = driver.failed(NackCode.TRANSFER_FAILED)
    assert nack_in(effects).step == Step.CHUNK
    assert isinstance(driver.running, Restore if staged else CallAbortRequests)
    assert only(driver.returned(), Ack).outcome == ("untouched" if staged else "partial")
    assert driver.session.phase == ("running" if staged else "quarantined")


@pytest.mark.parametrize("to", ["started", "staged", "whole", "about to swap"])
def test_a_later_update_takes_the_place_of_one_that_the_bus_has_given_up(to: str) -> None:
    """An engine that was deaf meanwhile holds up nobody: it lets go what it has, and is armed when
    it is asked again."""
    driver = Driver(dp_size=2)
    if to in ("whole", "about to swap"):
        driver.stages()
    else:
        driver.may_stage().command(UpdateStart("u1", staged=True))
        driver.returned()
    if to == "staged":
        driver.takes("u1", 1)
    later = make_arm("u2", MANIFEST, version=5, staging=STAGING)
    if to == "about to swap":
        driver.command(COMMIT)
        assert driver.command(later) == [CallCancel()]
        driver.failed(NackCode.CALLED_OFF)
    else:
        assert driver.command(later) == [Restore("model", staged=True)]
    assert driver.command(later) == []
    driver.returned()
    assert (driver.session.phase, driver.session.version) == ("running", 3)
    driver.command(later)
    assert only(driver.returned(Done(room=StagingCapacity(32))), Armed).update_id == "u2"


def test_another_transport_takes_the_place_of_an_update_that_the_bus_has_given_up() -> None:
    """So does a trainer that comes next: it begins with one of its own."""
    driver = Driver().stages()
    another = TransferInit("t2", "sim", b"", 0, 0, {})
    assert driver.command(another) == [Restore("model", staged=True)]
    assert driver.command(another) == []
    driver.returned()
    assert (driver.session.phase, driver.session.version) == ("running", 3)
    driver.command(another)
    assert only(driver.returned(), Ack).step is Step.TRANSFER_INIT


def test_the_transport_that_is_open_takes_nobodys_place() -> None:
    """A late copy of what was asked before is dropped."""
    driver = Driver().stages()
    assert not driver.command(TransferInit("t1", "sim", b"", 0, 0, {}))
    assert driver.session.phase == "staging"


def test_an_earlier_update_takes_nobodys_place() -> None:
    """A late ARM of it is refused, and so is one that lets engines catch up."""
    driver = Driver().stages()
    for version in (3, 4):
        late = make_arm("u0", MANIFEST, version=version, staging=STAGING)
        assert nack_in(driver.command(late)).code is NackCode.WRONG_STATE
    assert driver.session.phase == "staging"


def test_a_pause_comes_before_a_swap_that_waits() -> None:
    """Behind it, it would wait as well, and the peer ranks for the pause."""
    driver = Driver(dp_size=2).stages()
    driver.command(COMMIT)
    effects = driver.command(structs.replace(PAUSE, update_id="p1"))
    assert CallCancel() in effects
    assert nack_in(driver.failed(NackCode.CALLED_OFF)).code is NackCode.CALLED_OFF
    assert isinstance(driver.running, CallPause)
    driver.returned()
    assert nack_in(driver.command(COMMIT)).code is NackCode.CALLED_OFF
    assert only(driver.command(PauseGlobal("p1")), Ack).step is Step.PAUSE_GLOBAL
    driver.command(Resume("p1"))
    driver.returned()
    assert driver.command(COMMIT) == [SwapStaged(4, clear_cache=True)]


def test_an_engine_alone_swaps_in_a_pause_too() -> None:
    """Nobody else is at a step."""
    driver = Driver().stages()
    driver.command(structs.replace(PAUSE, update_id="p1"))
    driver.returned()
    assert driver.command(COMMIT) == [SwapStaged(4, clear_cache=True)]
    driver.returned()
    assert driver.session.version == 4


def test_a_swap_that_fails_half_way_quarantines() -> None:
    """Its requests end at once, and it says what it is."""
    driver = Driver().stages()
    driver.command(COMMIT)
    effects = driver.failed(NackCode.ENGINE_FAILED)
    assert nack_in(effects).code is NackCode.ENGINE_FAILED
    assert isinstance(driver.running, CallAbortRequests)
    assert only(driver.returned(), Ack).outcome == "partial"
    assert driver.session.is_stale
    assert driver.session.phase == "quarantined"


def test_who_is_told_of_the_version_that_it_is_about_to_serve_is_not_behind() -> None:
    """A peer rank has committed already. If its own commit does not come, it is."""
    driver = Driver().stages()
    assert driver.session.on_group_version(4, 0.0) == []
    driver.command(Abort("u1", ""))
    driver.returned()
    driver.take(driver.session.on_group_version(4, 0.0))
    assert isinstance(driver.running, CallAbortRequests)


@pytest.mark.parametrize("opens", [True, False])
def test_who_was_behind_opens_its_door_with_the_swap_and_then_has_committed(opens: bool) -> None:
    """No resume does; and who is said to have committed gets requests. Admission that can't be
    opened is tried again, with the next heartbeat."""
    driver = Driver()
    driver.take(driver.session.on_group_version(4, 0.0))
    driver.returned()
    driver.stages().command(COMMIT)
    effects = driver.returned()
    assert driver.running == CallAdmit()
    assert not messages(effects)
    assert driver.command(COMMIT) == [], "it is asked again, and has not committed yet"
    effects = driver.returned() if opens else driver.failed()
    assert only(effects, Ack).step is Step.COMMIT
    assert driver.session.version == 4
    assert driver.take(driver.session.on_group_version(4, 0.0)) == [] if opens else [CallAdmit()]


@pytest.mark.parametrize("undone", [True, False])
def test_who_gives_up_what_would_have_caught_it_up_closes_its_door_at_once(undone: bool) -> None:
    """Not with the next word of the broker; also if to let it go fails."""
    driver = Driver(dp_size=2).stages()
    assert driver.take(driver.session.on_group_version(4, 0.0)) == []
    driver.command(Abort("u1", ""))
    assert isinstance(driver.running, Restore)
    effects = driver.returned() if undone else driver.failed()
    assert only(effects, Ack).outcome == "untouched"
    assert isinstance(driver.running, CallAbortRequests)
    driver.returned()
    assert (driver.session.phase, driver.session.admission.closed) == ("running", True)


@pytest.mark.parametrize("when", ["waits for the swap", "is made"])
def test_who_was_behind_opens_its_door_with_the_swap_before_a_pause(when: str) -> None:
    """What comes in a pause is held; a closed admission would end it."""
    driver = Driver()
    driver.take(driver.session.on_group_version(4, 0.0))
    driver.returned()
    driver.stages()
    pause = structs.replace(PAUSE, update_id="p1")
    if when == "is made":
        driver.command(pause)
        driver.returned()
    driver.command(COMMIT)
    if when == "waits for the swap":
        driver.command(pause)
    assert not [each for each in messages(driver.returned()) if isinstance(each, Ack)]
    assert driver.running == CallAdmit()
    assert only(driver.returned(), Ack).step is Step.COMMIT
    assert not driver.session.admission.closed
    assert isinstance(driver.running, CallPause) or when == "is made"


@pytest.mark.parametrize("closes", [True, False])
def test_who_is_behind_after_its_swap_has_committed_nonetheless(closes: bool) -> None:
    """To an older version than its group's. Its admission stays closed, or is closed at last."""
    driver = Driver()
    driver.take(driver.session.on_group_version(5, 0.0))
    if closes:
        driver.returned()
    else:
        driver.failed()
    driver.stages().command(COMMIT)
    assert only(driver.returned(), Ack).step is Step.COMMIT
    assert driver.running == (None if closes else CallAbortRequests())


@pytest.mark.parametrize(
    ("room", "change", "why"),
    [
        (StagingCapacity(32, "no room"), {}, "no room"),
        (
            StagingCapacity(32),
            {"base": 3, "counts": (1, 1), "backend": "vllm:sparse_nccl"},
            "whole set",
        ),
        (StagingCapacity(why_not="not over that"), {"backend": "vllm:nccl"}, "over that"),
        (StagingCapacity(32), {"target": "draft"}, "whole set"),
    ],
)
def test_what_cannot_be_staged_is_said_when_it_is_armed(
    room: StagingCapacity, change: dict[str, Any], why: str
) -> None:
    """And refused when it is started so."""
    driver = Driver(draft=True)
    backend: str = change.get("backend", "sim")
    driver.command(TransferInit("t1", backend, b"", 0, 0, {}))
    driver.returned()
    arm = make_arm("u1", MANIFEST, version=4, staging=STAGING)
    counts = change.get("counts", ())
    digest = replace(MANIFEST, counts=counts).digest
    driver.command(structs.replace(arm, **change, digest=digest))
    assert why in only(driver.returned(Done(room=room)), Armed).why_paused
    nack = nack_in(driver.command(UpdateStart("u1", staged=True)))
    assert nack.code is NackCode.STAGING_REFUSED
    driver.paused()
    driver.command(UpdateStart("u1"))
    assert isinstance(driver.running, Start)


def test_beside_weights_that_are_not_whole_nothing_is_staged() -> None:
    """They are mended in a pause."""
    driver = Driver().loaded()
    driver.command(Abort("u1", ""))
    driver.returned()
    driver.command(make_arm("u2", MANIFEST, version=5, staging=STAGING))
    assert (
        "weights are missing"
        in only(driver.returned(Done(room=StagingCapacity(32))), Armed).why_paused
    )
    nack = nack_in(driver.command(UpdateStart("u2", staged=True)))
    assert nack.code is NackCode.STAGING_REFUSED


def test_no_canary_is_run_beside_requests() -> None:
    """There is no moment for it between the last chunk and the first token."""
    driver = Driver().stages()
    nack = nack_in(driver.command(Probe("u1", ((1,),), 1, "s")))
    assert nack.code is NackCode.WRONG_STATE


def test_without_the_word_an_update_is_armed_as_ever() -> None:
    """An older trainer hears nothing of staging."""
    driver = Driver().armed()
    assert nack_in(driver.command(UpdateStart("u1", staged=True))).code is NackCode.STAGING_REFUSED
