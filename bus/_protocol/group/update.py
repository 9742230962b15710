"""Updates a group's weights: the broker's side.

From STARTING on, several chunks are in flight at a time; they are numbered and taken in order.
Each chunk is one barrier with two messages: on WEIGHT_CHUNK_META engines begin to receive, and on
CHUNK_SENT they verify and load. Before CHUNK_SENT the broker waits for the trainer, and the
engines' timeout does not run. Engines execute messages in their order. So the first chunks are
announced while engines start, and UPDATE_FINISH is sent while they load the last one.

In OPENING, ARMING and STARTING one engine's refusal aborts the update (or fails the opening). An
engine that is overdue, lost or dead drops out. With a communicator, until the last chunk is sent,
the others would wait for that engine, so the update is aborted, and the trainer opens the transport
anew.

Invariants:

- Nothing is loaded before every engine has armed. One refusal aborts the update, with no engine
  touched.
- FINISH is sent only when every chunk of the manifest has been sent. It is done when every
  remaining engine has applied every chunk. COMMIT follows only then.
- From the first chunk on, an engine that fails or is lost drops out with all ranks of its DP group.
  They get ABORT, and quarantine themselves if they loaded anything. The others continue, because
  an abort would leave all of them half-loaded. The trainer finds the names in ``excluded``.
- An update that is aborted fails its chunks, even if all remaining engines have applied them. If a
  chunk counted as done, the trainer would enter the next chunk's collective alone.
- No COMMIT is sent with fewer DP groups left than the quorum: the update is aborted as soon as they
  are fewer. After COMMIT, each engine that commits serves, even if fewer than the quorum do.
- An engine that fails the canary drops out in the same way, before any COMMIT.

The tensors of an *open* update (ARM ``is_open``) come in parts, each announced by ARM_PART::

    LOADING    ARM_PART, no chunk in flight         EXTENDING  ARM_PART to every engine
    EXTENDING  every engine has checked the part    LOADING    the part's chunks may be announced
    EXTENDING  an engine refuses; or is lost or     ABORTING   ABORT; the trainer gets why
               overdue, if it has a communicator
    FINISHING  an engine refuses: a tensor is       ABORTING   the same
               missing

- No chunk is announced while EXTENDING: no rank enters a collective for a part that an engine may
  still refuse.
- An open update is being sent until UPDATE_FINISH: until then the loss of an engine that shares the
  communicator aborts it.
- Engines check at UPDATE_FINISH that no tensor is missing. If one finds that one is, none commits.

A staged update loads nothing before it is committed: see :mod:`bus._protocol.group.staging`.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Final

from bus import messages as m
from bus._protocol.core.ack_barrier import AckBarrier
from bus._protocol.core.failures import Declined, Failure, wrong_state
from bus._protocol.core.instructions import Ask, Instruction, StepDone, StepFailed
from bus._protocol.core.step_machine import StepMachine
from bus._protocol.group.staging import StagingDecision


class UpdateState(StrEnum):
    """Progress of a group's update."""

    IDLE = "idle"
    OPENING = "opening"
    ARMING = "arming"
    ARMED = "armed"
    STARTING = "starting"
    LOADING = "loading"
    EXTENDING = "extending"
    FINISHING = "finishing"
    FINISHED = "finished"
    PROBING = "probing"
    COMMITTING = "committing"
    ABORTING = "aborting"


class UpdateEvent(StrEnum):
    INIT_ASKED = "init_asked"
    ARM_ASKED = "arm_asked"
    START_ASKED = "start_asked"
    PART_ASKED = "part_asked"
    FINISH_ASKED = "finish_asked"
    PROBE_ASKED = "probe_asked"
    COMMIT_ASKED = "commit_asked"
    ALL_DONE = "all_done"
    FAILED = "failed"
    GIVEN_UP = "given_up"
    NO_ENGINES = "no_engines"


_S, _E = UpdateState, UpdateEvent
_GIVES_UP: Final = [
    each for each in _S if each not in (_S.IDLE, _S.OPENING, _S.COMMITTING, _S.ABORTING)
]

TRANSITIONS: Final[dict[tuple[UpdateState, UpdateEvent], UpdateState]] = {
    (_S.IDLE, _E.INIT_ASKED): _S.OPENING,  # TRANSFER_INIT, or TRANSFER_DRAIN, to every engine
    (_S.OPENING, _E.ALL_DONE): _S.IDLE,  # the trainer gets: open, or drained
    (_S.OPENING, _E.FAILED): _S.IDLE,  # the trainer gets why
    (_S.IDLE, _E.ARM_ASKED): _S.ARMING,  # ARM with the manifest and the version
    (_S.ARMING, _E.ALL_DONE): _S.ARMED,  # the trainer gets: armed
    (_S.ARMED, _E.START_ASKED): _S.STARTING,  # UPDATE_START
    (_S.STARTING, _E.ALL_DONE): _S.LOADING,
    (_S.LOADING, _E.PART_ASKED): _S.EXTENDING,  # ARM_PART
    (_S.EXTENDING, _E.ALL_DONE): _S.LOADING,  # the trainer gets: armed
    (_S.LOADING, _E.FINISH_ASKED): _S.FINISHING,  # UPDATE_FINISH
    (_S.FINISHING, _E.ALL_DONE): _S.FINISHED,
    (_S.FINISHED, _E.PROBE_ASKED): _S.PROBING,  # PROBE: engines run the canary's probes
    (_S.PROBING, _E.ALL_DONE): _S.FINISHED,  # the trainer gets the results
    (_S.FINISHED, _E.COMMIT_ASKED): _S.COMMITTING,  # COMMIT: engines serve the version
    (_S.COMMITTING, _E.ALL_DONE): _S.IDLE,  # the trainer gets: committed
    (_S.ABORTING, _E.ALL_DONE): _S.IDLE,  # the trainer gets why
    **{(state, _E.GIVEN_UP): _S.ABORTING for state in _GIVES_UP},  # ABORT: engines undo the update
    **{(state, _E.NO_ENGINES): _S.IDLE for state in UpdateState if state is not _S.IDLE},
}

# In these states weights may differ between or within engines, unless the update is staged.
UNSAFE: Final = frozenset(_S) - {_S.IDLE, _S.OPENING, _S.ARMING, _S.ARMED}

# In these states an engine that refuses a step aborts the update.
_REFUSABLE: Final = (_S.OPENING, _S.ARMING, _S.STARTING, _S.EXTENDING)

# In these states the trainer may announce chunks.
TAKES_CHUNKS: Final = (_S.STARTING, _S.LOADING)


class UpdateMachine(StepMachine[UpdateState, UpdateEvent]):
    """Tracks the update of one group. Methods take an event or command, and return instructions."""

    def __init__(self) -> None:
        super().__init__("update", TRANSITIONS, _S.IDLE)
        self.version = 0
        self.label = ""
        self._reset("", {}, communicator=0)

    def _reset(self, update_id: str, members: dict[str, str], *, communicator: int) -> None:
        self.update_id = update_id
        self.members = dict(members)
        self.excluded: dict[str, Failure] = {}
        self.partial: set[str] = set()  # engines that hold a part of an update, of model or draft
        self.target: m.Target = "model"
        self.canary: m.CanaryMode = ""
        self.staging = StagingDecision()
        self.staged = False  # engines serve before and after the swap
        self.quorum = 1  # DP groups
        self.probed: dict[str, tuple[m.ProbeResult, ...]] = {}  # by engine
        self.failure: Failure | None = None
        self.chunks: dict[int, AckBarrier] = {}  # chunks in flight, by number
        self.chunks_asked = 0
        self.chunks_planned = 0
        self.is_open = False  # more tensors may follow
        self.parts = 1
        self._communicator = communicator  # 0: the transport has none

    def require(self, *states: UpdateState, update_id: str = "") -> None:
        """Checks that the update is in one of these states, and has this id.

        Raises:
            Declined: the state or the id differs, or the update was aborted; says why.
        """
        if self.state not in states:
            if self.failure is not None and update_id == self.update_id:
                raise Declined(self.failure)
            if self.state is UpdateState.IDLE and update_id:
                detail = f"the broker knows no update {update_id}; it was probably restarted"
                raise wrong_state(detail, hint="send the update again")
            detail = f"update {self.update_id} is {self.state.value}, not {' or '.join(states)}"
            raise wrong_state(detail, hint="send one update at a time, its steps in order")
        if update_id and update_id != self.update_id:
            raise wrong_state(f"the update is {self.update_id}, not {update_id}", "update_id")

    # -- commands of the trainer ----------------------------------------------

    def open(
        self, message: m.TransferInit | m.TransferDrain, members: dict[str, str], now_ms: float
    ) -> list[Instruction]:
        """Sends the message to every engine, so that each opens or drains its transport."""
        self._go(_E.INIT_ASKED)
        self._reset(message.update_id, members, communicator=message.communicator)
        return self._ask(m.STEPS[type(message)], message, now_ms)

    def arm(
        self,
        message: m.Arm,
        members: dict[str, str],
        now_ms: float,
        staging: StagingDecision | None = None,
        asked: m.Arm | None = None,
    ) -> list[Instruction]:
        """Sends ARM to every engine; ``asked``: the first ARM, which may have the digest alone."""
        self._go(_E.ARM_ASKED)
        self._reset(message.update_id, members, communicator=message.communicator)
        self.staging = staging or StagingDecision()
        self.version, self.label = message.version, message.label
        self.target, self.canary = message.target, message.canary
        self.quorum = message.quorum or len(set(members.values()))
        self.chunks_planned, self.is_open = len(message.chunk_ends), message.is_open
        self._ask(m.Step.ARM, message, now_ms)
        return [Ask(asked or message, tuple(members))]

    def start(self, message: m.UpdateStart, now_ms: float) -> list[Instruction]:
        """Sends UPDATE_START to every engine, so that each gets ready to load."""
        self._go(_E.START_ASKED)
        self.staged = message.staged
        return self._ask(m.Step.START, message, now_ms)

    def chunk(self, message: m.WeightChunkMeta, now_ms: float) -> list[Instruction]:
        """Sends the next chunk's metadata to every engine; the caller has checked its number."""
        is_next = message.chunk == self.chunks_asked < self.chunks_planned
        if self.state not in TAKES_CHUNKS or not is_next:
            raise self._illegal(f"chunk {message.chunk}")
        self.chunks_asked += 1
        chunk = AckBarrier(m.Step.CHUNK, message, self.members, now_ms)
        chunk.waiting_for_trainer = True
        self.chunks[message.chunk] = chunk
        return [Ask(message, tuple(self.members))]

    def on_chunk_sent(self, message: m.ChunkSent, now_ms: float) -> list[Instruction]:
        """Asks engines to verify and load a chunk that the trainer has sent."""
        chunk = self.chunks[message.chunk]
        chunk.messages.append(message)
        chunk.waiting_for_trainer = False
        chunk.asked_ms = chunk.resent_ms = now_ms
        return [Ask(message, tuple(sorted(chunk.waiting)))]

    def extend(self, message: m.ArmPart, now_ms: float) -> list[Instruction]:
        """Sends ARM_PART to every engine, so that each checks the part's tensors."""
        if self.chunks or not self.has_sent_all or not self.is_open:
            raise self._illegal(f"part {message.part}")
        self._go(_E.PART_ASKED)
        self.parts += 1
        return self._ask(m.Step.PART, message, now_ms)

    def finish(self, message: m.UpdateFinish, now_ms: float) -> list[Instruction]:
        """Sends UPDATE_FINISH to every engine, after the last chunk."""
        if not self.has_sent_all:
            raise self._illegal("finish before the last chunk")
        self._go(_E.FINISH_ASKED)
        return self._ask(m.Step.FINISH, message, now_ms)

    def probe(self, message: m.Probe, now_ms: float) -> list[Instruction]:
        """Sends PROBE to every engine, so that each runs the canary's probes."""
        self._go(_E.PROBE_ASKED)
        self.probed = {}
        return self._ask(m.Step.PROBE, message, now_ms)

    def expel(self, failures: dict[str, Failure], now_ms: float) -> list[Instruction]:
        """Excludes engines that failed the canary, with their DP groups."""
        expelled: list[Instruction] = []
        for name, why in failures.items():
            if self.state is not _S.ABORTING:  # not aborted for lack of a quorum yet
                expelled += self.on_refused(name, why, now_ms)
        return expelled

    def commit(self, message: m.Commit, now_ms: float) -> list[Instruction]:
        """Sends COMMIT to every engine of the update, so that each serves the version."""
        self._go(_E.COMMIT_ASKED)
        return self._ask(m.Step.COMMIT, message, now_ms)

    def abort(self, failure: Failure, now_ms: float) -> list[Instruction]:
        """Sends ABORT to every engine; the trainer gets the failure when all have answered."""
        if self.state is _S.OPENING and self.barrier is not None:
            step = self.barrier.step
            self._end(_E.FAILED)
            return [StepFailed(step, failure)]
        self._go(_E.GIVEN_UP)
        self.failure = failure
        self.chunks.clear()
        return self._ask(m.Step.ABORT, m.Abort(self.update_id, failure.detail[:4096]), now_ms)

    # -- answers of the engines -----------------------------------------------

    def on_ack(self, name: str, ack: m.Ack, now_ms: float) -> list[Instruction]:
        """Records an engine's ACK of a step; duplicate and old ACKs change nothing."""
        if ack.update_id != self.update_id:
            return []
        if ack.step in (m.Step.ABORT, m.Step.COMMIT) and ack.outcome == "partial":
            self.partial.add(name)
        if ack.step is m.Step.CHUNK:
            return self._on_chunk_ack(name, ack, now_ms)
        return self._check_barrier() if self._is_last_ack(name, ack, now_ms) else []

    def on_armed(self, name: str, armed: m.Armed, now_ms: float) -> list[Instruction]:
        """Records an engine's ARMED, its answer to an ARM with staging options."""
        if self.state is _S.ARMING and armed.update_id == self.update_id:
            self.staging.on_armed(name, armed)
        done = m.Ack(m.Step.ARM, armed.update_id, 0, 0, armed.duration_ms, "", ())
        return self.on_ack(name, done, now_ms)

    def on_probed(self, name: str, probed: m.Probed, now_ms: float) -> list[Instruction]:
        """Records an engine's probe results."""
        if self.state is _S.PROBING and probed.update_id == self.update_id:
            self.probed[name] = probed.results
        done = m.Ack(m.Step.PROBE, probed.update_id, 0, 0, probed.duration_ms, "", ())
        return self.on_ack(name, done, now_ms)

    def on_refused(
        self, name: str, failure: Failure, now_ms: float, *, overdue: bool = False
    ) -> list[Instruction]:
        """Excludes an engine that refused, is ``overdue`` or dead; or aborts the whole update."""
        if name not in self.members or self.state is _S.IDLE:
            return []
        if failure.code is m.NackCode.MANIFEST_UNKNOWN and self.barrier:
            self.barrier.lacks_manifest.add(name)  # it gets the tensors
            return []
        is_lost = overdue or failure.code is m.NackCode.ENGINE_DEAD
        if not is_lost and (self.state in _REFUSABLE or self._lacks_tensors(failure)):
            return self.abort(failure, now_ms)
        gone = [name] if self.state is _S.ABORTING else self._dp_group_of(name)
        abort = Ask(m.Abort(self.update_id, failure.detail[:4096]), tuple(gone))
        asked = [] if self.state in (_S.OPENING, _S.ABORTING) else [abort]
        return [*asked, *self._exclude(gone, failure, now_ms)]

    def on_lost(self, name: str, failure: Failure, now_ms: float) -> list[Instruction]:
        """Excludes a lost engine, with all ranks of its DP group."""
        if name not in self.members or self.state is _S.IDLE:
            return []
        return self._exclude(self._dp_group_of(name), failure, now_ms)

    @property
    def is_unsafe(self) -> bool:
        """Whether weights may differ between or within engines, so that none may resume."""
        return self.state in UNSAFE and not self.staged

    @property
    def has_sent_all(self) -> bool:
        """Whether the trainer has sent every planned chunk."""
        return self.chunks_asked == self.chunks_planned and not any(
            chunk.waiting_for_trainer for chunk in self.chunks.values()
        )

    def barriers(self) -> list[AckBarrier]:
        """Returns the steps that engines have yet to acknowledge."""
        return [*([self.barrier] if self.barrier else []), *self.chunks.values()]

    # -- internal -------------------------------------------------------------

    def _lacks_tensors(self, failure: Failure) -> bool:
        is_refusal = failure.code is m.NackCode.MANIFEST_REFUSED
        return self.is_open and self.state is _S.FINISHING and is_refusal

    def _on_chunk_ack(self, name: str, ack: m.Ack, now_ms: float) -> list[Instruction]:
        current = self.chunks.get(ack.chunk)
        if current is None or current.waiting_for_trainer:
            return []
        if not current.on_ack(name, ack, now_ms) or current.waiting:
            return []
        del self.chunks[ack.chunk]
        if self.barrier is not None:
            self.barrier.asked_ms = now_ms  # the engines make progress
        return [StepDone(current), *self._check_barrier()]

    def _exclude(self, gone: list[str], failure: Failure, now_ms: float) -> list[Instruction]:
        for name in gone:
            del self.members[name]
            self.excluded[name] = failure
        if not self.members:
            return self._on_no_engines(failure)
        left = len(set(self.members.values()))
        if left < self.quorum and (self.state, _E.GIVEN_UP) in TRANSITIONS:
            detail = f"{left} of {self.quorum} DP groups are left: {failure.detail}"
            too_few = replace(failure, code=m.NackCode.QUORUM_MISSING, detail=detail)
            return self.abort(too_few, now_ms)
        sends = self.state in (_S.ARMED, *TAKES_CHUNKS, _S.EXTENDING)
        is_sending = sends and (self.is_open or not self.has_sent_all)
        if self._communicator and (is_sending or self.state in _REFUSABLE):
            closed = replace(failure, code=m.NackCode.TRANSFER_CLOSED)
            return self.abort(failure if is_sending else closed, now_ms)
        done: list[Instruction] = []
        for number, current in list(self.chunks.items()):
            current.remove(gone)
            if current.is_done:
                del self.chunks[number]
                done.append(StepDone(current))
        if self.barrier is not None:
            self.barrier.remove(gone)
        return [*done, *self._check_barrier()]

    def _on_no_engines(self, failure: Failure) -> list[Instruction]:
        failed: list[Instruction] = [
            StepFailed(m.Step.CHUNK, failure, number) for number in self.chunks
        ]
        if self.barrier is not None:
            failed.append(StepFailed(self.barrier.step, self.failure or failure))
        self.failure = self.failure or failure
        self._end(_E.NO_ENGINES)
        return failed

    def _check_barrier(self) -> list[Instruction]:
        """Ends the step if all engines have acknowledged; FINISH also needs every chunk."""
        done = self.barrier
        if done is None or not done.is_done or (self.state is _S.FINISHING and self.chunks):
            return []
        if self.state is _S.ABORTING:
            failure = self.failure
            assert failure is not None
            self._end(_E.ALL_DONE)
            return [StepFailed(m.Step.ABORT, failure)]
        if self.state in (_S.OPENING, _S.COMMITTING):
            self._end(_E.ALL_DONE)
        else:
            if isinstance(part := done.messages[0], m.ArmPart):
                self.chunks_planned += len(part.chunk_ends)
            self._go(_E.ALL_DONE)
            self.barrier = None
        return [StepDone(done)]

    def _end(self, event: UpdateEvent) -> None:
        self._go(event)
        self.barrier = None
        self.chunks.clear()
