"""A command that is refused before anything happens; whoever catches it answers NACK."""

from __future__ import annotations

from bus.messages import NackCode
from bus.protocol.instructions import Failure


class Declined(Exception):
    """Carries why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


def called_off(detail: str) -> Declined:
    """A staged update was not swapped in; what was served before is."""
    return Declined(Failure(NackCode.CALLED_OFF, detail))


def wrong_state(detail: str, field: str = "", hint: str = "") -> Declined:
    """Not now."""
    return Declined(Failure(NackCode.WRONG_STATE, detail, field=field, hint=hint))
