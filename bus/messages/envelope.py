"""What every frame carries."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from bus.messages.types import Count, Serial


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """What every frame carries. No dataclass: it is made and read with every frame, and
    a frozen dataclass of eleven fields takes ten times as long to make.

    ``id`` names the message and stays when it is sent again; ``seq`` grows with
    every frame of one ``boot`` (one life of a process), so that a receiver can
    tell a frame that is old or doubled. ``reply_to`` is the id of the message
    answered, or 0. ``epoch`` fences: see :mod:`bus.protocol.group.group`.
    """

    wire_major: Count
    wire_minor: Count
    kind: Annotated[str, Meta(max_length=64)]
    id: Count
    reply_to: Count
    sender: Annotated[str, Meta(min_length=1, max_length=128)]
    boot: Count
    group: Annotated[str, Meta(max_length=128)]
    epoch: Serial
    seq: Count
    body: msgspec.Raw
