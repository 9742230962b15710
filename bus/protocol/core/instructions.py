"""What the pause, sleep and update machines tell the group that composes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bus.messages import Message, Step
    from bus.protocol.core.ack_barrier import AckBarrier
    from bus.protocol.core.failures import Failure


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this of these engines, at once."""

    message: Message
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepDone:
    """A round is over and every engine in it has acked."""

    step: Step
    barrier: AckBarrier
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The trainer's step has failed, and why."""

    step: Step
    failure: Failure
    chunk: int = 0
