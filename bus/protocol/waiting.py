"""Who is waited for, and who is out: what a status tells of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bus.messages import OutView, WaitView

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bus.protocol.round import Round

GONE_KEPT: Final = 64


def waits(rounds: Iterable[Round], now_ms: float) -> tuple[WaitView, ...]:
    """Every ack that has not come, by round, and by name."""
    found: list[WaitView] = []
    for each in rounds:
        asked = each.messages[0]
        update_id: str = getattr(asked, "update_id", "")
        waited_ms = round(now_ms - each.asked_ms, 1)
        names = [""] if each.awaits_sender else sorted(each.waiting)
        found += [
            WaitView(name, each.step.value, update_id, each.chunk, waited_ms) for name in names
        ]
    return tuple(found)


class Gone:
    """Engines that were of a group, the last :data:`GONE_KEPT`, until they are back."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def add(self, name: str, reason: str) -> None:
        """It has left, or was lost."""
        self._reasons[name] = reason
        if len(self._reasons) > GONE_KEPT:
            del self._reasons[next(iter(self._reasons))]

    def discard(self, name: str) -> None:
        """It is there."""
        self._reasons.pop(name, None)

    def views(self, quarantined: Mapping[str, str]) -> tuple[OutView, ...]:
        """These, and those that are there but quarantined, by name."""
        found = [OutView(n, "gone", why[:4096]) for n, why in self._reasons.items()]
        found += [OutView(n, "quarantined", why[:4096]) for n, why in quarantined.items()]
        return tuple(sorted(found, key=lambda view: (view.state, view.engine)))
