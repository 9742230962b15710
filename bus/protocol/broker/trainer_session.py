"""A trainer's requests: which wait for which step, and what was answered.

A request is known by its message id. Asked again while it waits, it goes on waiting;
asked again after its answer, it gets the same answer. So a trainer may ask as often
as it likes, and nothing is done twice.

Who holds a group: its trainer, the epoch it was given, its requests and their answers.

Invariants: one trainer holds a group at a time; every new holder gets a higher epoch
than any before it; a command of an older epoch, or of somebody else, is declined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from bus.messages import Message, NackCode, Step, WaitEngines
from bus.protocol.broker.admission import OPEN_REQUESTS
from bus.protocol.broker.replies import ASKS_FOR, nack_of
from bus.protocol.core.effects import Effect, Note, Send
from bus.protocol.core.failures import Declined, Failure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus.protocol.broker.membership import Peer


Key: TypeAlias = tuple[Step, int]  # a step, and the chunk's number for Step.CHUNK

Answer: TypeAlias = tuple[int, Message]


ANSWERS_KEPT: Final = 256


class OpenRequests:
    """One holder's; forgotten when the group changes hands."""

    def __init__(self) -> None:
        self.waiters: dict[int, tuple[WaitEngines, float]] = {}  # with their deadlines
        self._asked: dict[Key, list[int]] = {}
        self._answers: dict[int, Message] = {}

    def answer_of(self, msg_id: int) -> Message | None:
        """What this request was answered, if it was."""
        return self._answers.get(msg_id)

    @property
    def open(self) -> int:
        """How many wait for their answers."""
        return len(self.waiters) + sum(map(len, self._asked.values()))

    def is_waiting(self, msg_id: int) -> bool:
        """Whether this request is waiting for its answer."""
        return msg_id in self.waiters or any(msg_id in ids for ids in self._asked.values())

    def ask(self, key: Key, msg_id: int) -> None:
        """This request waits for that step."""
        self._asked.setdefault(key, []).append(msg_id)

    def steps(self) -> list[Key]:
        """The steps that are waited for."""
        return list(self._asked)

    def answer(self, key: Key, message: Message) -> list[Answer]:
        """Everybody who waits for the step gets this answer."""
        return self.answer_ids(self._asked.pop(key, []), message)

    def answer_ids(self, ids: Iterable[int], message: Message) -> list[Answer]:
        """These requests get this answer."""
        answers: list[Answer] = []
        for msg_id in ids:
            self.waiters.pop(msg_id, None)
            self._answers[msg_id] = message
            answers.append((msg_id, message))
        while len(self._answers) > ANSWERS_KEPT:
            del self._answers[next(iter(self._answers))]
        return answers


class TrainerSession:
    """One group's. ``epoch`` is the group's; engines of an earlier broker may have raised
    it since the holder was given its own."""

    def __init__(self, group: str) -> None:
        self.epoch = 0
        self.owner: Peer | None = None
        self.requests = OpenRequests()
        self.granted_epoch = 0  # the epoch that the holder was given
        self._group = group

    def claim(self, trainer: Peer, now_ms: float) -> Failure | None:
        """A trainer takes the group, with a new epoch; or why it can't."""
        old = self.owner
        if old is not None and old.boot != trainer.boot:
            return Failure(
                NackCode.GROUP_HELD,
                f"group {self._group} is held by trainer {old.name} ({old.host}:{old.pid}), "
                f"heard {now_ms - old.last_heard_ms:.0f} ms ago",
                field="group",
                peer=old.name,
                hint="stop it, or wait until the bus has missed it",
            )
        if old is None:
            self.epoch += 1
            self.granted_epoch = self.epoch
            self.requests = OpenRequests()
        self.owner = trainer
        return None

    def release(self) -> None:
        """The holder is gone; nobody waits for its answers any more."""
        self.owner = None
        self.requests = OpenRequests()

    def check(self, trainer: Peer, epoch: int) -> None:
        """Whether this trainer may command.

        Raises:
            Declined: it does not hold the group, its epoch is over, or it has too many requests
                open.
        """
        if trainer is not self.owner:
            raise Declined(
                Failure(NackCode.FORBIDDEN, f"{trainer.name} does not hold group {self._group}")
            )
        if not self.granted_epoch <= epoch <= self.epoch:
            raise Declined(
                Failure(
                    NackCode.FENCED,
                    f"epoch {epoch}, the group is at {self.epoch}",
                    field="epoch",
                    hint="this trainer was replaced; join again to take the group",
                )
            )
        if self.requests.open >= OPEN_REQUESTS:
            raise Declined(
                Failure(NackCode.RATE_LIMITED, f"{OPEN_REQUESTS} requests wait for their answers")
            )

    def answer_again(self, trainer: Peer, msg_id: int) -> list[Effect] | None:
        """What to do with a request that was asked before; None for a new one."""
        if trainer is not self.owner:
            return None
        answer = self.requests.answer_of(msg_id)
        if answer is not None:
            return self._send([(msg_id, answer)])
        return [] if self.requests.is_waiting(msg_id) else None

    def decline(
        self, trainer: Peer, msg_id: int, message: Message, failure: Failure
    ) -> list[Effect]:
        """Refuse a command, with the reason."""
        step = ASKS_FOR.get(type(message), "")
        nack = nack_of(failure, step, getattr(message, "update_id", ""))
        if trainer is self.owner:
            self.requests.answer_ids([msg_id], nack)
        fields = {
            "group": self._group,
            "update_id": nack.update_id,
            "epoch": self.epoch,
            "peer": trainer.name,
            "code": nack.code.value,
            "detail": nack.detail,
        }
        return [
            Note("refused", "warning", fields),
            Send(nack, (trainer.route,), msg_id, self._group, self.epoch),
        ]

    def answer(self, key: Key, message: Message) -> list[Effect]:
        """Everybody who waits for the step gets this answer."""
        return self._send(self.requests.answer(key, message))

    def answer_ids(self, ids: Iterable[int], message: Message) -> list[Effect]:
        """These requests get this answer."""
        return self._send(self.requests.answer_ids(ids, message))

    def notify(self, message: Message) -> list[Effect]:
        """The holder hears of something that it has not asked for."""
        return self._send([(0, message)])

    def _send(self, answers: Iterable[Answer]) -> list[Effect]:
        if self.owner is None:
            return []
        route = (self.owner.route,)
        return [
            Send(message, route, msg_id, self._group, self.epoch) for msg_id, message in answers
        ]
