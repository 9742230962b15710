"""What the pause and update machines say to the group that composes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bus.errors import ProtocolError

if TYPE_CHECKING:
    from bus.messages import Message, NackCode, Step
    from bus.protocol.round import Round


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this of these engines, at once."""

    message: Message
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepDone:
    """A round is over and every engine in it has acked."""

    step: Step
    round: Round
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something can't be had; becomes the trainer's NACK."""

    code: NackCode
    detail: str
    peer: str = ""
    tensor: str = ""
    field: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The trainer's step has failed, and why."""

    step: Step
    failure: Failure
    chunk: int = 0


class IllegalTransition(ProtocolError):
    """A machine was told something that cannot happen in its state: a defect here."""

    def __init__(self, machine: str, state: str, event: str) -> None:
        super().__init__(f"{machine}: {event} in state {state} is not in its table")
