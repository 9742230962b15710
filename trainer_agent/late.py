"""What a trainer says of a step that has no answer in time: whose, which chunk, heard when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.errors import BusTimeout
from bus.messages import WIRE_NAMES, ChunkSent, WeightChunkMeta, step_name
from bus.protocol.broker.broker import BROKER_NAME
from bus.protocol.broker.replies import ASKS_FOR

if TYPE_CHECKING:
    from bus.messages import GroupStatus, Message, WaitView

# So many engines are named.
_NAMED = 8


def silent_broker(asked: Message, wait_s: float, address: str, heard_s: float) -> BusTimeout:
    """The broker does not answer. ``heard_s``: how long ago it was last heard."""
    return BusTimeout(
        f"no answer to {_what(asked)} within {wait_s:g} s; the broker at {address} is silent, "
        f"last heard {heard_s:.1f} s ago",
        peer=BROKER_NAME,
        step=_step(asked),
        chunk=_chunk(asked),
        heard_s=heard_s,
    )


def waits_on(asked: Message, wait_s: float, name: str, group: GroupStatus | None) -> BusTimeout:
    """The broker is there, and waits itself. ``group``: the one called ``name``, if it knows it."""
    what = f"no answer to {_what(asked)} within {wait_s:g} s"
    step, chunk = _step(asked), _chunk(asked)
    if group is None:
        detail = f"{what}; the broker does not know group {name}"
        return BusTimeout(detail, peer=BROKER_NAME, step=step, chunk=chunk)
    heard = {engine.name: engine.last_heard_ms / 1000 for engine in group.engines}
    waits = [wait for wait in group.waits if wait.engine]
    # Several chunks may be under way: who holds up the one that was asked for, comes first.
    waits.sort(key=lambda wait: (wait.step, wait.chunk) != (step, chunk or 0))
    told = [_told(wait, heard.get(wait.engine)) for wait in waits[:_NAMED]]
    return BusTimeout(
        f"{what}; group {name} is {group.pause}, update {group.update}, "
        f"waiting for: {', '.join(told) or 'nobody'}",
        peer=waits[0].engine if waits else "",
        step=step,
        chunk=chunk,
        heard_s=heard.get(waits[0].engine) if waits else None,
    )


def _told(wait: WaitView, heard_s: float | None) -> str:
    step = step_name(wait.step, wait.chunk)
    heard = "" if heard_s is None else f", heard {heard_s:.1f} s ago"
    return f"{wait.engine} ({step} for {wait.waited_ms / 1000:.1f} s{heard})"


def _what(asked: Message) -> str:
    chunk = _chunk(asked)
    name = WIRE_NAMES[type(asked)]
    return name if chunk is None else f"{name} of chunk {chunk}"


def _step(asked: Message) -> str:
    """As NACKs call it; of a message that asks for none, its own name."""
    step = ASKS_FOR.get(type(asked))
    return WIRE_NAMES[type(asked)] if step is None else step.value


def _chunk(asked: Message) -> int | None:
    return asked.chunk if isinstance(asked, (WeightChunkMeta, ChunkSent)) else None
