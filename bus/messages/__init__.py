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
HEARTBEAT_ACK       broker → peer                  the broker lives, and sees to this pause
PEER_RANKS          broker → engine                the ranks of its DP group, and where they are
LEASE_VOTE          engine → its peers             a pause's lease is over here; how do you stand?
RESTART             broker → engines               stuck for good: end, to be started anew
LEAVE               peer → broker                  the peer goes, in order
PAUSE_LOCAL         trainer → broker → engines     pause, phase 1: schedule nothing new
PAUSE_GLOBAL        broker → engines               pause, phase 2: idle on the device
SLEEP               trainer → broker → engines     paused, give memory back
WAKE                trainer → broker → engines     paused, take the weights' memory again
RESUME              trainer → broker → engines     schedule again; who sleeps, wakes by it
FIRST_REQ           DP coordinator → broker        an idle DP group got a request
FIRST_REQ_HELD      broker → DP coordinator        it is paused or down; kept, starts later
START_DP_WAVE       broker → DP coordinator        every rank joins this wave
WAVE_STARTED        DP coordinator → broker        this wave runs
WAVE_COMPLETE       DP coordinator → broker        every rank is idle; the next wave is one more
PLAN_TRANSFER       trainer → broker               ask who takes part in a collective transfer
TRANSFER_PLAN       broker → trainer               the communicator: its number and size
TRANSFER_INIT       trainer → broker → engines     open the out-of-band transport
ARM                 trainer → broker → engines     the manifest; engines check it
ARMED               engine → broker                it is right, and can (or can't) be staged
UPDATE_START        trainer → broker → engines     get ready to load
WEIGHT_CHUNK_META   trainer → broker → engines     receive one chunk
CHUNK_SENT          trainer → broker → engines     it is sent; check its sums, and load it
UPDATE_FINISH       trainer → broker → engines     all chunks are loaded
PROBE               trainer → broker → engines     run these probes, before the COMMIT
PROBED              engine → broker                what they gave
PROBE_REPORT        broker → trainer               what they gave on every engine
COMMIT              trainer → broker → engines     serve this version from now on
ABORT               trainer → broker → engines     give the update up
BEHIND              broker → trainer               engines are not at the group's version
TRAINER_STEP        trainer → broker → followers   how far rank 0 has come with an update
AWAIT_STEP          follower → broker              another rank of the trainer waits for that
WAIT_ENGINES        trainer → broker               answer when so many engines are there
GROUP_VIEW          broker → trainer               the engines of the group
STATUS_REQUEST      any → broker                   ask for the broker's whole view
STATUS              broker → any                   that view
ROUTES              broker → observers, schedulers which engines serve the group's version now
ROUTES_TAKEN        observer, scheduler → broker   who has left the routes gets no more requests
ACK, NACK           engine → broker, broker → any  done; or refused, and why
GROUP_ACK           broker → trainer               every engine has done the step
=================== ============================== =================================
"""

from __future__ import annotations

from typing import Final, TypeAlias

from bus.messages.canary import (
    Differing,
    EngineProbes,
    Probe,
    Probed,
    ProbeReport,
    ProbeResult,
)
from bus.messages.envelope import (
    Envelope,
)
from bus.messages.membership import (
    CoordinatorFacts,
    CoreStatus,
    EngineFacts,
    Heartbeat,
    HeartbeatAck,
    Join,
    LeaseVote,
    Leave,
    PeerRank,
    PeerRanks,
    Restart,
    Welcome,
)
from bus.messages.pause import PauseGlobal, PauseLocal, Resume, Sleep, Wake
from bus.messages.replies import (
    Ack,
    AwaitStep,
    GroupAck,
    Nack,
    NackCode,
    Step,
    TrainerStep,
    step_name,
)
from bus.messages.status import (
    DpGroupView,
    EngineView,
    GroupStatus,
    GroupView,
    OutView,
    Route,
    Routes,
    RoutesTaken,
    Status,
    StatusRequest,
    WaitEngines,
    WaitView,
)
from bus.messages.types import (
    MAX_BLOB_BYTES,
    MAX_FRAME_BYTES,
    MAX_PROBE_TOKENS,
    MAX_PROBED,
    MAX_PROBES,
    MAX_PROMPT_TOKENS,
    MAX_REQUEST_IDS,
    MAX_TENSORS,
    NO_LIMITS,
    REFUSED,
    WIRE_MAJOR,
    WIRE_MINOR,
    Blob,
    CanaryMode,
    CorePhase,
    Count,
    Counts,
    Dtypes,
    Escalation,
    Features,
    KvConnectors,
    LeasePosition,
    LongText,
    Name,
    PauseMode,
    PdRole,
    Phase,
    RequestIds,
    RequestLimits,
    Role,
    Scope,
    Serial,
    Shape,
    Shapes,
    ShortText,
    Size,
    SleepLevel,
    Target,
    TensorName,
    TensorNames,
    TrainerPoint,
    UpdateId,
    Verify,
)
from bus.messages.update import (
    Abort,
    Arm,
    Armed,
    ChunkSent,
    Commit,
    PlanTransfer,
    Staging,
    StaleEngines,
    TransferInit,
    TransferPlan,
    UpdateFinish,
    UpdateStart,
    WeightChunkMeta,
)
from bus.messages.waves import (
    FirstReq,
    FirstReqHeld,
    StartDpWave,
    WaveComplete,
    WaveStarted,
)

__all__ = [
    "Envelope",
    "EngineFacts",
    "CoordinatorFacts",
    "Join",
    "Welcome",
    "Heartbeat",
    "CoreStatus",
    "HeartbeatAck",
    "PeerRank",
    "PeerRanks",
    "LeaseVote",
    "Leave",
    "Restart",
    "PauseLocal",
    "PauseGlobal",
    "Sleep",
    "Wake",
    "Resume",
    "FirstReq",
    "FirstReqHeld",
    "StartDpWave",
    "WaveStarted",
    "WaveComplete",
    "PlanTransfer",
    "TransferPlan",
    "TransferInit",
    "Staging",
    "Arm",
    "Armed",
    "UpdateStart",
    "WeightChunkMeta",
    "ChunkSent",
    "UpdateFinish",
    "Probe",
    "ProbeResult",
    "Probed",
    "EngineProbes",
    "ProbeReport",
    "Differing",
    "Commit",
    "Abort",
    "StaleEngines",
    "WaitEngines",
    "EngineView",
    "DpGroupView",
    "GroupView",
    "StatusRequest",
    "WaitView",
    "OutView",
    "Route",
    "Routes",
    "RoutesTaken",
    "GroupStatus",
    "Status",
    "Step",
    "Ack",
    "NackCode",
    "Nack",
    "GroupAck",
    "TrainerStep",
    "AwaitStep",
    "Message",
    "WIRE_NAMES",
    "WIRE_MAJOR",
    "WIRE_MINOR",
    "MAX_FRAME_BYTES",
    "MAX_TENSORS",
    "NO_LIMITS",
    "REFUSED",
    "MAX_PROBES",
    "MAX_PROBE_TOKENS",
    "MAX_PROBED",
    "MAX_PROMPT_TOKENS",
    "MAX_BLOB_BYTES",
    "Count",
    "Scope",
    "Serial",
    "Size",
    "Name",
    "ShortText",
    "Features",
    "KvConnectors",
    "LongText",
    "UpdateId",
    "Blob",
    "TensorName",
    "TensorNames",
    "Dtypes",
    "Shape",
    "Shapes",
    "Counts",
    "MAX_REQUEST_IDS",
    "RequestIds",
    "RequestLimits",
    "Role",
    "TrainerPoint",
    "PauseMode",
    "Escalation",
    "SleepLevel",
    "LeasePosition",
    "Target",
    "CanaryMode",
    "CorePhase",
    "Verify",
    "PdRole",
    "Phase",
    "step_name",
]

Message: TypeAlias = (
    Join
    | Welcome
    | Heartbeat
    | CoreStatus
    | HeartbeatAck
    | PeerRanks
    | LeaseVote
    | Leave
    | Restart
    | PauseLocal
    | PauseGlobal
    | Sleep
    | Wake
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
    | Armed
    | UpdateStart
    | WeightChunkMeta
    | ChunkSent
    | UpdateFinish
    | Probe
    | Probed
    | ProbeReport
    | Commit
    | Abort
    | StaleEngines
    | TrainerStep
    | AwaitStep
    | WaitEngines
    | GroupView
    | StatusRequest
    | Status
    | Routes
    | RoutesTaken
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
    PeerRanks: "PEER_RANKS",
    LeaseVote: "LEASE_VOTE",
    Leave: "LEAVE",
    Restart: "RESTART",
    PauseLocal: "PAUSE_LOCAL",
    PauseGlobal: "PAUSE_GLOBAL",
    Sleep: "SLEEP",
    Wake: "WAKE",
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
    Armed: "ARMED",
    UpdateStart: "UPDATE_START",
    WeightChunkMeta: "WEIGHT_CHUNK_META",
    ChunkSent: "CHUNK_SENT",
    UpdateFinish: "UPDATE_FINISH",
    Probe: "PROBE",
    Probed: "PROBED",
    ProbeReport: "PROBE_REPORT",
    Commit: "COMMIT",
    Abort: "ABORT",
    StaleEngines: "BEHIND",
    TrainerStep: "TRAINER_STEP",
    AwaitStep: "AWAIT_STEP",
    WaitEngines: "WAIT_ENGINES",
    GroupView: "GROUP_VIEW",
    StatusRequest: "STATUS_REQUEST",
    Status: "STATUS",
    Routes: "ROUTES",
    RoutesTaken: "ROUTES_TAKEN",
    Ack: "ACK",
    Nack: "NACK",
    GroupAck: "GROUP_ACK",
}
