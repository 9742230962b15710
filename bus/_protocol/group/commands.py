"""Checks the commands of a group's trainer, then executes or queues them.

A command that must wait for an earlier step is queued (:class:`Commands` lists these). A command
that does not fit the group's state is declined, with the reason, and changes nothing. Any other
command changes the state machines, and returns actions for
:class:`bus._protocol.group.group.Group`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec.structs import replace

from bus import messages as m
from bus._lora import adapter_of
from bus._manifest import NO_TENSORS
from bus._protocol.core.failures import Failure, decline, wrong_state
from bus._protocol.core.validation import check_chunk, check_sums, manifest_of, part_of
from bus._protocol.group import catch_up
from bus._protocol.group.canary import failures, require_probes
from bus._protocol.group.engine_registry import communicator
from bus._protocol.group.pause import PauseState
from bus._protocol.group.reconciliation import EarlierCommits
from bus._protocol.group.sleep import SleepState
from bus._protocol.group.staging import StagingDecision, before_engines
from bus._protocol.group.update import TAKES_CHUNKS, UpdateState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._manifest import Manifest
    from bus._protocol.core.instructions import Instruction
    from bus._protocol.group.group_state import Action, GroupState
    from bus._protocol.group.update import UpdateMachine

    Queued: TypeAlias = m.UpdateStart | m.ArmPart | m.UpdateFinish | m.Commit

# In these states a chunk, or a repeated chunk, is accepted.
_KNOWS_CHUNKS: Final = (UpdateState.ARMED, *TAKES_CHUNKS, UpdateState.FINISHING)
_BEFORE_COMMIT: Final = (*_KNOWS_CHUNKS, UpdateState.FINISHED, UpdateState.PROBING)
_OVER: Final = (UpdateState.IDLE, UpdateState.ABORTING)


class Commands:
    """Validates and executes the owning trainer's commands.

    A trainer may send the next command before the last one is answered. A command that comes too
    early is queued:

    - UPDATE_START until the group is paused, unless the update is staged,
    - ARM_PART until every engine has applied every chunk,
    - UPDATE_FINISH until every chunk is sent,
    - COMMIT until every engine has finished,
    - RESUME until the update is over.

    If the update fails first, queued commands are refused with its error; RESUME is executed.

    Attributes:
        queued: the commands that wait for their turn, by step.
    """

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._manifest = NO_TENSORS  # of the update under way
        self._known: dict[str, Manifest] = {}  # by digest
        self._earlier_commits = EarlierCommits(state)
        self.queued: dict[m.Step, Queued] = {}

    def execute(self, msg_id: int, message: m.Message, now_ms: float) -> list[Action]:
        """Checks a command and starts its step.

        Args:
            msg_id: the request's id. Its answer is sent when its step is done.
            message: the command.
            now_ms: the broker's clock, in milliseconds.

        Returns:
            Instructions for engines, answers and log events. Queued commands are not among them:
            see :meth:`next_queued`.

        Raises:
            Declined: the command does not fit now; nothing has changed.
        """
        match message:
            case m.PauseLocal():
                return self._pause(msg_id, message, now_ms)
            case m.Resume():
                return self._resume(msg_id, message, now_ms)
            case m.Sleep():
                return self._sleep(msg_id, message, now_ms)
            case m.Wake():
                return self._wake(msg_id, message, now_ms)
            case m.WaitEngines():
                until_ms = now_ms + message.timeout_ms
                self._state.session.waiters[msg_id] = (message, until_ms)
                return [*self._state.answer_waiters(now_ms, is_new=True)]
            case m.TrainerStep():
                forwarded = self._state.followers.on_trainer_step(message)
                return [*forwarded, *self._state.session.answer_ids([msg_id], message)]
            case m.PlanTransfer():
                plan = transfer_plan(self._state, message)
                return [*self._state.session.answer_ids([msg_id], plan)]
            case m.TransferInit() | m.TransferDrain():
                return self._open(msg_id, message, now_ms)
            case m.Arm():
                return self._arm(msg_id, message, now_ms)
            case m.UpdateStart():
                self._state.update.require(UpdateState.ARMED, update_id=message.update_id)
                if message.staged:
                    self._state.update.staging.require()
                elif self._state.pause.state is PauseState.RESUMING:
                    raise wrong_state(
                        "the group is resuming; an update starts in a pause",
                        hint="send PAUSE_LOCAL first",
                    )
                return self._queue(msg_id, m.Step.START, message)
            case m.WeightChunkMeta() | m.ChunkSent():
                return self._chunk(msg_id, message, now_ms)
            case m.ArmPart():
                self._manifest = _extended(self._state.update, self._manifest, message)
                return self._queue(msg_id, m.Step.PART, message)
            case m.UpdateFinish():
                self._state.update.require(*TAKES_CHUNKS, update_id=message.update_id)
                return self._queue(msg_id, m.Step.FINISH, message)
            case m.Probe():
                self._state.update.require(UpdateState.FINISHED, update_id=message.update_id)
                if not self._state.update.canary:
                    raise wrong_state("the update was armed without a canary", "update_id")
                return self._ask(msg_id, m.Step.PROBE, self._state.update.probe(message, now_ms))
            case m.Commit():
                known = (self._state.update.update_id, self._state.served.assigned[0])
                if self._state.update.state is UpdateState.IDLE and message.update_id not in known:
                    return [*self._earlier_commits.answer(msg_id, message, now_ms)]
                self._state.update.require(*_BEFORE_COMMIT, update_id=message.update_id)
                if message.version != self._state.update.version:
                    raise wrong_state(
                        f"the broker assigned version {self._state.update.version} to this update",
                        "version",
                    )
                return self._queue(msg_id, m.Step.COMMIT, message)
            case m.Abort():
                return self._abort(msg_id, message, now_ms)
            case _:
                raise decline(
                    m.NackCode.FORBIDDEN, "a trainer may not send this message", field="kind"
                )

    def _ask(
        self, msg_id: int, step: m.Step, instructions: Iterable[Instruction], chunk: int = 0
    ) -> list[Action]:
        """Registers a request as waiting for a step, and returns the step's instructions."""
        self._state.session.ask((step, chunk), msg_id)
        return [*instructions]

    # -- queued commands ---------------------------------------------------------

    def _queue(self, msg_id: int, step: m.Step, message: Queued) -> list[Action]:
        """Queues a command until :meth:`next_queued` can execute the command."""
        self._state.session.ask((step, 0), msg_id)
        self.queued[step] = message
        return []

    def next_queued(self, now_ms: float) -> list[Action]:
        """Executes the next queued command, if possible; refuses commands of an ended update.

        Returns:
            Its actions; empty if every queued command still has to wait. Call again after executing
            the actions: the next command may follow.
        """
        update, pause = self._state.update, self._state.pause.state
        loads = update.state is UpdateState.LOADING
        refused: list[Action] = []
        for step, message in list(self.queued.items()):
            if update.state in _OVER or message.update_id != update.update_id:
                del self.queued[step]
                ended = Failure(m.NackCode.WRONG_STATE, "the update ended before this step began")
                nack = (update.failure or ended).nack(step.value, message.update_id)
                refused += self._state.session.answer((step, 0), nack)
                continue
            asked: list[Instruction] = []
            match message:
                case m.UpdateStart() if (
                    message.staged or pause is PauseState.PAUSED
                ) and update.state is UpdateState.ARMED:
                    asked = update.start(message, now_ms)
                case m.ArmPart() if loads and not update.chunks:
                    asked = update.extend(message, now_ms)
                case m.UpdateFinish() if loads and update.has_sent_all:
                    asked = update.finish(message, now_ms)
                case m.Commit() if update.state is UpdateState.FINISHED and message.differing:
                    self.queued[step] = replace(message, differing=())
                    return [*refused, *self._expel(failures(message.differing), now_ms)]
                case m.Commit() if update.state is UpdateState.FINISHED and (
                    not update.staged or pause is PauseState.RUNNING
                ):
                    asked = update.commit(message, now_ms)
            if asked:
                del self.queued[step]
                return [*refused, *asked]
        return refused

    def _expel(self, differing: dict[str, Failure], now_ms: float) -> list[Action]:
        """Excludes engines that failed the canary from the update, with their DP groups."""
        state, update = self._state, self._state.update
        before = set(update.excluded)
        notes = [
            state.note("canary_failed", update.update_id, "error", {"peer": n, "detail": f.detail})
            for n, f in differing.items()
        ]
        instructions = update.expel(differing, now_ms)
        expelled = update.excluded.keys() - before
        for each in expelled:
            state.registry.quarantine(each, update.excluded[each].detail)
        state.registry.expel(expelled, update.version)
        return [*notes, *instructions]

    def _pause(self, msg_id: int, message: m.PauseLocal, now_ms: float) -> list[Action]:
        pause = self._state.pause
        if pause.state is not PauseState.RUNNING:
            waiting = ", ".join(sorted(pause.barrier.waiting)[:8]) if pause.barrier else ""
            waits = f", waiting for {waiting}" if waiting else ""
            raise wrong_state(
                f"the group is {pause.state.value} (update {pause.update_id}){waits}",
                hint="send RESUME first, or wait until the broker has ended this pause",
            )
        least_ms = self._state.config.min_lease_ms
        if message.lease_ms < least_ms:
            text = f"{message.lease_ms} ms is too short for the broker to detect a lost peer"
            raise decline(m.NackCode.MALFORMED, text, field="lease_ms", hint=f"at least {least_ms}")
        members = self._members(message.scope)
        self._state.orphaned = False
        self._state.dp_groups.on_pause_asked(set(members.values()))
        fields: dict[str, object] = {"mode": message.mode, "engines": len(members)}
        if message.scope:
            fields["catch_up"] = list(message.scope)
        return [
            self._state.note("pause_asked", message.update_id, "info", fields),
            *self._ask(
                msg_id, m.Step.PAUSE_GLOBAL, self._state.pause.ask(message, members, now_ms)
            ),
        ]

    def _resume(self, msg_id: int, message: m.Resume, now_ms: float) -> list[Action]:
        state = self._state.pause.state
        if state is PauseState.RUNNING:
            if message.update_id and message.update_id == self._state.last_resumed:
                return [*self._state.answer_at_once(msg_id, m.Step.RESUME, message.update_id)]
            raise wrong_state(f"group {self._state.name} is not paused", "update_id")
        if message.update_id != self._state.pause.update_id:
            raise wrong_state(
                f"the group is in pause {self._state.pause.update_id}, not {message.update_id}",
                "update_id",
            )
        update = self._state.update
        self._state.session.ask((m.Step.RESUME, 0), msg_id)
        if update.is_unsafe:  # RESUME waits for the update's end
            self._state.resume_asked = True
            return []
        if state is PauseState.RESUMING:
            return []
        return self._state.end_pause(now_ms)

    def _sleep(self, msg_id: int, message: m.Sleep, now_ms: float) -> list[Action]:
        members = self._window(message.update_id)
        sleep = self._state.sleep
        if sleep.state is not SleepState.AWAKE:
            raise wrong_state(f"the group is {sleep.state.value}", hint="send RESUME first")
        facts = self._state.registry.facts(members)
        cannot = [name for name, engine in facts.items() if not engine.can_sleep]
        if cannot:
            raise wrong_state(
                f"{', '.join(cannot[:8])} can't sleep",
                "can_sleep",
                hint="start vLLM with --enable-sleep-mode, on a GPU",
            )
        asked = sleep.sleep(message, members, now_ms)
        return self._ask(msg_id, m.Step.SLEEP, asked)

    def _wake(self, msg_id: int, message: m.Wake, now_ms: float) -> list[Action]:
        members = self._window(message.update_id)
        sleep = self._state.sleep
        if sleep.state is SleepState.WAKING:  # an earlier request may have been cancelled
            self._state.session.ask((m.Step.WAKE, 0), msg_id)
            return []
        if sleep.barrier is not None:
            raise wrong_state(f"the group is {sleep.state.value}")
        return self._ask(msg_id, m.Step.WAKE, sleep.wake(message, members, now_ms))

    def _window(self, update_id: str) -> dict[str, str]:
        """Returns the engines of the completed pause, each with its DP group.

        Raises:
            Declined: the pause is not complete, or an update is under way.
        """
        pause = self._state.pause
        if pause.state is not PauseState.PAUSED:
            raise wrong_state(f"the group is {pause.state.value}", hint="send PAUSE_LOCAL first")
        if update_id != pause.update_id:
            text = f"the group is in pause {pause.update_id}, not {update_id}"
            raise wrong_state(text, "update_id")
        self._state.update.require(UpdateState.IDLE)
        return pause.members

    def _open(
        self, msg_id: int, message: m.TransferInit | m.TransferDrain, now_ms: float
    ) -> list[Action]:
        self._state.update.require(UpdateState.IDLE)
        members, number = self._members(message.scope), message.communicator
        made = self._require_communicator(number, members) if number else m.TransferPlan(0, 0, {})
        if isinstance(message, m.TransferInit):
            message = replace(message, world_size=made.world_size, first_ranks=made.first_ranks)
        asked = self._state.update.open(message, members, now_ms)
        return self._ask(msg_id, m.STEPS[type(message)], asked)

    def _members(self, scope: Iterable[str]) -> dict[str, str]:
        """Returns the engines that a command is for, with their DP groups.

        Raises:
            Declined: see :func:`bus._protocol.group.catch_up.members`.
        """
        return catch_up.members(self._state.registry, scope, self._state.version)

    def _require_communicator(self, number: int, members: Iterable[str]) -> m.TransferPlan:
        """Returns the communicator of these engines; declines if its number isn't ``number``."""
        made = _communicator(self._state, members)
        if made.communicator != number:
            raise decline(
                m.NackCode.TRANSFER_CLOSED,
                "engines joined, left or restarted since the transfer was planned",
                field="communicator",
                hint="request a new plan, and open the transport again",
            )
        return made

    def _arm(self, msg_id: int, message: m.Arm, now_ms: float) -> list[Action]:
        self._state.update.require(UpdateState.IDLE)
        sleep = self._state.sleep.state
        if sleep not in (SleepState.AWAKE, SleepState.WEIGHTS_AWAKE):
            raise decline(
                m.NackCode.ENGINE_ASLEEP, f"the group is {sleep.value}", hint="send WAKE first"
            )
        members, registry = self._members(message.scope), self._state.registry
        if message.communicator:
            self._require_communicator(message.communicator, members)
        manifest = manifest_of(message, self._known)
        if message.scope:
            catch_up.require_same_version(message, self._state.version)
        elif message.target == "draft":
            self._require_no_stale(registry.stale(members, self._state.version))
        elif adapter_of(message.backend):
            self._require_no_stale(registry.older(members, self._state.served.of_model))
        if message.default_quorum and not message.scope and self._state.registry.is_disaggregated():
            message = replace(message, quorum=0)
        groups = len(set(members.values()))
        if message.quorum > groups:
            raise decline(
                m.NackCode.QUORUM_MISSING,
                f"a commit needs {message.quorum} DP groups, and {groups} are present",
                field="quorum",
                hint="start more DP groups, or lower the quorum",
            )
        asleep = sleep is not SleepState.AWAKE
        require_probes(message.canary, members, self._state.registry, asleep=asleep)
        why_paused = before_engines(message, self._state.pause.state.value)
        staging = StagingDecision(wanted=message.staging is not None, pause_reason=why_paused)
        if why_paused:
            message = replace(message, staging=None)
        self._manifest = manifest
        asked = replace(message, after=self._state.version)
        if not message.scope:
            state = self._state
            version = state.served.assign(message, registry, state.session)
            asked = replace(asked, version=version)
        self._state.served.on_arm(asked.version)
        self._state.registry.on_arm(members, self._state.version)
        whole = _with_tensors(asked, manifest)
        arming = self._state.update.arm(whole, members, now_ms, staging, asked)
        return self._ask(msg_id, m.Step.ARM, arming)

    def _require_no_stale(self, stale: list[str]) -> None:
        """Checks, before an update of drafts or adapters, that no engine has older model weights.

        Such an update gets a version, too, which must mean the same model weights everywhere.
        """
        if stale:
            raise decline(
                m.NackCode.WRONG_STATE,
                f"not at the group's version {self._state.version}: {', '.join(stale[:8])}",
                stale[0],
                field="target",
                hint="update the model first, then its draft or adapters",
            )

    def _chunk(
        self, msg_id: int, message: m.WeightChunkMeta | m.ChunkSent, now_ms: float
    ) -> list[Action]:
        update, manifest, number = self._state.update, self._manifest, message.chunk
        update.require(*_KNOWS_CHUNKS, update_id=message.update_id)
        if update.state is UpdateState.ARMED:  # UPDATE_START was lost
            return []
        if number >= update.chunks_planned:
            text = f"there is no chunk {number}; the update has {update.chunks_planned}, from 0"
            raise wrong_state(text, "chunk")
        if number >= update.chunks_asked + isinstance(message, m.WeightChunkMeta):
            return []  # an earlier one was lost: the trainer repeats both
        under_way = update.chunks.get(number)
        instructions: list[Instruction] = []
        if isinstance(message, m.WeightChunkMeta) and number == update.chunks_asked:
            check_chunk(manifest, message)
            instructions = update.chunk(message, now_ms)
        elif under_way is None:
            return [*self._state.answer_at_once(msg_id, m.Step.CHUNK, message.update_id)]
        elif isinstance(message, m.ChunkSent) and under_way.waiting_for_trainer:
            check_sums(manifest, message)
            instructions = update.on_chunk_sent(message, now_ms)
        return self._ask(msg_id, m.Step.CHUNK, instructions, number)

    def _abort(self, msg_id: int, message: m.Abort, now_ms: float) -> list[Action]:
        state = self._state.update.state
        if state is UpdateState.IDLE or message.update_id != self._state.update.update_id:
            return [*self._state.answer_at_once(msg_id, m.Step.ABORT, message.update_id)]
        if state is UpdateState.COMMITTING:
            raise wrong_state("the update is being committed, so it can't be aborted")
        self._state.session.ask((m.Step.ABORT, 0), msg_id)
        if state is UpdateState.ABORTING:
            return []
        failure = Failure(m.NackCode.CANCELLED, message.reason or "aborted by the trainer")
        return [*self._state.update.abort(failure, now_ms)]


def transfer_plan(state: GroupState, message: m.PlanTransfer) -> m.TransferPlan:
    """Returns the communicator of the trainer and the engines that would take part now.

    Raises:
        Declined: see :func:`bus._protocol.group.catch_up.members`.
    """
    return _communicator(state, catch_up.members(state.registry, message.scope, state.version))


def _communicator(state: GroupState, members: Iterable[str]) -> m.TransferPlan:
    return communicator(state.registry.engines[name] for name in members)


def _with_tensors(message: m.Arm, manifest: Manifest) -> m.Arm:
    """Returns the ARM with the manifest's tensors, for engines that lack the manifest."""
    return replace(
        message,
        names=manifest.names,
        dtypes=manifest.dtypes,
        shapes=manifest.shapes,
        chunk_ends=manifest.chunk_ends,
        counts=manifest.counts,
    )


def _extended(update: UpdateMachine, known: Manifest, message: m.ArmPart) -> Manifest:
    """Returns the manifest of an open update, with its next part.

    Raises:
        Declined: the part is out of order, or a tensor (which is named) came before.
    """
    update.require(*TAKES_CHUNKS, update_id=message.update_id)
    if not update.is_open or message.part != update.parts or not update.has_sent_all:
        raise wrong_state(
            f"part {message.part} is out of order: part {update.parts} is next", "part"
        )
    return part_of(known, message)[1]
