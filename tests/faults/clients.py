"""The cells of a client that forgets: it is killed, or its connection is cut, at a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OUTCOMES: Final = {
    "old": "All engines serve the old version.",
    "new": "All engines serve the new version.",
    "quarantined": "The update was loaded, or was being loaded: engines are quarantined until the "
    "next whole one.",
}
# The calls of one update, and what the engines do at last if no further one comes.
BROADCAST: Final = {
    "pause": "old",
    "init": "old",
    "start": "old",
    "update": "quarantined",
    "finish": "new",
    "resume": "new",
}
FOLDER: Final = {"pause": "old", "folder": "new", "resume": "new"}
# Within a call: the engine's call in which it is, and the same.
WITHIN: Final = {
    "pause": ("pause", "old"),
    "update": ("arm", "old"),
    "half": ("", "quarantined"),
    "finish": ("commit", "new"),
    "folder": ("arm", "old"),
    "resume": ("resume", "new"),
}


@dataclass(frozen=True, slots=True)
class ClientCell:
    """Where a client's process is killed: after a call was answered, or within it."""

    calls: tuple[str, ...]
    within: bool

    def __str__(self) -> str:
        kind = "folder" if "folder" in self.calls else "broadcast"
        return f"{kind}-{'within' if self.within else 'after'}-{self.calls[-1]}"

    @property
    def last(self) -> str:
        return self.calls[-1]

    @property
    def outcome(self) -> str:
        return WITHIN[self.last][1] if self.within else {**BROADCAST, **FOLDER}[self.last]

    @property
    def is_held_up(self) -> bool:
        """Whether the client has left a pause, which ends by its silence."""
        return self.last != "resume" and not (self.within and self.last == "pause")

    @property
    def held(self) -> str:
        """The engine's call that waits; empty: none."""
        return WITHIN[self.last][0] if self.within else ""


def _cells() -> list[ClientCell]:
    found = []
    for calls in (tuple(BROADCAST), tuple(FOLDER)):
        for count, call in enumerate(calls, 1):
            if call == "pause" and "folder" in calls:
                continue  # it is the same
            found.append(ClientCell(calls[:count], within=False))
            if call in WITHIN:
                found.append(ClientCell(calls[:count], within=True))
            if call == "update":
                found.append(ClientCell((*calls[: count - 1], "half"), within=True))
    return found


CLIENT_CELLS: Final = tuple(_cells())
# With each outcome, and each kind of transport.
_SHARED: Final = ("broadcast-after-start", "broadcast-within-half", "folder-after-folder")
CLIENT_SHARE: Final = tuple(each for each in CLIENT_CELLS if str(each) in _SHARED)
