"""Refusals that a trainer's own side makes: the broker was not asked, or did not say so."""

from __future__ import annotations

from bus.errors import BusTimeout, Refused
from bus.messages import Nack, NackCode


def own_nack(
    code: NackCode,
    detail: str,
    *,
    step: str = "update",
    update_id: str = "",
    chunk: int = 0,
    field: str = "",
    peer: str = "",
    hint: str = "",
) -> Nack:
    """A NACK of nobody else's."""
    return Nack(
        code=code,
        step=step,
        update_id=update_id,
        chunk=chunk,
        detail=detail[:4096],
        field=field,
        peer=peer,
        tensor="",
        hint=hint,
        retry_after_ms=0,
    )


def nack_of(error: BaseException) -> Nack:
    """What others are told of a failure here."""
    if isinstance(error, Refused):
        return error.nack
    detail = f"rank 0: {type(error).__name__}: {error}"
    if isinstance(error, BusTimeout):
        step, chunk = error.step or "update", error.chunk or 0
        return own_nack(NackCode.TIMEOUT, detail, step=step, chunk=chunk, peer=error.peer)
    return own_nack(NackCode.CANCELLED, detail)
