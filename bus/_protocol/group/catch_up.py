"""Defines which DP groups are stale, and the update by which they catch up.

A DP group is stale if one of its ranks serves an older version than the group, or is quarantined
and lacks the model's weights. Two cases don't count as stale: a quarantined rank that lacks only
the draft's weights, and a rank that failed the canary with the group's present weights. A stale DP
group catches up by an update of its own, which brings the weights that the group serves:

============================== ===============================================================
engines                        the ranks of stale DP groups (``scope``), and no others: the
                               others are neither asked for anything nor paused
weights                        a whole set of the model's weights; no patch, no draft, no adapter
version                        the group's. No new one is assigned; weights of another are refused.
                               For a rank that has committed alone, in an update that failed, it is
                               an earlier one
trainer                        one whose heartbeats report that it has those weights. After each
                               such heartbeat it gets the stale DP groups (BEHIND), as long as no
                               pause or update is under way, so a lost message is repeated
============================== ===============================================================

Otherwise it is like any update (:mod:`bus._protocol.group.update`): an engine that drops out of it
stays stale.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final
from zlib import crc32

from bus._lora import adapter_of
from bus._protocol.core.access import outside_bounds
from bus._protocol.core.failures import Declined, wrong_state

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._protocol.core.membership import Peer
    from bus._protocol.group.engine_registry import EngineRegistry
    from bus._protocol.group.trainer_session import TrainerSession
    from bus.messages import Arm

# Far below the bound of versions (:func:`bus._protocol.core.access.outside_bounds`).
LARGEST_GAP: Final = 2**16


class GroupVersion:
    """The version that a group serves, in ``value``.

    A commit sets the version. From then on only commits raise it, so that one engine's report can't
    put the others out of service. A restarted broker knows of no commit. Until the next commit, the
    version is the lower median of the DP groups' versions: more than half of them serve it, or a
    later one. So it may fall when a DP group joins. A DP group's version is its ranks' lowest.

    ==========  ========================================  ==========  ==============================
    state       event                                     next        version
    ==========  ========================================  ==========  ==============================
    counted     a DP group reports, or is lost            counted     the median
    counted     ARM; the update's version is above all    updating    the same
                that are reported
    updating    a DP group reports a version below the    updating    the median
                update's, or is lost
    updating    a DP group reports a later version than   updating    the same: the DP group counts
                the group's, and it is not below the                  as it did before, or not yet
                update's
    updating    the update ends without a commit          counted     the median of all reports
    any         a commit, of the update or as the owner   committed   the commit's
                reports it
    committed   a DP group reports, or is lost            committed   the same
    ==========  ========================================  ==========  ==============================

    The fourth row is for a DP group that outlived the earlier broker and joins late. If its report
    raised the version, the update's engines would be stale even after their commit, and so would
    close admission. If the update commits, the DP group is ahead of the group: it is not routable,
    and the next update's version is above its own. If the update fails, the DP group counts.

    The median leaves out a DP group if one of its sidecars is new, so that its JOIN has epoch 0, or
    has joined with closed admission, as a stale engine does. If no other DP group is there, the
    median is over all.

    A restarted broker doesn't know which numbers the earlier one gave to engines that are now out
    of reach. The trainer does if it is still the same. Else, the first number leaves out up to
    :data:`LARGEST_GAP` others, by the update's id, so that hardly one is given twice.

    Attributes:
        value: the version.
        is_committed: whether a commit has set it.
        assigned: the update and its version, assigned last.
    """

    def __init__(self) -> None:
        self.value = 0
        self.is_committed = False
        self.assigned: tuple[str, int] = ("", 0)
        self._assigned_adapter = False  # whether that update is of an adapter alone
        self._of_model = 0  # the last commit that brought weights of the model
        self._reports = _Reports()
        self._updating = 0  # the version of the update under way; 0: none
        self._deferred: set[str] = set()  # DP groups whose reports count after that update

    @property
    def of_model(self) -> int:
        """The version of the last commit that brought weights of the model.

        Later commits brought adapters alone. In a restarted broker, until its first commit, the
        group's version.
        """
        return self._of_model if self.is_committed else self.value

    def assign(self, arm: Arm, registry: EngineRegistry, session: TrainerSession) -> int:
        """Assigns the version of an update: above the group's, and above all engines'.

        An update that is armed again after a refusal keeps its version, so that a late ARM can't
        arm an engine for another version.

        Args:
            arm: the trainer's request, with the version that it asks to exceed; 0 for none.
            registry: the group's engines. A version too far above the group's is ignored here; the
                engine that serves it refuses the update.
            session: the trainer's. An engine that knew a later epoch than the trainer when it took
                the group has outlived another broker, and that broker's trainer.

        Raises:
            Declined: the version asked for is too far above the group's version.
        """
        refused = outside_bounds("version", arm.version, self.value)
        if refused is not None:
            raise Declined(refused)
        last_id, version = self.assigned
        engines = registry.engines.values()
        served = [each.version for each in engines]
        above = max(v for v in (self.value, *served) if not outside_bounds("", v, self.value))
        if last_id != arm.update_id or version <= above:
            outlived = any(each.joined_epoch > session.known_epoch for each in engines)
            gap = crc32(arm.update_id.encode()) % LARGEST_GAP if outlived and not last_id else 0
            version = max(version, arm.version, above) + 1 + gap
        self.assigned = (arm.update_id, version)
        self._assigned_adapter = bool(adapter_of(arm.backend))
        return version

    def on_arm(self, version: int) -> None:
        """Records that an update to this version is under way, until :meth:`on_update_over`."""
        self._updating = version

    def on_update_over(self, registry: EngineRegistry) -> None:
        """Records the end of the update, and counts the reports that waited for it."""
        if not self._updating:
            return
        self._updating = 0
        for dp_group in sorted(self._deferred):
            self._reports.record(dp_group, registry.ranks(dp_group))
        self._deferred.clear()
        self._count(registry, "")

    def on_commit(self, version: int, registry: EngineRegistry) -> None:
        """Records that this version was committed."""
        is_adapter = self._assigned_adapter and version == self.assigned[1]
        self._of_model = self.of_model if is_adapter else version
        before = self.value
        self.value = max(self.value, version) if self.is_committed else version
        self.is_committed = True
        if self.value < before:
            registry.on_version_fell(before, "")

    def on_owner(self, version: int, registry: EngineRegistry) -> None:
        """Records the version of weights that the owner reports as committed.

        The report counts only if its version is later than the group's, and an engine serves it.
        """
        if version > self.value and any(e.version == version for e in registry.engines.values()):
            self.on_commit(version, registry)

    def on_report(self, registry: EngineRegistry, engine: Peer, *, is_lost: bool = False) -> None:
        """Computes the version from the engines' reports, unless a commit has set it.

        Args:
            engine: the engine that has joined, reported another version or left. Each such change
                must be reported, because only this engine's DP group is counted again.
            is_lost: whether it has left.
        """
        if self.is_committed or engine.facts is None:
            return
        dp_group = engine.facts.dp_group
        ranks = registry.ranks(dp_group)
        version = min((rank.version for rank in ranks), default=0)
        if 0 < self._updating <= version and version > self.value:
            self._deferred.add(dp_group)
            return
        self._deferred.discard(dp_group)
        self._reports.record(dp_group, ranks)
        self._count(registry, "" if is_lost else engine.name)

    def _count(self, registry: EngineRegistry, reporter: str) -> None:
        if self.is_committed or self._reports.is_empty:
            return
        before, self.value = self.value, self._reports.median()
        if self.value < before:
            registry.on_version_fell(before, reporter)


class _Reports:
    """Counts DP groups by reported version; each report moves one DP group.

    ``_counted`` has the DP groups that count in the median, ``_uncounted`` the others.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[Counter[int], int]] = {}  # by DP group: where it is counted
        self._counted: Counter[int] = Counter()
        self._uncounted: Counter[int] = Counter()

    def record(self, dp_group: str, ranks: Iterable[Peer]) -> None:
        """Counts a DP group by its ranks' present reports; without ranks, no longer."""
        if dp_group in self._of:
            counter, version = self._of.pop(dp_group)
            counter[version] -= 1
            if not counter[version]:
                del counter[version]
        reports = [(peer.version, peer.facts, peer.joined_epoch) for peer in ranks]
        if not reports:
            return
        is_new = any(not epoch or (facts and facts.closed) for _, facts, epoch in reports)
        counter = self._uncounted if is_new else self._counted
        version = min(version for version, _, _ in reports)
        counter[version] += 1
        self._of[dp_group] = (counter, version)

    @property
    def is_empty(self) -> bool:
        """Whether no DP group is counted."""
        return not self._of

    def median(self) -> int:
        """Returns the lower median of the versions; there must be a DP group."""
        counter = self._counted or self._uncounted
        before = (counter.total() - 1) // 2  # how many DP groups are below the median
        for version in sorted(counter):
            before -= counter[version]
            if before < 0:
                break
        return version


def stale_dp_groups(registry: EngineRegistry, version: int) -> tuple[str, ...]:
    """Returns the names of stale DP groups whose ranks are ready; ``version`` is the group's."""
    return tuple(sorted(_stale(registry, registry.ready(), version)))


def members(registry: EngineRegistry, scope: Iterable[str], version: int) -> dict[str, str]:
    """Returns the ready engines that an update is for, each with its DP group.

    Args:
        scope: the stale DP groups that catch up; empty: all DP groups.

    Raises:
        Declined: the group has no version yet, or a DP group in ``scope`` is not stale or not
            complete; or no engine is ready.
    """
    everybody = registry.members()
    wanted = frozenset(scope)
    if not wanted:
        return everybody
    if not version:
        raise wrong_state("the group has no version yet", "scope", hint="send it to all engines")
    for dp_group in sorted(wanted - _stale(registry, everybody, version)):
        known = dp_group in everybody.values()
        why = f"serves the group's version {version}" if known else "is absent or incomplete"
        raise wrong_state(f"DP group {dp_group} {why}", "scope", hint="leave this DP group out")
    return {name: dp_group for name, dp_group in everybody.items() if dp_group in wanted}


def require_same_version(arm: Arm, version: int) -> None:
    """Checks that an ARM for stale engines brings the whole model in the group's version.

    Raises:
        Declined: the weights are of another version, or not the whole model.
    """
    if arm.target != "model" or arm.base or adapter_of(arm.backend):
        raise wrong_state("engines catch up with a whole set of the model's weights", "scope")
    if arm.version != version:
        raise wrong_state(
            f"these are the weights of version {arm.version}, and the group serves {version}",
            "version",
            hint="send this update to all engines",
        )


def _stale(registry: EngineRegistry, names: Iterable[str], version: int) -> set[str]:
    peers = [registry.engines[name] for name in names if not registry.differs(name, version)]
    return {
        peer.facts.dp_group
        for peer in peers
        if peer.facts is not None
        and (peer.version < version or (version and registry.lacks_model(peer.name)))
    }
