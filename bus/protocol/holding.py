"""Who holds a group: its trainer, the epoch it was given, its requests and their answers.

Invariants: one trainer holds a group at a time; every new holder gets a higher epoch
than any before it; a command of an older epoch, or of somebody else, is declined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.messages import NackCode
from bus.protocol.effects import Effect, Note, Send
from bus.protocol.instructions import Failure
from bus.protocol.limits import OPEN_REQUESTS
from bus.protocol.refusal import Declined
from bus.protocol.requests import Answer, Key, Requests
from bus.protocol.wording import ASKS_FOR, failed_nack

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus.messages import Message
    from bus.protocol.membership import Peer


class Holding:
    """One group's. ``epoch`` is the group's; engines of an earlier broker may have raised
    it since the holder was given its own."""

    def __init__(self, group: str) -> None:
        self.epoch = 0
        self.trainer: Peer | None = None
        self.requests = Requests()
        self.granted = 0  # the epoch that the holder was given
        self._group = group

    def take(self, trainer: Peer, now_ms: float) -> Failure | None:
        """A trainer takes the group, with a new epoch; or why it can't."""
        old = self.trainer
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
            self.granted = self.epoch
            self.requests = Requests()
        self.trainer = trainer
        return None

    def release(self) -> None:
        """The holder is gone; nobody waits for its answers any more."""
        self.trainer = None
        self.requests = Requests()

    def check(self, trainer: Peer, epoch: int) -> None:
        """Whether this trainer may command.

        Raises:
            Declined: it does not hold the group, its epoch is over, or it has too many requests
                open.
        """
        if trainer is not self.trainer:
            raise Declined(
                Failure(NackCode.FORBIDDEN, f"{trainer.name} does not hold group {self._group}")
            )
        if not self.granted <= epoch <= self.epoch:
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

    def repeated(self, trainer: Peer, msg_id: int) -> list[Effect] | None:
        """What to do with a request that was asked before; None for a new one."""
        if trainer is not self.trainer:
            return None
        answer = self.requests.answer_of(msg_id)
        if answer is not None:
            return self._tell([(msg_id, answer)])
        return [] if self.requests.waits(msg_id) else None

    def decline(
        self, trainer: Peer, msg_id: int, message: Message, failure: Failure
    ) -> list[Effect]:
        """Refuse a command, with the reason."""
        step = ASKS_FOR.get(type(message), "")
        nack = failed_nack(failure, step, getattr(message, "update_id", ""))
        if trainer is self.trainer:
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
        return self._tell(self.requests.answer(key, message))

    def answer_ids(self, ids: Iterable[int], message: Message) -> list[Effect]:
        """These requests get this answer."""
        return self._tell(self.requests.answer_ids(ids, message))

    def tell(self, message: Message) -> list[Effect]:
        """The holder hears of something that it has not asked for."""
        return self._tell([(0, message)])

    def _tell(self, answers: Iterable[Answer]) -> list[Effect]:
        if self.trainer is None:
            return []
        route = (self.trainer.route,)
        return [
            Send(message, route, msg_id, self._group, self.epoch) for msg_id, message in answers
        ]
