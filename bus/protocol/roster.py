"""The engines of a group: who takes part, who came late, who is quarantined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.messages import EngineView, NackCode, WaitEngines
from bus.protocol.instructions import Failure
from bus.protocol.refusal import Declined, wrong_state

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus.messages import Phase
    from bus.protocol.membership import Peer


class Roster:
    """One group's engines by name.

    ``late`` ones joined in the middle of a pause or an update, and take part from
    the next one on. ``quarantined`` ones hold a part of an update; they stay paused
    until a whole one is committed.
    """

    def __init__(self, group: str) -> None:
        self.engines: dict[str, Peer] = {}
        self.quarantined: dict[str, str] = {}  # and why
        self._late: set[str] = set()
        self._group = group
        self._had_engines = False

    def add(self, peer: Peer, *, late: bool) -> None:
        """An engine has joined, or joined again."""
        self._had_engines = True
        if late and peer.name not in self.engines:
            self._late.add(peer.name)
        self.engines[peer.name] = peer
        if peer.phase == "quarantined":
            self.quarantined[peer.name] = "joined with a part of an update loaded"
        else:
            self.quarantined.pop(peer.name, None)

    def remove(self, peer: Peer) -> bool:
        """An engine is gone; False if it was not (or no longer) the one known."""
        if self.engines.get(peer.name) is not peer:
            return False
        del self.engines[peer.name]
        self._late.discard(peer.name)
        self.quarantined.pop(peer.name, None)
        return True

    def ready(self) -> list[str]:
        """Those that take part in what begins now, by name."""
        return sorted(name for name in self.engines if name not in self._late)

    def ready_count(self) -> int:
        """How many those are."""
        return len(self.engines) - len(self._late)

    def members(self) -> dict[str, str]:
        """The same with their DP groups.

        Raises:
            Declined: there are none.
        """
        members = {
            name: peer.facts.dp_group
            for name, peer in self.engines.items()
            if name not in self._late and peer.facts is not None
        }
        if members:
            return members
        if self._had_engines:
            raise Declined(
                Failure(
                    NackCode.EMPTY_GROUP,
                    f"every engine of group {self._group} is gone",
                    field="group",
                    hint="start sidecars, and wait_for_engines",
                )
            )
        raise Declined(
            Failure(
                NackCode.UNKNOWN_GROUP,
                f"no engine has joined group {self._group!r}",
                field="group",
                hint="check --group of the sidecars, and wait_for_engines",
            )
        )

    def check_whole(self, members: dict[str, str]) -> None:
        """All ranks of a DP group must be alive before any of them is paused.

        Raises:
            Declined: names the DP group that lacks some.
        """
        ranks: dict[str, int] = {}
        for dp_group in members.values():
            ranks[dp_group] = ranks.get(dp_group, 0) + 1
        for name, dp_group in members.items():
            facts = self.engines[name].facts
            if facts is not None and ranks[dp_group] < facts.dp_size:
                raise wrong_state(
                    f"DP group {dp_group} has {ranks[dp_group]} of {facts.dp_size} ranks",
                    hint="a pause of some ranks would wedge them; start the others",
                )

    def staying(self) -> frozenset[str]:
        """The quarantined ones with all ranks of their DP groups, which run or stand as one."""
        if not self.quarantined:
            return frozenset()
        groups = {
            p.facts.dp_group for n, p in self.engines.items() if n in self.quarantined and p.facts
        }
        return frozenset(
            n for n, p in self.engines.items() if p.facts and p.facts.dp_group in groups
        )

    def quarantine(self, name: str, reason: str) -> None:
        """An engine may hold a part of an update."""
        if name in self.engines:
            self.quarantined[name] = reason

    def told(self, name: str, phase: Phase) -> None:
        """An engine's own word on whether it holds a part; while it updates, it has none."""
        if phase == "quarantined":
            self.quarantined.setdefault(name, "it holds a part of an update")
        elif phase != "updating":
            self.quarantined.pop(name, None)

    def given_up(self, names: Iterable[str], update_id: str) -> None:
        """These had loaded a part when the update was given up."""
        for name in names:
            self.quarantine(name, f"update {update_id} was given up half-loaded")

    def aborted(self, name: str, outcome: str) -> bool:
        """An engine says what its ABORT found; True if it is quarantined for it."""
        if name not in self.engines:
            return False
        if outcome == "partial":
            self.quarantined.setdefault(name, "it had loaded a part of an update")
            return True
        self.quarantined.pop(name, None)
        return False

    def committed(self, names: Iterable[str], version: int) -> None:
        """These serve the version."""
        for name in names:
            self.quarantined.pop(name, None)
            peer = self.engines.get(name)
            if peer is not None:
                peer.version = version

    def admit_late(self) -> bool:
        """Those that came late take part from now on; False if there were none."""
        were = bool(self._late)
        self._late.clear()
        return were

    def too_few(self, wait: WaitEngines) -> Failure:
        """Why a wait for engines ended."""
        names = ", ".join(self.ready()) or "none"
        return Failure(
            NackCode.TIMEOUT,
            f"{len(self.ready())} of {wait.count} engines joined group {self._group} "
            f"in {wait.timeout_ms} ms: {names}",
            hint="look at the sidecars' logs, and at `wavebus status`",
        )

    def routes(self, names: Iterable[str]) -> tuple[bytes, ...]:
        """The transport's names of those that are there."""
        engines = self.engines
        return tuple(engines[name].route for name in names if name in engines)

    def views(self, now_ms: float, names: Iterable[str] | None = None) -> tuple[EngineView, ...]:
        """What a status shows of them."""
        chosen = sorted(self.engines) if names is None else names
        return tuple(self.engines[name].view(now_ms) for name in chosen)
