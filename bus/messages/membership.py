"""Who is there: joining, being heard, leaving."""

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
    """What an engine is, and where it stands when it joins (or joins again).

    ``workers`` counts its TP x PP worker processes; ``endpoint`` is the URL at
    which it takes requests, empty if it takes none over the network;
    ``can_sleep``: it was started so that it can give its memory back;
    ``peer_address``: where other ranks of its DP group reach its sidecar, empty if it has none;
    ``supervised``: whoever started it starts it anew, with all ranks of its DP group, when it
    ends;
    ``draft``: it has a draft model whose weights can be updated; ``canary``: what must become of
    its requests while it runs a canary's probes, empty if it can't;
    ``kind`` is the adapter (``embedded``, ``vllm``, ``vllm-http``) and
    ``software`` what runs behind it, with its version;
    ``closed``: as in :class:`Heartbeat`;
    ``features``: what its vLLM supports, and why not; empty for an engine that lacks nothing;
    ``untested``: says that wavebus was not run on its version of vLLM; empty if it was;
    ``dtype``: its model's, by torch's name (``bfloat16``); empty if the engine does not report it;
    ``limits``: what requests it takes;
    ``run``: the run whose caches its own are (:class:`Welcome`); one of its own before it has
    joined any group;
    ``pd_role``: whether it only prefills, or only decodes what others have prefilled;
    ``kv_connectors``: how updates treat its KV connectors.
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
    """The coordinator of one DP group, and where its waves stand when it joins.

    ``rank``: the rank that began the wave that runs; None if no wave runs, or nobody knows.
    """

    dp_group: Name
    dp_size: Size
    wave: Count
    running: bool
    rank: Count | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """``engine`` or ``coordinator`` is set for just that role."""

    role: Role
    host: ShortText
    pid: Count
    engine: EngineFacts | None
    coordinator: CoordinatorFacts | None


@dataclass(frozen=True, slots=True)
class Welcome:
    """``version`` is the group's; the envelope carries the epoch given.

    ``run`` names the group's run: engines put it into the salts of their caches, so that engines
    of one run find each other's keys and values, and never those of another run.
    """

    heartbeat_ms: Count
    peer_timeout_ms: Count
    version: Count
    run: ShortText = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """``version``: what an engine serves; of a trainer, of which it keeps the weights (0: none).
    ``closed``: requests that reach the engine are ended, or wait in a core that does not run.
    ``in_flight``: an engine's requests; a trainer's tensors, of those taken from its source."""

    phase: Phase
    version: Serial
    in_flight: Count
    update_id: UpdateId
    closed: bool = False


@dataclass(frozen=True, slots=True)
class CoreStatus:
    """An engine core's status page, as its sidecar has just read it.

    What the core does and since when, its steps so far, its wave, and how many requests it has.
    ``waiting`` of them wait for a slot or for memory. ``untagged`` requests came, since the core's
    start, with KV that names no version (docs/pd.md).
    """

    phase: CorePhase
    since_ms: float
    step: Count
    wave: Count
    requests: Count
    waiting: Count = 0
    untagged: Count = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """The engine, or the DP group that it is a rank of, does not go on by itself: end it, and the
    sidecar too, so that its supervisor starts it anew. ``reason`` is the diagnosis."""

    reason: LongText


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """``held``: the pause that the broker sees to at this engine, which renews its lease.
    ``closed``: as in the heartbeat that it answers."""

    version: Count
    held: UpdateId
    closed: bool = False


@dataclass(frozen=True, slots=True)
class PeerRank:
    """A rank of a DP group; ``key`` is its public key, if the broker has keys."""

    name: Name
    dp_rank: Count
    address: ShortText
    key: ShortText


@dataclass(frozen=True, slots=True)
class PeerRanks:
    """All ranks of the DP group, which is whole."""

    peers: Annotated[tuple[PeerRank, ...], Meta(max_length=4096)]


@dataclass(frozen=True, slots=True)
class LeaseVote:
    """How a rank stands, told to its peer ranks and to nobody else; ``asks``: tell me, too.

    ``pause_id`` is the pause that it is in, or was in last; ``version`` what it serves."""

    dp_group: Name
    dp_rank: Count
    position: LeasePosition
    pause_id: UpdateId
    version: Serial
    asks: bool


@dataclass(frozen=True, slots=True)
class Leave:
    reason: LongText
