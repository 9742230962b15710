"""Makes errors that originate in the trainer's process, not at the broker.

These are NACKs, and the :class:`bus.errors.BusTimeout` of an unanswered request. That error names
the step, the chunk, the peer that has not answered, and when the peer was last heard.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bus._protocol.core.config import BROKER_NAME
from bus._protocol.core.failures import Failure
from bus.errors import BusClosed, BusTimeout, Refused
from bus.messages import (
    GROUP_STEPS,
    WIRE_NAMES,
    ChunkSent,
    NackCode,
    WeightChunkMeta,
    step_name,
)

if TYPE_CHECKING:
    from bus.messages import GroupStatus, Message, Nack, WaitView


def require_process(pid: int, broker: str) -> None:
    """Checks that a connection is used by the process that has opened it.

    A forked process has neither the threads nor the event loop of the other one, so that its calls
    would never end.

    Args:
        pid: the process that has connected.
        broker: the broker's address.

    Raises:
        BusClosed: this process was forked from that one.
    """
    if pid and pid != os.getpid():
        raise BusClosed(
            f"this process was forked from {pid}, which is connected to {broker}: make an agent or "
            f"a client of its own here, and connect it to {broker}"
        )


def nack_of(error: BaseException) -> Nack:
    """Returns the NACK by which rank 0 reports an error to the other ranks."""
    if isinstance(error, Refused):
        return error.nack
    detail = f"rank 0: {type(error).__name__}: {error}"
    if isinstance(error, BusTimeout):
        step, chunk = error.step or "update", error.chunk or 0
        return Failure(NackCode.TIMEOUT, detail, error.peer).nack(step, chunk=chunk)
    return Failure(NackCode.CANCELLED, detail).nack("update")


# How many engines an error names.
_MAX_NAMED = 8


def silent_broker(asked: Message, wait_s: float, address: str, heard_s: float) -> BusTimeout:
    """Returns the error for a request that the broker has not answered in time.

    Args:
        asked: the request.
        wait_s: how long the trainer has waited for the answer, in seconds.
        address: the broker's address.
        heard_s: how long ago the broker was last heard, in seconds.
    """
    return BusTimeout(
        f"no answer to {_request(asked)} within {wait_s:g} s; the broker at {address} is silent, "
        f"last heard {heard_s:.1f} s ago",
        peer=BROKER_NAME,
        step=_step(asked),
        chunk=_chunk(asked),
        heard_s=heard_s,
    )


def silent_engines(
    asked: Message, wait_s: float, name: str, group: GroupStatus | None
) -> BusTimeout:
    """Returns the error for a request that engines have not acknowledged in time.

    Args:
        asked: the request.
        wait_s: how long the trainer has waited for the answer, in seconds.
        name: the group's name.
        group: the group's status; None if the broker does not know it.
    """
    what = f"no answer to {_request(asked)} within {wait_s:g} s"
    step, chunk = _step(asked), _chunk(asked)
    if group is None:
        detail = f"{what}; the broker does not know group {name}"
        return BusTimeout(detail, peer=BROKER_NAME, step=step, chunk=chunk)
    silent_s = {engine.name: engine.last_heard_ms / 1000 for engine in group.engines}
    waits = [wait for wait in group.waits if wait.engine]
    # Several chunks may be in flight: engines that delay this one come first.
    waits.sort(key=lambda wait: (wait.step, wait.chunk) != (step, chunk or 0))
    described = [_describe_wait(wait, silent_s.get(wait.engine)) for wait in waits[:_MAX_NAMED]]
    return BusTimeout(
        f"{what}; group {name} is {group.pause}, update {group.update}, "
        f"waiting for: {', '.join(described) or 'nobody'}",
        peer=waits[0].engine if waits else "",
        step=step,
        chunk=chunk,
        heard_s=silent_s.get(waits[0].engine) if waits else None,
    )


def _describe_wait(wait: WaitView, heard_s: float | None) -> str:
    step = step_name(wait.step, wait.chunk)
    last_frame = "" if heard_s is None else f", heard {heard_s:.1f} s ago"
    return f"{wait.engine} ({step} for {wait.waited_ms / 1000:.1f} s{last_frame})"


def _request(asked: Message) -> str:
    chunk = _chunk(asked)
    name = WIRE_NAMES[type(asked)]
    return name if chunk is None else f"{name} of chunk {chunk}"


def _step(asked: Message) -> str:
    """Returns a request's step, as NACKs name it; the message's name if none."""
    step = GROUP_STEPS.get(type(asked))
    return WIRE_NAMES[type(asked)] if step is None else step.value


def _chunk(asked: Message) -> int | None:
    return asked.chunk if isinstance(asked, (WeightChunkMeta, ChunkSent)) else None
