"""The engines of a group: which take part, which joined late, which are quarantined.

It also gives each engine its place in a collective transfer. Rank 0 of the communicator is the
trainer's sender. After it come the workers of every engine that takes part, engine by engine,
ranks of a DP group in order. The communicator's number is a digest of that order and of each
engine's boot. While no engine joins, leaves or restarts the number stays the same, also after a
restart of the broker. With another number the transport has to be made anew.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from bus.messages import EngineView, NackCode, OutView, PeerRank, PeerRanks
from bus.protocol.core.failures import Declined, Failure, wrong_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bus.messages import CanaryMode, Phase, Target
    from bus.protocol.core.membership import Peer


@dataclass(frozen=True, slots=True)
class Communicator:
    """``first_ranks``: of each engine's first worker; the others follow it."""

    number: int
    world_size: int
    first_ranks: dict[str, int]


def communicator(engines: Iterable[Peer]) -> Communicator:
    """The one that these engines and the trainer would make."""
    first_ranks: dict[str, int] = {}
    taken: list[tuple[str, int, int]] = []
    world_size = 1
    known = [(peer.facts, peer) for peer in engines if peer.facts is not None]
    for facts, peer in sorted(known, key=lambda k: (k[0].dp_group, k[0].dp_rank, k[1].name)):
        first_ranks[peer.name] = world_size
        taken.append((peer.name, peer.boot, facts.workers))
        world_size += facts.workers
    digest = hashlib.sha256(msgspec.msgpack.encode(taken)).digest()
    number = int.from_bytes(digest[:8], "big") >> 1 or 1  # 0 is no communicator
    return Communicator(number, world_size, first_ranks)


# A pause that nobody knows of, pending for more than so many heartbeats, is half-made.
PENDING_BEATS: Final = 2

# How many engines that have left a group are remembered.
DEPARTED_KEPT: Final = 64

# In these an engine makes tokens.
_SERVES: Final[frozenset[Phase]] = frozenset({"running", "armed", "staging"})


class EngineRegistry:
    """One group's engines by name.

    ``late`` ones joined in the middle of a pause or an update, and take part from
    the next one on. ``quarantined`` ones hold a part of an update; they stay paused
    until a whole one of the same target is committed: their ack of a COMMIT says
    whether it was. ``broken`` ones are ranks of a DP group that is not whole: it can't
    step, and so is neither paused nor updated until it is. Nor are the ranks of a DP group of which
    one is overdue with a step, until it answers.
    """

    def __init__(self, group: str) -> None:
        self.engines: dict[str, Peer] = {}
        self.quarantined: dict[str, str] = {}  # and why
        self._differs: dict[str, int] = {}  # by the canary, with the weights of that version
        self._has_model: set[str] = set()  # of these, who lacks something else than the model
        self._stale_when_armed: frozenset[str] = frozenset()  # when the update was armed
        # Whose admission is closed: who was behind, or quarantined, or a peer rank of theirs, is
        # not resumed yet; or it says so.
        self._not_admitting: set[str] = set()
        self._joined_late: set[str] = set()
        self._pausing: dict[str, int] = {}  # heartbeats in a row that said so
        self._pause_unknown: set[str] = set()  # who can't tell if they are paused
        self._incomplete: set[str] = set()
        self._group = group
        self._had_engines = False
        self.changes = 0  # of who is there, and of what they serve

    def add(self, peer: Peer, *, joined_late: bool) -> None:
        """An engine has joined, or joined again."""
        self._had_engines = True
        self.changes += 1
        if joined_late and peer.name not in self.engines:
            self._joined_late.add(peer.name)
        self.engines[peer.name] = peer
        self._record_pause_unknown(peer.name, peer.phase)
        self._check_dp_group(peer)
        if peer.name in self._joined_late:  # its peer ranks have fallen out with it
            self._joined_late.update(self.dp_peers(peer.name))
        if peer.phase in ("quarantined", "weights_discarded"):
            self.quarantined[peer.name] = "joined without whole weights"
        else:
            self._end_quarantine(peer.name)
        if peer.phase == "updating":  # in an update that nobody knows here: by its end it is whole
            self._not_admitting.add(peer.name)
        closed = peer.facts is not None and peer.facts.closed
        self._check_admission(peer.name, peer.phase, closed=closed)

    def remove(self, peer: Peer) -> bool:
        """An engine is gone; False if it was not (or no longer) the one known."""
        if self.engines.get(peer.name) is not peer:
            return False
        del self.engines[peer.name]
        self.changes += 1
        self._joined_late.discard(peer.name)
        self._incomplete.discard(peer.name)
        self._pausing.pop(peer.name, None)
        self._pause_unknown.discard(peer.name)
        self._check_dp_group(peer)
        self._end_quarantine(peer.name)
        self._not_admitting.discard(peer.name)
        self._differs.pop(peer.name, None)
        return True

    def dp_peers(self, name: str) -> list[str]:
        """All ranks of its DP group that are there, itself among them."""
        facts = self.engines[name].facts
        assert facts is not None
        if facts.dp_size == 1:
            return [name]
        return self._ranks(facts.dp_group)

    def introduction(self, names: Iterable[str]) -> PeerRanks:
        """Where these reach each other."""
        peers = [self.engines[name] for name in names]
        return PeerRanks(
            tuple(
                PeerRank(peer.name, peer.facts.dp_rank, peer.facts.peer_address, peer.user)
                for peer in peers
                if peer.facts is not None
            )
        )

    def is_incomplete(self, name: str) -> bool:
        """Whether it is a rank of a DP group that is not whole."""
        return name in self._incomplete

    def last_heard(self, name: str, now_ms: float) -> str:
        """The engine's name, and how long ago it was heard, if it is there."""
        peer = self.engines.get(name)
        return f"{name} (heard {now_ms - peer.last_heard_ms:.0f} ms ago)" if peer else name

    def unable(self) -> set[str]:
        """Ranks of DP groups that are not whole, or of which one is overdue with a step."""
        overdue = [name for name, peer in self.engines.items() if peer.overdue]
        return self._incomplete.union(*map(self.dp_peers, overdue))

    def is_disaggregated(self) -> bool:
        """Whether some engines prefill for others that decode."""
        roles = {peer.facts.pd_role for peer in self.engines.values() if peer.facts is not None}
        return {"prefill", "decode"} <= roles

    def ready(self) -> list[str]:
        """Those that take part in what begins now, by name."""
        out = self._joined_late | self.unable()
        return sorted(name for name in self.engines if name not in out)

    def ready_count(self) -> int:
        """How many those are."""
        return len(self.engines) - len(self._joined_late | self.unable())

    def members(self) -> dict[str, str]:
        """The same with their DP groups.

        Raises:
            Declined: there are none; names a DP group that lacks ranks.
        """
        out = self._joined_late | self.unable()
        members = {
            name: peer.facts.dp_group
            for name, peer in self.engines.items()
            if name not in out and peer.facts is not None
        }
        if members:
            return members
        if self._incomplete:
            raise self._lacks_ranks(min(self._incomplete))
        for name, peer in sorted(self.engines.items()):
            if peer.overdue:
                raise wrong_state(f"{name} has not answered {peer.overdue} yet")
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

    def communicator(self, members: Iterable[str]) -> Communicator:
        """The one that these would make."""
        return communicator(self.engines[name] for name in members)

    def kept_paused(self) -> frozenset[str]:
        """The quarantined ones, and those that are overdue with a step, with all ranks of their DP
        groups, which run or stand as one."""
        out = [n for n, peer in self.engines.items() if n in self.quarantined or peer.overdue]
        return frozenset[str]().union(*map(self.dp_peers, out))

    def unable_to_sleep(self, names: Iterable[str]) -> list[str]:
        """Which of them can't give their memory back, by name."""
        engines = (self.engines[name] for name in names if name in self.engines)
        return sorted(p.name for p in engines if p.facts is None or not p.facts.can_sleep)

    def unable_to_probe(self, names: Iterable[str], way: CanaryMode) -> list[str]:
        """Which of them can't run a canary's probes while requests are treated that way."""
        able = ("keep",) if way == "keep" else ("keep", "abort")
        engines = (self.engines[name] for name in names if name in self.engines)
        return sorted(p.name for p in engines if p.facts is None or p.facts.canary not in able)

    def stale(self, names: Iterable[str], version: int) -> list[str]:
        """Which of them don't serve this version, by name."""
        return sorted(name for name in names if self.engines[name].version != version)

    def is_still_pausing(self, name: str) -> bool:
        """A rank whose pause has been pending for some heartbeats, while a peer rank runs."""
        return self._pausing.get(name, 0) > PENDING_BEATS and any(
            self.engines[peer].phase == "running" for peer in self.dp_peers(name)
        )

    def is_pause_unknown(self, name: str) -> bool:
        """Whether it, or a rank that it stands with, can't tell if it is paused."""
        return bool(self._pause_unknown) and not self._pause_unknown.isdisjoint(self.dp_peers(name))

    def has_updating_peer(self, name: str) -> bool:
        """Whether a rank that it stands with is in the middle of an update, by its own word."""
        return any(self.engines[peer].phase == "updating" for peer in self.dp_peers(name))

    def quarantine(self, name: str, reason: str) -> None:
        """An engine may hold a part of an update."""
        self.changes += 1
        if name in self.engines:
            self.quarantined[name] = reason
            self._has_model.discard(name)

    def on_phase(self, name: str, phase: Phase, *, closed: bool = False) -> None:
        """An engine's own word on whether it holds a part; while it updates, it has none.
        ``closed``: its admission is."""
        self.changes += (phase == "quarantined") != (name in self.quarantined)
        self._pausing[name] = self._pausing.get(name, 0) + 1 if phase == "pausing" else 0
        self._record_pause_unknown(name, phase)
        if phase == "quarantined":
            self.quarantined.setdefault(name, "it holds a part of an update")
        elif phase not in ("updating", "weights_discarded"):
            self._end_quarantine(name)
        self._check_admission(name, phase, closed=closed)

    def on_resumed(self, name: str) -> None:
        """Its pause is over: if it was shut, and is whole, it is not any more."""
        if name in self._not_admitting:
            self._not_admitting.discard(name)
            self.changes += 1

    def on_version_fell(self, version: int, reporter: str) -> None:
        """Engines below ``version``, which the group served, may have closed their admission; each
        reports with its next heartbeat whether it is open. The ``reporter`` has just done so."""
        below = {name for name, peer in self.engines.items() if peer.version < version}
        self._not_admitting |= below - {reporter}
        self.changes += 1

    def is_not_admitting(self, name: str) -> bool:
        """Whether its admission is closed, though it may have all of the version by now: it was
        behind its group, or quarantined, and has not been resumed since."""
        return name in self._not_admitting

    def on_update_aborted(self, names: Iterable[str], update_id: str) -> None:
        """These had loaded a part when the update was given up."""
        for name in names:
            self.quarantine(name, f"update {update_id} was given up half-loaded")

    def on_abort_ack(self, name: str, outcome: str) -> bool:
        """An engine says what its ABORT found; True if it is quarantined for it."""
        if name not in self.engines:
            return False
        self.changes += 1
        if outcome == "partial":
            self.quarantined.setdefault(name, "it had loaded a part of an update")
            self._has_model.discard(name)
            return True
        self._end_quarantine(name)
        return False

    def on_arm(self, names: Iterable[str], version: int) -> None:
        """An update of these begins; ``version``: the group's before it."""
        self._stale_when_armed = frozenset(self.stale(names, version))

    def on_committed(
        self,
        names: Iterable[str],
        version: int,
        partial: set[str],
        target: Target,
        *,
        staged: bool = False,
    ) -> None:
        """These serve the version, as soon as they are whole; ``partial`` ones are not yet.
        ``staged``: no resume follows, and who was behind has opened its admission; or could not,
        and says so with its next heartbeat."""
        self.changes += 1
        for name in names:
            if name not in partial:
                self._end_quarantine(name)
            elif target == "model":
                self._has_model.add(name)
            peer = self.engines.get(name)
            if peer is not None:
                peer.version = version
                if staged:
                    self._not_admitting.discard(name)
                elif name in self._stale_when_armed:
                    self._not_admitting.update(self.dp_peers(name))

    def expel(self, names: Iterable[str], version: int) -> None:
        """Of their DP groups the canary has said that they serve this version's weights wrong."""
        self._differs.update(dict.fromkeys(names, version))

    def differs(self, name: str, version: int) -> bool:
        """Whether the weights of this version would make it no better."""
        return self._differs.get(name) == version

    def lacks_model(self, name: str) -> bool:
        """Whether a whole set of the model's weights may bring it back."""
        return name in self.quarantined and name not in self._has_model

    def admit_joined_late(self) -> bool:
        """Those that came late take part from now on; False if there were none."""
        were = bool(self._joined_late)
        self._joined_late.clear()
        return were

    def _end_quarantine(self, name: str) -> None:
        if self.quarantined.pop(name, None) is not None and name in self.engines:
            self._not_admitting.update(self.dp_peers(name))  # who ended requests for its sake
        self._has_model.discard(name)

    def _check_admission(self, name: str, phase: Phase, *, closed: bool) -> None:
        if closed and name not in self._not_admitting:
            self._not_admitting.add(name)
            self.changes += 1
        elif phase in _SERVES and not closed:
            self.on_resumed(name)

    def _record_pause_unknown(self, name: str, phase: Phase) -> None:
        if phase == "pause_unknown":
            self._pause_unknown.add(name)
        else:
            self._pause_unknown.discard(name)

    def _ranks(self, dp_group: str) -> list[str]:
        return sorted(
            name
            for name, peer in self.engines.items()
            if peer.facts is not None and peer.facts.dp_group == dp_group
        )

    def _check_dp_group(self, peer: Peer) -> None:
        """A rank came or went: is its DP group whole?"""
        if peer.facts is None or peer.facts.dp_size == 1:
            return
        ranks = self._ranks(peer.facts.dp_group)
        if len(ranks) < peer.facts.dp_size:
            self._incomplete.update(ranks)
        else:
            self._incomplete.difference_update(ranks)

    def _lacks_ranks(self, name: str) -> Declined:
        facts = self.engines[name].facts
        assert facts is not None
        there = len(self._ranks(facts.dp_group))
        return wrong_state(
            f"DP group {facts.dp_group} has {there} of {facts.dp_size} ranks",
            hint="a pause of some ranks would wedge them; start the others",
        )

    def routes(self, names: Iterable[str]) -> tuple[bytes, ...]:
        """The transport's names of those that are there."""
        engines = self.engines
        return tuple(engines[name].route for name in names if name in engines)

    def views(self, now_ms: float, names: Iterable[str] | None = None) -> tuple[EngineView, ...]:
        """What a status shows of them."""
        chosen = sorted(self.engines) if names is None else names
        return tuple(self.engines[name].view(now_ms) for name in chosen)


class DepartedEngines:
    """Engines that were of a group, the last :data:`DEPARTED_KEPT`, until they are back."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def add(self, name: str, reason: str) -> None:
        """It has left, or was lost."""
        self._reasons[name] = reason
        if len(self._reasons) > DEPARTED_KEPT:
            del self._reasons[next(iter(self._reasons))]

    def discard(self, name: str) -> None:
        """It is there."""
        self._reasons.pop(name, None)

    def views(self, quarantined: Mapping[str, str]) -> tuple[OutView, ...]:
        """These, and those that are there but quarantined, by name."""
        found = [OutView(n, "gone", why[:4096]) for n, why in self._reasons.items()]
        found += [OutView(n, "quarantined", why[:4096]) for n, why in quarantined.items()]
        return tuple(sorted(found, key=lambda view: (view.state, view.engine)))
