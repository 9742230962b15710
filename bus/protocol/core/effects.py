"""What the machines tell their shell to do. The shell obeys and judges nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bus.messages import Message


class Send(msgspec.Struct, frozen=True):
    """Send one message to peers, encoded once. As with the envelope, one is made per frame.

    ``routes`` are the transport's names of the peers; a peer's own machine sends
    to the broker and leaves them empty.
    """

    message: Message
    routes: tuple[bytes, ...] = ()
    reply_to: int = 0
    group: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Note:
    """Something an operator wants to read: one line of the log.

    ``level`` is ``debug``, ``info``, ``warning`` or ``error``. Durations among the
    fields are in milliseconds.
    """

    event: str
    level: str = "info"
    fields: Mapping[str, object] = field(default_factory=dict)


Effect: TypeAlias = Send | Note
