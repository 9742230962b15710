"""A trainer's requests: which wait for which step, and what was answered.

A request is known by its message id. Asked again while it waits, it goes on waiting;
asked again after its answer, it gets the same answer. So a trainer may ask as often
as it likes, and nothing is done twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from bus.messages import Message, Step, WaitEngines

if TYPE_CHECKING:
    from collections.abc import Iterable

Key: TypeAlias = tuple[Step, int]  # a step, and the chunk's number for Step.CHUNK
Answer: TypeAlias = tuple[int, Message]

ANSWERS_KEPT: Final = 256


class Requests:
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

    def waits(self, msg_id: int) -> bool:
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
