"""Refusals that a trainer's own side makes: the broker was not asked, or did not say so."""

from __future__ import annotations

from bus.errors import Refused
from bus.messages import Nack, NackCode


def own_nack(
    code: NackCode,
    detail: str,
    *,
    step: str = "update",
    update_id: str = "",
    field: str = "",
    hint: str = "",
) -> Nack:
    """A NACK of nobody else's."""
    return Nack(
        code=code,
        step=step,
        update_id=update_id,
        chunk=0,
        detail=detail[:4096],
        field=field,
        peer="",
        tensor="",
        hint=hint,
        retry_after_ms=0,
    )


def nack_of(error: BaseException) -> Nack:
    """What others are told of a failure here."""
    if isinstance(error, Refused):
        return error.nack
    return own_nack(NackCode.CANCELLED, f"rank 0: {type(error).__name__}: {error}")
