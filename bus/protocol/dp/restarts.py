"""Who is stuck for good, and is to be started anew.

::

    event                       then
    a DP group is stuck         supervised: RESTART to all its ranks; else the status says so
    an engine is stuck          the same, of its DP group, be it of one
    again_ms later, still so    RESTART again
    the engine joins anew, or   forgotten
    moves

Nobody is sent RESTART who has not said, when joining, that it is started anew. Of a DP group
none, unless all ranks that are there have: a rank alone can't come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bus.messages import Restart
from bus.protocol.core.effects import Effect, Note, Send

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bus.protocol.core.membership import Peer

AGAIN_MS: Final = 5_000.0
UNSUPERVISED: Final = "nobody supervises it: restart {}"


class Restarts:
    """Of one group. ``epoch`` is the group's."""

    def __init__(self, group: str, epoch: Callable[[], int]) -> None:
        self._group = group
        self._epoch = epoch
        self._asked: dict[str, float] = {}  # by the DP group's name: when

    def advice(self, ranks: Iterable[Peer], size: int) -> str:
        """What a diagnosis has to add: who is to do something; empty if we do."""
        if _is_supervised(ranks):
            return ""
        return UNSUPERVISED.format(f"all {size} ranks" if size > 1 else "the engine")

    def stuck(self, dp_group: str, ranks: list[Peer], reason: str, now_ms: float) -> list[Effect]:
        """These don't go on by themselves: all ranks of the DP group that are there."""
        asked_ms = self._asked.get(dp_group)
        if asked_ms is not None and now_ms < asked_ms + AGAIN_MS:
            return []
        self._asked[dp_group] = now_ms
        supervised = _is_supervised(ranks)
        effects: list[Effect] = []
        if asked_ms is None:
            fields: dict[str, object] = {
                "group": self._group,
                "dp_group": dp_group,
                "peers": [peer.name for peer in ranks],
                "supervised": supervised,
                "reason": reason,
            }
            event = "restart_asked" if supervised else "restart_needed"
            effects.append(Note(event, "error", fields))
        if supervised:
            routes = tuple(peer.route for peer in ranks)
            effects.append(Send(Restart(reason[:4096]), routes, 0, self._group, self._epoch()))
        return effects

    def over(self, dp_group: str) -> None:
        """It moves, or is another one."""
        self._asked.pop(dp_group, None)


def _is_supervised(ranks: Iterable[Peer]) -> bool:
    found = [peer.facts is not None and peer.facts.supervised for peer in ranks]
    return bool(found) and all(found)
