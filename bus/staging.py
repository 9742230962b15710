"""What an engine answers to whether it can stage an update: receive it while it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bus.errors import EngineError
from bus.messages import NackCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.messages import Staging


@dataclass(frozen=True, slots=True)
class Room:
    """For an update that is armed.

    Attributes:
        needed_bytes: what staging takes, in the worker that needs most; 0 if that is not known.
        why_not: why there can be none; empty: there can.
    """

    needed_bytes: int = 0
    why_not: str = ""


def greatest(rooms: Sequence[Room]) -> Room:
    """Of an engine's workers: what it takes in the one that needs most, and why the first one can't
    that can't.

    Raises:
        ValueError: there are none.
    """
    return Room(
        max(room.needed_bytes for room in rooms),
        next((room.why_not for room in rooms if room.why_not), ""),
    )


def need_room(staging: Staging, room: Room) -> Room:
    """The same room, unless there is none, and there must be.

    Raises:
        EngineError: code ``staging_refused``.
    """
    if room.why_not and staging.required:
        raise EngineError(room.why_not, code=NackCode.STAGING_REFUSED)
    return room
