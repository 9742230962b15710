"""Instructions that the state machines of pause, sleep and update return to their group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from bus._protocol.core.ack_barrier import AckBarrier
    from bus._protocol.core.failures import Failure
    from bus.messages import Message, Step


@dataclass(frozen=True, slots=True)
class Ask:
    """Instruction: send a message to these engines at once."""

    message: Message
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepDone:
    """Instruction: answer the trainer that every engine of a barrier has done its step."""

    barrier: AckBarrier


@dataclass(frozen=True, slots=True)
class StepFailed:
    """Instruction: answer the trainer that the step has failed.

    ``chunk`` is the chunk's number; used only for the step ``chunk``.
    """

    step: Step
    failure: Failure
    chunk: int = 0


Instruction: TypeAlias = Ask | StepDone | StepFailed
