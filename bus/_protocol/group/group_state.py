"""Holds the state of one group, for all rules that read or change the state.

The modules :mod:`~bus._protocol.group.commands`, :mod:`~bus._protocol.group.timeouts` and
:mod:`~bus._protocol.group.status` work on a :class:`GroupState` and return actions. Only
:class:`bus._protocol.group.group.Group` executes actions, so none of them imports the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from bus._protocol.core.effects import Effect, Note, Send
from bus._protocol.core.failures import Failure
from bus._protocol.core.instructions import Instruction, StepFailed
from bus._protocol.dp.groups import DpGroups
from bus._protocol.group.canary import probe_report
from bus._protocol.group.catch_up import GroupVersion
from bus._protocol.group.engine_registry import EngineRegistry
from bus._protocol.group.pause import PauseMachine, PauseState
from bus._protocol.group.replies import (
    DONE_EVENTS,
    PAUSE_STEPS,
    SLEEP_STEPS,
    WINDOW_STEPS,
    done_ack,
    done_fields,
    failure_fields,
)
from bus._protocol.group.routing import SETTLE_MS, Routing
from bus._protocol.group.sleep import SleepMachine
from bus._protocol.group.trainer_session import Followers, TrainerSession
from bus._protocol.group.update import UpdateMachine, UpdateState
from bus.messages import GroupAck, GroupView, Message, NackCode, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bus._protocol.core.ack_barrier import AckBarrier
    from bus._protocol.core.config import BrokerConfig
    from bus._protocol.core.membership import Peer

    Watchers: TypeAlias = Callable[[], tuple[bytes, ...]]  # returns their routing ids

_ENDED_KEPT: Final = 64
_LONGEST_END: Final = 4096
# The events that end an update: in words, and the field that says more.
_ENDS: Final = {"committed": "was committed as version", "update_failed": "failed:"}
_REASONS: Final = {"committed": "version", "update_failed": "detail"}
# The result of a rule. The group executes instructions, and passes effects on unchanged.
Action: TypeAlias = Instruction | Effect
# These steps change engines' phases and versions, and so possibly which engines are routable.
_MOVES: Final = frozenset({Step.SLEEP, Step.RESUME, Step.COMMIT, Step.ABORT})


class GroupState:
    """The state machines, engines, trainer and version of one group.

    Args:
        name: the group's name.
        config: the broker's configuration.

    Attributes:
        served: the version that the group serves, and whether a commit has set it.
        run: the run of the first engine that joined, used as cache salt; empty before.
        last_resumed: the id of the pause that was resumed last.
        orphaned: the trainer that asked for the present pause is gone.
        resume_asked: RESUME came while the update was unsafe, and waits for the update's end.
        ended: the outcomes of the last updates as text, by update id.
        moved_ms: when the trainer last made progress, or was last answered.
        is_due_known: False: a deadline of the group may be earlier than at its last review.
        count_due_ms: when :meth:`answer_waiters` must be called at the latest; None: never.
    """

    def __init__(self, name: str, config: BrokerConfig) -> None:
        self.name = name
        self.config = config
        self.served = GroupVersion()
        self.run = ""
        self.session = TrainerSession(name)
        self.registry = EngineRegistry(name)
        self.followers = Followers()
        self.dp_groups = DpGroups(name, lambda: self.epoch)
        self.pause = PauseMachine(self.registry.kept_paused, lambda: self.version)
        self.sleep = SleepMachine()
        self.update = UpdateMachine()
        self.routing = Routing(self.registry, self.update, self.sleep, config.heartbeat_ms)
        self.last_resumed = ""
        self.orphaned = False
        self.resume_asked = False
        self.ended: dict[str, str] = {}
        self.moved_ms = 0.0
        self.is_due_known = False
        self.count_due_ms: float | None = None
        self._counted_ms = -SETTLE_MS

    @property
    def version(self) -> int:
        """The version that the group serves; 0 before its first commit."""
        return self.served.value

    @property
    def epoch(self) -> int:
        """The group's fencing epoch."""
        return self.session.epoch

    @property
    def owner(self) -> Peer | None:
        return self.session.owner

    def is_busy(self) -> bool:
        """Whether a pause or an update is under way."""
        return (
            self.pause.state is not PauseState.RUNNING or self.update.state is not UpdateState.IDLE
        )

    def barriers(self) -> list[AckBarrier]:
        """Returns the steps that engines have been asked for and have not all acknowledged."""
        alone = (self.pause.barrier, self.sleep.barrier)
        return [*(each for each in alone if each is not None), *self.update.barriers()]

    # -- changes that several rules share ----------------------------------------

    def end_pause(self, now_ms: float) -> list[Action]:
        """Resumes the engines that have weights, and quarantines those that have none."""
        notes = self.abandon_discarded_weights(
            "a sleep discarded its weights, and no update followed"
        )
        return [*notes, *self.pause.resume(now_ms)]

    def abandon_discarded_weights(self, reason: str) -> list[Effect]:
        """Quarantines the engines whose weights a sleep has discarded; they stay asleep."""
        effects: list[Effect] = []
        for name in sorted(self.sleep.discarded & self.registry.engines.keys()):
            effects += self.quarantine(name, reason, self.pause.update_id)
        return effects

    def quarantine(self, name: str, reason: str, update_id: str) -> list[Effect]:
        """Quarantines an engine and logs this, unless the engine is quarantined already."""
        if self.registry.is_quarantined(name):
            return []
        self.registry.quarantine(name, reason)
        return [self.note("quarantined", update_id, "error", {"peer": name, "reason": reason})]

    def take_back(self, peer: Peer, message: Message, now_ms: float) -> list[Effect]:
        """Ends an engine's overdue state if ``message`` shows that its overdue step is over."""
        if not peer.answers(message):
            return []
        fields = {"peer": peer.name, "step": peer.overdue}
        self.registry.on_answered(peer)
        note = self.note("engine_answered", "", "info", fields)
        return [note, *self.answer_waiters(now_ms)]

    def on_follower_gone(self, peer: Peer, reason: str) -> list[Effect]:
        """Removes a lost follower, and notifies rank 0: its collective may wait for that rank."""
        self.followers.on_gone(peer)
        failure = Failure(NackCode.PEER_LOST, f"a rank of the trainer is gone: {reason}", peer.name)
        return self.session.notify(failure.nack("update", ""))

    def answer_waiters(self, now_ms: float, *, is_new: bool = False) -> list[Effect]:
        """Answers every WAIT_ENGINES for which enough engines are ready.

        Engines are counted at most once in :data:`SETTLE_MS`, as routes are computed, because a
        thousand may join at once. If one ``is_new``, they are counted now.
        """
        self.count_due_ms = None
        self.is_due_known &= not is_new
        waits = self.session.waiters.values()
        if not any(len(self.registry.engines) >= wait.count for wait, _ in waits):
            return []
        self.is_due_known = False
        if now_ms < self._counted_ms + SETTLE_MS and not is_new:
            self.count_due_ms = self._counted_ms + SETTLE_MS
            return []
        self._counted_ms = now_ms
        effects: list[Effect] = []
        for msg_id, (wait, _) in list(self.session.waiters.items()):
            if self._ready_count() >= wait.count:
                view = GroupView(self.registry.views(now_ms, self.registry.ready()), self.version)
                effects += self.session.answer_ids([msg_id], view)
        return effects

    def _ready_count(self) -> int:
        """Returns how many engines are ready, without those that are about to open admission.

        The latter booted with closed admission, and serve the group's version.
        """
        ready = self.registry.ready()
        closed = (self.registry.engines[n] for n in ready if self.registry.is_not_admitting(n))
        opening = sum(peer.phase == "running" and peer.version >= self.version for peer in closed)
        return len(ready) - opening

    # -- parts of effects --------------------------------------------------------

    def note(self, event: str, update_id: str, level: str, fields: Mapping[str, object]) -> Note:
        """Returns a log event with the fields that every event of a group has.

        If the event ends an update, :attr:`ended` remembers how.

        Args:
            event: the event's name.
            update_id: the pause or update that it concerns; empty: none.
            level: ``debug``, ``info``, ``warning`` or ``error``.
            fields: its further fields.
        """
        if event in _ENDS:
            self.ended.pop(update_id, None)
            self.ended[update_id] = f"{_ENDS[event]} {fields[_REASONS[event]]}"[:_LONGEST_END]
            if len(self.ended) > _ENDED_KEPT:
                del self.ended[next(iter(self.ended))]
        common = {"group": self.name, "update_id": update_id, "epoch": self.epoch}
        return Note(event, level, {**common, **fields})

    def answer_at_once(self, msg_id: int, step: Step, update_id: str) -> list[Effect]:
        """Answers a request for a step that is already done, or that concerns no engine."""
        return self.session.answer_ids([msg_id], self.empty_ack(step, update_id))

    def empty_ack(self, step: Step, update_id: str) -> GroupAck:
        """Returns the acknowledgement of a step that was requested of no engine."""
        engines, excluded = len(self.registry.engines), tuple(self.update.excluded)
        return GroupAck(
            step, update_id, self.version, engines, excluded, 0, "", 0.0, 0.0, 0.0, (), ()
        )


class GroupSteps(GroupState):
    """Records steps that are done or have failed, answers their requests, and sends routes."""

    def on_step_done(self, barrier: AckBarrier, now_ms: float) -> list[Effect]:
        """Records that all engines have acknowledged a step, and answers its requests."""
        self.moved_ms = now_ms
        if barrier.step in _MOVES:
            self.registry.changes += 1
        if barrier.step is Step.COMMIT:
            return [*self._on_committed(), *self._answer(barrier, now_ms)]
        if barrier.step is Step.RESUME:
            self.last_resumed = self.pause.update_id
        return self._answer(barrier, now_ms)

    def _on_committed(self) -> list[Effect]:
        """Records a commit; engines with incomplete weights of the other model are quarantined."""
        update = self.update
        members, partial = update.members, update.partial
        self.registry.on_committed(
            members, update.version, partial, update.target, staged=update.staged
        )
        self.served.on_commit(update.version, self.registry)
        self.sleep.on_committed(members.keys() - partial)
        effects: list[Effect] = []
        for name in sorted(members.keys() & partial - self.sleep.discarded):
            reason = "only a part of an update of its other model is loaded"
            effects += self.quarantine(name, reason, self.update.update_id)
        return effects

    def _answer(self, barrier: AckBarrier, now_ms: float) -> list[Effect]:
        step, left_out = barrier.step, tuple(sorted(self.registry.unable()))
        answer = done_ack(barrier, self.pause, self.update, self.version, left_out, now_ms)
        fields = done_fields(barrier, answer, self.update)
        note = self.note(DONE_EVENTS[step], answer.update_id, "info", fields)
        reply = probe_report(self.update, answer) if step is Step.PROBE else answer
        return [note, *self.session.answer((step, barrier.chunk), reply)]

    def on_step_failed(self, failed: StepFailed) -> list[Effect]:
        """Logs why a step has failed, and refuses its requests."""
        step, failure = failed.step, failed.failure
        update_id = self.pause.update_id if step in WINDOW_STEPS else self.update.update_id
        event = "sleep_failed" if step in SLEEP_STEPS else "update_failed"
        if step in PAUSE_STEPS:
            event = "pause_failed"
        elif failure.code in (
            NackCode.TRANSFER_CLOSED,
            NackCode.DTYPE_KEPT,
        ):  # the trainer arms again
            event = "dtype_kept" if failure.code is NackCode.DTYPE_KEPT else "transfer_closed"
        level = "info" if event in ("transfer_closed", "dtype_kept") else "warning"
        fields = failure_fields(step.value, failure, failed.chunk)
        effects: list[Effect] = [self.note(event, update_id, level, fields)]
        keys = [(step, failed.chunk)]
        if step is Step.ABORT:
            for name in self.update.partial:
                self.registry.quarantine(name, f"update {update_id} ended half-loaded")
            aborted = self.empty_ack(Step.ABORT, update_id)
            effects += self.session.answer((Step.ABORT, 0), aborted)
            keys = [key for key in self.session.steps() if key[0] not in WINDOW_STEPS]
        for key in keys:
            nack = failure.nack(key[0].value, update_id, key[1])
            answers = self.session.answer(key, nack)
            effects += answers
            if step is Step.RESUME and not answers:  # no engine is left, and the owner counts on it
                effects += self.session.notify(nack)
        return effects

    def review_routes(
        self, effects: list[Effect], watchers: Watchers, now_ms: float
    ) -> list[Effect]:
        """Sends watchers the change of the routes, if there is one, and logs the change."""
        change = self.routing.changed(self.version, now_ms)
        effects = self.routing.hold(effects) if self.routing.is_holding else effects
        if change is None:
            return effects
        fields = {
            "version": change.version,
            "engines": len(self.routing.now.engines),
            "came": [each.engine for each in change.came],
            "gone": list(change.gone),
        }
        note, to = self.note("routes", "", "info", fields), watchers()
        return [*effects, note, *([Send(change, to, 0, self.name, self.epoch)] if to else ())]
