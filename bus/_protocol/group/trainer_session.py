"""Tracks a group's owning trainer, that trainer's requests, and its follower ranks.

The message id identifies a request. If the trainer repeats a request that has no answer yet,
nothing changes. If it repeats an answered request, it gets the same answer. So a trainer may
repeat requests at any time, and no command is executed twice.

Invariants of ownership:

- One trainer owns a group at a time.
- Every new owner gets a higher epoch than all owners before it.
- A command with an older epoch, or from another peer, is declined.

Rank 0 of a trainer owns the group. The other ranks are its followers. For each update, a follower
waits until rank 0 sends GO and END with the number ``n`` of the update::

    rank 0 has sent  a follower
    (nothing yet)    waits, and touches no tensor: other ranks would block in its collectives
    GO n             gathers its tensors together with rank 0, and sends none; or, if GO has an
                     address, connects to the engines there
    END n            returns the version, or raises rank 0's error

Invariants of followers:

- Rank 0 sends a GO for tensors only after all engines are armed.
- An END with a failure also answers followers that wait for GO.
- If rank 0 leaves or dies, all waiting followers get an error, also when they repeat their request.
  Its GOs and ENDs are discarded, because its successor counts from 1 again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from bus import messages as m
from bus._protocol.core.access import OPEN_REQUESTS
from bus._protocol.core.effects import Effect, Note, Send
from bus._protocol.core.failures import Failure, decline

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._protocol.core.membership import Peer


Key: TypeAlias = tuple[m.Step, int]  # a step, and the chunk's number for Step.CHUNK

ANSWERS_KEPT: Final = 256
UPDATES_KEPT: Final = 4


class TrainerSession:
    """Tracks which trainer owns a group, that trainer's requests, and their answers.

    Attributes:
        epoch: the group's fencing epoch. Engines that outlived an earlier broker may raise it above
            the epoch that the owner was granted.
        owner: the trainer that owns the group; None: no trainer does.
        granted_epoch: the epoch that the owner was granted.
        known_epoch: the epoch in the owner's JOIN, from an earlier broker or ownership.
        waiters: the WAIT_ENGINES that wait for engines, by request id, with their deadlines.
    """

    def __init__(self, group: str) -> None:
        self.epoch = 0
        self.owner: Peer | None = None
        self.granted_epoch = 0
        self.known_epoch = 0
        self._group = group
        self._discard_requests()

    def _discard_requests(self) -> None:
        self.waiters: dict[int, tuple[m.WaitEngines, float]] = {}
        self._asked: dict[Key, list[int]] = {}  # the requests that wait for a step
        self._answers: dict[int, m.Message] = {}

    # -- ownership --------------------------------------------------------------

    def claim(self, trainer: Peer, now_ms: float) -> Failure | None:
        """Makes a trainer the owner of the group, with a new epoch.

        An owner that joins again keeps its epoch and its requests.

        Returns:
            Why the trainer can't be the owner; None: the trainer is the owner.
        """
        old = self.owner
        if old is not None and old.boot != trainer.boot:
            return Failure(
                m.NackCode.GROUP_HELD,
                f"group {self._group} is owned by trainer {old.name} ({old.host}:{old.pid}), "
                f"last heard {now_ms - old.last_heard_ms:.0f} ms ago",
                field="group",
                peer=old.name,
                hint="stop that trainer; if it is dead, wait for the broker's peer timeout",
            )
        if old is None:
            self.epoch += 1
            self.granted_epoch = self.epoch
            self.known_epoch = trainer.joined_epoch
            self._discard_requests()
        self.owner = trainer
        return None

    def release(self) -> None:
        """Removes the owner and its requests."""
        self.owner = None
        self._discard_requests()

    def check(self, trainer: Peer, epoch: int) -> None:
        """Checks that this trainer may command the group.

        Raises:
            Declined: the trainer does not own the group, its epoch is outdated, or too many of its
                requests are open.
        """
        if trainer is not self.owner:
            raise decline(m.NackCode.FORBIDDEN, f"{trainer.name} does not own group {self._group}")
        if not self.granted_epoch <= epoch <= self.epoch:
            raise decline(
                m.NackCode.FENCED,
                f"the command has epoch {epoch}, and the group has {self.epoch}",
                field="epoch",
                hint="this trainer was replaced; join again to take the group",
            )
        if self.open_requests >= OPEN_REQUESTS:
            raise decline(
                m.NackCode.RATE_LIMITED,
                f"{OPEN_REQUESTS} requests of this trainer have no answer yet",
                hint="wait for answers before sending more",
            )

    # -- requests and answers -----------------------------------------------------

    @property
    def open_requests(self) -> int:
        """The number of requests that wait for their answers."""
        return len(self.waiters) + sum(map(len, self._asked.values()))

    def ask(self, key: Key, msg_id: int) -> None:
        """Registers the request ``msg_id`` as waiting for a step or a chunk."""
        self._asked.setdefault(key, []).append(msg_id)

    def steps(self) -> list[Key]:
        """Returns the steps that requests wait for."""
        return list(self._asked)

    def answer_again(self, trainer: Peer, msg_id: int) -> list[Effect] | None:
        """Returns the answer to a repeated request; None: the request is new.

        The answer is empty while the first request still waits.
        """
        if trainer is not self.owner:
            return None
        if msg_id in self._answers:
            return self.notify(self._answers[msg_id], msg_id)
        waits = msg_id in self.waiters or any(msg_id in ids for ids in self._asked.values())
        return [] if waits else None

    def decline(
        self, trainer: Peer, msg_id: int, message: m.Message, failure: Failure
    ) -> list[Effect]:
        """Refuses a command, with the reason.

        The refusal is kept for repeated requests, except that of an ARM without tensors, which the
        trainer repeats with them.
        """
        step = m.GROUP_STEPS.get(type(message), "")
        nack = failure.nack(step, getattr(message, "update_id", ""))
        if trainer is self.owner and nack.code is not m.NackCode.MANIFEST_UNKNOWN:
            self.answer_ids([msg_id], nack)
        level = "info" if nack.code is m.NackCode.MANIFEST_UNKNOWN else "warning"
        fields = {
            "group": self._group,
            "update_id": nack.update_id,
            "epoch": self.epoch,
            "peer": trainer.name,
            "code": nack.code.value,
            "detail": nack.detail,
        }
        return [
            Note("refused", level, fields),
            Send(nack, (trainer.route,), msg_id, self._group, self.epoch),
        ]

    def answer(self, key: Key, message: m.Message) -> list[Effect]:
        """Answers every request that waits for the step."""
        return self.answer_ids(self._asked.pop(key, []), message)

    def answer_ids(self, ids: Iterable[int], message: m.Message) -> list[Effect]:
        """Answers the requests with these ids, and keeps the answers for repeated requests."""
        effects: list[Effect] = []
        for msg_id in ids:
            self.waiters.pop(msg_id, None)
            self._answers[msg_id] = message
            effects += self.notify(message, msg_id)
        while len(self._answers) > ANSWERS_KEPT:
            del self._answers[next(iter(self._answers))]
        return effects

    def notify(self, message: m.Message, reply_to: int = 0) -> list[Effect]:
        """Sends the owner a message; ``reply_to`` 0: the message answers no request."""
        if self.owner is None:
            return []
        return [Send(message, (self.owner.route,), reply_to, self._group, self.epoch)]


class Followers:
    """The other ranks of one group's trainer, and the steps that rank 0 has announced.

    A follower waits for one step at a time: the one that it asked for last.
    """

    def __init__(self) -> None:
        self._deliver: dict[tuple[int, m.TrainerPoint], m.TrainerStep] = {}
        self._waiting: dict[str, tuple[Peer, int, m.AwaitStep]] = {}  # with its request's id
        # Requests that rank 0 left unanswered: the follower's boot, the request's id, the error.
        self._failed: dict[str, tuple[int, int, m.Nack]] = {}

    def on_await_step(self, peer: Peer, msg_id: int, message: m.AwaitStep) -> list[Effect]:
        """Answers an AWAIT_STEP at once, or when rank 0 announces the step."""
        failed = self._failed.get(peer.name)
        if failed is not None and failed[:2] == (peer.boot, msg_id):
            return [_fail(peer, msg_id, message, failed[2])]
        self._waiting[peer.name] = (peer, msg_id, message)
        return self._answers()

    def on_trainer_step(self, message: m.TrainerStep) -> list[Effect]:
        """Records a TRAINER_STEP of rank 0, and answers the followers that wait for it."""
        self._deliver[message.number, message.point] = message
        for number, point in list(self._deliver):
            if number <= message.number - UPDATES_KEPT:
                del self._deliver[number, point]
        return self._answers()

    def on_gone(self, peer: Peer) -> None:
        """Removes a follower that left or was lost."""
        self._failed.pop(peer.name, None)
        waiting = self._waiting.get(peer.name)
        if waiting is not None and waiting[0] is peer:
            del self._waiting[peer.name]

    def on_leader_gone(self, nack: m.Nack) -> list[Effect]:
        """Answers all waiting followers with an error, because rank 0 left or was lost."""
        effects: list[Effect] = []
        for name, (peer, msg_id, asked) in self._waiting.items():
            self._failed[name] = (peer.boot, msg_id, nack)
            effects.append(_fail(peer, msg_id, asked, nack))
        self._deliver.clear()
        self._waiting.clear()
        return effects

    def _answers(self) -> list[Effect]:
        effects: list[Effect] = []
        for name, (peer, msg_id, asked) in list(self._waiting.items()):
            answer = self._answer(asked.number, asked.point)
            if answer is not None:
                del self._waiting[name]
                effects.append(_tell(peer, msg_id, answer))
        return effects

    def _answer(self, number: int, point: m.TrainerPoint) -> m.TrainerStep | None:
        ended = self._deliver.get((number, "end"))
        if ended is not None and (point == "end" or ended.failure is not None):
            return ended
        return self._deliver.get((number, point))


def _tell(peer: Peer, msg_id: int, step: m.TrainerStep) -> Send:
    return Send(step, (peer.route,), msg_id, peer.group)


def _fail(peer: Peer, msg_id: int, asked: m.AwaitStep, failure: m.Nack) -> Send:
    return _tell(peer, msg_id, m.TrainerStep(asked.number, asked.point, 0, failure, b""))
