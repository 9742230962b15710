"""Requests restarts of engines and DP groups that are stuck for good.

::

    event                       then
    a DP group is stuck         supervised: RESTART to all its ranks; else the status says so
    an engine is stuck          the same, for its DP group, which may be the engine alone
    AGAIN_MS later, still so    RESTART again
    the engine joins again, or  the record is dropped
    moves

RESTART goes only to engines whose JOIN says that they are supervised. In a DP group it goes to
none, unless all present ranks are supervised: a rank alone can't recover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bus._protocol.core.effects import Effect, Note, Send
from bus.messages import Restart

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus._protocol.core.membership import Peer

AGAIN_MS: Final = 5_000.0


class Restarts:
    """Requests restarts of the stuck engines and DP groups of one group.

    ``epoch`` returns the group's present fencing epoch.
    """

    def __init__(self, group: str, epoch: Callable[[], int]) -> None:
        self._group = group
        self._epoch = epoch
        self._asked: dict[str, float] = {}  # time of the last request, by DP group

    def request(
        self,
        dp_group: str,
        ranks: list[Peer],
        size: int,
        text: str,
        now_ms: float,
        *,
        whose: str = "",
    ) -> tuple[str, list[Effect]]:
        """Requests the restart of a stuck DP group, at most once in 5 s.

        Args:
            dp_group: the DP group, or the name of an engine that steps alone.
            ranks: its present ranks.
            text: the diagnosis.
            whose: the rank that the diagnosis is about, as its prefix in the log and for sidecars.

        Returns:
            The diagnosis and the effects. If no supervisor restarts these ranks, the diagnosis says
            which ranks the operator must restart.
        """
        found = [peer.facts is not None and peer.facts.supervised for peer in ranks]
        supervised = bool(found) and all(found)
        if not supervised:
            which = f"all {size} ranks" if size > 1 else "the engine"
            text = f"{text}; no supervisor restarts it: restart {which} by hand"
        asked_ms = self._asked.get(dp_group)
        if asked_ms is not None and now_ms < asked_ms + AGAIN_MS:
            return text, []
        self._asked[dp_group] = now_ms
        reason = whose + text
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
        return text, effects

    def over(self, dp_group: str) -> None:
        """Records that a DP group steps again, or was restarted.

        If the DP group is stuck once more, its restart is logged and requested at once.
        """
        self._asked.pop(dp_group, None)
