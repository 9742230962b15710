"""The other ranks of a trainer: they wait for what rank 0, which holds the group, tells them.

::

    rank 0 tells     every other rank, in its n-th update
    (nothing yet)    waits; it touches no tensor, since peers would wait for it in a collective
    GO n             gathers its tensors beside rank 0, and sends none; or meets the engines
                     where rank 0 says, if GO says where
    END n            returns the version, or raises what rank 0 raised

Invariants: nobody is told GO for tensors before rank 0 has heard that all engines are armed;
END with a failure answers those who still wait for GO, too; when rank 0 is gone, all who
wait are told so, and what it said is forgotten, since its successor counts anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bus.messages import AwaitStep, Nack, TrainerPoint, TrainerStep
from bus.protocol.core.effects import Effect, Send

if TYPE_CHECKING:
    from bus.protocol.broker.membership import Peer

UPDATES_KEPT: Final = 4


class Followers:
    """One group's. A follower waits for one thing at a time: what it asked last."""

    def __init__(self) -> None:
        self._deliver: dict[tuple[int, TrainerPoint], TrainerStep] = {}
        self._waiting: dict[str, tuple[Peer, int, AwaitStep]] = {}  # with its request's id

    def on_await_step(self, peer: Peer, msg_id: int, message: AwaitStep) -> list[Effect]:
        """AWAIT_STEP: answered at once, or when rank 0 has come so far."""
        self._waiting[peer.name] = (peer, msg_id, message)
        return self._answers()

    def on_trainer_step(self, message: TrainerStep) -> list[Effect]:
        """TRAINER_STEP."""
        self._deliver[message.number, message.point] = message
        for number, point in list(self._deliver):
            if number <= message.number - UPDATES_KEPT:
                del self._deliver[number, point]
        return self._answers()

    def on_gone(self, peer: Peer) -> None:
        """A follower has left, or is dead."""
        waiting = self._waiting.get(peer.name)
        if waiting is not None and waiting[0] is peer:
            del self._waiting[peer.name]

    def on_leader_gone(self, nack: Nack) -> list[Effect]:
        """Rank 0 has left, or is dead."""
        effects: list[Effect] = [
            _tell(peer, msg_id, TrainerStep(asked.number, asked.point, 0, nack, b""))
            for peer, msg_id, asked in self._waiting.values()
        ]
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

    def _answer(self, number: int, point: TrainerPoint) -> TrainerStep | None:
        ended = self._deliver.get((number, "end"))
        if ended is not None and (point == "end" or ended.failure is not None):
            return ended
        return self._deliver.get((number, point))


def _tell(peer: Peer, msg_id: int, step: TrainerStep) -> Send:
    return Send(step, (peer.route,), msg_id, peer.group)
