"""Tracks the peers on the bus: their joins, heartbeats, leaves and losses.

::

    state    event              next     effect
    (none)   join               JOINED   WELCOME
    JOINED   join, same boot    JOINED   WELCOME again: the peer reconnected, or missed the first
    JOINED   join, same boot,   JOINED   it leaves its old place, and joins as any other
             other role, group or rank
    JOINED   join, other boot   JOINED   NACK name_taken, as long as the first one is alive
    JOINED   join, other key    JOINED   the same
    JOINED   any frame          JOINED   the peer counts as alive; after a second join only from its
                                         next heartbeat on, which shows that it got the WELCOME
    JOINED   leave              (none)   its group is notified
    JOINED   silent too long    (none)   its group is notified: lost

Invariant: one name is one process (one ``boot``) at any time. A restarted process
takes its name back as soon as the old one has left or has been silent for
``peer_timeout_ms``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from bus._ids import check_name
from bus._protocol.core.failures import Failure
from bus.errors import UsageError
from bus.messages import (
    Ack,
    CoordinatorFacts,
    CoreStatus,
    EngineFacts,
    EngineView,
    Envelope,
    Heartbeat,
    Join,
    Message,
    NackCode,
    Phase,
    Role,
    Step,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus._protocol.core.access import Bucket

# Roles that belong to no group.
WATCHERS: Final = ("observer", "scheduler")
# Steps that an ABORT ends; engines answer the ABORT once the step's call has returned.
UNDONE: Final = (
    *(Step.TRANSFER_INIT, Step.TRANSFER_DRAIN, Step.ARM, Step.START, Step.CHUNK, Step.PART),
    *(Step.FINISH, Step.PROBE, Step.COMMIT, Step.ABORT),
)
_LONGEST: Final = 6  # misses in a row; more count as many
# The phases in which an engine may still execute a step; any other phase shows the step's end.
_AT_IT: Final[dict[str, tuple[Phase, ...]]] = {
    **dict.fromkeys((Step.PAUSE_LOCAL, Step.PAUSE_GLOBAL, Step.RESUME), ("pausing", "resuming")),
    Step.SLEEP: ("paused",),
    Step.WAKE: ("asleep", "weights_discarded"),
}


@dataclass(slots=True)
class Peer:
    """The broker's record of one peer.

    Attributes:
        name: the peer's name.
        role: what the peer does on the bus.
        group: its group.
        route: the routing id of the peer's connection.
        boot: identifies the peer's process; after a restart it is another number.
        host: the name of the peer's host.
        pid: its process id.
        last_seq: the number of the last frame that was accepted.
        last_heard_ms: when the peer last gave a sign of life.
        facts: an engine's properties from its JOIN; None for other roles.
        coordinator: a DP coordinator's properties; None for other roles.
        core: the last status page of an engine's core; None: not reported.
        core_reported_ms: when ``core`` was reported.
        phase: an engine's state, such as ``paused``.
        version: the version that an engine serves.
        in_flight: how many requests an engine has.
        user: the public key with which the peer has joined.
        bucket: the token bucket that limits the peer's rate; None: no limit.
        is_unreachable: the peer has joined again, and has not shown yet that it received the
            answer.
        joined_epoch: the epoch in the peer's JOIN: the last one it had received; 0: none.
        overdue: the step that the engine has not answered in time; empty: none.
        missed: the step that the engine did not answer in time, ``misses`` times in a row.
        out_until_ms: until then only the answer to that step ends the overdue state.
    """

    name: str
    role: Role
    group: str
    route: bytes
    boot: int
    host: str
    pid: int
    last_seq: int
    last_heard_ms: float
    facts: EngineFacts | None
    coordinator: CoordinatorFacts | None = None
    core: CoreStatus | None = None
    core_reported_ms: float = 0.0
    phase: Phase = "running"
    version: int = 0
    in_flight: int = 0
    user: str = ""
    bucket: Bucket | None = None
    is_unreachable: bool = False
    joined_epoch: int = 0
    overdue: str = ""
    missed: str = ""
    misses: int = 0
    out_until_ms: float = 0.0

    @property
    def place(self) -> tuple[object, ...]:
        """The peer's role, group and rank on the bus; see :func:`place_of`."""
        join = Join(self.role, self.host, self.pid, self.facts, self.coordinator)
        return place_of(self.group, join)

    def on_frame(self, now_ms: float, is_heartbeat: bool, step: str) -> None:
        """Records a frame of the peer as a sign of life.

        The link of a peer that joins again may be cut in one direction: the broker receives the
        peer's frames, and the peer receives nothing. So after a second JOIN, frames are no signs of
        life until the first heartbeat, which shows that the peer received the broker's answer.

        Args:
            now_ms: when the frame arrived.
            is_heartbeat: whether the frame is a heartbeat.
            step: the step that the frame answers; empty: none.
        """
        if is_heartbeat:
            self.is_unreachable = False
        elif self.missed and step == self.missed:
            self.missed = ""
        if not self.is_unreachable:
            self.last_heard_ms = now_ms

    def on_overdue(self, step: Step, now_ms: float, waited_ms: float) -> None:
        """Records that the engine has not answered a step in time.

        An engine that misses the same step again and again would delay each update by the timeout.
        So the engine is excluded for longer each time, unless it answers the step itself.

        Args:
            step: the step.
            now_ms: the time.
            waited_ms: how long the others have waited for the answer.
        """
        self.misses = self.misses + 1 if self.missed == step.value else 1
        self.overdue = self.missed = step.value
        self.out_until_ms = now_ms + waited_ms * (4 ** (min(self.misses, _LONGEST) - 1) - 1)

    def answers(self, message: Message) -> bool:
        """Returns whether a message shows that an engine's overdue step has ended.

        Three messages do: the answer to the step, the answer to an ABORT that ends the step
        (:data:`UNDONE`), and a heartbeat with a phase in which the step can't be running. The last
        two count from ``out_until_ms`` on.
        """
        step = getattr(message, "step", "")
        undone = step == Step.ABORT and type(message) is Ack and self.overdue in UNDONE
        at_it = _AT_IT.get(self.overdue)
        over = type(message) is Heartbeat and at_it is not None and message.phase not in at_it
        return step == self.overdue or (self.may_return and (undone or over))

    @property
    def may_return(self) -> bool:
        """Whether an overdue engine may take part again without an answer to its step."""
        return self.last_heard_ms >= self.out_until_ms

    def view(self, now_ms: float) -> EngineView:
        """Returns the engine's entry in a status."""
        assert self.facts is not None
        core = self.core or CoreStatus("", 0.0, 0, 0, 0)
        core_for_ms = core.since_ms + now_ms - self.core_reported_ms if self.core else 0.0
        return EngineView(
            **self.facts.properties(),
            name=self.name,
            dp_group=self.facts.dp_group,
            version=self.version,
            phase=self.phase,
            in_flight=self.in_flight,
            host=self.host,
            pid=self.pid,
            last_heard_ms=round(now_ms - self.last_heard_ms, 1),
            core_phase=core.phase,
            core_since_ms=round(core_for_ms, 1),
            core_step=core.step,
            core_wave=core.wave,
            waiting=core.waiting,
            untagged=core.untagged,
            pd_role=self.facts.pd_role,
        )


def place_of(group: str, join: Join) -> tuple[object, ...]:
    """Returns the place that a JOIN asks for: role, group, DP group and rank."""
    part: tuple[object, ...] = ()
    if join.engine is not None:
        part = (join.engine.dp_group, join.engine.dp_rank, join.engine.dp_size)
    elif join.coordinator is not None:
        part = (join.coordinator.dp_group, join.coordinator.dp_size)
    return (join.role, "" if join.role in WATCHERS else group, *part)


# A place that only one peer can have: an engine's URL on its host; or the rank of an engine, or the
# coordinator (None), of a DP group.
_Place: TypeAlias = tuple[str, str] | tuple[str, str, int | None]


def _places(
    group: str, host: str, engine: EngineFacts | None, coordinator: CoordinatorFacts | None
) -> list[_Place]:
    if coordinator is not None:
        return [(group, coordinator.dp_group, None)]
    if engine is None:
        return []
    rank: list[_Place] = [(group, engine.dp_group, engine.dp_rank)]
    return [*rank, (host, engine.endpoint)] if engine.endpoint else rank


def _malformed(field: str, detail: str) -> Failure:
    return Failure(NackCode.MALFORMED, detail, field=field)


class Membership:
    """Holds the joined peers, by name, by connection, and by place on the bus.

    Args:
        peer_timeout_ms: the silence after which a peer is lost.
    """

    def __init__(self, peer_timeout_ms: float) -> None:
        self.peer_timeout_ms = peer_timeout_ms
        self.by_name: dict[str, Peer] = {}
        self.by_route: dict[bytes, Peer] = {}
        self._by_place: dict[_Place, Peer] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    def join(
        self, route: bytes, envelope: Envelope, join: Join, now_ms: float, user: str = ""
    ) -> Peer | Failure:
        """Adds a peer, or replaces its record if the same process joins again.

        Args:
            route: the routing id of the peer's connection.
            envelope: the envelope of the JOIN, with the peer's name, group and boot.
            join: the JOIN.
            now_ms: when the frame arrived.
            user: the public key of the connection; empty without keys.

        Returns:
            The peer's new record, or why it can't join.
        """
        refused = self._refuse(envelope, user, join, now_ms)
        if refused is not None:
            return refused
        name, group = envelope.sender, envelope.group
        old = self.by_name.get(name)
        heard_ms = now_ms
        if old is not None:
            self.remove(old)
            if old.is_unreachable:
                heard_ms = old.last_heard_ms
        peer = Peer(
            name=name,
            role=join.role,
            group=group,
            route=route,
            boot=envelope.boot,
            host=join.host,
            pid=join.pid,
            last_seq=envelope.seq,
            last_heard_ms=heard_ms,
            facts=join.engine,
            coordinator=join.coordinator,
            user=user,
            is_unreachable=old is not None,
        )
        if old is not None:
            peer.bucket = old.bucket
            peer.overdue, peer.missed, peer.misses = old.overdue, old.missed, old.misses
            peer.out_until_ms = old.out_until_ms
        if join.engine is not None:
            peer.phase = join.engine.phase
            peer.version = join.engine.version
        self.by_name[name] = peer
        self.by_route[route] = peer
        for place in _places(group, join.host, join.engine, join.coordinator):
            self._by_place[place] = peer
        return peer

    def _refuse(self, envelope: Envelope, user: str, join: Join, now_ms: float) -> Failure | None:
        name, group = envelope.sender, envelope.group
        try:
            check_name(name, "sender")
            if join.role not in WATCHERS:
                check_name(group, "group")
        except UsageError as error:
            return _malformed(str(error).split("=", 1)[0], str(error))
        if (join.role == "engine") != (join.engine is not None):
            text = "the JOIN of an engine must have this field, and no other peer's may"
            return _malformed("engine", text)
        if (join.role == "coordinator") != (join.coordinator is not None):
            text = "the JOIN of a coordinator must have this field, and no other peer's may"
            return _malformed("coordinator", text)
        if join.engine is not None and join.engine.dp_rank >= join.engine.dp_size:
            text = f"rank {join.engine.dp_rank} must be below dp_size {join.engine.dp_size}"
            return _malformed("engine.dp_rank", text)
        held = self.by_name.get(name)
        if held is None or (held.boot, held.user) == (envelope.boot, user):
            return self._refuse_place(name, group, join)
        silent_ms = now_ms - held.last_heard_ms
        return Failure(
            NackCode.NAME_TAKEN,
            f"the name is taken by {held.role} {held.host}:{held.pid}, "
            f"last heard {silent_ms:.0f} ms ago",
            field="sender",
            peer=name,
            hint=f"choose another --name; if that peer is dead, wait {self.peer_timeout_ms:.0f} ms",
        )

    def _refuse_place(self, name: str, group: str, join: Join) -> Failure | None:
        """Returns the refusal if another peer has this engine, rank or DP group; else None."""
        dead = f"wait {self.peer_timeout_ms:.0f} ms if that peer is dead"
        for place in _places(group, join.host, join.engine, join.coordinator):
            other = self._by_place.get(place)
            if other is None or other.name == name:
                continue
            if len(place) == 2:  # noqa: PLR2004 - host and URL
                field = "engine.endpoint"
                detail = f"the engine at {place[1]} already has the sidecar {other.name} "
                detail += f"({other.host}:{other.pid}, group {other.group})"
                hint = f"stop one of the two sidecars, or {dead}"
            elif place[2] is None:
                field = "coordinator.dp_group"
                detail = f"DP group {place[1]} already has a DP coordinator, {other.name}"
                hint = f"give every DP group its own --dp-group, or {dead}"
            else:
                field = "engine.dp_rank"
                detail = f"DP group {place[1]} already has a rank {place[2]}, {other.name}"
                hint = "give every DP group its own --dp-group, every rank its own --dp-rank"
            return Failure(NackCode.NAME_TAKEN, detail, other.name, field=field, hint=hint)
        return None

    def remove(self, peer: Peer) -> None:
        """Removes a peer's record. A newer record with the same name, route or place stays."""
        if self.by_name.get(peer.name) is peer:
            del self.by_name[peer.name]
        if self.by_route.get(peer.route) is peer:
            del self.by_route[peer.route]
        for place in _places(peer.group, peer.host, peer.facts, peer.coordinator):
            if self._by_place.get(place) is peer:
                del self._by_place[place]

    def silent(self, now_ms: float) -> list[Peer]:
        """Returns the peers that were silent for longer than ``peer_timeout_ms``."""
        limit = now_ms - self.peer_timeout_ms
        return [peer for peer in self.by_name.values() if peer.last_heard_ms < limit]

    def watchers(self) -> tuple[bytes, ...]:
        """Returns the routing ids of all watchers."""
        return tuple(peer.route for peer in self.by_name.values() if peer.role in WATCHERS)
