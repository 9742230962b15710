"""Effects that the machines return, for their driver to execute without further decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bus.messages import Message


class Send(msgspec.Struct, frozen=True):
    """Sends one message to peers; the message is encoded once.

    ``routes`` are the transport's names of the peers. A peer's own machine sends to the broker and
    leaves them empty. A ``Struct`` for speed, like the envelope, because one is made per frame.
    """

    message: Message
    routes: tuple[bytes, ...] = ()
    reply_to: int = 0
    group: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Note:
    """One log event for operators.

    ``level`` is ``debug``, ``info``, ``warning`` or ``error``. Durations among the fields are in
    milliseconds.
    """

    event: str
    level: str = "info"
    fields: Mapping[str, object] = field(default_factory=dict)


Effect: TypeAlias = Send | Note
