"""Base of a group's state machines that request steps from engines: pause, sleep and update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from bus._protocol.core.ack_barrier import AckBarrier
from bus._protocol.core.instructions import Ask, Instruction
from bus._protocol.core.state_table import E, S, StateMachine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bus.messages import Ack, Message, Step


class StepMachine(StateMachine[S, E], Generic[S, E]):
    """Base of state machines that request steps from engines, and wait for their ACKs.

    Attributes:
        update_id: the id of the pause or update.
        members: the engines that take part, each with its DP group.
        barrier: the step that engines have not all acknowledged; None: there is none.
    """

    def __init__(self, name: str, transitions: Mapping[tuple[S, E], S], initial: S) -> None:
        super().__init__(name, transitions, initial)
        self.update_id = ""
        self.members: dict[str, str] = {}
        self.barrier: AckBarrier | None = None

    def _ask(self, step: Step, message: Message, now_ms: float) -> list[Instruction]:
        """Requests a step from all members."""
        self.barrier = AckBarrier(step, message, self.members, now_ms)
        return [Ask(message, tuple(self.members))]

    def _is_last_ack(self, name: str, ack: Ack, now_ms: float) -> bool:
        """Records an engine's ACK; returns whether this ACK completes the step."""
        current = self.barrier
        if current is None or ack.step is not current.step or ack.update_id != self.update_id:
            return False
        return current.on_ack(name, ack, now_ms) and current.is_done

    def _dp_group_of(self, name: str) -> list[str]:
        """Returns the members in an engine's DP group, because they drop out together."""
        return [n for n, dp_group in self.members.items() if dp_group == self.members.get(name)]
