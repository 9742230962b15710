"""Why something can't be had: the reason, and the exception that carries it."""

from __future__ import annotations

from dataclasses import dataclass

from bus.messages import NackCode


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something can't be had; becomes the trainer's NACK."""

    code: NackCode
    detail: str
    peer: str = ""
    tensor: str = ""
    field: str = ""
    hint: str = ""


class Declined(Exception):
    """Carries why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


def swap_cancelled(detail: str) -> Declined:
    """A staged update was not swapped in; what was served before is."""
    return Declined(Failure(NackCode.CALLED_OFF, detail))


def wrong_state(detail: str, field: str = "", hint: str = "") -> Declined:
    """Not now."""
    return Declined(Failure(NackCode.WRONG_STATE, detail, field=field, hint=hint))
