"""Records a group's engines: which take part, have joined late, or are quarantined.

:func:`communicator` gives the workers of these engines their ranks in a collective transfer.
Rank 0 is the trainer's sender. After it come the workers of every engine that takes part, engine by
engine, ranks of a DP group in order. The communicator's number is a digest of that order and of
each engine's boot. The number stays the same, also after a restart of the broker, while no engine
joins, leaves or restarts. If the number changes, the transport must be opened again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from bus._protocol.core.failures import decline, wrong_state
from bus.messages import EngineView, NackCode, Step, TransferPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._protocol.core.failures import Declined
    from bus._protocol.core.membership import Peer
    from bus.messages import Ack, EngineFacts, Heartbeat, Phase, Target


def communicator(engines: Iterable[Peer]) -> TransferPlan:
    """Returns the ranks and number of the communicator of the trainer and these engines."""
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
    return TransferPlan(number, world_size, first_ranks)


# A pause that the group did not ask for counts as half-made after more heartbeats than this.
PENDING_BEATS: Final = 2

# How many of the engines that left a group the status still shows.
DEPARTED_KEPT: Final = 64

# In these phases an engine is not routable.
UNROUTABLE: Final[frozenset[Phase]] = frozenset(
    {"asleep", "weights_discarded", "quarantined", "pause_unknown"}
)

# In these phases an engine generates tokens.
_SERVES: Final[frozenset[Phase]] = frozenset({"running", "armed", "staging"})

# The phase of an engine that has done a step.
_PHASE_AFTER: Final[dict[Step, Phase]] = {
    Step.PAUSE_LOCAL: "pausing",
    Step.PAUSE_GLOBAL: "paused",
    Step.SLEEP: "asleep",
    Step.RESUME: "running",
    Step.START: "updating",
    Step.COMMIT: "paused",
}
_PHASE_AFTER_STAGED: Final[dict[Step, Phase]] = {
    **_PHASE_AFTER,
    Step.START: "staging",
    Step.COMMIT: "running",
}
# The phase by the outcome of an ABORT; an untouched engine's stays.
_PHASE_FOUND: Final[dict[str, Phase]] = {"partial": "quarantined", "restored": "paused"}


@dataclass(slots=True)
class EngineRecord:
    """The group's conclusions about one engine. Only :class:`EngineRegistry` changes it.

    Attributes:
        quarantined: why the engine may hold a part of an update; None: it is not quarantined. It
            stays paused until its ACK of a COMMIT, or a heartbeat, shows whole weights.
        has_model: the engine is quarantined, but the model's weights are whole.
        differs_at: the version with which it failed the canary; None: it has not failed.
        was_stale: it did not serve the group's version when the update under way was armed.
        not_admitting: its admission is closed: the engine reports so, or the engine or a peer rank
            was stale or quarantined and has not been resumed since.
        joined_late: it joined during a pause or an update, and takes part from the next one on.
        pausing_beats: how many heartbeats in a row reported that it is pausing.
        pause_unknown: the engine reports that its pause may or may not have been made.
        incomplete: its DP group lacks a rank, so it can't step, and is neither paused nor updated.
    """

    quarantined: str | None = None
    has_model: bool = False
    differs_at: int | None = None
    was_stale: bool = False
    not_admitting: bool = False
    joined_late: bool = False
    pausing_beats: int = 0
    pause_unknown: bool = False
    incomplete: bool = False


def _routed_by(peer: Peer, record: EngineRecord) -> tuple[object, ...]:
    """Returns everything about one engine that the routes depend on."""
    facts = peer.facts
    assert facts is not None
    entry = (facts.dp_group, facts.dp_size, facts.endpoint, facts.limits, facts.pd_role)
    is_out = peer.phase in UNROUTABLE or bool(peer.overdue) or record.quarantined is not None
    return (*entry, peer.version, is_out, record.not_admitting, record.incomplete)


def _why_nobody(registry: EngineRegistry, group: str) -> Declined:
    """Returns the error of a request to a group in which no engine is ready."""
    for name, facts in registry.facts(registry.engines).items():
        if registry.is_incomplete(name):
            there = len(registry.dp_peers(name))
            return wrong_state(
                f"DP group {facts.dp_group} has {there} of {facts.dp_size} ranks",
                hint="start the missing ranks: a pause of only some ranks would hang",
            )
    for name, peer in sorted(registry.engines.items()):
        if peer.overdue:
            return wrong_state(f"{name} has not answered {peer.overdue} yet")
    if registry.engines or registry.departed:
        code, detail = NackCode.EMPTY_GROUP, f"every engine of group {group} is gone"
        hint = "start sidecars, and call wait_for_engines"
    else:
        code, detail = NackCode.UNKNOWN_GROUP, f"no engine has joined group {group!r}"
        hint = "check --group of the sidecars, and call wait_for_engines"
    return decline(code, detail, field="group", hint=hint)


class EngineRegistry:
    """Holds the engines of one group, by name.

    Only this class writes an engine's :class:`EngineRecord`, and the phase, version, requests and
    overdue step of its :class:`Peer`.

    Attributes:
        engines: the engines that are present.
        departed: why each engine left, without those that rejoined; :data:`DEPARTED_KEPT` at most.
        changes: grows with each change after which an engine may have to leave the routes, so that
            the routes must be computed at once.
        additions: grows with each change that can only add engines to the routes, so that computing
            the routes may wait for further ones.
    """

    def __init__(self, group: str) -> None:
        self.engines: dict[str, Peer] = {}
        self.departed: dict[str, str] = {}
        self.changes = 0
        self.additions = 0
        self._records: dict[str, EngineRecord] = {}  # by name, as engines
        self._ranks: dict[str, set[str]] = {}  # the names of each DP group
        self._group = group

    # -- joins, reports and losses -----------------------------------------------

    def add(self, peer: Peer, *, joined_late: bool) -> None:
        """Adds an engine that joined or rejoined; ``joined_late``: during a pause or an update."""
        facts = peer.facts
        assert facts is not None
        is_new, changes = peer.name not in self.engines, self.changes
        before = None if is_new else _routed_by(self.engines[peer.name], self._records[peer.name])
        # Without a complete DP group before it, a new engine can't put others out of the routes.
        ranks = () if facts.dp_size == 1 else self._ranks.get(facts.dp_group, ())
        only_adds = is_new and all(self._records[name].incomplete for name in ranks)
        record = self._records.setdefault(peer.name, EngineRecord())
        record.joined_late |= joined_late and is_new
        self.engines[peer.name] = peer
        self.departed.pop(peer.name, None)
        self._ranks.setdefault(facts.dp_group, set()).add(peer.name)
        record.pause_unknown = peer.phase == "pause_unknown"
        self._check_dp_group(facts)
        if record.joined_late:  # its peer ranks wait with it
            for each in self.dp_peers(peer.name):
                self._records[each].joined_late = True
        if peer.phase in ("quarantined", "weights_discarded"):
            record.quarantined = "joined with incomplete weights"
        else:
            self._end_quarantine(peer.name)
        if peer.phase == "updating":  # in an earlier broker's update
            self.on_unknown_update(peer.name)
        self._check_admission(record, peer.phase, closed=facts.closed)
        self.additions += only_adds
        self.changes = changes + (not only_adds and before != _routed_by(peer, record))

    def remove(self, peer: Peer, reason: str) -> bool:
        """Removes an engine that has left; returns False for an unknown or replaced engine."""
        if self.engines.get(peer.name) is not peer:
            return False
        del self.engines[peer.name], self._records[peer.name]
        self.departed[peer.name] = reason
        if len(self.departed) > DEPARTED_KEPT:
            del self.departed[next(iter(self.departed))]
        self.changes += 1
        facts = peer.facts
        assert facts is not None
        self._ranks[facts.dp_group].discard(peer.name)
        if not self._ranks[facts.dp_group]:
            del self._ranks[facts.dp_group]
        self._check_dp_group(facts)
        return True

    def on_heartbeat(self, peer: Peer, beat: Heartbeat) -> bool:
        """Records an engine's heartbeat; returns whether the engine's version has changed."""
        is_new = peer.version != beat.version
        was_out, is_out = peer.phase in UNROUTABLE, beat.phase in UNROUTABLE
        self.changes += is_new or (is_out and not was_out)
        self.additions += was_out and not is_out
        peer.phase, peer.version, peer.in_flight = beat.phase, beat.version, beat.in_flight
        self.on_phase(peer.name, beat.phase, closed=beat.closed)
        return is_new

    def on_phase(self, name: str, phase: Phase, *, closed: bool = False) -> None:
        """Records an engine's phase, and whether its admission is ``closed``."""
        record = self._records[name]
        self.changes += (phase == "quarantined") != (record.quarantined is not None)
        record.pausing_beats = record.pausing_beats + 1 if phase == "pausing" else 0
        record.pause_unknown = phase == "pause_unknown"
        if phase == "quarantined":
            record.quarantined = record.quarantined or "only a part of an update is loaded"
        elif phase not in ("updating", "weights_discarded"):
            self._end_quarantine(name)
        self._check_admission(record, phase, closed=closed)

    def on_ack(self, peer: Peer, ack: Ack, *, staged: bool) -> None:
        """Records the phase that an engine's ACK shows; ``staged``: the update is staged."""
        after = _PHASE_AFTER_STAGED if staged else _PHASE_AFTER
        was_out = peer.phase in UNROUTABLE
        peer.phase = _PHASE_FOUND.get(ack.outcome) or after.get(ack.step, peer.phase)
        self.additions += was_out and peer.phase not in UNROUTABLE

    def on_overdue(self, name: str, step: Step, now_ms: float, waited_ms: float) -> None:
        """Marks an engine that has not answered ``step`` in time as overdue."""
        self.changes += 1
        if name in self.engines:
            self.engines[name].on_overdue(step, now_ms, waited_ms)

    def on_answered(self, peer: Peer) -> None:
        """Ends the overdue state of an engine that has answered."""
        peer.overdue = ""
        self.additions += 1

    # -- pauses and updates ---------------------------------------------------------

    def quarantine(self, name: str, reason: str) -> None:
        """Quarantines an engine that may hold a part of an update."""
        self.changes += 1
        if name in self._records:
            self._records[name].quarantined = reason
            self._records[name].has_model = False

    def on_unknown_update(self, name: str) -> None:
        """Records that an engine is in an update that the group does not know.

        Until it resumes, it may hold a part of that update, and have closed its admission.
        """
        record = self._records[name]
        self.changes += not record.not_admitting
        record.not_admitting = True

    def on_resumed(self, name: str) -> None:
        """Records that an engine has resumed, and so admits requests again."""
        record = self._records.get(name)
        if record is not None and record.not_admitting:
            record.not_admitting = False
            self.additions += 1

    def on_version_fell(self, version: int, reporter: str) -> None:
        """Records that the group no longer serves ``version``, but an older one.

        Engines older than ``version`` may have closed admission. So each counts as not admitting
        until its next heartbeat, except ``reporter``, which has just reported.
        """
        for name, peer in self.engines.items():
            if peer.version < version and name != reporter:
                self._records[name].not_admitting = True
        self.changes += 1

    def on_abort_ack(self, name: str, outcome: str) -> bool:
        """Records an ABORT's outcome; returns whether the engine is quarantined now."""
        record = self._records.get(name)
        if record is None:
            return False
        self.changes += (outcome == "partial") != (record.quarantined is not None)
        if outcome == "partial":
            record.quarantined = record.quarantined or "only a part of an update was loaded"
            record.has_model = False
            return True
        self._end_quarantine(name)
        return False

    def on_arm(self, names: Iterable[str], version: int) -> None:
        """Records which of these engines are stale when their update is armed."""
        stale = frozenset(self.stale(names, version))
        for name, record in self._records.items():
            record.was_stale = name in stale

    def on_committed(
        self,
        names: Iterable[str],
        version: int,
        partial: set[str],
        target: Target,
        *,
        staged: bool = False,
    ) -> None:
        """Records a commit; ``partial`` engines still lack weights of the other model.

        ``staged``: no resume follows, so a stale engine opens its admission itself; its next
        heartbeat reports if it could not.
        """
        self.changes += 1
        for name in names:
            if name not in self.engines:
                continue
            record = self._records[name]
            if name not in partial:
                self._end_quarantine(name)
            elif target == "model":
                record.has_model = True
            self.engines[name].version = version
            if staged:
                record.not_admitting = False
            elif record.was_stale:
                self._close_admission(name)

    def expel(self, names: Iterable[str], version: int) -> None:
        """Records that these engines, or peer ranks of theirs, failed the canary at ``version``."""
        for name in names:
            if name in self._records:
                self._records[name].differs_at = version

    def admit_joined_late(self) -> bool:
        """Lets engines that joined late take part; returns False without such engines."""
        late = [record for record in self._records.values() if record.joined_late]
        for record in late:
            record.joined_late = False
        return bool(late)

    # -- queries of one engine --------------------------------------------------------

    def is_quarantined(self, name: str) -> bool:
        """Returns whether an engine may hold weights of two versions."""
        return name in self._records and self._records[name].quarantined is not None

    def is_not_admitting(self, name: str) -> bool:
        """Returns whether an engine's admission is closed."""
        return name in self._records and self._records[name].not_admitting

    def is_incomplete(self, name: str) -> bool:
        """Returns whether an engine's DP group lacks a rank."""
        return name in self._records and self._records[name].incomplete

    def is_still_pausing(self, name: str) -> bool:
        """Whether a rank's pause has lasted for several heartbeats while a peer rank still runs."""
        return self._records[name].pausing_beats > PENDING_BEATS and any(
            self.engines[peer].phase == "running" for peer in self.dp_peers(name)
        )

    def is_pause_unknown(self, name: str) -> bool:
        """Returns whether a rank of an engine's DP group reports an unknown pause state."""
        return any(self._records[peer].pause_unknown for peer in self.dp_peers(name))

    def differs(self, name: str, version: int) -> bool:
        """Returns whether an engine has failed the canary at this version."""
        return self._records[name].differs_at == version

    def lacks_model(self, name: str) -> bool:
        """Returns whether an engine is quarantined and lacks weights of the model itself."""
        return self.is_quarantined(name) and not self._records[name].has_model

    def last_heard(self, name: str, now_ms: float) -> str:
        """Returns a text with an engine's name, and how long ago its last frame arrived."""
        peer = self.engines.get(name)
        return f"{name} (heard {now_ms - peer.last_heard_ms:.0f} ms ago)" if peer else name

    def ranks(self, dp_group: str) -> list[Peer]:
        """Returns the engines of a DP group that are present, in no order."""
        return [self.engines[name] for name in self._ranks.get(dp_group, ())]

    def dp_peers(self, name: str) -> list[str]:
        """Returns the ranks of an engine's DP group that are present, including the engine."""
        facts = self.engines[name].facts
        assert facts is not None
        return [name] if facts.dp_size == 1 else sorted(self._ranks[facts.dp_group])

    # -- queries of several -------------------------------------------------------------

    @property
    def quarantined(self) -> dict[str, str]:
        """The reason of each quarantined engine's quarantine, by name."""
        records = self._records.items()
        return {name: r.quarantined for name, r in records if r.quarantined is not None}

    def unable(self) -> set[str]:
        """Returns the engines whose DP group lacks a rank, or has one that is overdue."""
        out = {name for name, record in self._records.items() if record.incomplete}
        overdue = [name for name, peer in self.engines.items() if peer.overdue]
        return out.union(*map(self.dp_peers, overdue))

    def _left_out(self) -> set[str]:
        return self.unable() | {n for n, record in self._records.items() if record.joined_late}

    def ready(self) -> list[str]:
        """Returns, sorted, the names of the engines that can take part in a pause or update."""
        return sorted(self.engines.keys() - self._left_out())

    def members(self) -> dict[str, str]:
        """Returns the DP group of each ready engine, by engine name.

        Raises:
            Declined: no engine is ready. The error says why, as when a DP group lacks ranks.
        """
        out = self._left_out()
        members = {
            name: peer.facts.dp_group
            for name, peer in self.engines.items()
            if name not in out and peer.facts is not None
        }
        if members:
            return members
        raise _why_nobody(self, self._group)

    def kept_paused(self) -> frozenset[str]:
        """Returns the engines whose DP group has a rank that is quarantined or overdue."""
        out = [n for n, peer in self.engines.items() if peer.overdue or self.is_quarantined(n)]
        return frozenset[str]().union(*map(self.dp_peers, out))

    def stale(self, names: Iterable[str], version: int) -> list[str]:
        """Returns, sorted, the names of the engines that don't serve the version."""
        return sorted(name for name in names if self.engines[name].version != version)

    def older(self, names: Iterable[str], version: int) -> list[str]:
        """Returns, sorted, the names of engines with whole weights of an earlier version."""
        whole = {*names} - self.quarantined.keys()
        return sorted(name for name in whole if self.engines[name].version < version)

    def facts(self, names: Iterable[str]) -> dict[str, EngineFacts]:
        """Returns the facts of these engines by name; leaves out absent engines."""
        engines = ((name, self.engines.get(name)) for name in sorted(names))
        return {name: peer.facts for name, peer in engines if peer is not None and peer.facts}

    def is_disaggregated(self) -> bool:
        """Whether some engines of the group only prefill, and others only decode."""
        roles = {facts.pd_role for facts in self.facts(self.engines).values()}
        return {"prefill", "decode"} <= roles

    def routes(self, names: Iterable[str]) -> tuple[bytes, ...]:
        """Returns the routing ids of these engines; leaves out absent engines."""
        return tuple(self.engines[name].route for name in names if name in self.engines)

    def views(self, now_ms: float, names: Iterable[str] | None = None) -> tuple[EngineView, ...]:
        """Returns the engines' views for a status. ``names``: default all."""
        chosen = sorted(self.engines) if names is None else names
        return tuple(self.engines[name].view(now_ms) for name in chosen)

    # -- internal -------------------------------------------------------------------------

    def _end_quarantine(self, name: str) -> None:
        record = self._records[name]
        if record.quarantined is not None:
            record.quarantined = None
            self._close_admission(name)  # peer ranks have ended their requests, too
        record.has_model = False

    def _close_admission(self, name: str) -> None:
        for each in self.dp_peers(name):
            self._records[each].not_admitting = True

    def _check_admission(self, record: EngineRecord, phase: Phase, *, closed: bool) -> None:
        if closed or phase in _SERVES:
            self.changes += closed and not record.not_admitting
            self.additions += record.not_admitting and not closed
            record.not_admitting = closed

    def _check_dp_group(self, facts: EngineFacts) -> None:
        """Updates, after a rank joined or left, whether its DP group is complete."""
        if facts.dp_size > 1:
            ranks = self._ranks.get(facts.dp_group, ())
            for name in ranks:
                self._records[name].incomplete = len(ranks) < facts.dp_size
