"""The broker's update machine: every state and every event, and its invariants."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from bus._protocol.core.failures import Declined, Failure
from bus._protocol.core.instructions import Ask, StepDone, StepFailed
from bus._protocol.core.state_table import IllegalTransition
from bus._protocol.group.update import TRANSITIONS, UNSAFE, UpdateEvent, UpdateMachine, UpdateState
from bus.messages import (
    Abort,
    Ack,
    Commit,
    NackCode,
    Probe,
    Probed,
    ProbeResult,
    Step,
    TransferDrain,
    TransferInit,
    UpdateFinish,
    UpdateStart,
)
from tests.sim.makers import make_arm, make_chunk, make_manifest, make_part, make_sent
from tests.unit.bus._builders import LOST, ack
from tests.unit.bus._tables import check_event

if TYPE_CHECKING:
    from bus._protocol.core.instructions import Instruction

MEMBERS = {"e0": "e0", "e1": "dp1", "e2": "dp1"}
MANIFEST = make_manifest(("a", "b", "c"))
CHUNKS = MANIFEST.chunks
OPEN = replace(MANIFEST, is_open=True)
PART = make_manifest(("d", "e"))
JOINED = OPEN.join(PART)
ARM = make_arm("u1", MANIFEST, version=4, label="step 4")
REFUSED = Failure(NackCode.ENGINE_FAILED, "no", peer="e1", tensor="b")
STATES = list(UpdateState)
COMMIT = Commit("u1", 4, "", ())
PROBE = Probe("u1", ((1, 2), (3,)), 2, "salt")
_S = UpdateState


def machine(state: UpdateState, quorum: int = 1, *, communicator: int = 0) -> UpdateMachine:
    """A machine that was brought to this state the long way."""
    update = UpdateMachine()
    if state is _S.IDLE:
        return update
    if state is _S.OPENING:
        update.open(TransferInit("t1", "sim", b"", 0, 0, {}), MEMBERS, 0.0)
        return update
    is_open = state is _S.EXTENDING
    arm = structs.replace(ARM, quorum=quorum, communicator=communicator, is_open=is_open)
    update.arm(arm, MEMBERS, 0.0)
    if state is _S.ARMING:
        return update
    if state is _S.ABORTING:
        update.abort(LOST, 1.0)
        return update
    all_ack(update, Step.ARM)
    if state is _S.ARMED:
        return update
    update.start(UpdateStart("u1"), 1.0)
    if state is _S.STARTING:
        return update
    all_ack(update, Step.START)
    if state is _S.LOADING:
        return update
    for k in range(CHUNKS):
        apply(update, k)
    if state is _S.EXTENDING:
        update.extend(make_part("u1", OPEN, PART), 3.0)
        return update
    update.finish(UpdateFinish("u1"), 3.0)
    if state is _S.FINISHING:
        return update
    all_ack(update, Step.FINISH)
    if state is _S.FINISHED:
        return update
    if state is _S.PROBING:
        update.probe(PROBE, 4.0)
        return update
    update.commit(Commit("u1", 4, "", ()), 4.0)
    assert update.state is _S.COMMITTING
    return update


def all_ack(
    update: UpdateMachine, step: Step, chunk: int = 0, *, outcome: str = ""
) -> list[Instruction]:
    """Everybody acks; what came of it."""
    said: list[Instruction] = []
    for name in list(update.members):
        said += update.on_ack(name, ack(step, update.update_id, chunk, outcome=outcome), 1.0)
    return said


def begin(update: UpdateMachine, k: int) -> None:
    """A chunk is told and sent: now it is for the engines."""
    update.chunk(make_chunk("u1", MANIFEST, k, 1), 2.0)
    update.on_chunk_sent(make_sent("u1", MANIFEST, k, 1), 2.0)


def apply(update: UpdateMachine, k: int) -> list[Instruction]:
    """A whole chunk; what came of the acks."""
    begin(update, k)
    return all_ack(update, Step.CHUNK, k)


def snapshot(update: UpdateMachine) -> tuple[object, ...]:
    """Everything that a refused event must leave alone."""
    return (
        update.state,
        update.update_id,
        update.version,
        dict(update.members),
        dict(update.excluded),
        frozenset(update.partial),
        frozenset(update.barrier.waiting) if update.barrier else None,
        {
            k: (frozenset(r.waiting), r.waiting_for_trainer, tuple(r.messages), r.asked_ms)
            for k, r in update.chunks.items()
        },
        update.chunks_asked,
        update.failure,
    )


@pytest.mark.parametrize(("state", "event"), list(product(UpdateState, UpdateEvent)))
def test_the_table_says_what_follows_and_refuses_the_rest(
    state: UpdateState, event: UpdateEvent
) -> None:
    """An event that the table does not have in a state raises, and the state stays."""
    check_event(UpdateMachine(), TRANSITIONS, state, event)


COMMANDS = {
    "open": lambda u: u.open(TransferInit("t1", "sim", b"x", 0, 0, {}), {"e9": "e9"}, 9.0),
    "arm": lambda u: u.arm(make_arm("u2", MANIFEST, version=9), {"e9": "e9"}, 9.0),
    "start": lambda u: u.start(UpdateStart("u1"), 9.0),
    "chunk": lambda u: u.chunk(make_chunk("u1", MANIFEST, u.chunks_asked % CHUNKS, 1), 9.0),
    "part": lambda u: u.extend(make_part("u1", OPEN, PART), 9.0),
    "finish": lambda u: u.finish(UpdateFinish("u1"), 9.0),
    "probe": lambda u: u.probe(PROBE, 9.0),
    "commit": lambda u: u.commit(Commit("u1", 4, "", ()), 9.0),
    "give_up": lambda u: u.abort(LOST, 9.0),
}
ALLOWED = {
    "open": {_S.IDLE},
    "arm": {_S.IDLE},
    "start": {_S.ARMED},
    "chunk": {_S.STARTING, _S.LOADING},
    "part": set[UpdateState](),  # LOADING, but only of an open update, with every chunk applied
    "finish": set[UpdateState](),  # LOADING, but only with every chunk sent
    "probe": {_S.FINISHED},
    "commit": {_S.FINISHED},
    "give_up": set(STATES) - {_S.IDLE, _S.COMMITTING, _S.ABORTING},
}


@pytest.mark.parametrize(("state", "command"), list(product(UpdateState, COMMANDS)))
def test_a_command_out_of_its_turn_is_illegal_and_changes_nothing(
    state: UpdateState, command: str
) -> None:
    """Every command in every state: it is in its turn, or it raises and leaves no trace."""
    update = machine(state)
    before = snapshot(update)
    if state in ALLOWED[command]:
        COMMANDS[command](update)
        assert snapshot(update) != before
        return
    with pytest.raises(IllegalTransition):
        COMMANDS[command](update)
    assert snapshot(update) == before


@pytest.mark.parametrize(("state", "step"), list(product(UpdateState, Step)))
def test_an_ack_that_is_not_awaited_changes_nothing(state: UpdateState, step: Step) -> None:
    """Of another update, from a stranger, of a step that nobody waits for, or doubled."""
    update = machine(state)
    before = snapshot(update)
    own = update.update_id
    assert update.on_ack("e0", ack(step, "u0"), 1.0) == []
    assert update.on_ack("stranger", ack(step, own, 7), 1.0) == []
    awaited = update.barrier.step if update.barrier else None
    if step is not awaited:
        assert update.on_ack("e0", ack(step, own, 7), 1.0) == []
        assert snapshot(update) == before
        return
    update.on_ack("e0", ack(step, own), 1.0)
    before = snapshot(update)
    assert update.on_ack("e0", ack(step, own), 1.0) == []
    assert snapshot(update) == before


def test_chunks_of_a_part_are_announced_when_all_have_checked_it() -> None:
    update = machine(_S.EXTENDING)
    chunk = make_chunk("u1", JOINED, CHUNKS, 1)
    for name in ("e0", "e1"):
        update.on_ack(name, ack(Step.PART, "u1"), 4.0)
        with pytest.raises(IllegalTransition):
            update.chunk(chunk, 4.0)
    assert [type(each) for each in update.on_ack("e2", ack(Step.PART, "u1"), 4.0)] == [StepDone]
    assert update.state is _S.LOADING
    assert not update.has_sent_all
    update.chunk(chunk, 5.0)
    update.on_chunk_sent(make_sent("u1", JOINED, CHUNKS, 1), 5.0)
    with pytest.raises(IllegalTransition):  # chunks are in flight, and one is to come
        update.extend(make_part("u1", JOINED, make_manifest(("f",)), 2), 5.0)


@pytest.mark.parametrize("communicator", [0, 7])
def test_a_part_that_one_engine_refuses_aborts_the_update(communicator: int) -> None:
    update = machine(_S.EXTENDING, communicator=communicator)
    update.on_refused("e1", REFUSED, 4.0)
    assert (update.state, update.failure) == (_S.ABORTING, REFUSED)
    assert update.excluded == {}


@pytest.mark.parametrize("state", [_S.LOADING, _S.EXTENDING])
@pytest.mark.parametrize("communicator", [0, 7])
def test_an_engine_lost_between_parts_is_missed_by_its_communicator(
    state: UpdateState, communicator: int
) -> None:
    """The others would wait for it in the next part's collective."""
    update = machine(_S.EXTENDING, communicator=communicator)
    if state is _S.LOADING:
        all_ack(update, Step.PART)
        for k in range(CHUNKS, JOINED.chunks):
            update.chunk(make_chunk("u1", JOINED, k, 1), 5.0)
            update.on_chunk_sent(make_sent("u1", JOINED, k, 1), 5.0)
            all_ack(update, Step.CHUNK, k)
        assert update.has_sent_all
    update.on_lost("e0", LOST, 6.0)
    assert update.state is (_S.ABORTING if communicator else state)
    assert set(update.excluded) == {"e0"}
    if communicator:
        assert update.failure == LOST


def test_a_missing_tensor_at_the_end_aborts_an_open_update_alone() -> None:
    """Nobody commits, also who has finished. In any other update an engine alone is at fault."""
    missing = replace(REFUSED, code=NackCode.MANIFEST_REFUSED)
    for is_open in (True, False):
        update = machine(_S.EXTENDING)
        all_ack(update, Step.PART)
        for k in range(CHUNKS, JOINED.chunks):
            update.chunk(make_chunk("u1", JOINED, k, 1), 5.0)
            update.on_chunk_sent(make_sent("u1", JOINED, k, 1), 5.0)
            all_ack(update, Step.CHUNK, k)
        update.is_open = is_open
        update.finish(UpdateFinish("u1"), 6.0)
        update.on_ack("e0", ack(Step.FINISH, "u1"), 6.0)
        update.on_refused("e1", missing, 6.0)
        assert update.state is (_S.ABORTING if is_open else _S.FINISHED)
        assert set(update.excluded) == (set() if is_open else {"e1", "e2"})


def test_the_steps_follow_each_other_and_each_is_told_once() -> None:
    """Arm, start, chunks, finish, commit; the trainer hears of each when all have done it."""
    told: list[Step] = []
    update = UpdateMachine()
    update.arm(ARM, MEMBERS, 0.0)
    told += [each.barrier.step for each in all_ack(update, Step.ARM) if isinstance(each, StepDone)]
    update.start(UpdateStart("u1"), 1.0)
    told += [
        each.barrier.step for each in all_ack(update, Step.START) if isinstance(each, StepDone)
    ]
    for k in range(CHUNKS):
        done = apply(update, k)
        told += [each.barrier.step for each in done if isinstance(each, StepDone)]
    update.finish(UpdateFinish("u1"), 1.0)
    told += [
        each.barrier.step for each in all_ack(update, Step.FINISH) if isinstance(each, StepDone)
    ]
    update.commit(Commit("u1", 4, "", ()), 1.0)
    told += [
        each.barrier.step for each in all_ack(update, Step.COMMIT) if isinstance(each, StepDone)
    ]
    assert told == [Step.ARM, Step.START, *[Step.CHUNK] * CHUNKS, Step.FINISH, Step.COMMIT]
    assert update.state is _S.IDLE


def test_one_refusal_at_arm_gives_the_update_up_on_every_engine() -> None:
    """Nothing is armed anywhere when the trainer hears who refused which tensor."""
    update = machine(_S.ARMING)
    update.on_ack("e0", ack(Step.ARM), 1.0)
    (ask,) = update.on_refused("e1", REFUSED, 1.0)
    assert ask == Ask(Abort("u1", "no"), ("e0", "e1", "e2"))
    assert update.state is _S.ABORTING
    (failed,) = all_ack(update, Step.ABORT, outcome="untouched")
    assert failed == StepFailed(Step.ABORT, REFUSED)
    assert update.state is _S.IDLE


@pytest.mark.parametrize("state", [_S.LOADING, _S.FINISHING, _S.FINISHED, _S.COMMITTING])
def test_an_engine_that_fails_later_falls_out_with_its_dp_group(state: UpdateState) -> None:
    """Its ranks are told to abort; the others go on."""
    update = machine(state)
    ask, *_ = update.on_refused("e1", REFUSED, 1.0)
    assert ask == Ask(Abort("u1", "no"), ("e1", "e2"))
    assert set(update.members) == {"e0"}
    assert set(update.excluded) == {"e1", "e2"}
    assert update.state is state


@pytest.mark.parametrize("state", [s for s in UpdateState if s is not _S.IDLE])
def test_an_engine_that_is_lost_is_not_waited_for(state: UpdateState) -> None:
    """The update goes on without its DP group, and says so."""
    update = machine(state)
    awaited = update.barrier.step if update.barrier else None
    if awaited is not None:
        update.on_ack("e0", ack(awaited, update.update_id), 1.0)
    said = update.on_lost("e2", LOST, 9.0)
    assert set(update.members) == {"e0"}
    assert set(update.excluded) == {"e1", "e2"}
    if awaited is not None:
        assert len(said) == 1
        assert isinstance(said[0], StepFailed if state is _S.ABORTING else StepDone)


@pytest.mark.parametrize("state", [s for s in UpdateState if s is not _S.IDLE])
def test_with_nobody_left_the_update_is_over(state: UpdateState) -> None:
    """Whoever waits for a step hears why; the machine takes the next update."""
    update = machine(state)
    awaited = update.barrier.step if update.barrier else None
    if state is _S.LOADING:
        update.chunk(make_chunk("u1", MANIFEST, 0, 1), 2.0)
    update.on_lost("e0", LOST, 9.0)
    said = update.on_lost("e1", LOST, 9.0)
    assert update.state is _S.IDLE
    assert update.barriers() == []
    steps = [each.step for each in said if isinstance(each, StepFailed)]
    expected = [awaited] if awaited else []
    assert steps == ([Step.CHUNK] if state is _S.LOADING else expected)


OVERDUE = Failure(NackCode.TIMEOUT, "it lives but has not acked", peer="e1")
DEAD = Failure(NackCode.ENGINE_DEAD, "its worker has left", peer="e1")


@pytest.mark.parametrize("failure", [OVERDUE, DEAD])
@pytest.mark.parametrize("state", [_S.OPENING, _S.ARMING, _S.STARTING])
def test_who_is_overdue_or_dead_falls_out_before_the_first_chunk_too(
    state: UpdateState, failure: Failure
) -> None:
    """With its DP group, which undoes what it may have begun; the others go on."""
    update = machine(state)
    assert update.barrier is not None
    update.on_ack("e0", ack(update.barrier.step, update.update_id), 1.0)
    asked = update.on_refused("e1", failure, 9.0, overdue=failure is OVERDUE)
    assert isinstance(asked[-1], StepDone)
    told = [each for each in asked if isinstance(each, Ask)]
    abort = Ask(Abort("u1", failure.detail), ("e1", "e2"))
    assert told == ([] if state is _S.OPENING else [abort])
    assert (set(update.members), set(update.excluded)) == ({"e0"}, {"e1", "e2"})


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("state", [_S.ARMING, _S.ARMED, _S.STARTING])
def test_nobody_enters_a_collective_without_who_is_overdue_or_lost(
    state: UpdateState, *, lost: bool
) -> None:
    """The update is given up before it begins, and waits for those alone who are left; at ARM the
    trainer hears that it needs another communicator."""
    update = UpdateMachine()
    update.arm(structs.replace(ARM, communicator=5), MEMBERS, 0.0)
    if state is not _S.ARMING:
        all_ack(update, Step.ARM)
    if state is _S.STARTING:
        update.start(UpdateStart("u1"), 1.0)
    if lost:
        asked = update.on_lost("e1", OVERDUE, 9.0)
    else:
        asked = update.on_refused("e1", OVERDUE, 9.0, overdue=True)
    assert asked[-1] == Ask(Abort("u1", OVERDUE.detail), ("e0",))
    (failed,) = update.on_ack("e0", ack(Step.ABORT), 9.0)
    code = NackCode.TRANSFER_CLOSED if state is _S.ARMING else NackCode.TIMEOUT
    assert failed == StepFailed(Step.ABORT, replace(OVERDUE, code=code))


@pytest.mark.parametrize("sent", range(4))
def test_an_engine_that_is_lost_ends_an_update_whose_chunks_need_it(sent: int) -> None:
    """Of three chunks some are sent. The rest would be collectives of all, which can't end; when
    all have been sent, the others go on alone."""
    update = UpdateMachine()
    update.arm(structs.replace(ARM, communicator=5), MEMBERS, 0.0)
    all_ack(update, Step.ARM)
    update.start(UpdateStart("u1"), 1.0)
    all_ack(update, Step.START)
    for k in range(3):
        update.chunk(make_chunk("u1", MANIFEST, k, 1), 2.0)
        if k < sent:
            update.on_chunk_sent(make_sent("u1", MANIFEST, k, 1), 2.0)
    asked = update.on_lost("e1", LOST, 9.0)
    if sent == 3:
        assert (update.state, set(update.members)) == (_S.LOADING, {"e0"})
        return
    assert update.state is _S.ABORTING
    assert asked[-1] == Ask(Abort("u1", LOST.detail), ("e0",))
    assert update.on_ack("e0", ack(Step.ABORT), 9.0) == [StepFailed(Step.ABORT, LOST)]


@pytest.mark.parametrize(("communicator", "quorum"), [(5, 1), (0, 2)])
def test_a_chunk_that_ends_its_update_is_not_done(communicator: int, quorum: int) -> None:
    """Not even if who is left has applied it: after a chunk that is done, the trainer would enter
    the next one's collective alone."""
    update = UpdateMachine()
    update.arm(structs.replace(ARM, communicator=communicator, quorum=quorum), MEMBERS, 0.0)
    all_ack(update, Step.ARM)
    update.start(UpdateStart("u1"), 1.0)
    all_ack(update, Step.START)
    begin(update, 0)
    assert update.on_ack("e0", ack(Step.CHUNK, "u1", 0), 2.0) == []
    asked = update.on_refused("e1", REFUSED, 3.0)
    assert {type(each) for each in asked} == {Ask}
    assert update.state is _S.ABORTING
    (failed,) = update.on_ack("e0", ack(Step.ABORT), 4.0)
    assert isinstance(failed, StepFailed)
    assert failed.step is Step.ABORT


def test_a_command_of_an_update_that_was_given_up_hears_why() -> None:
    update = machine(_S.ABORTING)
    all_ack(update, Step.ABORT)
    with pytest.raises(Declined) as declined:
        update.require(_S.ARMED, update_id="u1")
    assert declined.value.failure == LOST
    with pytest.raises(Declined, match="the broker knows no update u2"):
        update.require(_S.ARMED, update_id="u2")


@pytest.mark.parametrize("state", UpdateState)
def test_a_stranger_changes_nothing(state: UpdateState) -> None:
    """Who takes no part can neither fail nor be lost."""
    update = machine(state)
    before = snapshot(update)
    assert update.on_refused("stranger", REFUSED, 1.0) == []
    assert update.on_lost("stranger", LOST, 9.0) == []
    assert snapshot(update) == before


def test_a_failed_open_leaves_nothing_behind() -> None:
    """There is nothing to abort: the trainer opens again."""
    update = machine(_S.OPENING)
    (failed,) = update.on_refused("e1", REFUSED, 1.0)
    assert failed == StepFailed(Step.TRANSFER_INIT, REFUSED)
    assert update.state is _S.IDLE
    assert update.on_ack("e0", ack(Step.TRANSFER_INIT, ""), 2.0) == []


def test_chunks_may_overlap_and_are_told_one_by_one() -> None:
    """Two under way: each is applied when every engine has applied it, in any order."""
    update = machine(_S.LOADING)
    begin(update, 0)
    begin(update, 1)
    assert not update.has_sent_all
    (second,) = all_ack(update, Step.CHUNK, 1)
    (first,) = all_ack(update, Step.CHUNK, 0)
    assert isinstance(first, StepDone)
    assert isinstance(second, StepDone)
    assert (second.barrier.chunk, first.barrier.chunk) == (1, 0)


@pytest.mark.parametrize("number", [1, 2, 7])
def test_a_chunk_out_of_order_is_illegal(number: int) -> None:
    """The next one, or none."""
    update = machine(_S.LOADING)
    before = snapshot(update)
    chunk = make_chunk("u1", MANIFEST, min(number, CHUNKS - 1), 1)
    with pytest.raises(IllegalTransition):
        update.chunk(chunk, 2.0)
    assert snapshot(update) == before


@pytest.mark.parametrize("sent", range(CHUNKS))
def test_finish_before_the_last_chunk_is_sent_is_illegal(sent: int) -> None:
    """Every chunk of the manifest must have left the trainer first."""
    update = machine(_S.LOADING)
    for k in range(sent):
        begin(update, k)
    update.chunk(make_chunk("u1", MANIFEST, sent, 1), 2.0)
    with pytest.raises(IllegalTransition):
        update.finish(UpdateFinish("u1"), 3.0)
    assert update.state is _S.LOADING


def test_chunks_are_told_while_engines_start() -> None:
    """They do what they are told in its order."""
    update = machine(_S.STARTING)
    begin(update, 0)
    (started,) = all_ack(update, Step.START)
    (applied,) = all_ack(update, Step.CHUNK, 0)
    assert isinstance(started, StepDone)
    assert isinstance(applied, StepDone)
    assert update.state is _S.LOADING


def test_finish_is_done_when_the_last_chunk_is_applied_by_the_last_engine() -> None:
    """Whichever of the acks was lost on its way, and came later."""
    update = machine(_S.LOADING)
    for k in range(CHUNKS):
        begin(update, k)
    update.finish(UpdateFinish("u1"), 3.0)
    for k in range(CHUNKS - 1):
        all_ack(update, Step.CHUNK, k)
    for name in ("e0", "e1"):
        update.on_ack(name, ack(Step.CHUNK, "u1", CHUNKS - 1), 4.0)
    assert all_ack(update, Step.FINISH) == []
    assert update.state is _S.FINISHING
    applied, finished = update.on_ack("e2", ack(Step.CHUNK, "u1", CHUNKS - 1), 5.0)
    assert isinstance(applied, StepDone)
    assert isinstance(finished, StepDone)
    assert (applied.barrier.step, finished.barrier.step) == (Step.CHUNK, Step.FINISH)
    assert update.state is _S.FINISHED


def test_finish_is_done_without_who_falls_out_with_the_last_chunk() -> None:
    """It is waited for neither in the chunk nor in the finish."""
    update = machine(_S.LOADING)
    for k in range(CHUNKS):
        begin(update, k)
    update.finish(UpdateFinish("u1"), 3.0)
    for k in range(CHUNKS):
        update.on_ack("e0", ack(Step.CHUNK, "u1", k), 4.0)
    assert update.on_ack("e0", ack(Step.FINISH), 4.0) == []
    said = update.on_refused("e1", REFUSED, 5.0)
    steps = [each.barrier.step for each in said if isinstance(each, StepDone)]
    assert steps == [*[Step.CHUNK] * CHUNKS, Step.FINISH]
    assert update.state is _S.FINISHED


def test_what_was_loaded_when_it_was_given_up_is_remembered() -> None:
    """Engines that say partial are those to be quarantined."""
    update = machine(_S.LOADING)
    update.abort(LOST, 5.0)
    update.on_ack("e0", ack(Step.ABORT, outcome="restored"), 6.0)
    update.on_ack("e1", ack(Step.ABORT, outcome="partial"), 6.0)
    (failed,) = update.on_ack("e2", ack(Step.ABORT, outcome="untouched"), 6.0)
    assert isinstance(failed, StepFailed)
    assert update.partial == {"e1"}


def test_a_refused_abort_leaves_the_others_aborting() -> None:
    """Only the one that refused is not waited for any more."""
    update = machine(_S.ABORTING)
    assert update.on_refused("e1", REFUSED, 6.0) == []
    assert set(update.members) == {"e0", "e2"}
    assert update.state is _S.ABORTING


def test_weights_may_differ_from_the_start_to_the_commit() -> None:
    """In these states nobody may resume."""
    safe = {_S.IDLE, _S.OPENING, _S.ARMING, _S.ARMED}
    assert set(UpdateState) - safe == UNSAFE


def test_an_ack_before_the_chunk_is_sent_does_not_count() -> None:
    """Nobody can have applied what has not left; each engine is still waited for."""
    update = machine(_S.LOADING)
    update.chunk(make_chunk("u1", MANIFEST, 0, 1), 2.0)
    before = snapshot(update)
    for name in MEMBERS:
        assert update.on_ack(name, ack(Step.CHUNK), 3.0) == []
    assert snapshot(update) == before
    assert update.on_chunk_sent(make_sent("u1", MANIFEST, 0, 1), 4.0) == [
        Ask(make_sent("u1", MANIFEST, 0, 1), ("e0", "e1", "e2"))
    ]
    (done,) = all_ack(update, Step.CHUNK, 0)
    assert isinstance(done, StepDone)


def test_a_chunks_time_runs_from_when_it_is_sent() -> None:
    """Until then the trainer is waited for, and no engine's time runs."""
    update = machine(_S.LOADING)
    update.chunk(make_chunk("u1", MANIFEST, 0, 1), 2.0)
    (current,) = update.chunks.values()
    assert (current.waiting_for_trainer, current.messages) == (
        True,
        [make_chunk("u1", MANIFEST, 0, 1)],
    )
    update.on_chunk_sent(make_sent("u1", MANIFEST, 0, 1), 900.0)
    assert (current.asked_ms, current.resent_ms) == (900.0, 900.0)
    assert not current.waiting_for_trainer
    assert current.messages == [make_chunk("u1", MANIFEST, 0, 1), make_sent("u1", MANIFEST, 0, 1)]


def test_who_falls_out_before_the_chunk_is_sent_does_not_hear_of_it() -> None:
    """The others do, and are waited for."""
    update = machine(_S.LOADING)
    update.chunk(make_chunk("u1", MANIFEST, 0, 1), 2.0)
    (ask,) = update.on_refused("e2", REFUSED, 3.0)
    assert ask == Ask(Abort("u1", "no"), ("e1", "e2"))
    sent = make_sent("u1", MANIFEST, 0, 1)
    assert update.on_chunk_sent(sent, 4.0) == [Ask(sent, ("e0",))]
    (done,) = update.on_ack("e0", ack(Step.CHUNK), 5.0)
    assert isinstance(done, StepDone)


def test_with_nobody_left_a_chunk_that_is_not_sent_fails() -> None:
    """It does not count as applied, though nobody is waited for any more."""
    update = machine(_S.LOADING)
    update.chunk(make_chunk("u1", MANIFEST, 0, 1), 2.0)
    assert update.on_lost("e1", LOST, 9.0) == []
    assert update.on_lost("e0", LOST, 9.0) == [StepFailed(Step.CHUNK, LOST, 0)]
    assert update.state is _S.IDLE


@pytest.mark.parametrize("communicator", [0, 5])
def test_a_rendezvous_that_loses_an_engine_is_over(communicator: int) -> None:
    """Those who came wait for it, until the trainer lets go of them; where each opens its end
    alone, the others go on."""
    update = UpdateMachine()
    update.open(TransferInit("t1", "sim", b"", communicator, 3, {}), MEMBERS, 0.0)
    lost, *others = MEMBERS
    told = update.on_lost(lost, Failure(NackCode.PEER_LOST, "gone", lost), 9.0)
    if not communicator:
        assert told == []
        assert set(update.members) == set(others)
        return
    (failed,) = told
    assert isinstance(failed, StepFailed)
    assert (failed.step, failed.failure.code) == (Step.TRANSFER_INIT, NackCode.TRANSFER_CLOSED)
    assert failed.failure.peer == lost
    assert update.state is _S.IDLE


def test_an_end_that_opened_too_late_is_not_taken_for_the_next() -> None:
    """The trainer gave its opening up, and asked for another."""
    update = UpdateMachine()
    for update_id in ("t1", "t2"):
        if update.state is _S.OPENING:
            update.abort(REFUSED, 1.0)
        update.open(TransferInit(update_id, "sim", b"", 5, 3, {}), MEMBERS, 0.0)
    late, own = (Ack(Step.TRANSFER_INIT, each, 0, 0, 1.0, "", ()) for each in ("t1", "t2"))
    for name in MEMBERS:
        assert update.on_ack(name, late, 2.0) == []
    assert update.state is _S.OPENING
    for name in MEMBERS:
        update.on_ack(name, own, 3.0)
    assert update.state is _S.IDLE


RESULTS = (ProbeResult((7, 8), (-0.5, -0.25)), ProbeResult((9, 9), (-1.0, -2.0)))


def test_the_canarys_answers_are_gathered_and_the_update_is_finished_as_before() -> None:
    """It is told when all have answered; what comes late or twice changes nothing."""
    update = machine(_S.PROBING)
    assert update.on_probed("e0", Probed("u0", RESULTS, 1.0), 5.0) == []
    assert update.on_probed("e0", Probed("u1", RESULTS, 1.0), 5.0) == []
    assert update.on_probed("e1", Probed("u1", RESULTS, 1.0), 5.0) == []
    (done,) = update.on_probed("e2", Probed("u1", RESULTS, 1.0), 5.0)
    assert isinstance(done, StepDone)
    assert done.barrier.step is Step.PROBE
    assert update.state is _S.FINISHED
    assert update.probed == dict.fromkeys(("e0", "e1", "e2"), RESULTS)
    assert update.on_probed("e2", Probed("u1", (), 1.0), 5.0) == []
    assert update.probed["e2"] == RESULTS


def test_who_differs_by_the_canary_falls_out_with_its_dp_group() -> None:
    """Each is told to abort; the commit is asked of the others alone."""
    update = machine(_S.FINISHED)
    asked = update.expel({"e1": LOST, "stranger": LOST}, 9.0)
    peers = tuple(name for name, group in MEMBERS.items() if group == MEMBERS["e1"])
    assert asked == [Ask(Abort("u1", LOST.detail), peers)]
    assert set(update.excluded) == set(peers)
    left = tuple(name for name in MEMBERS if name not in peers)
    assert update.commit(COMMIT, 6.0) == [Ask(COMMIT, left)]


def test_without_anybody_left_the_update_is_over() -> None:
    """Nothing is committed."""
    update = machine(_S.FINISHED)
    update.expel(dict.fromkeys(MEMBERS, LOST), 9.0)
    assert update.state is _S.IDLE
    assert update.failure == LOST


@pytest.mark.parametrize("how", ["refused", "lost"])
def test_an_engine_that_fails_its_probes_falls_out(how: str) -> None:
    """And the others are not waited for any longer than before."""
    update = machine(_S.PROBING)
    for name in ("e0", "e2"):
        update.on_probed(name, Probed("u1", RESULTS, 1.0), 5.0)
    said = (
        update.on_refused("e1", LOST, 6.0) if how == "refused" else update.on_lost("e1", LOST, 9.0)
    )
    assert any(isinstance(each, StepDone) and each.barrier.step is Step.PROBE for each in said)
    assert "e1" in update.excluded


@pytest.mark.parametrize("state", [_S.ARMING, _S.ARMED, _S.STARTING, _S.LOADING, _S.FINISHED])
@pytest.mark.parametrize("quorum", [0, 2])
def test_with_fewer_dp_groups_than_the_quorum_the_update_is_given_up(
    state: UpdateState, quorum: int
) -> None:
    """As soon as they are fewer; 0 is all. Who is left is told, and the trainer hears of both."""
    update = machine(state, quorum)
    said = update.on_lost("e0", LOST, 9.0)
    assert said[-1] == Ask(Abort("u1", f"1 of 2 DP groups are left: {LOST.detail}"), ("e1", "e2"))
    assert update.state is _S.ABORTING
    (failed,) = all_ack(update, Step.ABORT)
    assert isinstance(failed, StepFailed)
    assert (failed.failure.code, failed.failure.peer) == (NackCode.QUORUM_MISSING, LOST.peer)


def test_with_as_many_dp_groups_as_the_quorum_the_others_go_on() -> None:
    """All ranks of one that is lost count as one."""
    update = machine(_S.LOADING, 1)
    update.on_lost("e1", LOST, 9.0)
    assert update.state is _S.LOADING
    assert set(update.members) == {"e0"}


def test_a_quorum_is_of_those_that_were_there_before_the_commit() -> None:
    """Once it is asked it can't be taken back: whoever commits serves."""
    update = machine(_S.COMMITTING, 0)
    update.on_lost("e1", LOST, 9.0)
    (done,) = update.on_ack("e0", ack(Step.COMMIT, "u1"), 9.0)
    assert isinstance(done, StepDone)
    assert update.state is _S.IDLE


def test_who_differs_may_leave_too_few() -> None:
    """They are all told to abort, each once."""
    update = machine(_S.FINISHED, 2)
    said = update.expel({"e1": LOST, "e0": LOST}, 9.0)
    asked = [name for each in said if isinstance(each, Ask) for name in each.names]
    assert sorted(asked) == ["e0", "e1", "e2"]
    assert update.state is _S.ABORTING
    assert update.barrier is not None
    assert update.barrier.asked_ms == 9.0


def test_a_drain_that_an_engine_can_not_make_fails_by_its_own_name() -> None:
    """The trainer waits for that step, and for no opening."""
    update = UpdateMachine()
    update.open(TransferDrain("d1", "t1", "sim", 5, b"", 1000), MEMBERS, 0.0)
    (failed,) = update.on_refused("e1", REFUSED, 1.0)
    assert failed == StepFailed(Step.TRANSFER_DRAIN, REFUSED)
    update.open(TransferDrain("d2", "t1", "sim", 5, b"", 1000), MEMBERS, 2.0)
    done = Ack(Step.TRANSFER_DRAIN, "d2", 0, 0, 1.0, "", ())
    told = [each for name in MEMBERS for each in update.on_ack(name, done, 3.0)]
    assert [type(each) for each in told] == [StepDone]
    assert update.state is _S.IDLE
