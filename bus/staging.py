"""What an engine answers to whether it can stage an update: receive it while it serves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """For an update that is armed.

    Attributes:
        needed_bytes: what staging takes, in the worker that needs most; 0 if that is not known.
        why_not: why there can be none; empty: there can.
    """

    needed_bytes: int = 0
    why_not: str = ""
