"""The vocabulary of the bus: every control message, as a frozen dataclass.

A frame on the wire is one MessagePack map, the :class:`Envelope`, whose ``body``
is the map of one of the message classes below. Every field is required on the
wire; units stand in the names. Tensors never travel in here.

Who says what:

=================== ============================== =================================
wire name           from → to                      effect
=================== ============================== =================================
JOIN                peer → broker                  the peer is known and has its facts
WELCOME             broker → peer                  the join is accepted
HEARTBEAT           peer → broker                  the peer lives; its present state
CORE_STATUS         engine → broker                where its core stands: step, wave, phase
HEARTBEAT_ACK       broker → peer                  the broker lives
LEAVE               peer → broker                  the peer goes, in order
PAUSE_LOCAL         trainer → broker → engines     pause, phase 1: schedule nothing new
PAUSE_GLOBAL        broker → engines               pause, phase 2: idle on the device
RESUME              trainer → broker → engines     schedule again
FIRST_REQ           gateway → broker               an idle DP group got a request
FIRST_REQ_HELD      broker → gateway               it is paused or down; kept, starts later
START_DP_WAVE       broker → gateway               every rank joins this wave
WAVE_STARTED        gateway → broker               this wave runs
WAVE_COMPLETE       gateway → broker               every rank is idle; the next wave is one more
PLAN_TRANSFER       trainer → broker               ask who takes part in a collective transfer
TRANSFER_PLAN       broker → trainer               the communicator: its number and size
TRANSFER_INIT       trainer → broker → engines     open the out-of-band transport
ARM                 trainer → broker → engines     the manifest; engines check it
UPDATE_START        trainer → broker → engines     get ready to load
WEIGHT_CHUNK_META   trainer → broker → engines     receive one chunk
CHUNK_SENT          trainer → broker → engines     it is sent; check its sums, and load it
UPDATE_FINISH       trainer → broker → engines     all chunks are loaded
COMMIT              trainer → broker → engines     serve this version from now on
ABORT               trainer → broker → engines     give the update up
TRAINER_STEP        trainer → broker → followers   how far rank 0 has come with an update
AWAIT_STEP          follower → broker              another rank of the trainer waits for that
WAIT_ENGINES        trainer → broker               answer when so many engines are there
GROUP_VIEW          broker → trainer               the engines of the group
STATUS_REQUEST      any → broker                   ask for the broker's whole view
STATUS              broker → any                   that view
ACK, NACK           engine → broker, broker → any  done; or refused, and why
GROUP_ACK           broker → trainer               every engine has done the step
=================== ============================== =================================
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

WIRE_MAJOR: Final = 1
WIRE_MINOR: Final = 0

# Bounds. A frame over MAX_FRAME_BYTES is refused unread; 16 MiB hold the manifest
# of a model of 100,000 tensors with names of 100 characters.
MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
MAX_TENSORS: Final = 200_000
MAX_BLOB_BYTES: Final = 4 * 1024 * 1024

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Name: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*\Z")
]
ShortText: TypeAlias = Annotated[str, Meta(max_length=256)]
LongText: TypeAlias = Annotated[str, Meta(max_length=4096)]
UpdateId: TypeAlias = Annotated[str, Meta(max_length=64)]
Blob: TypeAlias = Annotated[bytes, Meta(max_length=MAX_BLOB_BYTES)]
TensorName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512)]
TensorNames: TypeAlias = Annotated[tuple[TensorName, ...], Meta(max_length=MAX_TENSORS)]
Dtypes: TypeAlias = Annotated[
    tuple[Annotated[str, Meta(max_length=32)], ...], Meta(max_length=MAX_TENSORS)
]
Shape: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=16)]
Shapes: TypeAlias = Annotated[tuple[Shape, ...], Meta(max_length=MAX_TENSORS)]
Counts: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_TENSORS)]

MAX_REQUEST_IDS: Final = 4096
RequestIds: TypeAlias = Annotated[tuple[ShortText, ...], Meta(max_length=MAX_REQUEST_IDS)]

# A follower is another rank of the trainer.
Role: TypeAlias = Literal["trainer", "follower", "engine", "gateway", "observer"]
# What rank 0 tells its followers: gather the tensors with me; it is over.
TrainerPoint: TypeAlias = Literal["go", "end"]
PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
# What a `wait` pause becomes at its deadline.
Escalation: TypeAlias = Literal["keep", "abort"]
# What an engine's core does, by its status page; empty: it has none.
CorePhase: TypeAlias = Literal["", "idle", "work", "step", "dummy", "sync", "barrier"]
# How a chunk is checked before it is loaded: `unsupported` where a backend can't.
Verify: TypeAlias = Literal["off", "sample", "full", "unsupported"]
# What an engine says of itself, in its heartbeats and when it joins.
Phase: TypeAlias = Literal[
    "running", "pausing", "paused", "resuming", "armed", "updating", "quarantined"
]


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """What every frame carries. No dataclass: it is made and read with every frame, and
    a frozen dataclass of eleven fields takes ten times as long to make.

    ``id`` names the message and stays when it is sent again; ``seq`` grows with
    every frame of one ``boot`` (one life of a process), so that a receiver can
    tell a frame that is old or doubled. ``reply_to`` is the id of the message
    answered, or 0. ``epoch`` fences: see :mod:`bus.protocol.group`.
    """

    wire_major: Count
    wire_minor: Count
    kind: Annotated[str, Meta(max_length=64)]
    id: Count
    reply_to: Count
    sender: Annotated[str, Meta(min_length=1, max_length=128)]
    boot: Count
    group: Annotated[str, Meta(max_length=128)]
    epoch: Count
    seq: Count
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine is, and where it stands when it joins (or joins again).

    ``workers`` counts its TP x PP worker processes; ``endpoint`` is the URL at
    which it takes requests, empty if it takes none over the network;
    ``kind`` is the adapter (``embedded``, ``vllm``, ``vllm-http``) and
    ``software`` what runs behind it, with its version.
    """

    kind: ShortText
    software: ShortText
    model: ShortText
    dp_group: Name
    dp_rank: Count
    dp_size: Annotated[int, Meta(ge=1)]
    workers: Annotated[int, Meta(ge=1)]
    backends: Annotated[tuple[ShortText, ...], Meta(max_length=32)]
    endpoint: ShortText
    version: Count
    phase: Phase
    update_id: UpdateId


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """The coordinator of one DP group, and where its waves stand when it joins."""

    dp_group: Name
    dp_size: Annotated[int, Meta(ge=1)]
    wave: Count
    running: bool


@dataclass(frozen=True, slots=True)
class Join:
    """``engine`` or ``gateway`` is set for just that role."""

    role: Role
    host: ShortText
    pid: Count
    engine: EngineFacts | None
    gateway: GatewayFacts | None


@dataclass(frozen=True, slots=True)
class Welcome:
    """``version`` is the group's; the envelope carries the epoch given."""

    heartbeat_ms: Count
    peer_timeout_ms: Count
    version: Count


@dataclass(frozen=True, slots=True)
class Heartbeat:
    phase: Phase
    version: Count
    in_flight: Count
    update_id: UpdateId


@dataclass(frozen=True, slots=True)
class CoreStatus:
    """A DP rank's status page, as its sidecar has just read it: what the engine's core
    does, since when, its steps so far, its wave, and how many requests it has."""

    phase: CorePhase
    since_ms: float
    step: Count
    wave: Count
    requests: Count


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    version: Count


@dataclass(frozen=True, slots=True)
class Leave:
    reason: LongText


@dataclass(frozen=True, slots=True)
class PauseLocal:
    """``lease_ms``: how long an engine stays paused once nobody renews the pause.

    ``timeout_ms``: how long the caller waits for the whole pause; the pause goes
    on and is recovered forward when it passes. ``wait_ms`` (mode ``wait`` only, 0: no
    end): when requests still run after it, the pause becomes ``escalate``.
    """

    update_id: UpdateId
    mode: PauseMode
    clear_cache: bool
    lease_ms: Count
    timeout_ms: Count
    wait_ms: Count
    escalate: Escalation


@dataclass(frozen=True, slots=True)
class PauseGlobal:
    update_id: UpdateId


@dataclass(frozen=True, slots=True)
class Resume:
    update_id: UpdateId


@dataclass(frozen=True, slots=True)
class FirstReq:
    """Rank ``rank`` of an idle DP group got a request; ``wave`` is the one to start."""

    dp_group: Name
    rank: Count
    wave: Count


@dataclass(frozen=True, slots=True)
class FirstReqHeld:
    """Kept until the DP group may run again; ``reason`` says why not now."""

    dp_group: Name
    wave: Count
    reason: ShortText


@dataclass(frozen=True, slots=True)
class StartDpWave:
    """Every rank but ``excluded`` (none, if it is None) joins the wave, with dummy
    batches until all are idle."""

    dp_group: Name
    wave: Count
    excluded: Count | None


@dataclass(frozen=True, slots=True)
class WaveStarted:
    """``local``: decided without the broker, which had not answered."""

    dp_group: Name
    wave: Count
    local: bool


@dataclass(frozen=True, slots=True)
class WaveComplete:
    dp_group: Name
    wave: Count


@dataclass(frozen=True, slots=True)
class PlanTransfer:
    pass


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """See :mod:`bus.protocol.communicator`. The trainer's sender is rank 0."""

    communicator: Count
    world_size: Count


@dataclass(frozen=True, slots=True)
class TransferInit:
    """``params`` is a MessagePack blob that only the backend reads (bounded, typed).

    ``communicator`` is the number of the one that the transport is made for, 0 for a backend
    without collectives. The broker adds ``world_size`` and where each engine stands in it.
    """

    backend: ShortText
    params: Blob
    communicator: Count
    world_size: Count
    first_ranks: Annotated[dict[ShortText, Count], Meta(max_length=16_384)]


@dataclass(frozen=True, slots=True)
class Arm:
    """The manifest of an update (see :class:`bus.manifest.Manifest`) and its version.

    The trainer sends the last ``version`` it knows, the broker puts the one it assigned, which
    is greater: also when it is a new broker, and whoever serves that version is yet to join.
    """

    update_id: UpdateId
    version: Count
    label: ShortText
    backend: ShortText
    communicator: Count
    names: TensorNames
    dtypes: Dtypes
    shapes: Shapes
    chunk_ends: Counts
    digest: ShortText


@dataclass(frozen=True, slots=True)
class UpdateStart:
    update_id: UpdateId


@dataclass(frozen=True, slots=True)
class WeightChunkMeta:
    """One chunk: tensors, and a transport handle that only the backend reads."""

    update_id: UpdateId
    chunk: Count
    names: TensorNames
    dtypes: Dtypes
    shapes: Shapes
    sizes_bytes: Counts
    handle: Blob


@dataclass(frozen=True, slots=True)
class ChunkSent:
    """Every byte of the chunk has left. ``sums`` are its tensors' (see :mod:`bus.checksum`),
    computed where the sender has them; none, if nothing is to be verified."""

    update_id: UpdateId
    chunk: Count
    verify: Verify
    sums: Counts


@dataclass(frozen=True, slots=True)
class UpdateFinish:
    update_id: UpdateId


@dataclass(frozen=True, slots=True)
class Commit:
    update_id: UpdateId
    version: Count
    label: ShortText


@dataclass(frozen=True, slots=True)
class Abort:
    update_id: UpdateId
    reason: LongText


@dataclass(frozen=True, slots=True)
class WaitEngines:
    count: Count
    timeout_ms: Count


@dataclass(frozen=True, slots=True)
class EngineView:
    """``core_since_ms``: for how long its core has been in ``core_phase``, as far as the
    sidecar's last word goes."""

    name: ShortText
    dp_group: ShortText
    dp_rank: Count
    endpoint: ShortText
    kind: ShortText
    software: ShortText
    version: Count
    phase: ShortText
    in_flight: Count
    host: ShortText
    pid: Count
    last_heard_ms: float
    backends: tuple[ShortText, ...]
    core_phase: CorePhase
    core_since_ms: float
    core_step: Count
    core_wave: Count


@dataclass(frozen=True, slots=True)
class DpGroupView:
    """``state`` is the wave machine's; ``health`` is ok, slow, wedged or down, and
    ``diagnosis`` says why in words."""

    name: ShortText
    state: ShortText
    wave: Count
    ranks: Count
    size: Count
    first_req: bool
    gateway: ShortText
    health: ShortText
    diagnosis: LongText


@dataclass(frozen=True, slots=True)
class GroupView:
    engines: Annotated[tuple[EngineView, ...], Meta(max_length=16_384)]
    version: Count


@dataclass(frozen=True, slots=True)
class StatusRequest:
    pass


@dataclass(frozen=True, slots=True)
class GroupStatus:
    name: ShortText
    epoch: Count
    version: Count
    holder: ShortText
    pause: ShortText
    update: ShortText
    update_id: UpdateId
    waiting_for: Annotated[tuple[ShortText, ...], Meta(max_length=16_384)]
    engines: Annotated[tuple[EngineView, ...], Meta(max_length=16_384)]
    dp_groups: Annotated[tuple[DpGroupView, ...], Meta(max_length=16_384)]


@dataclass(frozen=True, slots=True)
class Status:
    """``cpu_s`` and ``rss_bytes`` are the broker process's own."""

    broker: ShortText
    uptime_s: float
    cpu_s: float
    rss_bytes: Count
    peers: Count
    groups: Annotated[tuple[GroupStatus, ...], Meta(max_length=4096)]


class Step(StrEnum):
    """What an ACK or GROUP_ACK says has been done."""

    PAUSE_LOCAL = "pause_local"
    PAUSE_GLOBAL = "pause_global"
    RESUME = "resume"
    TRANSFER_INIT = "transfer_init"
    ARM = "arm"
    START = "start"
    CHUNK = "chunk"
    FINISH = "finish"
    COMMIT = "commit"
    ABORT = "abort"


class Ack(msgspec.Struct, frozen=True):
    """An engine has done ``step``. No dataclass, for the reason that the envelope is none.

    ``chunk`` counts only for the step ``chunk``. ``duration_ms`` is what the
    engine took. ``in_flight`` is the number of requests it holds. ``outcome``
    says what an ABORT found: ``untouched``, ``restored`` or ``partial``; and of a
    ``wait`` pause whether it ``drained``, or was ``escalated``. ``waited_for`` are
    the requests that a ``wait`` pause still waited for at its deadline.
    """

    step: Step
    update_id: UpdateId
    chunk: Count
    in_flight: Count
    duration_ms: float
    outcome: ShortText
    waited_for: RequestIds


class NackCode(StrEnum):
    """Why something was refused. The text beside it is for people; this is for code."""

    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    UNKNOWN_KIND = "unknown_kind"
    WIRE_VERSION = "wire_version"
    STALE = "stale"
    NOT_JOINED = "not_joined"
    NAME_TAKEN = "name_taken"
    GROUP_HELD = "group_held"
    UNKNOWN_GROUP = "unknown_group"
    EMPTY_GROUP = "empty_group"
    FORBIDDEN = "forbidden"
    FENCED = "fenced"
    WRONG_STATE = "wrong_state"
    MANIFEST_REFUSED = "manifest_refused"
    BACKEND_MISSING = "backend_missing"
    TRANSFER_CLOSED = "transfer_closed"
    TRANSFER_FAILED = "transfer_failed"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    ENGINE_FAILED = "engine_failed"
    ENGINE_DEAD = "engine_dead"
    PEER_LOST = "peer_lost"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Nack:
    """Refused, and nothing has changed.

    ``field`` names the message field or option at fault, ``peer`` who refused,
    ``tensor`` the tensor, ``step`` where in a pause or an update; empty where
    there is none. ``hint`` says what to do.
    """

    code: NackCode
    step: ShortText
    update_id: UpdateId
    chunk: Count
    detail: LongText
    field: ShortText
    peer: ShortText
    tensor: Annotated[str, Meta(max_length=512)]
    hint: LongText
    retry_after_ms: Count


@dataclass(frozen=True, slots=True)
class TrainerStep:
    """``number`` counts rank 0's updates from 1. ``version`` (with ``end``) is what was
    committed; ``failure`` is what rank 0 raised instead."""

    number: Count
    point: TrainerPoint
    version: Count
    failure: Nack | None


@dataclass(frozen=True, slots=True)
class AwaitStep:
    number: Count
    point: TrainerPoint


@dataclass(frozen=True, slots=True)
class GroupAck:
    """Every engine of the group has done ``step``.

    ``excluded`` names engines that fell out on the way (dead or quarantined).
    ``in_flight`` is summed over the engines; ``slowest`` is who acked last.
    ``paused_ms`` (with ``resume`` only) is the time from the first PAUSE_LOCAL to
    the last RESUME ack. ``escalated`` names engines whose ``wait`` pause came to its
    deadline, ``waited_for`` the requests that it waited for until then.
    """

    step: Step
    update_id: UpdateId
    version: Count
    engines: Count
    excluded: Annotated[tuple[ShortText, ...], Meta(max_length=16_384)]
    in_flight: Count
    slowest: ShortText
    slowest_ms: float
    duration_ms: float
    paused_ms: float
    escalated: Annotated[tuple[ShortText, ...], Meta(max_length=16_384)]
    waited_for: RequestIds


Message: TypeAlias = (
    Join
    | Welcome
    | Heartbeat
    | CoreStatus
    | HeartbeatAck
    | Leave
    | PauseLocal
    | PauseGlobal
    | Resume
    | FirstReq
    | FirstReqHeld
    | StartDpWave
    | WaveStarted
    | WaveComplete
    | PlanTransfer
    | TransferPlan
    | TransferInit
    | Arm
    | UpdateStart
    | WeightChunkMeta
    | ChunkSent
    | UpdateFinish
    | Commit
    | Abort
    | TrainerStep
    | AwaitStep
    | WaitEngines
    | GroupView
    | StatusRequest
    | Status
    | Ack
    | Nack
    | GroupAck
)

WIRE_NAMES: Final[dict[type[Message], str]] = {
    Join: "JOIN",
    Welcome: "WELCOME",
    Heartbeat: "HEARTBEAT",
    CoreStatus: "CORE_STATUS",
    HeartbeatAck: "HEARTBEAT_ACK",
    Leave: "LEAVE",
    PauseLocal: "PAUSE_LOCAL",
    PauseGlobal: "PAUSE_GLOBAL",
    Resume: "RESUME",
    FirstReq: "FIRST_REQ",
    FirstReqHeld: "FIRST_REQ_HELD",
    StartDpWave: "START_DP_WAVE",
    WaveStarted: "WAVE_STARTED",
    WaveComplete: "WAVE_COMPLETE",
    PlanTransfer: "PLAN_TRANSFER",
    TransferPlan: "TRANSFER_PLAN",
    TransferInit: "TRANSFER_INIT",
    Arm: "ARM",
    UpdateStart: "UPDATE_START",
    WeightChunkMeta: "WEIGHT_CHUNK_META",
    ChunkSent: "CHUNK_SENT",
    UpdateFinish: "UPDATE_FINISH",
    Commit: "COMMIT",
    Abort: "ABORT",
    TrainerStep: "TRAINER_STEP",
    AwaitStep: "AWAIT_STEP",
    WaitEngines: "WAIT_ENGINES",
    GroupView: "GROUP_VIEW",
    StatusRequest: "STATUS_REQUEST",
    Status: "STATUS",
    Ack: "ACK",
    Nack: "NACK",
    GroupAck: "GROUP_ACK",
}
