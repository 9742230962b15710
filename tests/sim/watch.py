"""The guarantees of a group as checks after every event, and a count of what was reached.

A test that holds invariants over runs in which nothing happened proves nothing. So a
:class:`Watch` counts the states that matter, and the test asserts the counts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from bus._protocol.engine.calls import CallResume
from bus._protocol.engine.lease import LEASE_RETRY_MS, LeaseState
from bus._protocol.engine.pause import EnginePauseState
from bus._protocol.engine.update_states import EngineUpdateState
from bus._protocol.group.pause import PauseState
from bus._protocol.group.sleep import SleepState
from bus._protocol.group.timeouts import next_deadline_ms
from bus._protocol.group.update import TAKES_CHUNKS, UpdateState
from bus.messages import (
    Ack,
    Arm,
    ArmPart,
    ChunkSent,
    GroupAck,
    Message,
    Nack,
    NackCode,
    Step,
    WeightChunkMeta,
)
from tests.sim.ground_truth import GARBLED, InvariantViolation

if TYPE_CHECKING:
    from bus._protocol.core.membership import Peer
    from bus._protocol.group.group import Group
    from tests.sim.engine import SimEngine
    from tests.sim.world import SimWorld

_MOVING: Final = (UpdateState.COMMITTING, UpdateState.ABORTING)  # the routes stay as they were


class Watch:
    """Checks a world after every event.

    Attributes:
        reach: how often each state that matters was reached.
        lost_ranks: DP groups that lost a rank; what is left of them does not run as one.
    """

    def __init__(self, world: SimWorld, reach: Counter[str] | None = None) -> None:
        self.world = world
        self.reach: Counter[str] = Counter() if reach is None else reach
        self.lost_ranks: set[str] = set()
        self._pause = PauseState.RUNNING
        self._update = UpdateState.IDLE
        self._group: Group | None = None
        self._group_version = 0
        self._was_committed = False
        self._peers: dict[str, Peer] = {}
        self._owner: Peer | None = None
        self._epoch = 0
        self._routable: frozenset[str] = frozenset()
        self._digest = ""  # of the manifest that was sent last
        self._quorum = 1  # that it asked for
        self._scope: tuple[str, ...] = ()  # that it was for
        self._round: dict[str, int] = {}  # engines of the pause last made, and their boots
        self._round_id = ""
        self._paused_round: set[str] = set()
        self._versions: dict[int, int] = {}  # by boot
        self._commits: dict[int, int] = {}  # by boot: commits counted
        self._alone_ms: float | None = None  # since when no trainer runs
        self._down_ms: dict[int, float] = {}  # by boot: when its DP group lacked a rank last
        self._payloads: dict[int, set[int]] = {}  # version -> payloads committed under it
        self._seen: Counter[tuple[int, str]] = Counter()
        world.checks.append(self.check)
        world.on_answer.append(self._on_answer)

    def check(self) -> None:
        """Raise :class:`InvariantViolation` if an invariant does not hold now."""
        trainers = self.world.trainers.values()
        if any(each.alive and not each.process.stopped for each in trainers):
            self._alone_ms = None
        elif self._alone_ms is None:
            self._alone_ms = self.world.now_ms
        group = self.world.group
        if group is not self._group:
            self._group = group
            self._pause, self._update = PauseState.RUNNING, UpdateState.IDLE
            self._round, self._peers, self._owner, self._epoch = {}, {}, None, 0
            self._group_version, self._run = 0, ""
            self._was_committed = False
            self._routable = frozenset()
        for engine in self.world.engines.values():
            self._check_engine(engine)
        if group is None:
            return
        fell = self._was_committed and group.version < self._group_version
        if fell or self._run not in ("", group.run):
            raise InvariantViolation(f"the group was at {self._run}, {self._group_version} before")
        self._group_version, self._run = group.version, group.run
        self._was_committed = group.served.is_committed  # a first commit decides between reports
        self._check_peer_ranks()
        self._check_members(group)
        self._check_pause(group)
        self._check_window(group)
        self._check_update(group)
        self._check_collective(group)
        self._check_routes(group)
        self._count(group)

    def check_end(self) -> None:
        """After :meth:`SimWorld.settle`: nobody was forgotten."""
        for trainer in self.world.trainers.values():
            if trainer.alive and trainer.unanswered:
                raise InvariantViolation(f"{trainer.name} was never answered: {trainer.unanswered}")
        for engine in self.world.live_engines:
            if engine.session.update.partial:
                self.reach["quarantined at the end"] += 1
                if engine.truth.running and not engine.truth.closed:
                    raise InvariantViolation(f"{engine.name} is quarantined and runs")
            elif not engine.truth.running and not self.world.is_at_rest(engine):
                raise InvariantViolation(
                    f"{engine.name} was left {engine.session.phase} "
                    f"(pause {engine.session.pause.update_id})"
                )
            self._check_admission(engine)
        self._check_dp_groups()

    def _check_admission(self, engine: SimEngine) -> None:
        """Who runs, and is on the bus, takes requests if it serves what its group does."""
        group = self.world.group
        if group is None or not engine.is_joined or not engine.truth.running:
            return
        session = engine.session
        if not session.at_rest or session.admission.unconfirmed:
            return
        self.reach["with admission closed at the end"] += session.is_stale
        if session.is_stale != engine.truth.closed:
            raise InvariantViolation(
                f"{engine.name} serves {session.version}, its group {group.version}; its admission "
                f"is {'closed' if engine.truth.closed else 'open'}"
            )

    # -- the invariants -------------------------------------------------------------

    def _check_engine(self, engine: SimEngine) -> None:
        truth = engine.truth
        if truth.running and engine.alive and truth.is_mixed:
            raise InvariantViolation(f"{engine.name} generates with mixed weights {truth.models}")
        if truth.running and engine.alive and truth.has_uncommitted:
            raise InvariantViolation(f"{engine.name} generates with {truth.models}, not committed")
        if GARBLED in truth.weights.values():
            raise InvariantViolation(f"{engine.name} loaded what was not sent: {truth.weights}")
        if not engine.alive:
            return
        # A swap is made before its call returns.
        if engine.session.version != truth.version and not engine.swapped:
            raise InvariantViolation(
                f"{engine.name} says version {engine.session.version}, serves {truth.version}"
            )
        before = self._versions.get(engine.boot, truth.version)
        commits = len(truth.commits)
        # One that has committed alone, in an update that failed, is brought back to its group.
        brought_back = truth.version == truth.group_version and not truth.running
        if truth.version < before and not brought_back:
            raise InvariantViolation(f"{engine.name} fell from version {before} to {truth.version}")
        if truth.version != before and commits == self._commits.get(engine.boot, 0):
            raise InvariantViolation(
                f"{engine.name} is at version {truth.version} without a commit"
            )
        if commits != self._commits.get(engine.boot, 0):
            # The version of a draft, or of a removal, does not say what the model has.
            if "model" not in truth.broken and not truth.is_removal:
                payload = next(iter(truth.weights.values()))
                self._payloads.setdefault(truth.version, set()).add(payload)
            self.reach["engine committed, partial still"] += bool(truth.broken)
            self.reach["engine committed"] += 1
        self._versions[engine.boot] = truth.version
        self._commits[engine.boot] = commits
        self._check_lease(engine)

    def _check_lease(self, engine: SimEngine) -> None:
        """Who is paused has a lease that is renewed, or it is quarantined; or it resumes. A trainer
        that is gone renews nothing, as soon as the broker has missed it."""
        session, process = engine.session, engine.process
        idle = session.pause.state is EnginePauseState.PAUSED and engine.running_call is None
        if not idle or process.stopped or session.update.partial or self._has_logged_lease(engine):
            return
        world = self.world
        renewed_ms = process.last_frame_ms
        if world.group is not None and world.group.registry.is_incomplete(engine.name):
            self._down_ms[engine.boot] = world.now_ms  # its DP group is, and is said to be
        if self._alone_ms is not None:
            alone_ms = self._alone_ms + world.config.peer_timeout_ms
            renewed_ms = min(renewed_ms, max(alone_ms, self._down_ms.get(engine.boot, 0.0)))
        begun_ms = max(engine.returned_ms, process.continued_ms)
        leases = [each.lease_ms for each in world.trainers.values()]
        # The sidecar of a rank then reads what the cores have decided.
        lease_ms = max(leases, default=0) + LEASE_RETRY_MS * (1 + (engine.dp_size > 1))
        left_ms = max(renewed_ms, begun_ms) + lease_ms - world.now_ms
        if left_ms < 0:
            raise InvariantViolation(f"{engine.name} is paused, {-left_ms:.0f} ms beyond its lease")

    def _has_logged_lease(self, engine: SimEngine) -> bool:
        """A rank whose lease is over waits for its peers, and says whom it misses; or it stays with
        one that is not whole."""
        lease = engine.session.lease
        if lease.state is LeaseState.SETTLED:
            return any(note.event == "lease_settled" for note in engine.notes)
        waits = engine.dp_size > 1 and lease.state is LeaseState.OVER
        return waits and any(note.event == "lease_undecided" for note in engine.notes)

    def check_versions(self) -> None:
        """One version is one set of weights, if someone is left who knew the earlier broker."""
        for version, payloads in self._payloads.items():
            if len(payloads) > 1:
                raise InvariantViolation(f"version {version} is weights {sorted(payloads)}")

    def _check_members(self, group: Group) -> None:
        """One name is one process, one group has one owner, and epochs only grow."""
        peers = self.world.broker.machine.peers.by_name
        silent_ms = self.world.config.peer_timeout_ms
        for name, old in self._peers.items():
            new = peers.get(name)
            if new is not None and new.boot == old.boot:
                continue
            if new is not None:
                raise InvariantViolation(f"{name} became another process, {old.boot} to {new.boot}")
            if self.world.now_ms - old.last_heard_ms < silent_ms and not self._has_left(old):
                raise InvariantViolation(f"{name} was dropped, and was heard just now")
            self.reach["peer gone"] += 1
        self._peers = dict(peers)
        owner = group.owner
        if group.epoch < self._epoch:
            raise InvariantViolation(f"the epoch fell from {self._epoch} to {group.epoch}")
        if owner is not None and (self._owner is None or owner.boot != self._owner.boot):
            if self._owner is not None:
                raise InvariantViolation(f"{owner.name} took the group from {self._owner.name}")
            if group.epoch == self._epoch:
                raise InvariantViolation(f"{owner.name} holds the group with an old epoch")
            self.reach["group taken"] += 1
        self._owner, self._epoch = owner, group.epoch

    def _has_left(self, peer: Peer) -> bool:
        """Whether that life said that it goes."""
        world = self.world
        boots = {each.boot for each in world.engines.values() if not each.alive}
        boots |= {each.boot for each in world.trainers.values() if not each.alive}
        return peer.boot in boots or peer.boot in world.superseded_boots

    def _check_pause(self, group: Group) -> None:
        state = group.pause.state
        if state is PauseState.PAUSED:
            for name in group.pause.members:
                self._require_idle(group, name, "the group is called paused")
        if state is PauseState.PAUSED and self._pause is not PauseState.PAUSED:
            self.reach["all paused"] += 1
            self._round_id = group.pause.update_id
            self._round = {
                name: self.world.engines[name].boot
                for name in group.pause.members
                if name in self.world.engines
            }
        if state is PauseState.RESUMING and self._pause is not PauseState.RESUMING:
            for name in group.pause.members:
                self._require_idle(group, name, "a resume is asked")
            if self._pause is not PauseState.PAUSED:
                self.reach["recovered forward"] += 1
        if state is PauseState.GLOBAL and self._pause is PauseState.LOCAL:
            for name in group.pause.members:
                self._require_asked(group, name)
        elif state is PauseState.GLOBAL and self._pause is not PauseState.GLOBAL:
            self._check_one_phase(group)
        self._pause = state

    def _check_one_phase(self, group: Group) -> None:
        """Nobody waits for a peer rank in a pause of one phase."""
        members = group.pause.members
        if any(facts.dp_size > 1 for facts in group.registry.facts(members).values()):
            raise InvariantViolation(f"{members} are paused in one phase")
        self.reach["paused in one phase"] += 1

    def _check_window(self, group: Group) -> None:
        """A trainer that was told of a pause, and still holds the group, holds it truly."""
        for trainer in self.world.trainers.values():
            if trainer.pause_window is None or group.owner is None:
                continue
            update_id, epoch = trainer.pause_window
            current = group.owner.boot == trainer.boot and group.epoch == epoch
            if not current or update_id != self._round_id:
                continue
            if group.pause.update_id != update_id:
                raise InvariantViolation(f"{trainer.name} holds {update_id}, the bus does not")
            for name in self._round:
                if name in group.pause.members:
                    self._require_idle(group, name, f"{trainer.name} was told that it is paused")

    def _check_update(self, group: Group) -> None:
        """Who is asked to arm can meet; who is called armed is, with the manifest that was
        sent; and nobody is asked to start before all are."""
        update = group.update
        if update.state is self._update:
            return
        if update.state is UpdateState.ARMING and update.barrier is not None:
            (arm,) = update.barrier.messages
            assert isinstance(arm, Arm)
            self._digest, self._quorum, self._scope = arm.digest, arm.quorum, arm.scope
            if arm.scope and arm.version != group.version:
                raise InvariantViolation(
                    f"engines catch up as {arm.version}, the group serves {group.version}"
                )
            if arm.communicator:
                self._check_communicator(group, arm.communicator)
        if self._update is UpdateState.EXTENDING and update.state is UpdateState.LOADING:
            self.reach["extended"] += 1
            for name in update.members:
                self._require_extended(group, name)
        if update.state is UpdateState.EXTENDING and update.barrier is not None:
            (part,) = update.barrier.messages
            assert isinstance(part, ArmPart)
            self._digest = part.digest
        if update.state in (UpdateState.ARMED, UpdateState.STARTING):
            for name in update.members:
                self._require_armed(group, name)
        if update.state is UpdateState.STARTING and not update.staged:
            running = update.members.keys() - group.pause.members.keys()
            self.reach["started beside late engines"] += len(update.members) < len(
                group.registry.engines
            )
            if running:
                raise InvariantViolation(f"{running} are to load weights, and are in no pause")
        if update.state is UpdateState.COMMITTING:
            left = set(update.members.values())
            self.reach[f"committed with a quorum of {self._quorum}"] += 1
            if len(left) < self._quorum:
                raise InvariantViolation(f"committed by {left}, of {self._quorum} at least")

    def _check_collective(self, group: Group) -> None:
        """While chunks of a communicator are to be sent, nobody of it is missing."""
        update = group.update
        may_send = update.state in (UpdateState.ARMED, *TAKES_CHUNKS, UpdateState.EXTENDING)
        sends = may_send and (update.is_open or not update.has_sent_all)
        if update.state is UpdateState.EXTENDING and update.chunks:
            raise InvariantViolation(f"chunks {sorted(update.chunks)} of what may be refused")
        if sends and update._communicator and update.excluded:
            raise InvariantViolation(f"the next chunk needs {sorted(update.excluded)}")

    def _check_routes(self, group: Group) -> None:
        """Who becomes routable takes requests; computed anew, the routes are the same."""
        routable = frozenset(route.engine for route in group.routing.now.engines)
        for name in routable - self._routable:
            engine = self._member(group, name)
            if engine is None:
                continue
            self.reach["routable again"] += bool(self._group_version)
            if engine.truth.closed:
                raise InvariantViolation(f"{name} is routable, and its admission is closed")
        moves = UpdateState.COMMITTING
        if self._update is moves and group.update.state is moves and routable != self._routable:
            raise InvariantViolation(f"routed {self._routable}, in the same commit {routable}")
        self._routable = routable
        routing = group.routing
        is_current = routing.is_current(group.version)
        only_adds = routing._seen == routing._inputs(group.version)
        if group.update.state not in _MOVING and only_adds:
            self.reach["routable engines wait for others"] += not is_current
            due = frozenset(route.engine for route in routing._routable(group.version))
            if due != routable if is_current else not routable <= due:
                raise InvariantViolation(f"routed {routable}, routable {due}")
        self._check_version(group)
        self._check_marks(group)

    def _check_marks(self, group: Group) -> None:
        """What was skipped, because nothing had marked it, would have found nothing."""
        broker = self.world.broker
        due_ms = next_deadline_ms(group)
        waits = group.routing.added != group.registry.additions  # an ACK without effects
        if group.is_due_known and not waits and due_ms is not None:
            if broker is not None and broker.machine.next_deadline_ms() > due_ms:
                raise InvariantViolation(f"a tick is due at {due_ms}, and not known to the broker")
            self.reach["deadlines"] += 1
        if group._commands.queued or group._follow_ups._settled is None:
            return
        pause, idle = group.pause.state, group.update.state is UpdateState.IDLE
        sleeps = group.sleep.barrier is not None or group.sleep.state is not SleepState.AWAKE
        late = any(record.joined_late for record in group.registry._records.values())
        missed = {
            "the end of a sleep": pause is PauseState.RUNNING and sleeps,
            "the end of a pause": pause is PauseState.PAUSED
            and idle
            and (group.orphaned or group.resume_asked),
            "the admission of late engines": late and not group.is_busy(),
        }
        if any(missed.values()):
            raise InvariantViolation(f"nobody looks for {[k for k, v in missed.items() if v]}")

    def _check_version(self, group: Group) -> None:
        """The version that is counted report by report is the median of all reports, but for those
        that wait for the end of an update; and no engine of that update is stale because of it."""
        served, update = group.served, group.update
        if served.is_committed or not group.registry.engines:
            return
        arms = update.state not in (UpdateState.IDLE, UpdateState.OPENING)
        if served._updating != (update.version if arms else 0):
            raise InvariantViolation(f"{served._updating} is under way, {update.version} is")
        if arms and not self._scope and group.version >= update.version:
            raise InvariantViolation(f"at {group.version} before {update.version} is committed")
        reports: dict[str, list[Peer]] = {}
        for peer in group.registry.engines.values():
            if peer.facts is not None:
                reports.setdefault(peer.facts.dp_group, []).append(peer)
        entries: list[tuple[bool, int]] = []  # of a DP group: whether it counts first, its version
        for name, ranks in reports.items():
            version = min(peer.version for peer in ranks)
            counts = all(p.joined_epoch and p.facts and not p.facts.closed for p in ranks)
            if name not in served._deferred:
                entries.append((counts, version))
                continue
            self.reach["reports wait for an update"] += 1
            if not group.version < update.version <= version:
                raise InvariantViolation(f"{name} waits for {update.version}, reports {version}")
            if before := served._reports._of.get(name):
                entries.append((before[0] is served._reports._counted, before[1]))
        versions = sorted(version for counts, version in entries if counts)
        versions = versions or sorted(version for _, version in entries)
        if versions and group.version != versions[(len(versions) - 1) // 2]:
            raise InvariantViolation(f"at {group.version}, engines report {versions}")

    def _check_communicator(self, group: Group, number: int) -> None:
        ranks: list[int] = []
        size = 1 + len(group.update.members)  # each has one worker; the sender is rank 0
        for name in group.update.members:
            engine = self._member(group, name)
            if engine is None:
                continue
            opened = engine.truth.transfer
            if opened is None or opened.communicator != number:
                raise InvariantViolation(f"ARM in communicator {number}, {name} has {opened}")
            if opened.world_size != size:
                raise InvariantViolation(f"{size} take part, {name} has {opened}")
            ranks.append(opened.first_rank)
        if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(1, size)):
            raise InvariantViolation(f"ranks of a communicator of {size}: {ranks}")
        self.reach["armed in a communicator"] += 1

    def _require_armed(self, group: Group, name: str) -> None:
        engine = self._member(group, name)
        if engine is None or engine.aborted_update == group.update.update_id:
            return  # it refuses what comes now
        if engine.session.update.state is not EngineUpdateState.ARMED:
            raise InvariantViolation(
                f"the update is {group.update.state.value}, {name} is not armed"
            )
        manifest = engine.truth.manifest
        if manifest is None or manifest.digest != self._digest:
            raise InvariantViolation(f"{name} armed another manifest than was sent")

    def _require_extended(self, group: Group, name: str) -> None:
        engine = self._member(group, name)
        if engine is None or engine.aborted_update == group.update.update_id:
            return
        manifest = engine.truth.manifest
        if manifest is None or manifest.digest != self._digest:
            raise InvariantViolation(f"{name} is sent tensors that it has not checked")

    def _require_idle(self, group: Group, name: str, why: str) -> None:
        engine = self._member(group, name)
        if engine is None or engine.lease_ran_out:
            return
        if not engine.truth.idle or engine.truth.running:
            raise InvariantViolation(f"{why}, and {name} is {engine.session.phase}")

    def _require_asked(self, group: Group, name: str) -> None:
        engine = self._member(group, name)
        if engine is None or engine.pause_failed or engine.lease_ran_out:
            return
        asked = engine.paused_locally == group.pause.update_id
        if not asked or engine.session.pause.state is EnginePauseState.RUNNING:
            raise InvariantViolation(f"phase 2 is asked, and {name} has not done phase 1")

    def _member(self, group: Group, name: str) -> SimEngine | None:
        """The engine, unless it is another life than the one that the bus knows."""
        engine = self.world.engines.get(name)
        peer = group.registry.engines.get(name)
        if engine is None or peer is None or not engine.alive or engine.boot != peer.boot:
            return None
        return engine

    def _check_peer_ranks(self) -> None:
        """No rank generates while the weights of a peer rank are touched, or not whole."""
        for touched in self.world.live_engines:
            if touched.dp_size == 1 or not touched.session.update.is_mixed:
                continue
            for peer in self.world.live_engines:
                if peer.dp_group != touched.dp_group or touched.dp_group in self.lost_ranks:
                    continue
                if peer.truth.running:
                    raise InvariantViolation(
                        f"{peer.name} runs, and {touched.name} is {touched.session.phase}"
                    )

    def _check_dp_groups(self) -> None:
        """At rest, a DP group runs as one or stands as one, unless it lost a rank."""
        by_group: dict[str, list[SimEngine]] = {}
        for engine in self.world.live_engines:
            by_group.setdefault(engine.dp_group, []).append(engine)
        for dp_group, ranks in by_group.items():
            whole = len(ranks) == ranks[0].dp_size
            lost = dp_group in self.lost_ranks
            if whole and not lost and len({r.truth.running for r in ranks}) > 1:
                phases = {r.name: r.session.phase for r in ranks}
                raise InvariantViolation(f"DP group {dp_group} runs in part: {phases}")

    # -- what was reached -------------------------------------------------------------

    def _count(self, group: Group) -> None:
        update = group.update.state
        if update is not self._update:
            self.reach[f"update {update.value}"] += 1
            if self._update is UpdateState.COMMITTING:
                self.reach["committed"] += 1
        self._update = update

    def _on_answer(self, answer: Message) -> None:
        if isinstance(answer, GroupAck) and answer.step is Step.PAUSE_GLOBAL:
            self.reach["told paused"] += 1
        if isinstance(answer, GroupAck) and answer.step is Step.COMMIT:
            self._on_commit_answer(answer)
        if isinstance(answer, GroupAck) and answer.step in (Step.SLEEP, Step.WAKE):
            self._on_sleep_answer(answer)
        if isinstance(answer, Nack):
            self.reach[f"refused {answer.code.value}"] += 1

    def _on_commit_answer(self, answer: GroupAck) -> None:
        """Whom the answer does not exclude, serves the version, or a later one."""
        group = self.world.group
        if group is None or group.update.update_id != answer.update_id:
            return
        for name in group.update.members.keys() - set(answer.excluded):
            engine = self._member(group, name)
            if engine is None:
                continue
            self.reach["told of a commit"] += 1
            if engine.truth.version < answer.version:
                raise InvariantViolation(
                    f"told of version {answer.version}, {name} is at an older one"
                )

    def _on_sleep_answer(self, answer: GroupAck) -> None:
        """What the trainer hears of its engines' memory is so, as long as the pause lasts."""
        self.reach[f"told of {answer.step.value}"] += 1
        group = self.world.group
        if group is None or group.pause.state is not PauseState.PAUSED:
            return
        expected = {"weights", "cache"} if answer.step is Step.SLEEP else {"cache"}
        for name in group.pause.members:
            engine = self._member(group, name)
            if answer.update_id != group.pause.update_id or engine is None:
                continue
            if answer.step is Step.WAKE and not engine.truth.asleep:
                continue  # it did not sleep before
            if engine.truth.asleep != expected and not engine.lease_ran_out:
                raise InvariantViolation(
                    f"told of {answer.step}, {name} has {engine.truth.asleep} asleep"
                )

    def count_end(self) -> None:
        """Add up what the engines saw."""
        reach = self.reach
        for engine in self.world.engines.values():
            reach["engine rejoined"] += max(0, engine.joins - 1)
            reach.update(engine.met)
            woken = [c for c in engine.calls if isinstance(c, CallResume) and c.asleep]
            reach["woken by a resume"] += len(woken)
            self._count_chunks(engine)
            for note in engine.notes:
                reach[f"event {note.event}"] += 1
                if note.event == "lease_expired":
                    reach["lease expired"] += 1
                    reach["lease of a rank expired"] += engine.dp_size > 1
            for sent in engine.sent:
                if isinstance(sent, Nack) and sent.code is NackCode.FENCED:
                    reach["engine fenced"] += 1
                if isinstance(sent, Nack) and sent.code is NackCode.CHECKSUM_MISMATCH:
                    reach["mismatch found"] += 1
                if isinstance(sent, Ack) and sent.outcome:
                    reach[f"abort {sent.outcome}"] += 1
        for trainer in self.world.trainers.values():
            for outcome in trainer.catch_ups:
                reach["catch-up failed" if outcome.error else "caught up"] += 1
            for code, count in trainer.nacks.items():
                reach[f"nack {code.value}"] += count
            for request in trainer.requests:
                if request.sent > 1 and request.answer is not None:
                    reach["asked again and answered"] += 1
                if request.answer is not None:
                    reach["answered"] += 1
        for key, count in self.world.network.counts.items():
            reach[f"frames {key}"] += count

    def _count_chunks(self, engine: SimEngine) -> None:
        """In which orders the two messages of a chunk came."""
        announced: Counter[tuple[str, int]] = Counter()
        sent: Counter[tuple[str, int]] = Counter()
        for command in engine.commands:
            if isinstance(command, WeightChunkMeta):
                key = (command.update_id, command.chunk)
                self.reach["chunk told again"] += key in announced
                was_early = (command.update_id, command.chunk - 1) in announced.keys() - sent
                self.reach["chunk told before the last is sent"] += was_early
                announced[key] += 1
            elif isinstance(command, ChunkSent):
                key = (command.update_id, command.chunk)
                self.reach["chunk sent again"] += key in sent
                self.reach["chunk sent before it is told"] += key not in announced
                sent[key] += 1
