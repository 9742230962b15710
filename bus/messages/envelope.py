"""Defines the fields that every frame on the bus carries in addition to its message."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from bus.messages.types import Count, Serial


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """The fields of every frame: sender, message id, epoch, and the encoded message.

    Attributes:
        wire_version: the sender's wire version; see :mod:`bus.messages.codec`.
        kind: the message's wire name, such as ``COMMIT``.
        id: names the message. A repeated message keeps its id.
        reply_to: the id of the message that this message answers; 0: none.
        sender: the name of the sending peer, or ``broker``.
        boot: identifies the sending process; after a restart it is another number.
        group: the group that the message concerns; empty: none.
        epoch: the fencing epoch; see :mod:`bus._protocol.group.group`.
        seq: grows with every frame of one ``boot``, so that receivers drop old and repeated frames.
        body: the encoded message.
    """

    wire_version: Count
    kind: Annotated[str, Meta(max_length=64)]
    id: Count
    reply_to: Count
    sender: Annotated[str, Meta(min_length=1, max_length=128)]
    boot: Count
    group: Annotated[str, Meta(max_length=128)]
    epoch: Serial
    seq: Count
    body: msgspec.Raw
