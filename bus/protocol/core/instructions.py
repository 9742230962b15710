"""Instructions that the pause, sleep and update machines return to their group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from bus.messages import Message, Step
    from bus.protocol.core.ack_barrier import AckBarrier
    from bus.protocol.core.failures import Failure


@dataclass(frozen=True, slots=True)
class Ask:
    """Sends a message to these engines at once."""

    message: Message
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepDone:
    """Reports that every engine of a barrier has acknowledged the step."""

    step: Step
    barrier: AckBarrier
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class StepFailed:
    """Reports that the step has failed, so that the trainer gets the failure."""

    step: Step
    failure: Failure
    chunk: int = 0


Instruction: TypeAlias = Ask | StepDone | StepFailed
