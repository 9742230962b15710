"""The state of one group, for all rules that read or change it.

The modules :mod:`~bus.protocol.group.commands`, :mod:`~bus.protocol.group.timeouts` and
:mod:`~bus.protocol.group.status` work on a :class:`GroupState` and return actions. Only
:class:`bus.protocol.group.group.Group` executes actions, so none of them imports the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from bus.messages import GroupAck, GroupView, Message, NackCode, Step
from bus.protocol.core.effects import Effect, Note
from bus.protocol.core.failures import Failure
from bus.protocol.core.instructions import Instruction
from bus.protocol.dp.groups import DpGroups
from bus.protocol.group.catch_up import GroupVersion
from bus.protocol.group.engine_registry import EngineRegistry
from bus.protocol.group.pause import PauseMachine, PauseState
from bus.protocol.group.routing import Routing
from bus.protocol.group.sleep import SleepMachine
from bus.protocol.group.trainer_session import Followers, TrainerSession
from bus.protocol.group.update import UpdateMachine, UpdateState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bus.protocol.core.ack_barrier import AckBarrier
    from bus.protocol.core.config import BrokerConfig
    from bus.protocol.core.membership import Peer

_ENDED_KEPT: Final = 64
_LONGEST_END: Final = 4096
# The events that end an update: in words, and the field that says more.
_ENDS: Final = {"committed": "was committed as version", "update_failed": "failed:"}
_REASONS: Final = {"committed": "version", "update_failed": "detail"}
# The result of a rule. The group executes instructions, and passes effects on unchanged.
Action: TypeAlias = Instruction | Effect


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
        ended: how the last updates ended, by their ids, in words.
        moved_ms: when the trainer last made progress, or was last answered.
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
        """The trainer that owns the group."""
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
        """Quarantines an engine and logs it, unless it is quarantined already."""
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

    def answer_waiters(self, now_ms: float) -> list[Effect]:
        """Answers every WAIT_ENGINES for which enough engines are ready."""
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
