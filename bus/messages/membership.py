"""Messages of membership: JOIN, heartbeats, LEAVE, and the direct links of a DP group's ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from bus.messages.types import (
    NO_LIMITS,
    CanaryMode,
    CorePhase,
    Count,
    Features,
    KvConnectors,
    LeasePosition,
    LongText,
    Message,
    Name,
    PdRole,
    Phase,
    RequestLimits,
    Role,
    Serial,
    ShortText,
    Size,
    UpdateId,
)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine's properties, and its state when it joins (or joins again).

    Attributes:
        kind: the adapter: ``embedded``, ``vllm`` or ``vllm-http``.
        software: the engine's software behind the adapter, with its version.
        workers: how many worker processes (TP x PP) the engine has.
        endpoint: the URL that takes requests; empty: none over the network.
        can_sleep: the engine was started with sleep support, so it can give memory back.
        draft: the engine has a draft model whose weights can be updated.
        supervised: if the engine ends, it is restarted with all ranks of its DP group.
        canary: how a pause must treat requests while probes run; empty: it can't run probes.
        peer_address: where other ranks of its DP group reach its sidecar; empty: nowhere.
        closed: as in :class:`Heartbeat`.
        features: features that its vLLM lacks, with the reason; empty: all work.
        untested: a warning that wavebus was not tested with its vLLM version; empty: it was.
        dtype: the model's dtype, by torch's name (``bfloat16``); empty: unknown.
        limits: which requests the engine takes.
        run: the run whose cache entries the engine has (:class:`Welcome`); a run of its own before
            it has joined any group.
        pd_role: whether it only prefills, or only decodes.
        kv_connectors: how updates treat its KV connectors.
    """

    kind: ShortText
    software: ShortText
    model: ShortText
    dp_group: Name
    dp_rank: Count
    dp_size: Size
    workers: Size
    backends: Annotated[tuple[ShortText, ...], Meta(max_length=32)]
    endpoint: ShortText
    can_sleep: bool
    draft: bool
    supervised: bool
    canary: CanaryMode
    version: Serial
    phase: Phase
    update_id: UpdateId
    peer_address: ShortText
    closed: bool = False
    features: Features = field(default_factory=dict)
    untested: ShortText = ""
    dtype: ShortText = ""
    limits: RequestLimits = NO_LIMITS
    run: ShortText = ""
    pd_role: PdRole = ""
    kv_connectors: KvConnectors = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CoordinatorFacts:
    """The DP group of a DP coordinator, and the state of its wave when the coordinator joins.

    ``rank``: the rank that began the running wave; None: no wave runs, or it is unknown.
    """

    dp_group: Name
    dp_size: Size
    wave: Count
    running: bool
    rank: Count | None = None


@dataclass(frozen=True, slots=True)
class Join(Message):
    """Peer to broker: a request to join the bus.

    ``engine`` is set only for the role ``engine``, ``coordinator`` only for ``coordinator``.
    """

    role: Role
    host: ShortText
    pid: Count
    engine: EngineFacts | None
    coordinator: CoordinatorFacts | None


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Broker to peer: the JOIN is accepted. The envelope carries the epoch that is granted.

    Attributes:
        version: the version that the group serves.
        run: the group's run. Engines put it into the salts of their caches, so that only engines of
            one run share cache entries.
    """

    heartbeat_ms: Count
    peer_timeout_ms: Count
    version: Count
    run: ShortText = ""


@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """Peer to broker: the peer is alive.

    Attributes:
        version: the version that an engine serves; the version whose weights a trainer keeps
            (0: none).
        in_flight: an engine's requests; how many tensors a trainer has taken from its source.
        closed: the engine rejects new requests, or keeps them waiting in a core that does not run.
    """

    phase: Phase
    version: Serial
    in_flight: Count
    update_id: UpdateId
    closed: bool = False


@dataclass(frozen=True, slots=True)
class CoreStatus(Message):
    """Engine to broker: the content of an engine core's status page.

    Attributes:
        phase: what the core does, for ``since_ms``.
        step: how many steps the core has run.
        requests: how many requests it has. ``waiting`` of them wait for a slot or for memory.
        untagged: how many requests since the core's start had a KV cache that names no version
            (docs/pd.md).
    """

    phase: CorePhase
    since_ms: float
    step: Count
    wave: Count
    requests: Count
    waiting: Count = 0
    untagged: Count = 0


@dataclass(frozen=True, slots=True)
class Restart(Message):
    """Broker to engines: the engine or its DP group is stuck and must restart.

    The sidecar ends the engine and itself, so that the supervisor restarts both. ``reason`` is the
    diagnosis.
    """

    reason: LongText


@dataclass(frozen=True, slots=True)
class HeartbeatAck(Message):
    """Broker to peer: the broker is alive.

    Attributes:
        held: the pause that the broker keeps at this engine, which renews the engine's lease.
        closed: as in the heartbeat.
    """

    version: Count
    held: UpdateId
    closed: bool = False


@dataclass(frozen=True, slots=True)
class PeerRank:
    """One rank of a DP group. ``key``: its public key, if the broker has keys."""

    name: Name
    dp_rank: Count
    address: ShortText
    key: ShortText


@dataclass(frozen=True, slots=True)
class PeerRanks(Message):
    """Broker to engine: all ranks of its DP group, which is complete."""

    peers: Annotated[tuple[PeerRank, ...], Meta(max_length=4096)]


@dataclass(frozen=True, slots=True)
class LeaseVote(Message):
    """Engine to its peer ranks: its position when a pause lease is over.

    Attributes:
        pause_id: the pause that the rank is in, or was in last.
        version: the version that the rank serves.
        asks: the receiver is to answer with its own vote.
    """

    dp_group: Name
    dp_rank: Count
    position: LeasePosition
    pause_id: UpdateId
    version: Serial
    asks: bool


@dataclass(frozen=True, slots=True)
class Leave(Message):
    """Peer to broker: the peer leaves the bus."""

    reason: LongText
