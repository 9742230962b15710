"""Effects: what a state machine returns, for its driver (the I/O code) to execute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bus.messages import Message


class Send(msgspec.Struct, frozen=True):
    """Effect: the driver sends one message to these peers, encoded once.

    A ``Struct`` for speed, like the envelope, because one is made per frame.

    Attributes:
        message: the message.
        routes: the routing ids of the receivers' connections; empty: to the broker.
        reply_to: the id of the message that this one answers; 0: none.
        group: the group that the message concerns; empty: none.
        epoch: the group's fencing epoch.
    """

    message: Message
    routes: tuple[bytes, ...] = ()
    reply_to: int = 0
    group: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Note:
    """Effect: the driver logs one event for operators.

    Attributes:
        event: the event's name.
        level: ``debug``, ``info``, ``warning`` or ``error``.
        fields: the event's fields. Durations are in milliseconds.
    """

    event: str
    level: str = "info"
    fields: Mapping[str, object] = field(default_factory=dict)


Effect: TypeAlias = Send | Note
