"""One engine's update: each chunk once and in order, finished before it is committed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from bus._manifest import NO_TENSORS, Manifest
from bus._protocol.core.failures import Declined, Failure
from bus._protocol.engine.admission import Admission
from bus._protocol.engine.calls import (
    Call,
    CallAbortRequests,
    CallCommit,
    CallPause,
    CallProbe,
    CallQueue,
    CallResult,
    CallSleep,
    SessionEffect,
)
from bus._protocol.engine.update import EngineUpdate
from bus._protocol.engine.update_states import MIXED, EngineUpdateState
from bus.messages import (
    Abort,
    Ack,
    ChunkSent,
    Commit,
    Nack,
    NackCode,
    Probe,
    Probed,
    ProbeResult,
    Step,
    TransferInit,
    UpdateFinish,
    UpdateStart,
    Verify,
)
from bus.operations import (
    ArmManifest,
    Done,
    Extend,
    Finish,
    LoadChunk,
    Open,
    ReceiveChunk,
    Restore,
    Start,
)
from tests.sim.makers import make_arm, make_chunk, make_manifest, make_part, make_sent
from tests.unit.bus._builders import messages, only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MANIFEST = make_manifest(("a", "b", "c"))
CHUNKS = MANIFEST.chunks
OPEN = replace(MANIFEST, is_open=True)
PART = make_manifest(("d", "e"))
JOINED = OPEN.join(PART)
BROKEN = Failure(NackCode.ENGINE_FAILED, "it broke", tensor="b")
LATE = Failure(NackCode.TRANSFER_FAILED, "the broadcast broke")
_S = EngineUpdateState


class Driver:
    """The machine with its queue; calls return when the test says so."""

    def __init__(self, *, version: int = 3, opened: bool = True) -> None:
        self.queue = CallQueue()
        self.admission = Admission()
        self.update = EngineUpdate(self.queue, version, "e0", self.admission, draft=False)
        self.calls: list[Call] = []
        if opened:
            self.open()
            self.returned()
            self.calls.clear()

    def open(self, update_id: str = "t1", params: bytes = b"p") -> list[SessionEffect]:
        return self.issue(self.update.open(1, TransferInit(update_id, "sim", params, 0, 0, {})))

    def arm(
        self, update_id: str = "u1", version: int = 4, manifest: Manifest = OPEN
    ) -> list[SessionEffect]:
        return self.issue(self.update.arm(2, make_arm(update_id, manifest, version=version)))

    def part(self, number: int = 1, update_id: str = "u1") -> list[SessionEffect]:
        return self.issue(self.update.extend(8, make_part(update_id, OPEN, PART, number)))

    def start(self, update_id: str = "u1", *, paused: bool = True) -> list[SessionEffect]:
        return self.issue(self.update.start(3, UpdateStart(update_id), paused=paused))

    def chunk(self, number: int, update_id: str = "u1") -> list[SessionEffect]:
        manifest = MANIFEST if number < CHUNKS else JOINED
        message = make_chunk(update_id, manifest, number, 1)
        return self.issue(self.update.chunk(10 + number, message))

    def sent(
        self, number: int, update_id: str = "u1", *, verify: Verify = "full"
    ) -> list[SessionEffect]:
        told = make_sent(update_id, JOINED, number, 1, verify=verify)
        return self.issue(self.update.chunk(20 + number, told))

    def apply(self, number: int, update_id: str = "u1") -> list[SessionEffect]:
        """A chunk from its first message to its ack: received, and verified and loaded."""
        effects = [*self.chunk(number, update_id), *self.sent(number, update_id)]
        for _ in range(2):
            effects += self.returned()
        return effects

    def finish(self, update_id: str = "u1") -> list[SessionEffect]:
        return self.issue(self.update.finish(4, UpdateFinish(update_id)))

    def probe(self, salt: str = "s") -> list[SessionEffect]:
        message = Probe("u1", ((1, 2), (3,)), 2, salt)
        return self.issue(self.update.probe(7, message, CallPause("keep", clear_cache=True)))

    def commit(self, update_id: str = "u1", version: int = 4) -> list[SessionEffect]:
        return self.issue(self.update.commit(5, Commit(update_id, version, "", ())))

    def abort(self, update_id: str = "u1") -> list[SessionEffect]:
        return self.issue(self.update.abort(6, Abort(update_id, "")))

    def returned(self, told: CallResult = None) -> list[SessionEffect]:
        call = self.queue.running()
        assert call is not None
        return self.issue(self.update.on_call_done(self.queue.end(call), 2.0, told))

    def failed(self, failure: Failure | None = None) -> list[SessionEffect]:
        call = self.queue.running()
        assert call is not None
        return self.issue(self.update.on_call_failed(self.queue.end(call), failure or BROKEN))

    def issue(self, effects: Iterable[SessionEffect]) -> list[SessionEffect]:
        for call in self.queue.issue(0.0):
            self.update.on_issued(call)
            self.calls.append(call)
        return list(effects)

    def to(self, state: EngineUpdateState) -> Driver:
        """Bring it there the long way; in LOADING every chunk is applied."""
        order: list[tuple[EngineUpdateState, Callable[[], object]]] = [
            (_S.ARMING, self.arm),
            (_S.ARMED, self.returned),
            (_S.STARTING, self.start),
            (_S.LOADING, self._load),
            (_S.FINISHING, self.finish),
            (_S.FINISHED, self.returned),
            (_S.COMMITTING, self.commit),
        ]
        if state is _S.ABORTING:
            self.to(_S.LOADING)
            self.abort()
        elif state is _S.PROBING:
            self.to(_S.FINISHED)
            self.probe()
        elif state is _S.EXTENDING:
            self.to(_S.LOADING)
            self.part()
        elif state is not _S.NONE:
            for reached, step in order:
                step()
                if reached is state:
                    break
        assert self.update.state is state
        return self

    def _load(self) -> None:
        self.returned()
        for k in range(CHUNKS):
            self.apply(k)


def started() -> Driver:
    """It takes chunks, and none has come."""
    driver = Driver().to(_S.STARTING)
    driver.returned()
    assert driver.update.state is _S.LOADING
    return driver


def outcome(effects: Iterable[SessionEffect]) -> str:
    """What an ABORT found."""
    acked = only(effects, Ack)
    assert acked.step is Step.ABORT
    return acked.outcome


def test_an_update_from_the_first_step_to_the_last() -> None:
    """Each command is one engine call, acked by its return; a chunk is two calls."""
    driver = Driver().to(_S.COMMITTING)
    assert only(driver.returned(), Ack).step is Step.COMMIT
    assert [type(call) for call in driver.calls] == [
        ArmManifest,
        Start,
        *[ReceiveChunk, LoadChunk] * CHUNKS,
        Finish,
        CallCommit,
    ]
    assert driver.update.version == 4
    assert not driver.update.is_mixed


COMMANDS: dict[str, Callable[[Driver], object]] = {
    "open": lambda d: d.open("t2"),
    "arm": lambda d: d.arm(),
    "arm another": lambda d: d.arm("u2", 5),
    "arm an earlier one": lambda d: d.arm("u0", 3),
    "start": lambda d: d.start(),
    "chunk": lambda d: d.chunk(0),
    "sent": lambda d: d.sent(0),
    "part": lambda d: d.part(),
    "first chunk of the part": lambda d: d.chunk(CHUNKS),
    "finish": lambda d: d.finish(),
    "probe": lambda d: d.probe(),
    "commit": lambda d: d.commit(),
    "abort": lambda d: d.abort(),
}
# In which states a command does something new; and in which it is an old one, answered again, or
# dropped because it comes too early and will be repeated. In all others it is refused.
NEW = {
    "open": {_S.NONE, _S.ARMING, _S.ARMED},
    "arm": {_S.NONE},
    "arm another": {_S.NONE, _S.ARMED},
    "arm an earlier one": set[EngineUpdateState](),
    "start": {_S.ARMED},
    "chunk": {_S.STARTING},
    "sent": set[EngineUpdateState](),
    "part": {_S.LOADING},
    "first chunk of the part": set[EngineUpdateState](),
    "finish": {_S.LOADING},
    "probe": {_S.FINISHED},
    "commit": {_S.FINISHED},
    "abort": set(_S) - {_S.NONE, _S.COMMITTING, _S.ABORTING},
}
OLD = {
    "open": MIXED,
    "arm": set(_S) - {_S.NONE},
    "arm another": MIXED,
    "arm an earlier one": {_S.ABORTING},
    "start": MIXED,
    "chunk": MIXED - {_S.STARTING},
    "sent": MIXED,
    "part": {_S.EXTENDING},
    "first chunk of the part": set[EngineUpdateState](),
    "finish": {_S.FINISHING, _S.FINISHED, _S.PROBING, _S.COMMITTING},
    "probe": {_S.PROBING},
    "commit": {_S.COMMITTING},
    "abort": {_S.NONE, _S.ABORTING},
}


@pytest.mark.parametrize(("state", "command"), list(product(EngineUpdateState, COMMANDS)))
def test_every_command_in_every_state(state: EngineUpdateState, command: str) -> None:
    """New, old or refused; what is refused or old calls nothing and moves nothing."""
    driver = Driver().to(state)
    calls, waiting = list(driver.calls), len(driver.queue)
    if state in NEW[command]:
        COMMANDS[command](driver)
        moved = driver.update.state is not state or len(driver.queue) != waiting
        assert moved or driver.update._abort_asked is not None
        return
    if state in OLD[command]:
        COMMANDS[command](driver)
    else:
        with pytest.raises(Declined) as declined:
            COMMANDS[command](driver)
        assert declined.value.failure.code is NackCode.WRONG_STATE
    assert driver.update.state is state
    assert driver.calls == calls
    assert len(driver.queue) == waiting


def test_the_chunks_of_a_part_come_when_the_engine_has_checked_it() -> None:
    """The part is acked again as often as it is asked; the update is finished behind its chunks."""
    driver = Driver().to(_S.EXTENDING)
    assert driver.calls[-1] == Extend(PART)
    with pytest.raises(Declined, match="extending"):
        driver.chunk(CHUNKS)
    for acks in (driver.returned(), driver.part()):
        assert only(acks, Ack).step is Step.PART
    assert driver.update.state is _S.LOADING
    assert driver.finish() == []  # a CHUNK_SENT may be lost
    for number in (CHUNKS, CHUNKS + 1):
        driver.apply(number)
    driver.finish()
    assert driver.calls[-1] == Finish()
    assert driver.calls.count(Extend(PART)) == 1


def test_a_part_that_is_refused_leaves_the_update_without_it() -> None:
    driver = Driver().to(_S.EXTENDING)
    nack = only(driver.failed(Failure(NackCode.MANIFEST_REFUSED, "no", tensor="d")), Nack)
    assert (nack.step, nack.tensor) == ("part", "d")
    assert driver.update.state is _S.LOADING
    with pytest.raises(Declined, match=f"has {CHUNKS}, from 0"):
        driver.chunk(CHUNKS)
    assert outcome([*driver.abort(), *driver.returned()]) == "partial"


def test_a_part_waits_for_the_chunks_before_it() -> None:
    """It is repeated; a chunk may have been lost."""
    driver = Driver().to(_S.STARTING)
    driver.returned()
    for number in range(CHUNKS):
        assert driver.part() == []
        driver.apply(number)
    driver.part()
    assert driver.update.state is _S.EXTENDING


@pytest.mark.parametrize(("number", "manifest"), [(2, OPEN), (1, MANIFEST)])
def test_a_part_out_of_its_turn_or_of_a_whole_update_is_refused(
    number: int, manifest: Manifest
) -> None:
    driver = Driver()
    driver.arm(manifest=manifest)
    driver.returned()
    driver.start()
    driver._load()
    with pytest.raises(Declined) as declined:
        driver.part(number)
    assert declined.value.failure.field == "part"
    assert driver.update.state is _S.LOADING


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("digest", "0" * 64, NackCode.MANIFEST_REFUSED),
        ("names", ("a", "e"), NackCode.MANIFEST_REFUSED),  # it came in the first part
        ("names", (), NackCode.MANIFEST_UNKNOWN),
    ],
)
def test_a_part_that_contradicts_what_came_before_is_refused(
    field: str, value: Any, code: NackCode
) -> None:
    driver = Driver().to(_S.LOADING)
    part = make_part("u1", OPEN, PART)
    sent = structs.replace(part, **{field: value})
    with pytest.raises(Declined) as declined:
        driver.update.extend(8, sent)
    assert declined.value.failure.code is code
    assert driver.update.state is _S.LOADING


def test_an_abort_while_a_part_is_checked_waits_for_the_check() -> None:
    driver = Driver().to(_S.EXTENDING)
    assert driver.abort() == []
    driver.returned()
    assert outcome(driver.returned()) == "partial"


@pytest.mark.parametrize("command", ["start", "chunk", "sent", "part", "finish", "commit"])
def test_a_command_of_another_update_is_refused(command: str) -> None:
    """It names the field; nothing moves."""
    driver = Driver().to(_S.LOADING)
    ask: dict[str, Callable[[], object]] = {
        "start": lambda: driver.start("u0"),
        "chunk": lambda: driver.chunk(0, "u0"),
        "sent": lambda: driver.sent(0, "u0"),
        "part": lambda: driver.part(1, "u0"),
        "finish": lambda: driver.finish("u0"),
        "commit": lambda: driver.commit("u0"),
    }
    with pytest.raises(Declined) as declined:
        ask[command]()
    assert declined.value.failure.field == "update_id"
    assert driver.update.state is _S.LOADING


def test_a_transport_is_opened_once_however_often_it_is_asked() -> None:
    """While it opens, while it waits behind another call, and when it is open."""
    driver = Driver(opened=False)
    driver.open()
    driver.open()
    assert driver.calls == [Open("t1", "sim", b"p")]
    assert only(driver.returned(), Ack).step is Step.TRANSFER_INIT
    assert only(driver.open(), Ack).step is Step.TRANSFER_INIT
    assert len(driver.calls) == 1
    driver.arm()
    driver.open("t2", b"q")
    driver.open("t2", b"q")
    driver.returned()
    driver.returned()
    assert driver.calls[2:] == [Open("t2", "sim", b"q")]


def test_each_opening_is_answered_by_its_own_name() -> None:
    """The trainer may have gone on to the next while the first still opens, and then fails."""
    driver = Driver(opened=False)
    driver.open("t1")
    driver.open("t2")
    failed = only(driver.failed(), Nack)
    assert (failed.step, failed.update_id) == ("transfer_init", "t1")
    assert only(driver.returned(), Ack).update_id == "t2"
    assert only(driver.open("t2"), Ack).update_id == "t2"


def test_without_an_open_transport_nothing_is_armed() -> None:
    """The code tells the trainer to open it."""
    driver = Driver(opened=False)
    with pytest.raises(Declined) as declined:
        driver.arm()
    assert declined.value.failure.code is NackCode.TRANSFER_CLOSED
    assert driver.update.state is _S.NONE
    driver.open()
    driver.failed()
    with pytest.raises(Declined):
        driver.arm()


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_version_that_does_not_grow_is_not_armed(version: int) -> None:
    """Versions only grow."""
    driver = Driver(version=3)
    with pytest.raises(Declined) as declined:
        driver.arm(version=version)
    assert declined.value.failure.field == "version"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("digest", "0" * 64),
        ("dtypes", ("float32", "float32")),
        ("dtypes", ("float32", "float32", "complex9")),
        ("shapes", ((4,), (4,))),
        ("names", ("a", "b", "b")),
        ("chunk_ends", (1, 1, 3)),
        ("chunk_ends", (1, 2)),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(field: str, value: object) -> None:
    """By name, and nothing is armed."""
    driver = Driver()
    message = make_arm("u1", MANIFEST, version=4)
    structs.force_setattr(message, field, value)
    with pytest.raises(Declined) as declined:
        driver.update.arm(2, message)
    assert declined.value.failure.code is NackCode.MANIFEST_REFUSED
    assert declined.value.failure.field == field
    assert driver.update.state is _S.NONE
    assert len(driver.queue) == 0


def test_an_engine_that_refuses_the_manifest_names_the_tensor() -> None:
    """And is as it was; the same may be armed again."""
    driver = Driver().to(_S.ARMING)
    nack = only(driver.failed(), Nack)
    assert (nack.step, nack.tensor) == (Step.ARM, "b")
    assert driver.update.state is _S.NONE
    driver.arm()
    assert [type(call) for call in driver.calls] == [ArmManifest, ArmManifest]


def test_an_update_does_not_start_while_the_engine_runs() -> None:
    """It needs a completed pause."""
    driver = Driver().to(_S.ARMED)
    with pytest.raises(Declined):
        driver.start(paused=False)
    assert driver.update.state is _S.ARMED


def test_chunks_are_loaded_once_and_in_order() -> None:
    """Doubled ones are acked again, early ones wait to be asked again, old ones are old."""
    driver = started()
    assert driver.chunk(1) == []
    driver.chunk(0)
    driver.chunk(1)
    assert driver.chunk(0) == []
    driver.sent(0)
    driver.sent(1)
    assert driver.sent(0) == []
    for _ in range(4):
        driver.returned()
    for again in (driver.chunk(0), driver.sent(0)):
        acked = only(again, Ack)
        assert (acked.step, acked.chunk) == (Step.CHUNK, 0)
    loads = [call for call in driver.calls if isinstance(call, LoadChunk)]
    assert loads == [load(0), load(1)]


def test_a_chunk_that_is_told_twice_while_it_is_under_way_is_loaded_once() -> None:
    """Either message may be doubled when those of the next chunk are on their way already."""
    driver = started()
    driver.chunk(0)
    driver.chunk(1)
    driver.sent(0)
    assert driver.chunk(0) == []
    assert driver.sent(0) == []
    driver.sent(1)
    while driver.queue.running() is not None:
        driver.returned()
    assert [call for call in driver.calls if isinstance(call, LoadChunk)] == [load(0), load(1)]


def test_a_chunk_of_another_manifest_is_refused() -> None:
    """It is not taken, and the right one still may be."""
    driver = Driver().to(_S.STARTING)
    driver.returned()
    other = replace(MANIFEST, shapes=((5,), *MANIFEST.shapes[1:]))
    with pytest.raises(Declined) as declined:
        driver.update.chunk(9, make_chunk("u1", other, 0, 1))
    failure = declined.value.failure
    assert (failure.code, failure.field) == (NackCode.MANIFEST_REFUSED, "digest")
    assert f"is of manifest {other.digest[:12]}" in failure.detail
    driver.chunk(0)
    assert isinstance(driver.calls[-1], ReceiveChunk)


def test_a_chunk_that_the_manifest_does_not_have_is_refused() -> None:
    """The field is named."""
    driver = Driver().to(_S.LOADING)
    message = make_chunk("u1", MANIFEST, 0, 1)
    structs.force_setattr(message, "chunk", CHUNKS)
    with pytest.raises(Declined) as declined:
        driver.update.chunk(9, message)
    assert declined.value.failure.field == "chunk"


@pytest.mark.parametrize("sent", range(CHUNKS))
def test_finish_needs_every_chunk(sent: int) -> None:
    """One that was lost on its way is told again, and so is the finish: until then, nothing."""
    driver = started()
    for k in range(sent):
        driver.apply(k)
    driver.chunk(sent)
    assert driver.finish() == []
    assert driver.update.state is _S.LOADING
    driver.returned()
    assert driver.queue.running() is None
    for k in range(sent, CHUNKS):
        driver.chunk(k)
        driver.sent(k)
    driver.finish()
    while driver.queue.running():
        driver.returned()
    assert driver.calls[-1] == Finish()
    assert driver.update.state is _S.FINISHED


def test_finish_follows_the_last_load() -> None:
    """Asked while that runs; each is acked by its own return."""
    driver = started()
    for k in range(CHUNKS - 1):
        driver.apply(k)
    driver.chunk(CHUNKS - 1)
    driver.sent(CHUNKS - 1)
    assert driver.finish() == []
    assert driver.finish() == []
    driver.returned()
    assert driver.calls[-1] == load(CHUNKS - 1)
    assert only(driver.returned(), Ack).step is Step.CHUNK
    assert driver.calls[-1] == Finish()
    assert only(driver.returned(), Ack).step is Step.FINISH
    assert driver.calls.count(Finish()) == 1


def test_no_finish_after_a_load_that_failed() -> None:
    """It was asked already; the update can only be given up."""
    driver = started()
    for k in range(CHUNKS - 1):
        driver.apply(k)
    driver.chunk(CHUNKS - 1)
    driver.sent(CHUNKS - 1)
    driver.finish()
    driver.returned()
    assert only(driver.failed(), Nack).step == Step.CHUNK
    assert driver.update.state is _S.LOADING
    assert driver.queue.running() is None
    driver.abort()
    assert outcome(driver.returned()) == "partial"


def test_chunks_that_are_told_while_it_starts_follow() -> None:
    """In order; no call is made before the start has returned."""
    driver = Driver().to(_S.STARTING)
    driver.chunk(0)
    driver.sent(0)
    assert [type(call) for call in driver.calls] == [ArmManifest, Start]
    assert only(driver.returned(), Ack).step is Step.START
    driver.returned()
    assert only(driver.returned(), Ack).step is Step.CHUNK
    assert load_calls(driver) == [("receive", 0), ("load", 0)]


def test_with_room_for_two_one_is_received_ahead() -> None:
    """The next one when the first is to be loaded, and not before."""
    driver = Driver(opened=False)
    driver.open()
    call = driver.queue.running()
    assert call is not None
    driver.issue(driver.update.on_call_done(driver.queue.end(call), 2.0, Done(ahead=2)))
    driver.to(_S.STARTING)
    driver.returned()
    for k in range(3):
        driver.chunk(k)
    driver.returned()
    driver.returned()
    assert load_calls(driver) == [("receive", 0), ("receive", 1)]
    driver.sent(0)
    driver.returned()
    assert load_calls(driver)[2:] == [("load", 0), ("receive", 2)]
    driver.returned()
    assert driver.queue.running() is None
    driver.sent(1)
    driver.sent(2)
    driver.returned()
    driver.returned()
    assert driver.update._chunks.applied == CHUNKS


@pytest.mark.parametrize("failure", [LATE, BROKEN])
def test_a_chunk_that_did_not_come_is_not_loaded(failure: Failure) -> None:
    """A load that says so has loaded nothing: the old weights are restored."""
    driver = started()
    driver.chunk(0)
    driver.sent(0)
    driver.returned()
    driver.failed(failure)
    driver.abort()
    assert outcome(driver.returned()) == ("restored" if failure is LATE else "partial")


def test_commit_needs_the_version_that_was_armed() -> None:
    """Another one is refused; the version stays."""
    driver = Driver().to(_S.FINISHED)
    with pytest.raises(Declined) as declined:
        driver.commit(version=9)
    assert declined.value.failure.field == "version"
    assert driver.update.version == 3


def test_the_version_changes_when_the_commit_has_returned() -> None:
    """Not when it is asked; and a doubled COMMIT is acked again."""
    driver = Driver().to(_S.COMMITTING)
    assert driver.update.version == 3
    driver.returned()
    assert driver.update.version == 4
    assert only(driver.commit(), Ack).step is Step.COMMIT
    assert sum(isinstance(call, CallCommit) for call in driver.calls) == 1


def test_a_finish_or_a_commit_that_fails_may_be_tried_again() -> None:
    """Each goes back one step."""
    driver = Driver().to(_S.FINISHING)
    assert only(driver.failed(), Nack).step is Step.FINISH
    assert driver.update.state is _S.LOADING
    driver.finish()
    driver.returned()
    driver.commit()
    assert only(driver.failed(), Nack).step is Step.COMMIT
    assert driver.update.state is _S.FINISHED
    assert driver.update.version == 3


def test_a_chunk_that_fails_to_arrive_drops_those_behind_it() -> None:
    """Nothing was loaded of it; it is refused with its number."""
    driver = Driver().to(_S.STARTING)
    driver.returned()
    driver.chunk(0)
    driver.chunk(1)
    nack = only(driver.failed(LATE), Nack)
    assert (nack.step, nack.chunk, nack.code) == (Step.CHUNK, 0, NackCode.TRANSFER_FAILED)
    assert len(driver.queue) == 0
    assert outcome([*driver.abort(), *driver.returned()]) == "restored"


@pytest.mark.parametrize("state", [_S.NONE, _S.ARMED])
def test_an_abort_before_the_start_touches_nothing(state: EngineUpdateState) -> None:
    """No call is made."""
    driver = Driver().to(state)
    calls = list(driver.calls)
    assert outcome(driver.abort()) == "untouched"
    assert driver.calls == calls
    assert driver.update.state is _S.NONE
    assert not driver.update.is_mixed


def test_an_abort_after_the_start_and_before_a_load_restores() -> None:
    """The old weights are whole: the engine may serve them."""
    driver = Driver().to(_S.STARTING)
    driver.returned()
    assert driver.abort() == []
    assert driver.calls[-1] == Restore("model")
    assert driver.update.is_mixed
    assert outcome(driver.returned()) == "restored"
    assert not driver.update.is_mixed


@pytest.mark.parametrize("state", [_S.LOADING, _S.FINISHED])
def test_an_abort_after_a_load_quarantines(state: EngineUpdateState) -> None:
    """Requests are ended with the tokens they have; only a whole update ends it."""
    driver = Driver().to(state)
    driver.abort()
    assert driver.calls[-1] == CallAbortRequests()
    assert outcome(driver.returned()) == "partial"
    assert driver.update.is_mixed
    assert driver.update.state is _S.NONE
    assert outcome(driver.abort()) == "partial"


@pytest.mark.parametrize(
    ("state", "expected"),
    [(_S.ARMING, "untouched"), (_S.STARTING, "restored"), (_S.FINISHING, "partial")],
)
def test_an_abort_waits_for_the_call_under_way(state: EngineUpdateState, expected: str) -> None:
    """A call can't be taken back: what it leaves behind decides."""
    driver = Driver().to(state)
    assert driver.abort() == []
    effects = driver.returned()
    if expected != "untouched":
        effects += driver.returned()
    acks = [each for each in messages(effects) if isinstance(each, Ack)]
    assert [each.outcome for each in acks if each.step is Step.ABORT] == [expected]
    assert driver.update.state is _S.NONE


def test_an_abort_while_a_chunk_is_received_finds_nothing_loaded() -> None:
    """Its load, which was to follow, does not."""
    driver = Driver().to(_S.STARTING)
    driver.returned()
    driver.chunk(0)
    assert driver.abort() == []
    driver.returned()
    assert driver.calls[-1] == Restore("model")
    assert outcome(driver.returned()) == "restored"


def test_what_vllms_own_engines_receive_they_have_loaded() -> None:
    """Also what they failed to receive: nobody knows how far it came."""
    for fails in (False, True):
        driver = Driver(opened=False)
        opening = TransferInit("t1", "vllm:nccl", b"p", 0, 0, {})
        driver.issue(driver.update.open(1, opening))
        driver.returned()
        arm = structs.replace(make_arm("u1", MANIFEST, version=4), backend="vllm:nccl")
        driver.issue(driver.update.arm(2, arm))
        driver.returned()
        driver.start()
        driver.returned()
        driver.chunk(0)
        assert isinstance(driver.calls[-1], ReceiveChunk)
        if fails:
            driver.failed()
        else:
            driver.returned()
        driver.abort()
        assert driver.calls[-1] == CallAbortRequests()
        assert outcome(driver.returned()) == "partial"


ADAPTER = "lora:policy-lora"


def arm_with(driver: Driver, backend: str, update_id: str, version: int = 4) -> list[SessionEffect]:
    """TRANSFER_INIT and ARM; for an adapter, or for the model's weights."""
    opening = TransferInit(f"t-{update_id}", backend, b"p", 0, 0, {})
    driver.issue(driver.update.open(1, opening))
    driver.returned()
    arm = make_arm(update_id, MANIFEST, version=version, transfer=opening.update_id)
    arm = structs.replace(arm, backend=backend)
    return driver.issue(driver.update.arm(2, arm))


def load_with(driver: Driver, backend: str, update_id: str, version: int = 4) -> None:
    """As far as every chunk is loaded."""
    arm_with(driver, backend, update_id, version)
    driver.returned()
    driver.start(update_id)
    driver.returned()
    for k in range(CHUNKS):
        driver.apply(k, update_id)


def commit_with(driver: Driver, backend: str, update_id: str, version: int) -> str:
    """A whole update; what its commit says."""
    load_with(driver, backend, update_id, version)
    driver.finish(update_id)
    driver.returned()
    driver.commit(update_id, version)
    return only(driver.returned(), Ack).outcome


@pytest.mark.parametrize("fails", ["start", "load", "nothing", "finish"])
def test_an_adapter_is_undone_however_far_it_came(fails: str) -> None:
    """The engine has kept the one before: nobody is quarantined."""
    driver = Driver(opened=False)
    arm_with(driver, ADAPTER, "u1")
    driver.returned()
    driver.start()
    if fails == "start":
        driver.failed()
    else:
        driver.returned()
        driver.chunk(0)
        driver.sent(0)
        driver.returned()
        assert driver.calls[-1] == load(0)
        driver.failed() if fails == "load" else driver.returned()
    if fails == "finish":
        for k in range(1, CHUNKS):
            driver.apply(k)
        driver.finish()
        driver.failed()
    driver.abort()
    assert driver.calls[-1] == Restore("model")
    assert outcome(driver.returned()) == "restored"
    assert not driver.update.is_mixed


@pytest.mark.parametrize(
    ("lost", "sent"), [("sim", ADAPTER), (ADAPTER, "sim"), (ADAPTER, "lora:another")]
)
def test_what_is_lost_only_the_whole_of_the_same_mends(lost: str, sent: str) -> None:
    """A quarantine is not ended by an update that brings something else, whole as it is."""
    driver = Driver(opened=False)
    load_with(driver, lost, "u1")
    driver.abort()
    if lost == ADAPTER:
        driver.failed()
    driver.returned()
    assert driver.update.partial
    assert commit_with(driver, sent, "u2", 5) == "partial"
    assert driver.update.is_mixed
    assert commit_with(driver, lost, "u3", 6) == ""
    assert not driver.update.is_mixed


def test_weights_that_a_sleep_has_discarded_no_adapter_mends() -> None:
    """Loaded and committed, or undone."""
    driver = Driver(opened=False)
    driver.update.on_issued(CallSleep(2))
    assert commit_with(driver, ADAPTER, "u1", 4) == "partial"
    load_with(driver, ADAPTER, "u2", 5)
    driver.abort("u2")
    assert driver.calls[-1] == Restore("model")
    assert outcome(driver.returned()) == "partial"
    assert driver.update.partial == {"model"}


REMOVAL = "lora-removal:policy-lora"


def remove(driver: Driver, update_id: str, version: int) -> None:
    """As far as it is finished: no chunk comes."""
    driver.issue(driver.update.open(1, TransferInit(f"t-{update_id}", REMOVAL, b"", 0, 0, {})))
    driver.returned()
    arm = make_arm(update_id, NO_TENSORS, version=version, transfer=f"t-{update_id}")
    arm = structs.replace(arm, backend=REMOVAL)
    driver.issue(driver.update.arm(2, structs.replace(arm, after=driver.update.version)))
    driver.returned()
    driver.start(update_id)
    driver.returned()
    driver.finish(update_id)


def test_an_adapter_is_removed_by_an_update_without_chunks() -> None:
    driver = Driver(opened=False)
    remove(driver, "u1", 4)
    driver.returned()
    driver.commit("u1", 4)
    assert only(driver.returned(), Ack).outcome == ""
    assert driver.update.version == 4
    arm = ArmManifest(NO_TENSORS, "model", digest=NO_TENSORS.digest)
    calls = [Start(recover=False, target="model"), Finish(), CallCommit(4)]
    assert driver.calls[1:] == [arm, *calls]


def test_a_removal_that_fails_is_undone_and_mends_what_its_adapter_lacks() -> None:
    """It is of the same part as the adapter's updates: either ends the other's quarantine."""
    driver = Driver(opened=False)
    remove(driver, "u1", 4)
    driver.failed()
    driver.abort()
    assert driver.calls[-1] == Restore("model")
    driver.failed()
    driver.returned()
    assert driver.update.partial == {ADAPTER}
    remove(driver, "u2", 5)
    driver.returned()
    driver.commit("u2", 5)
    assert only(driver.returned(), Ack).outcome == ""
    assert not driver.update.partial


@pytest.mark.parametrize(
    ("manifest", "backend"), [(NO_TENSORS, "sim"), (NO_TENSORS, ADAPTER), (MANIFEST, REMOVAL)]
)
def test_an_update_brings_tensors_or_removes(manifest: Manifest, backend: str) -> None:
    driver = Driver(opened=False)
    driver.issue(driver.update.open(1, TransferInit("t1", backend, b"", 0, 0, {})))
    driver.returned()
    arm = structs.replace(make_arm("u1", manifest, version=4), backend=backend)
    with pytest.raises(Declined) as declined:
        driver.update.arm(2, arm)
    assert declined.value.failure.code is NackCode.MANIFEST_REFUSED


@pytest.mark.parametrize("backend", ["sim", ADAPTER, REMOVAL])
@pytest.mark.parametrize("after", [2, 3, 4])
def test_an_engine_that_missed_an_update_drops_its_adapters(after: int, backend: str) -> None:
    """It may be one of an adapter, or its removal; whatever the next one brings."""
    driver = Driver(opened=False)
    driver.issue(driver.update.open(1, TransferInit("t1", backend, b"", 0, 0, {})))
    driver.returned()
    manifest = NO_TENSORS if backend == REMOVAL else MANIFEST
    arm = structs.replace(make_arm("u1", manifest, version=9), backend=backend, after=after)
    driver.issue(driver.update.arm(2, arm))
    assert driver.calls[-1] == ArmManifest(
        manifest, "model", drops_adapters=after != 3, digest=manifest.digest
    )


PATCH = Manifest.of_patch(make_manifest(("a", "c")).tensors(), (2, 0))


class Patched(Driver):
    """With vLLM's engine for patches; it serves version 3, unless the test says otherwise."""

    def __init__(self, *, version: int = 3) -> None:
        super().__init__(version=version, opened=False)
        self.open_for_patches()

    def open_for_patches(self) -> None:
        self.opening = f"t{len(self.calls)}"
        opening = TransferInit(self.opening, "vllm:sparse_nccl", b"p", 0, 0, {})
        self.issue(self.update.open(1, opening))
        self.returned()

    def arm_patch(self, base: int, update_id: str = "u1", version: int = 9) -> None:
        arm = make_arm(update_id, PATCH, version=version, base=base, transfer=self.opening)
        arm = structs.replace(arm, backend="vllm:sparse_nccl", after=self.update.version)
        self.issue(self.update.arm(2, arm))

    def refused_patch(self, base: int, update_id: str = "u1") -> Failure:
        calls = len(self.calls)
        with pytest.raises(Declined) as declined:
            self.arm_patch(base, update_id)
        assert len(self.calls) == calls
        return declined.value.failure

    def receive(self, update_id: str = "u1") -> None:
        self.start(update_id)
        self.returned()
        meta = make_chunk(update_id, PATCH, 0, 1)
        self.issue(self.update.chunk(10, meta))


def test_a_patch_goes_onto_the_version_that_it_is_a_difference_from() -> None:
    """And makes the next, which is the base of the one after it."""
    driver = Patched()
    driver.arm_patch(3, "u1", 5)
    assert driver.calls[-1] == ArmManifest(PATCH, "model", digest=PATCH.digest)
    driver.returned()
    driver.receive()
    assert Start(recover=False, target="model") in driver.calls
    driver.returned()
    acked = driver.issue(driver.update.chunk(20, ChunkSent("u1", 0, "unsupported", ())))
    assert only(acked, Ack).step is Step.CHUNK
    driver.finish()
    driver.returned()
    driver.commit(version=5)
    driver.returned()
    assert driver.update.version == 5
    assert driver.refused_patch(3, "u2").code is NackCode.OTHER_BASE
    driver.arm_patch(5, "u3")
    assert driver.calls[-1] == ArmManifest(PATCH, "model", digest=PATCH.digest)


@pytest.mark.parametrize(("version", "base"), [(3, 2), (3, 4), (0, 1), (5, 3)])
def test_a_patch_onto_another_version_is_refused(version: int, base: int) -> None:
    """Older, newer, or nobody's: with both versions, and what brings the engine there."""
    failure = Patched(version=version).refused_patch(base)
    assert (failure.code, failure.field) == (NackCode.OTHER_BASE, "base")
    assert f"version {base}" in failure.detail
    assert f"serves version {version}" in failure.detail
    assert ("as it was booted" in failure.detail) is (version == 0)
    assert "whole set of weights" in failure.hint


@pytest.mark.parametrize("fails", [False, True])
def test_no_patch_mends_an_engine_that_holds_a_part_of_one(fails: bool) -> None:
    """It says the version that it had, and has it no more."""
    driver = Patched()
    driver.arm_patch(3)
    driver.returned()
    driver.receive()
    if fails:
        driver.failed()
    else:
        driver.returned()
    driver.abort()
    assert outcome(driver.returned()) == "partial"
    assert driver.update.version == 3
    failure = driver.refused_patch(3, "u2")
    assert failure.code is NackCode.OTHER_BASE
    assert "has no complete weights" in failure.detail


def test_a_patch_that_broke_off_is_mended_by_a_whole_set_of_weights() -> None:
    """Over another transport; then patches go onto that."""
    driver = Patched()
    driver.arm_patch(3)
    driver.returned()
    driver.receive()
    driver.failed()
    driver.abort()
    driver.returned()
    driver.open()
    driver.returned()
    driver.to(_S.COMMITTING)
    assert Start(recover=True, target="model") in driver.calls
    driver.returned()
    driver.open_for_patches()
    assert driver.refused_patch(3, "u3").code is NackCode.OTHER_BASE
    driver.arm_patch(4, "u4")
    assert driver.calls[-1] == ArmManifest(PATCH, "model", digest=PATCH.digest)


def test_a_patch_that_was_given_up_before_it_came_leaves_its_base() -> None:
    driver = Patched()
    driver.arm_patch(3)
    driver.returned()
    driver.start()
    driver.returned()
    driver.abort()
    assert driver.calls[-1] == Restore("model")
    assert outcome(driver.returned()) == "restored"
    driver.arm_patch(3, "u2")
    assert driver.calls[-1] == ArmManifest(PATCH, "model", digest=PATCH.digest)


def test_no_patch_starts_on_weights_that_went_in_a_sleep() -> None:
    """Not if they went after it was armed, either."""
    driver = Patched()
    driver.arm_patch(3)
    driver.returned()
    driver.update.on_issued(CallSleep(2))
    with pytest.raises(Declined) as declined:
        driver.start()
    assert declined.value.failure.code is NackCode.OTHER_BASE
    assert not any(isinstance(call, Start) for call in driver.calls)


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"base": 0}, NackCode.MANIFEST_REFUSED, "base"),
        ({"backend": "sim"}, NackCode.BACKEND_MISSING, "backend"),
        ({"backend": "vllm:nccl"}, NackCode.BACKEND_MISSING, "backend"),
        ({"counts": (2, 5)}, NackCode.MANIFEST_REFUSED, "counts"),
        ({"counts": (2,)}, NackCode.MANIFEST_REFUSED, "counts"),
        ({"counts": (1, 1)}, NackCode.MANIFEST_REFUSED, "digest"),
        ({"counts": ()}, NackCode.MANIFEST_REFUSED, "digest"),
    ],
)
def test_what_is_half_a_patch_is_refused(
    change: dict[str, Any], code: NackCode, field: str
) -> None:
    """With a base go counts, and a transport of patches."""
    arm = structs.replace(make_arm("u1", PATCH, version=4, base=3), backend="vllm:sparse_nccl")
    with pytest.raises(Declined) as declined:
        Patched().update.arm(2, structs.replace(arm, **change))
    failure = declined.value.failure
    assert (failure.code, failure.field) == (code, field)


def test_a_whole_set_of_weights_is_no_patch() -> None:
    """Nor has it a base, or goes where patches go."""
    for change in ({"base": 3}, {"backend": "vllm:sparse_nccl"}):
        with pytest.raises(Declined):
            Driver().update.arm(2, structs.replace(make_arm("u1", MANIFEST, version=4), **change))


def test_an_abort_while_a_chunk_is_loaded_finds_it_loaded() -> None:
    """Half a load is a load."""
    driver = started()
    driver.chunk(0)
    driver.sent(0)
    driver.returned()
    assert driver.calls[-1] == load(0)
    assert driver.abort() == []
    driver.failed()
    assert driver.calls[-1] == CallAbortRequests()
    assert outcome(driver.returned()) == "partial"


def test_an_abort_of_an_arm_that_fails_finds_nothing() -> None:
    """The update ended by itself."""
    driver = Driver().to(_S.ARMING)
    driver.abort()
    effects = messages(driver.failed())
    assert [type(each) for each in effects] == [Nack, Ack]
    assert driver.update.state is _S.NONE


def test_a_start_that_fails_is_not_to_be_trusted() -> None:
    """Half started counts as loaded."""
    driver = Driver().to(_S.STARTING)
    assert only(driver.failed(), Nack).step is Step.START
    driver.abort()
    assert outcome(driver.returned()) == "partial"


@pytest.mark.parametrize("state", [_S.STARTING, _S.LOADING])
def test_an_undoing_that_fails_quarantines(state: EngineUpdateState) -> None:
    """Only a whole update brings this engine back."""
    driver = Driver().to(state)
    if state is _S.STARTING:
        driver.returned()
    driver.abort()
    failed = driver.failed()
    if state is _S.STARTING:  # the restore: its requests are ended then
        assert driver.calls[-1] == CallAbortRequests()
        failed = driver.returned()
    assert outcome(failed) == "partial"
    assert driver.update.partial
    assert driver.admission.closed


def test_a_quarantined_engine_is_told_to_recover_and_freed_by_the_commit() -> None:
    """And by nothing before it, another abort least of all."""
    driver = Driver().to(_S.LOADING)
    driver.abort()
    driver.returned()
    driver.arm("u2")
    driver.returned()
    driver.start("u2")
    assert driver.calls[-1] == Start(recover=True, target="model")
    driver.returned()
    assert outcome(driver.abort("u2")) == "partial"
    driver.arm("u3")
    driver.returned()
    driver.start("u3")
    driver.returned()
    for k in range(CHUNKS):
        driver.apply(k, "u3")
    driver.finish("u3")
    driver.returned()
    assert driver.update.is_mixed
    driver.commit("u3")
    driver.returned()
    assert not driver.update.is_mixed


def test_a_pause_that_waits_behind_an_arm_outlives_its_failure() -> None:
    """It was acked as issued: dropping it would leave the engine pausing for ever."""
    driver = Driver().to(_S.ARMING)
    pause = CallPause("keep", True)
    driver.queue.add(pause, 7)
    driver.failed()
    assert driver.calls[-1] is pause


def test_a_pause_that_waits_behind_an_arm_outlives_its_abort() -> None:
    """The same for an update that is given up."""
    driver = Driver().to(_S.ARMING)
    pause = CallPause("keep", True)
    driver.queue.add(pause, 7)
    driver.abort()
    driver.returned()
    assert driver.calls[-1] is pause


def load(chunk: int) -> LoadChunk:
    """Of one that is verified."""
    return LoadChunk(chunk, "full", (1,))


def load_calls(driver: Driver) -> list[tuple[str, int]]:
    """What was called of chunks, in order."""
    names = {ReceiveChunk: "receive", LoadChunk: "load"}
    return [
        (names[type(call)], call.seq)
        for call in driver.calls
        if isinstance(call, ReceiveChunk | LoadChunk)
    ]


def drain(driver: Driver) -> list[SessionEffect]:
    """Every call that is queued returns."""
    effects: list[SessionEffect] = []
    while len(driver.queue):
        effects += driver.returned()
    return effects


def test_a_chunk_is_received_verified_and_loaded_in_this_order() -> None:
    """It is verified and loaded when it is sent, not before; the ack comes with its load."""
    driver = started()
    driver.chunk(0)
    assert driver.returned() == []
    assert load_calls(driver) == [("receive", 0)]
    assert driver.queue.running() is None
    driver.sent(0)
    assert driver.calls[-1] == LoadChunk(0, "full", (1,))
    acked = only(driver.returned(), Ack)
    assert (acked.step, acked.chunk) == (Step.CHUNK, 0)


@pytest.mark.parametrize("verify", ["off", "unsupported"])
def test_nothing_is_verified_where_there_is_nothing_to_verify(verify: Verify) -> None:
    """The chunk is loaded once it is sent."""
    driver = started()
    driver.chunk(0)
    driver.returned()
    driver.sent(0, verify=verify)
    assert driver.calls[-1] == LoadChunk(0, verify, ())


def test_a_chunk_that_is_sent_while_it_is_received_is_loaded_after_that() -> None:
    driver = started()
    driver.chunk(0)
    driver.sent(0)
    assert load_calls(driver) == [("receive", 0)]
    drain(driver)
    assert load_calls(driver) == [("receive", 0), ("load", 0)]


def test_a_chunk_that_is_told_early_waits_until_the_one_before_is_to_be_loaded() -> None:
    """One is staged at a time."""
    driver = started()
    driver.chunk(0)
    driver.returned()
    assert driver.chunk(1) == []
    assert load_calls(driver) == [("receive", 0)]
    assert driver.queue.running() is None
    driver.sent(0)
    driver.sent(1)
    drain(driver)
    whole = [("receive", 0), ("load", 0)]
    assert load_calls(driver) == [*whole, *((what, 1) for what, _ in whole)]


def test_a_chunk_that_is_sent_before_it_is_told_is_forgotten_and_asked_again() -> None:
    """What tells of it was lost on its way; both come again."""
    driver = started()
    assert driver.sent(0) == []
    driver.chunk(0)
    driver.returned()
    assert driver.queue.running() is None
    assert load_calls(driver) == [("receive", 0)]
    driver.chunk(0)
    driver.sent(0)
    acked = only(drain(driver), Ack)
    assert (acked.step, acked.chunk) == (Step.CHUNK, 0)


def test_a_chunk_that_is_sent_before_the_one_before_it_is_forgotten() -> None:
    """The word that the one before was sent is lost; nothing is loaded until it comes."""
    driver = started()
    driver.chunk(0)
    driver.chunk(1)
    driver.returned()
    assert driver.sent(1) == []
    assert driver.queue.running() is None
    driver.sent(0)
    drain(driver)
    assert load_calls(driver)[-1] == ("receive", 1)
    driver.sent(1)
    drain(driver)
    assert driver.update._chunks.applied == 2


@pytest.mark.parametrize("after", range(3))
def test_doubles_of_both_messages_change_nothing_wherever_they_come(after: int) -> None:
    """After the receive and the load began, and when all is done."""
    driver = started()
    driver.chunk(0)
    driver.sent(0)
    effects: list[SessionEffect] = []
    for step in range(2):
        if step == after:
            assert driver.chunk(0) == driver.sent(0) == driver.sent(0) == []
        effects += driver.returned()
    if after == 2:
        for again in (driver.chunk(0), driver.sent(0)):
            assert only(again, Ack).chunk == 0
    assert load_calls(driver) == [("receive", 0), ("load", 0)]
    assert len(messages(effects)) == 1
    assert len(driver.queue) == 0


def test_doubles_of_a_chunk_that_waits_for_its_turn_change_nothing() -> None:
    """Told and sent, while the one before is received."""
    driver = started()
    for _ in range(2):
        for k in range(2):
            driver.chunk(k)
            driver.sent(k)
    drain(driver)
    whole = [("receive", 0), ("load", 0)]
    assert load_calls(driver) == [*whole, *((what, 1) for what, _ in whole)]


@pytest.mark.parametrize(
    ("verify", "sums"),
    [
        ("full", ()),
        ("sample", ()),
        ("full", (1, 2)),
        ("sample", (1, 2)),
        ("off", (1,)),
        ("unsupported", (1,)),
    ],
)
def test_the_wrong_number_of_sums_is_refused_and_changes_nothing(
    verify: Verify, sums: tuple[int, ...]
) -> None:
    """The field is named; the chunk stands where it stood, and the right sums are taken."""
    driver = started()
    driver.chunk(0)
    driver.returned()
    with pytest.raises(Declined) as declined:
        driver.update.chunk(9, ChunkSent("u1", 0, verify, sums))
    assert declined.value.failure.code is NackCode.MALFORMED
    assert declined.value.failure.field == "sums"
    assert driver.update.state is _S.LOADING
    assert len(driver.queue) == 0
    driver.sent(0)
    assert only(drain(driver), Ack).chunk == 0


def test_a_sent_chunk_that_the_manifest_does_not_have_is_refused() -> None:
    driver = started()
    with pytest.raises(Declined) as declined:
        driver.update.chunk(9, ChunkSent("u1", CHUNKS, "off", ()))
    assert declined.value.failure.field == "chunk"


MISMATCH = Failure(NackCode.CHECKSUM_MISMATCH, "not what was sent", tensor="b")


def mismatch(driver: Driver) -> Nack:
    """The load that runs finds another sum, and loads nothing; what is said of it."""
    call = driver.queue.running()
    assert isinstance(call, LoadChunk)
    return only(driver.issue(driver.update.on_call_failed(driver.queue.end(call), MISMATCH)), Nack)


@pytest.mark.parametrize(("chunk", "found"), [(0, "restored"), (1, "partial")])
def test_a_chunk_that_is_not_what_was_sent_is_not_loaded(chunk: int, found: str) -> None:
    """It is refused with its number and the tensor, and those behind it are dropped. An abort
    restores, if nothing of the update was loaded, and quarantines otherwise."""
    driver = started()
    for k in range(chunk):
        driver.apply(k)
    for k in range(chunk, chunk + 2):
        driver.chunk(k)
        driver.sent(k)
    driver.returned()
    nack = mismatch(driver)
    assert (nack.code, nack.step, nack.chunk, nack.tensor) == (
        NackCode.CHECKSUM_MISMATCH,
        Step.CHUNK,
        chunk,
        "b",
    )
    assert len(driver.queue) == 0
    assert driver.update._chunks.applied == chunk
    assert driver.finish() == []
    assert outcome([*driver.abort(), *driver.returned()]) == found
    assert bool(driver.update.partial) is (found == "partial")
    assert load_calls(driver)[-1] == ("load", chunk)


def test_a_chunk_that_was_not_what_was_sent_may_be_asked_again() -> None:
    """From its first message on: it is received anew."""
    driver = started()
    driver.chunk(0)
    driver.sent(0)
    driver.returned()
    mismatch(driver)
    assert driver.sent(0) == []
    assert driver.queue.running() is None
    assert only(driver.apply(0), Ack).chunk == 0
    assert load_calls(driver) == [("receive", 0), ("load", 0)] * 2


def test_a_receive_that_failed_may_be_asked_again() -> None:
    """What was known of this chunk and the next one is forgotten, and told again."""
    driver = started()
    for k in range(2):
        driver.chunk(k)
        driver.sent(k)
    assert only(driver.failed(), Nack).chunk == 0
    assert len(driver.queue) == 0
    assert driver.sent(0) == driver.sent(1) == driver.chunk(1) == []
    assert len(driver.queue) == 0
    for k in range(2):
        assert only(driver.apply(k), Ack).chunk == k
    loads = [call for call in load_calls(driver) if call[0] == "load"]
    assert loads == [("load", 0), ("load", 1)]


def test_a_mismatch_and_an_abort_that_waits_for_it_find_nothing_loaded() -> None:
    """ABORT comes while the sums are compared."""
    driver = started()
    driver.chunk(0)
    driver.sent(0)
    driver.returned()
    assert driver.abort() == []
    mismatch(driver)
    assert driver.calls[-1] == Restore("model")
    assert outcome(driver.returned()) == "restored"


@pytest.mark.parametrize("step", ["receive", "received", "load"])
def test_an_abort_of_a_chunk_on_its_way(step: str) -> None:
    """Only once its load has begun the old weights are gone."""
    driver = started()
    driver.chunk(0)
    if step != "received":
        driver.sent(0)
    if step != "receive":
        driver.returned()
    effects = [*driver.abort(), *drain(driver)]
    assert [each.outcome for each in messages(effects) if isinstance(each, Ack)][-1] == (
        "partial" if step == "load" else "restored"
    )
    assert (("load", 0) in load_calls(driver)) is (step == "load")
    assert driver.update.state is _S.NONE


@pytest.mark.parametrize("ask", [lambda d: d.sent(0), lambda d: d.chunk(1)])
def test_what_comes_of_a_chunk_while_an_abort_waits_is_refused(
    ask: Callable[[Driver], object],
) -> None:
    """Queued behind the call under way, it would be loaded before the old weights are put back."""
    driver = started()
    driver.chunk(0)
    assert driver.abort() == []
    with pytest.raises(Declined) as declined:
        ask(driver)
    assert declined.value.failure.code is NackCode.WRONG_STATE
    assert outcome(drain(driver)) == "restored"
    assert load_calls(driver) == [("receive", 0)]


def test_what_an_update_left_of_chunks_is_not_the_next_ones() -> None:
    """Told and sent, and then given up."""
    driver = started()
    driver.chunk(0)
    driver.chunk(1)
    driver.abort()
    drain(driver)
    driver.arm("u2", 5)
    driver.returned()
    driver.start("u2")
    driver.returned()
    driver.calls.clear()
    assert driver.sent(0, "u2") == []
    assert driver.queue.running() is None
    driver.apply(0, "u2")
    assert load_calls(driver) == [("receive", 0), ("load", 0)]


def test_an_engine_without_a_place_enters_no_communicator() -> None:
    """Rank 0, which an absent place might be taken for, is the sender's."""
    driver = Driver(opened=False)
    with pytest.raises(Declined) as declined:
        driver.update.open(1, TransferInit("t1", "sim", b"p", 5, 2, {"somebody else": 1}))
    assert declined.value.failure.field == "first_ranks"
    assert driver.queue.running() is None


def open_in(driver: Driver, communicator: int, *, rank: int = 1, size: int = 2) -> None:
    told = TransferInit(f"t{communicator}", "sim", b"p", communicator, size, {"e0": rank, "e1": 7})
    driver.issue(driver.update.open(1, told))


def test_an_engine_opens_its_end_in_its_own_place() -> None:
    """As the broker says; the same parameters in another communicator are another transport."""
    driver = Driver(opened=False)
    open_in(driver, 5, rank=3, size=9)
    assert driver.calls == [Open("t5", "sim", b"p", 5, 9, 3)]
    driver.returned()
    open_in(driver, 6, rank=3, size=9)
    assert driver.calls[1:] == [Open("t6", "sim", b"p", 6, 9, 3)]


@pytest.mark.parametrize(("opened", "asked"), [(5, 6), (5, 0), (0, 5)])
def test_an_arm_of_another_communicator_is_refused(opened: int, asked: int) -> None:
    """The field is named; nothing is armed, and the right one still may be."""
    driver = Driver(opened=False)
    open_in(driver, opened)
    driver.returned()
    with pytest.raises(Declined) as declined:
        driver.update.arm(2, make_arm("u1", MANIFEST, version=4, communicator=asked))
    assert declined.value.failure.code is NackCode.TRANSFER_CLOSED
    assert declined.value.failure.field == "communicator"
    assert driver.update.state is _S.NONE
    assert len(driver.queue) == 0
    arm = make_arm("u1", MANIFEST, version=4, communicator=opened, transfer=f"t{opened}")
    driver.issue(driver.update.arm(2, arm))
    assert isinstance(driver.calls[-1], ArmManifest)


GIVEN = (ProbeResult((7, 8), (-0.5, -0.25)), ProbeResult((9, 9), (-1.0, -2.0)))


def test_probes_are_run_once_and_told_as_often_as_they_are_asked_for() -> None:
    """By one engine call, as the pause was made; other probes are run anew."""
    driver = Driver().to(_S.PROBING)
    call = CallProbe(((1, 2), (3,)), 2, "s", "keep", clear_cache=True)
    assert driver.calls[-1] == call
    assert only(driver.returned(GIVEN), Probed) == Probed("u1", GIVEN, 2.0)
    assert driver.update.state is _S.FINISHED
    assert only(driver.probe(), Probed).results == GIVEN
    assert driver.calls[-1] == call
    assert driver.calls.count(call) == 1
    driver.probe("another")
    assert driver.update.state is _S.PROBING
    driver.returned(GIVEN)
    assert only([*driver.commit(), *driver.returned()], Ack).step is Step.COMMIT


def test_probes_that_fail_can_be_asked_for_again() -> None:
    """The update is as it was; so is the engine, for all that the update knows."""
    driver = Driver().to(_S.PROBING)
    refused = only(driver.failed(), Nack)
    assert (refused.step, refused.update_id) == ("probe", "u1")
    assert driver.update.state is _S.FINISHED
    driver.probe()
    assert driver.update.state is _S.PROBING


def test_an_abort_follows_the_probes_that_are_under_way() -> None:
    """What is loaded stays: the engine is quarantined, with admission closed."""
    driver = Driver().to(_S.PROBING)
    driver.abort()
    driver.returned(GIVEN)
    assert driver.calls[-1] == CallAbortRequests()
    assert outcome(driver.returned()) == "partial"
    assert driver.admission.closed


def test_a_door_that_is_found_closed_is_a_quarantine() -> None:
    """Nobody knows of which of the models the engine holds a part."""
    update = EngineUpdate(CallQueue(), 3, "e0", Admission(closed=True), draft=True)
    assert update.partial == {"model", "draft"}
    assert update.is_mixed
