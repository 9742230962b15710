"""Defines the reason of a refusal, its NACK, and the exception that carries the reason."""

from __future__ import annotations

from dataclasses import dataclass

from bus.messages import Nack, NackCode


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason of a refusal. Fields as in :class:`bus.messages.Nack`."""

    code: NackCode
    detail: str
    peer: str = ""
    tensor: str = ""
    field: str = ""
    hint: str = ""

    def nack(self, step: str = "", update_id: str = "", chunk: int = 0) -> Nack:
        """Returns the NACK with this reason, its texts cut to the bounds of the wire.

        Args:
            step: the step of a pause or an update that is refused; empty: none.
            update_id: the pause or update of that step.
            chunk: the chunk's number; used only for the step ``chunk``.
        """
        return Nack(
            code=self.code,
            step=step,
            update_id=update_id,
            chunk=chunk,
            detail=self.detail[:4096],
            field=self.field[:256],
            peer=self.peer[:256],
            tensor=self.tensor[:512],
            hint=self.hint[:4096],
            retry_after_ms=0,
        )


class Declined(Exception):
    """Raised when a command is refused; carries the reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


def decline(
    code: NackCode, detail: str, peer: str = "", *, field: str = "", hint: str = ""
) -> Declined:
    """Returns the error that declines a command; arguments as in :class:`Failure`."""
    return Declined(Failure(code, detail, peer, field=field, hint=hint))


def swap_cancelled(detail: str) -> Declined:
    """Returns the error of a cancelled swap. The engine continues to serve its old weights."""
    return decline(NackCode.CALLED_OFF, detail)


def wrong_state(detail: str, field: str = "", hint: str = "") -> Declined:
    """Returns the error of a command that does not fit the present state."""
    return decline(NackCode.WRONG_STATE, detail, field=field, hint=hint)
