"""Messages of membership: JOIN, heartbeats, LEAVE, and engines' status pages."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from bus.messages.types import (
    NO_LIMITS,
    CanaryMode,
    CorePhase,
    Count,
    Features,
    KvConnectors,
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


class EngineProperties(Struct, frozen=True):
    """An engine's properties, as the engine's adapter reports them.

    Attributes:
        kind: the adapter: ``embedded``, ``vllm`` or ``vllm-http``.
        software: the engine's software behind the adapter, with its version.
        model: the name of the served model.
        dp_rank, dp_size: its number in its DP group, and how many ranks that has.
        workers: how many worker processes (TP x PP) the engine has.
        backends: the transports over which the engine can receive weights.
        endpoint: the URL that takes requests; empty: none over the network.
        can_sleep: the engine was started with sleep support, so it can give memory back.
        draft: the engine has a draft model whose weights can be updated.
        canary: how a pause must treat requests so that the engine can run probes in it; empty: the
            engine can't run probes.
        features: features that its vLLM lacks, with the reason; empty: all work.
        untested: a warning that wavebus was not tested with its vLLM version; empty: it was.
        dtype: the model's dtype, by torch's name (``bfloat16``); empty: unknown.
        limits: which requests the engine takes.
        kv_connectors: how updates treat its KV connectors.
    """

    kind: ShortText
    software: ShortText
    model: ShortText
    dp_rank: Count
    dp_size: Size
    workers: Size
    backends: Annotated[tuple[ShortText, ...], Meta(max_length=32)]
    endpoint: ShortText
    can_sleep: bool = False
    draft: bool = False
    canary: CanaryMode = ""
    features: Features = field(default_factory=dict)
    untested: ShortText = ""
    dtype: ShortText = ""
    limits: RequestLimits = NO_LIMITS
    kv_connectors: KvConnectors = field(default_factory=dict)

    def properties(self) -> dict[str, Any]:
        """Returns the properties of this base class by name, without those of subclasses."""
        return {name: getattr(self, name) for name in EngineProperties.__struct_fields__}


class EngineFacts(EngineProperties, frozen=True, kw_only=True):
    """An engine's properties, and its state when it joins (or joins again).

    Attributes:
        dp_group: the engine's DP group, in which it is rank ``dp_rank`` of ``dp_size``.
        supervised: if the engine ends, its supervisor restarts it with all ranks of its DP group.
        version: the version that the engine serves.
        phase: the engine's state.
        update_id: the pause or update to which ``phase`` refers; empty: none.
        closed: as in :class:`Heartbeat`.
        run: the run whose cache entries the engine has (:class:`Welcome`); a run of its own before
            it has joined any group.
        pd_role: whether the engine only prefills, or only decodes; empty: it does both.
    """

    dp_group: Name
    supervised: bool
    version: Serial
    phase: Phase
    update_id: UpdateId
    closed: bool = False
    run: ShortText = ""
    pd_role: PdRole = ""


class CoordinatorFacts(Struct, frozen=True):
    """A DP coordinator's DP group, and the state of its wave when it joins.

    Attributes:
        dp_group: the DP group's name.
        dp_size: how many ranks the DP group has.
        wave: the number of the running wave, or of the next one if none runs.
        running: whether a wave runs.
        rank: the rank that began the running wave; None: no wave runs, or the rank is unknown.
    """

    dp_group: Name
    dp_size: Size
    wave: Serial
    running: bool
    rank: Count | None = None


class Join(Message, frozen=True):
    """Peer to broker: asks to join the bus. The envelope names the peer and its group.

    Attributes:
        role: what the peer does on the bus.
        host: the name of the peer's host.
        pid: the peer's process id.
        engine: the engine's properties; set only for the role ``engine``.
        coordinator: the DP coordinator's properties; set only for the role ``coordinator``.
    """

    role: Role
    host: ShortText
    pid: Count
    engine: EngineFacts | None
    coordinator: CoordinatorFacts | None


class Welcome(Message, frozen=True):
    """Broker to peer: the JOIN is accepted. The envelope carries the epoch that is granted.

    Attributes:
        heartbeat_ms: how often the peer must send a heartbeat, in ms.
        peer_timeout_ms: the silence, in ms, after which the broker or the peer counts as lost.
        version: the version that the group serves.
        run: the group's run. Engines put it into the salts of their caches, so that only engines of
            one run share cache entries.
    """

    heartbeat_ms: Count
    peer_timeout_ms: Count
    version: Count
    run: ShortText = ""


class Heartbeat(Message, frozen=True):
    """Peer to broker: the peer is alive.

    Attributes:
        phase: an engine's state.
        version: the version that an engine serves; the version whose weights a trainer keeps (0:
            none).
        in_flight: how many requests an engine has; how many tensors a trainer has taken from its
            source.
        update_id: the pause or update to which ``phase`` refers; empty: none.
        closed: the engine rejects new requests, or keeps them waiting in a core that does not run.
    """

    phase: Phase
    version: Serial
    in_flight: Serial
    update_id: UpdateId
    closed: bool = False


class CoreStatus(Message, frozen=True):
    """Engine to broker: the content of an engine core's status page.

    Attributes:
        phase: what the core does.
        since_ms: how long the core has been in ``phase``, in ms.
        step: how many steps the core has run.
        wave: the number of the core's wave.
        requests: how many requests the core has, with those that wait.
        waiting: how many of ``requests`` wait for a slot or for memory.
        untagged: how many requests since the core's start had a KV cache that names no version
            (docs/pd.md).
    """

    phase: CorePhase
    since_ms: float
    step: Serial
    wave: Serial
    requests: Serial
    waiting: Serial = 0
    untagged: Serial = 0


class Restart(Message, frozen=True):
    """Broker to engines: the engine or its DP group is stuck and must restart.

    The sidecar ends the engine and itself, so that the supervisor restarts both. ``reason`` is the
    diagnosis.
    """

    reason: LongText


class HeartbeatAck(Message, frozen=True):
    """Broker to peer: the broker is alive. Answers a heartbeat.

    Attributes:
        version: the version that the group serves.
        held: the pause that the broker keeps at this engine. Naming the pause renews its lease.
        closed: the heartbeat's ``closed``; False while a commit keeps the engine in the routes. A
            sidecar that ends its engine first waits for True.
    """

    version: Count
    held: UpdateId
    closed: bool = False


class Leave(Message, frozen=True):
    """Peer to broker: the peer leaves the bus."""

    reason: LongText
