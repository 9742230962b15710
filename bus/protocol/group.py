"""One group: its engines, its trainer, its pause and its update, composed.

The two machines stay readable alone; what binds them stands here, and is little:

- Only the trainer that holds the group may command it, and only with the group's
  epoch, which grows with every new holder: a trainer that comes back after it was
  replaced is refused.
- UPDATE_START needs the group PAUSED. RESUME is refused while an update could leave
  engines with different or half-loaded weights (``update.UNSAFE``).
- An engine that joins while the group is paused or an update is under way takes
  part from the next one on.
- When the trainer is gone, an unsafe update is aborted, then the group resumes;
  engines that had loaded a part stay paused, quarantined.

Methods take what happened, with ``now_ms``, and return effects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from bus.manifest import Manifest
from bus.messages import (
    Abort,
    Ack,
    Arm,
    Commit,
    GroupAck,
    GroupStatus,
    GroupView,
    Heartbeat,
    Message,
    Nack,
    NackCode,
    PauseLocal,
    Resume,
    Step,
    TransferInit,
    UpdateFinish,
    UpdateStart,
    WaitEngines,
    WeightChunkMeta,
)
from bus.protocol.effects import Effect, Note, Send
from bus.protocol.instructions import Ask, Failure, StepDone, StepFailed
from bus.protocol.pause import PauseMachine, PauseState
from bus.protocol.update import UNSAFE, UpdateMachine, UpdateState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus.protocol.membership import Peer
    from bus.protocol.round import Round

Instruction: TypeAlias = Ask | StepDone | StepFailed
Key: TypeAlias = tuple[Step, int]  # a step, and the chunk's number for Step.CHUNK

ANSWERS_KEPT: Final = 256
_PAUSE_STEPS: Final = frozenset({Step.PAUSE_LOCAL, Step.PAUSE_GLOBAL, Step.RESUME})
# The log's word for a step that is done.
_DONE_EVENTS: Final = {
    Step.PAUSE_LOCAL: "pause_local",
    Step.PAUSE_GLOBAL: "paused",
    Step.RESUME: "resumed",
    Step.TRANSFER_INIT: "transfer_open",
    Step.ARM: "armed",
    Step.START: "update_started",
    Step.CHUNK: "chunk_applied",
    Step.FINISH: "update_finished",
    Step.COMMIT: "committed",
}


class Declined(Exception):  # noqa: N818 - not an error of ours: an answer
    """A command that is refused before anything is asked of any engine."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class Group:
    """See the module. ``retry_ms`` is how often engines that don't answer are asked again;
    ``step_timeout_ms`` how long an engine that lives may take for one step."""

    def __init__(
        self, name: str, *, retry_ms: float, step_timeout_ms: float, min_lease_ms: float
    ) -> None:
        self.name = name
        self.retry_ms = retry_ms
        self.step_timeout_ms = step_timeout_ms
        self.min_lease_ms = min_lease_ms
        self.epoch = 0
        self.version = 0
        self.holder: Peer | None = None
        self.engines: dict[str, Peer] = {}
        self.pending: set[str] = set()  # joined in the middle of a pause or an update
        self.quarantined: dict[str, str] = {}
        self.pause = PauseMachine()
        self.update = UpdateMachine()
        self._manifest: Manifest | None = None
        self._last_resumed = ""
        self._had_engines = False
        self._versions_given = 0
        self._asked: dict[Key, list[int]] = {}  # trainer's message ids that wait for a step
        self._answers: dict[int, Message] = {}  # given, to answer again when asked again
        self._waiters: dict[int, tuple[WaitEngines, float]] = {}

    # -- the trainer ----------------------------------------------------------

    def hold(self, trainer: Peer, now_ms: float) -> Failure | None:
        """A trainer takes the group, with a new epoch; or says who has it."""
        old = self.holder
        if old is not None and old.boot != trainer.boot:
            return Failure(
                NackCode.GROUP_HELD,
                f"group {self.name} is held by trainer {old.name} ({old.host}:{old.pid}), "
                f"heard {now_ms - old.last_heard_ms:.0f} ms ago",
                field="group",
                peer=old.name,
                hint="stop it, or wait until the bus has missed it",
            )
        if old is None:
            self.epoch += 1
            self._asked.clear()
            self._answers.clear()
            self._waiters.clear()
        self.holder = trainer
        return None

    def released(self, reason: str, now_ms: float) -> list[Effect]:
        """The holder is gone: recover forward, so that engines generate again."""
        self.holder = None
        self._waiters.clear()
        failure = Failure(NackCode.CANCELLED, reason)
        effects: list[Effect] = []
        state = self.update.state
        if state not in (UpdateState.IDLE, UpdateState.COMMITTING, UpdateState.ABORTING):
            if state is UpdateState.OPENING:
                effects += self._obey(
                    self.update.refused(next(iter(self.update.members)), failure, now_ms), now_ms
                )
            else:
                effects += self._obey(self.update.give_up(failure, now_ms), now_ms)
        self.pause.fail(failure)
        return [*effects, *self._settle(now_ms)]

    def command(
        self, trainer: Peer, msg_id: int, epoch: int, message: Message, now_ms: float
    ) -> list[Effect]:
        """A command of a trainer. Asked again under the same id, it is answered again."""
        answer = self._answers.get(msg_id)
        if answer is not None:
            return [self._to_holder(answer, msg_id)] if trainer is self.holder else []
        if msg_id in self._waiters or any(msg_id in ids for ids in self._asked.values()):
            return []
        try:
            self._check_holder(trainer, epoch)
            return self._command(msg_id, message, now_ms)
        except Declined as declined:
            nack = self._nack(declined.failure, _step_of(message), _update_id_of(message))
            self._remember(msg_id, nack)
            return [
                Note(
                    "refused",
                    "warning",
                    {
                        "group": self.name,
                        "peer": trainer.name,
                        "epoch": epoch,
                        "update_id": nack.update_id,
                        "code": nack.code.value,
                        "detail": nack.detail,
                    },
                ),
                Send(nack, (trainer.route,), msg_id, self.name, self.epoch),
            ]

    def _check_holder(self, trainer: Peer, epoch: int) -> None:
        if trainer is not self.holder:
            raise Declined(
                Failure(NackCode.FORBIDDEN, f"{trainer.name} does not hold group {self.name}")
            )
        if epoch != self.epoch:
            raise Declined(
                Failure(
                    NackCode.FENCED,
                    f"epoch {epoch}, the group is at {self.epoch}",
                    field="epoch",
                    hint="this trainer was replaced; join again to take the group",
                )
            )

    def _command(self, msg_id: int, message: Message, now_ms: float) -> list[Effect]:
        if isinstance(message, PauseLocal):
            return self._pause(msg_id, message, now_ms)
        if isinstance(message, Resume):
            return self._resume(msg_id, message, now_ms)
        if isinstance(message, WaitEngines):
            self._waiters[msg_id] = (message, now_ms + message.timeout_ms)
            return self._serve_waiters(now_ms)
        if isinstance(message, TransferInit):
            self._need_update(UpdateState.IDLE)
            members = self._members()
            return self._run(
                (Step.TRANSFER_INIT, 0), msg_id, self.update.open(message, members, now_ms), now_ms
            )
        if isinstance(message, Arm):
            return self._arm(msg_id, message, now_ms)
        if isinstance(message, UpdateStart):
            self._need_update(UpdateState.ARMED, message.update_id)
            if self.pause.state is not PauseState.PAUSED:
                raise Declined(
                    Failure(
                        NackCode.WRONG_STATE,
                        f"the group is {self.pause.state.value}; an update starts in a pause",
                        hint="send PAUSE_LOCAL first",
                    )
                )
            return self._run((Step.START, 0), msg_id, self.update.start(message, now_ms), now_ms)
        if isinstance(message, WeightChunkMeta):
            return self._chunk(msg_id, message, now_ms)
        if isinstance(message, UpdateFinish):
            self._need_update(UpdateState.LOADING, message.update_id)
            if self.update.chunks or self.update.chunks_asked != self.update.chunks_planned:
                raise Declined(
                    Failure(
                        NackCode.WRONG_STATE,
                        f"{self.update.chunks_asked - len(self.update.chunks)} of "
                        f"{self.update.chunks_planned} chunks are applied",
                        hint="send the others first, or ABORT",
                    )
                )
            return self._run((Step.FINISH, 0), msg_id, self.update.finish(message, now_ms), now_ms)
        if isinstance(message, Commit):
            self._need_update(UpdateState.FINISHED, message.update_id)
            if message.version != self.update.version:
                raise Declined(
                    Failure(
                        NackCode.WRONG_STATE,
                        f"the bus gave this update version {self.update.version}",
                        field="version",
                    )
                )
            return self._run((Step.COMMIT, 0), msg_id, self.update.commit(message, now_ms), now_ms)
        if isinstance(message, Abort):
            return self._abort(msg_id, message, now_ms)
        raise Declined(Failure(NackCode.FORBIDDEN, "a trainer does not send this"))

    def _pause(self, msg_id: int, message: PauseLocal, now_ms: float) -> list[Effect]:
        if self.pause.state is not PauseState.RUNNING:
            waiting = sorted(self.pause.round.waiting)[:8] if self.pause.round else []
            raise Declined(
                Failure(
                    NackCode.WRONG_STATE,
                    f"the group is {self.pause.state.value} (update {self.pause.update_id})"
                    + (f", waiting for {', '.join(waiting)}" if waiting else ""),
                    hint="one pause at a time: RESUME it, or wait until it is recovered",
                )
            )
        if message.lease_ms < self.min_lease_ms:
            raise Declined(
                Failure(
                    NackCode.MALFORMED,
                    f"{message.lease_ms} ms is shorter than the bus takes to miss a peer",
                    field="lease_ms",
                    hint=f"at least {self.min_lease_ms:.0f}",
                )
            )
        members = self._members()
        self._need_whole_dp_groups(members)
        effects: list[Effect] = [
            self._note("pause_asked", message.update_id, mode=message.mode, engines=len(members))
        ]
        return effects + self._run(
            (Step.PAUSE_GLOBAL, 0), msg_id, self.pause.ask(message, members, now_ms), now_ms
        )

    def _resume(self, msg_id: int, message: Resume, now_ms: float) -> list[Effect]:
        state = self.pause.state
        if state is PauseState.RUNNING:
            if message.update_id and message.update_id == self._last_resumed:
                return self._answer_now(msg_id, Step.RESUME, message.update_id)
            raise Declined(
                Failure(NackCode.WRONG_STATE, f"group {self.name} is not paused", field="update_id")
            )
        if message.update_id != self.pause.update_id:
            raise Declined(
                Failure(
                    NackCode.WRONG_STATE,
                    f"the pause under way is {self.pause.update_id}",
                    field="update_id",
                )
            )
        if self.update.state in UNSAFE:
            raise Declined(
                Failure(
                    NackCode.WRONG_STATE,
                    f"update {self.update.update_id} is {self.update.state.value}: engines may "
                    "hold different weights",
                    hint="COMMIT or ABORT it first",
                )
            )
        if state is PauseState.RESUMING:
            self._asked.setdefault((Step.RESUME, 0), []).append(msg_id)
            return []
        instructions = self.pause.resume(now_ms, stay=frozenset(self.quarantined))
        return self._run((Step.RESUME, 0), msg_id, instructions, now_ms)

    def _arm(self, msg_id: int, message: Arm, now_ms: float) -> list[Effect]:
        self._need_update(UpdateState.IDLE)
        try:
            manifest = Manifest(message.names, message.dtypes, message.shapes, message.chunk_ends)
        except ValueError as error:
            field, _, detail = str(error).partition(": ")
            raise Declined(Failure(NackCode.MANIFEST_REFUSED, detail, field=field)) from error
        if manifest.digest() != message.digest:
            raise Declined(
                Failure(
                    NackCode.MANIFEST_REFUSED, "is not the manifest's digest", field="digest"
                )
            )
        members = self._members()
        self._manifest = manifest
        version = max(self.version, self._versions_given) + 1
        self._versions_given = version
        asked = Arm(
            message.update_id,
            version,
            message.label,
            message.backend,
            message.names,
            message.dtypes,
            message.shapes,
            message.chunk_ends,
            message.digest,
        )
        return self._run(
            (Step.ARM, 0), msg_id, self.update.arm(asked, members, now_ms), now_ms
        )

    def _chunk(self, msg_id: int, message: WeightChunkMeta, now_ms: float) -> list[Effect]:
        self._need_update(UpdateState.LOADING, message.update_id)
        assert self._manifest is not None
        if message.chunk >= self._manifest.chunks or message.chunk > self.update.chunks_asked:
            raise Declined(
                Failure(
                    NackCode.WRONG_STATE,
                    f"chunk {message.chunk}, expected {self.update.chunks_asked} "
                    f"of {self._manifest.chunks}",
                    field="chunk",
                )
            )
        if message.chunk < self.update.chunks_asked:
            if message.chunk not in self.update.chunks:
                return self._answer_now(msg_id, Step.CHUNK, message.update_id)
            self._asked.setdefault((Step.CHUNK, message.chunk), []).append(msg_id)
            return []
        tensors = self._manifest.chunk(message.chunk)
        for field, expected, got in (
            ("names", tuple(t.name for t in tensors), message.names),
            ("dtypes", tuple(t.dtype for t in tensors), message.dtypes),
            ("shapes", tuple(t.shape for t in tensors), message.shapes),
            ("sizes_bytes", tuple(t.size_bytes for t in tensors), message.sizes_bytes),
        ):
            if expected != got:
                raise Declined(
                    Failure(
                        NackCode.MANIFEST_REFUSED,
                        f"chunk {message.chunk} differs from the armed manifest",
                        field=field,
                    )
                )
        return self._run(
            (Step.CHUNK, message.chunk), msg_id, self.update.chunk(message, now_ms), now_ms
        )

    def _abort(self, msg_id: int, message: Abort, now_ms: float) -> list[Effect]:
        state = self.update.state
        if state is UpdateState.IDLE or message.update_id != self.update.update_id:
            return self._answer_now(msg_id, Step.ABORT, message.update_id)
        if state is UpdateState.COMMITTING:
            raise Declined(Failure(NackCode.WRONG_STATE, "the update is being committed"))
        self._asked.setdefault((Step.ABORT, 0), []).append(msg_id)
        if state is UpdateState.ABORTING:
            return []
        failure = Failure(NackCode.CANCELLED, message.reason or "aborted by the trainer")
        return self._obey(self.update.give_up(failure, now_ms), now_ms)

    # -- the engines ----------------------------------------------------------

    def joined(self, peer: Peer, now_ms: float) -> list[Effect]:
        """An engine is there (again)."""
        self._had_engines = True
        known = peer.name in self.engines
        self.engines[peer.name] = peer
        self.version = max(self.version, peer.version)
        if peer.phase == "quarantined":
            self.quarantined[peer.name] = "joined with a part of an update loaded"
        else:
            self.quarantined.pop(peer.name, None)
        busy = (
            self.pause.state is not PauseState.RUNNING or self.update.state is not UpdateState.IDLE
        )
        in_it = peer.name in self.pause.members or peer.name in self.update.members
        if busy and not known and not in_it:
            self.pending.add(peer.name)
        return self._serve_waiters(now_ms)

    def lost(self, peer: Peer, failure: Failure, now_ms: float) -> list[Effect]:
        """An engine is gone: left, silent, or dead."""
        if self.engines.get(peer.name) is not peer:
            return []
        del self.engines[peer.name]
        self.pending.discard(peer.name)
        self.quarantined.pop(peer.name, None)
        effects = self._obey(self.update.lost(peer.name, failure), now_ms)
        effects += self._obey(self.pause.lost(peer.name, failure, now_ms), now_ms)
        return effects + self._settle(now_ms)

    def heard(self, peer: Peer, beat: Heartbeat, now_ms: float) -> list[Effect]:
        """A heartbeat; an engine left behind by a pause or update that is over comes back."""
        peer.phase = beat.phase
        peer.version = beat.version
        peer.in_flight = beat.in_flight
        self.version = max(self.version, beat.version)
        if beat.phase == "paused" and self.pause.state is PauseState.RUNNING:
            stray: Message = Resume(beat.update_id)
        elif beat.phase in ("armed", "updating") and self.update.state is UpdateState.IDLE:
            stray = Abort(beat.update_id, "the bus knows nothing of this update")
        else:
            return []
        return [
            self._note("stray", beat.update_id, "warning", peer=peer.name, phase=beat.phase),
            Send(stray, (peer.route,), 0, self.name, self.epoch),
        ]

    def acked(self, name: str, ack: Ack, now_ms: float) -> list[Effect]:
        """An engine's ack. The common case, and the hot one: it changes a set and no more."""
        machine = self.pause if ack.step in _PAUSE_STEPS else self.update
        instructions = machine.acked(name, ack, now_ms)
        if ack.step is Step.ABORT and name not in self.update.members:
            return self._late_abort(name, ack)
        return self._obey(instructions, now_ms) if instructions else []

    def nacked(self, name: str, nack: Nack, now_ms: float) -> list[Effect]:
        """An engine's refusal of a step."""
        failure = Failure(nack.code, nack.detail, name, nack.tensor, nack.field, nack.hint)
        if nack.step.startswith(("pause", "resume")):
            if nack.update_id != self.pause.update_id:
                return []
            instructions = self.pause.refused(name, failure, now_ms)
        else:
            if nack.update_id != self.update.update_id:
                return []
            instructions = self.update.refused(name, failure, now_ms)
            if name in self.update.excluded and name in self.engines:
                self.quarantined[name] = failure.detail
        note = self._note(
            "engine_refused",
            nack.update_id,
            "warning",
            peer=name,
            step=nack.step,
            code=nack.code.value,
            detail=nack.detail,
            tensor=nack.tensor,
        )
        return [note, *self._obey(instructions, now_ms), *self._settle(now_ms)]

    def _late_abort(self, name: str, ack: Ack) -> list[Effect]:
        """An engine that fell out of the update says what its ABORT found."""
        if name not in self.quarantined:
            return []
        if ack.outcome != "partial":
            del self.quarantined[name]
            return []
        return [
            self._note(
                "quarantined", ack.update_id, "error", peer=name, reason=self.quarantined[name]
            )
        ]

    # -- time -----------------------------------------------------------------

    def tick(self, now_ms: float) -> list[Effect]:
        """Ask again those who have not answered; end what took too long."""
        effects: list[Effect] = []
        for each in self._rounds():
            if now_ms - each.asked_ms > self.step_timeout_ms:
                effects += self._overdue(each, now_ms)
            elif each.overdue(self.retry_ms, now_ms):
                effects.append(self._send(each.message, each.waiting))
        effects += self._obey(self.pause.expire(now_ms), now_ms)
        for msg_id, (wait, deadline_ms) in list(self._waiters.items()):
            if now_ms >= deadline_ms:
                del self._waiters[msg_id]
                names = ", ".join(sorted(self.engines)) or "none"
                failure = Failure(
                    NackCode.TIMEOUT,
                    f"{len(self.engines)} of {wait.count} engines joined group {self.name} "
                    f"in {wait.timeout_ms} ms: {names}",
                    hint="look at the sidecars' logs, and at `wavebus status`",
                )
                effects += self._reply([msg_id], self._nack(failure, "", ""))
        return effects

    def next_deadline_ms(self) -> float | None:
        """When :meth:`tick` has something to do, at the latest."""
        times = [each.resent_ms + self.retry_ms for each in self._rounds() if each.waiting]
        times += [deadline for _, deadline in self._waiters.values()]
        if self.pause.deadline_ms is not None:
            times.append(self.pause.deadline_ms)
        return min(times, default=None)

    def _overdue(self, current: Round, now_ms: float) -> list[Effect]:
        effects: list[Effect] = []
        for name in sorted(current.waiting):
            peer = self.engines.get(name)
            heard = f"; heard {now_ms - peer.last_heard_ms:.0f} ms ago" if peer else ""
            failure = Failure(
                NackCode.TIMEOUT,
                f"{name} lives but has not acked {current.step.value} for "
                f"{now_ms - current.asked_ms:.0f} ms{heard}",
                peer=name,
            )
            if current.step in _PAUSE_STEPS:
                effects += self._obey(self.pause.lost(name, failure, now_ms), now_ms)
            else:
                effects += self._obey(self.update.refused(name, failure, now_ms), now_ms)
        return effects + self._settle(now_ms)

    # -- obeying the machines -------------------------------------------------

    def _run(
        self, key: Key, msg_id: int, instructions: list[Instruction], now_ms: float
    ) -> list[Effect]:
        self._asked.setdefault(key, []).append(msg_id)
        return self._obey(instructions, now_ms)

    def _obey(self, instructions: Iterable[Instruction], now_ms: float) -> list[Effect]:
        effects: list[Effect] = []
        for each in instructions:
            if isinstance(each, Ask):
                effects.append(self._send(each.message, each.names))
            elif isinstance(each, StepDone):
                effects += self._step_done(each, now_ms)
            else:
                effects += self._step_failed(each)
        if effects:
            effects += self._settle(now_ms)
        return effects

    def _step_done(self, done: StepDone, now_ms: float) -> list[Effect]:
        step, current = done.step, done.round
        in_pause = step in _PAUSE_STEPS
        update_id = self.pause.update_id if in_pause else self.update.update_id
        duration_ms = now_ms - current.asked_ms
        paused_ms = 0.0
        if step is Step.PAUSE_GLOBAL:
            duration_ms = now_ms - self.pause.asked_ms
        elif step is Step.RESUME:
            paused_ms = now_ms - self.pause.asked_ms
            self._last_resumed = update_id
        elif step is Step.COMMIT:
            self.version = self.update.version
            for name in self.update.members:
                self.quarantined.pop(name, None)
                peer = self.engines.get(name)
                if peer is not None:
                    peer.version = self.version
        excluded = () if in_pause else tuple(self.update.excluded)
        fields: dict[str, object] = {
            "engines": current.engines,
            "duration_ms": round(duration_ms, 2),
            "slowest": current.slowest,
            "slowest_ms": round(current.slowest_ms, 2),
        }
        if step is Step.CHUNK:
            fields["chunk"] = done.chunk
            fields["chunks"] = self.update.chunks_planned
        if step in (Step.ARM, Step.COMMIT):
            fields["version"] = self.update.version
            fields["label"] = self.update.label
        if step is Step.PAUSE_GLOBAL:
            fields["in_flight"] = current.in_flight
        if step is Step.RESUME:
            fields["paused_ms"] = round(paused_ms, 2)
        if excluded:
            fields["excluded"] = list(excluded)
        note = self._note(_DONE_EVENTS[step], update_id, "info", **fields)
        if step is Step.PAUSE_LOCAL:
            return [note]
        answer = GroupAck(
            step=step,
            update_id=update_id,
            version=self.version if in_pause else self.update.version,
            engines=current.engines,
            excluded=excluded,
            in_flight=current.in_flight,
            slowest=current.slowest,
            slowest_ms=round(current.slowest_ms, 3),
            duration_ms=round(duration_ms, 3),
            paused_ms=round(paused_ms, 3),
        )
        return [note, *self._reply(self._asked.pop((step, done.chunk), []), answer)]

    def _step_failed(self, failed: StepFailed) -> list[Effect]:
        step, failure = failed.step, failed.failure
        in_pause = step in _PAUSE_STEPS
        update_id = self.pause.update_id if in_pause else self.update.update_id
        note = self._note(
            "pause_failed" if in_pause else "update_failed",
            update_id,
            "warning",
            step=step.value,
            code=failure.code.value,
            detail=failure.detail,
            peer=failure.peer,
            tensor=failure.tensor,
        )
        effects: list[Effect] = [note]
        if step is Step.ABORT:
            self._quarantine_partial()
            ids = self._asked.pop((Step.ABORT, 0), [])
            aborted = self._group_ack(Step.ABORT, update_id)
            effects += self._reply(ids, aborted)
        if in_pause or step is not Step.ABORT:
            keys = [(step, failed.chunk)]
        else:
            keys = [key for key in self._asked if key[0] not in _PAUSE_STEPS]
        for key in keys:
            nack = self._nack(failure, key[0].value, update_id, key[1])
            effects += self._reply(self._asked.pop(key, []), nack)
        return effects

    def _quarantine_partial(self) -> None:
        for name in self.update.partial:
            if name in self.engines:
                self.quarantined[name] = f"update {self.update.update_id} was given up half-loaded"

    def _settle(self, now_ms: float) -> list[Effect]:
        """What follows by itself: a group without its trainer resumes; joiners come in."""
        idle = self.update.state is UpdateState.IDLE
        if self.holder is None and idle and self.pause.state is PauseState.PAUSED:
            return self._obey(
                self.pause.resume(now_ms, stay=frozenset(self.quarantined)), now_ms
            )
        if self.pending and idle and self.pause.state is PauseState.RUNNING:
            self.pending.clear()
            return self._serve_waiters(now_ms)
        return []

    # -- small things ---------------------------------------------------------

    def status(self, now_ms: float) -> GroupStatus:
        """What `wavebus status` shows of the group."""
        waiting = sorted({name for each in self._rounds() for name in each.waiting})
        return GroupStatus(
            name=self.name,
            epoch=self.epoch,
            version=self.version,
            holder=self.holder.name if self.holder else "",
            pause=self.pause.state.value,
            update=self.update.state.value,
            update_id=self.update.update_id
            if self.update.state is not UpdateState.IDLE
            else (self.pause.update_id if self.pause.state is not PauseState.RUNNING else ""),
            waiting_for=tuple(waiting),
            engines=tuple(
                self.engines[name].view(now_ms) for name in sorted(self.engines)
            ),
        )

    def _members(self) -> dict[str, str]:
        """The engines that take part in what begins now, with their DP groups."""
        if not self.engines:
            if self._had_engines:
                raise Declined(
                    Failure(
                        NackCode.EMPTY_GROUP,
                        f"every engine of group {self.name} is gone",
                        field="group",
                        hint="start sidecars, and wait_for_engines",
                    )
                )
            raise Declined(
                Failure(
                    NackCode.UNKNOWN_GROUP,
                    f"no engine has joined group {self.name!r}",
                    field="group",
                    hint="check --group of the sidecars, and wait_for_engines",
                )
            )
        return {
            name: peer.facts.dp_group
            for name, peer in self.engines.items()
            if name not in self.pending and peer.facts is not None
        }

    def _need_whole_dp_groups(self, members: dict[str, str]) -> None:
        """All ranks of a DP group must be alive before any of them is paused."""
        ranks: dict[str, int] = {}
        for dp_group in members.values():
            ranks[dp_group] = ranks.get(dp_group, 0) + 1
        for name, dp_group in members.items():
            facts = self.engines[name].facts
            if facts is not None and ranks[dp_group] < facts.dp_size:
                raise Declined(
                    Failure(
                        NackCode.WRONG_STATE,
                        f"DP group {dp_group} has {ranks[dp_group]} of {facts.dp_size} ranks",
                        peer=name,
                        hint="a pause of some ranks would wedge them; start the others",
                    )
                )

    def _need_update(self, state: UpdateState, update_id: str = "") -> None:
        if self.update.state is not state:
            under_way = f" (update {self.update.update_id})" if self.update.update_id else ""
            raise Declined(
                Failure(
                    NackCode.WRONG_STATE,
                    f"the update is {self.update.state.value}{under_way}, not {state.value}",
                    hint="one update at a time, its steps in order",
                )
            )
        if update_id and update_id != self.update.update_id:
            raise Declined(
                Failure(
                    NackCode.WRONG_STATE,
                    f"the update under way is {self.update.update_id}",
                    field="update_id",
                )
            )

    def _serve_waiters(self, now_ms: float) -> list[Effect]:
        effects: list[Effect] = []
        for msg_id, (wait, _) in list(self._waiters.items()):
            ready = [n for n in self.engines if n not in self.pending]
            if len(ready) >= wait.count:
                del self._waiters[msg_id]
                view = GroupView(
                    tuple(self.engines[name].view(now_ms) for name in sorted(ready)), self.version
                )
                effects += self._reply([msg_id], view)
        return effects

    def _rounds(self) -> list[Round]:
        return [*([self.pause.round] if self.pause.round else []), *self.update.rounds()]

    def _send(self, message: Message, names: Iterable[str]) -> Send:
        engines = self.engines
        routes = tuple(engines[name].route for name in names if name in engines)
        return Send(message, routes, 0, self.name, self.epoch)

    def _to_holder(self, message: Message, reply_to: int) -> Send:
        assert self.holder is not None
        return Send(message, (self.holder.route,), reply_to, self.name, self.epoch)

    def _reply(self, ids: list[int], message: Message) -> list[Effect]:
        for msg_id in ids:
            self._remember(msg_id, message)
        if self.holder is None:
            return []
        return [self._to_holder(message, msg_id) for msg_id in ids]

    def _answer_now(self, msg_id: int, step: Step, update_id: str) -> list[Effect]:
        return self._reply([msg_id], self._group_ack(step, update_id))

    def _remember(self, msg_id: int, message: Message) -> None:
        self._answers[msg_id] = message
        while len(self._answers) > ANSWERS_KEPT:
            del self._answers[next(iter(self._answers))]

    def _group_ack(self, step: Step, update_id: str) -> GroupAck:
        excluded = tuple(self.update.excluded)
        return GroupAck(
            step, update_id, self.version, len(self.engines), excluded, 0, "", 0.0, 0.0, 0.0
        )

    def _nack(self, failure: Failure, step: str, update_id: str, chunk: int = 0) -> Nack:
        return Nack(
            code=failure.code,
            step=step,
            update_id=update_id,
            chunk=chunk,
            detail=failure.detail[:4096],
            field=failure.field[:256],
            peer=failure.peer,
            tensor=failure.tensor[:512],
            hint=failure.hint,
            retry_after_ms=0,
        )

    def _note(
        self, event: str, update_id: str, level: str = "info", **fields: object
    ) -> Note:
        return Note(
            event,
            level,
            {"group": self.name, "update_id": update_id, "epoch": self.epoch, **fields},
        )


def _step_of(message: Message) -> str:
    """The step that a trainer's command asks for."""
    steps: dict[type[Message], Step] = {
        PauseLocal: Step.PAUSE_GLOBAL,
        Resume: Step.RESUME,
        TransferInit: Step.TRANSFER_INIT,
        Arm: Step.ARM,
        UpdateStart: Step.START,
        WeightChunkMeta: Step.CHUNK,
        UpdateFinish: Step.FINISH,
        Commit: Step.COMMIT,
        Abort: Step.ABORT,
    }
    step = steps.get(type(message))
    return step.value if step else ""


def _update_id_of(message: Message) -> str:
    update_id = getattr(message, "update_id", "")
    return update_id if isinstance(update_id, str) else ""
