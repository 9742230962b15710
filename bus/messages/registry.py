"""Lists every message: its class, wire name, permitted senders, and the step it belongs to.

To add a message, write its class in a module of :mod:`bus.messages` and one line here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias, get_args

from bus.messages import canary, membership, pause, replies, status, update, waves
from bus.messages.replies import Step
from bus.messages.types import Message, Role

Senders: TypeAlias = tuple[Role, ...]


@dataclass(frozen=True, slots=True)
class MessageEntry:
    """The registration of one message.

    Attributes:
        cls: the message's class.
        wire_name: its name in the envelope.
        senders: the roles of peers that may send it to the broker; none: only the broker sends it.
        step: the step of a pause or an update that the message requests from engines; None: no
            step.
    """

    cls: type[Message]
    wire_name: str
    senders: Senders = ()
    step: Step | None = None


_ALL: Final[Senders] = get_args(Role)
_TRAINER: Final[Senders] = ("trainer",)
_ENGINE: Final[Senders] = ("engine",)
_COORDINATOR: Final[Senders] = ("coordinator",)

MESSAGES: Final = (
    MessageEntry(membership.Join, "JOIN", _ALL),
    MessageEntry(membership.Welcome, "WELCOME"),
    MessageEntry(membership.Heartbeat, "HEARTBEAT", _ALL),
    MessageEntry(membership.CoreStatus, "CORE_STATUS", _ENGINE),
    MessageEntry(membership.HeartbeatAck, "HEARTBEAT_ACK"),
    MessageEntry(membership.Leave, "LEAVE", _ALL),
    MessageEntry(membership.Restart, "RESTART"),
    MessageEntry(pause.PauseLocal, "PAUSE_LOCAL", _TRAINER, Step.PAUSE_LOCAL),
    MessageEntry(pause.PauseGlobal, "PAUSE_GLOBAL", (), Step.PAUSE_GLOBAL),
    MessageEntry(pause.Sleep, "SLEEP", _TRAINER, Step.SLEEP),
    MessageEntry(pause.Wake, "WAKE", _TRAINER, Step.WAKE),
    MessageEntry(pause.Resume, "RESUME", _TRAINER, Step.RESUME),
    MessageEntry(waves.FirstReq, "FIRST_REQ", _COORDINATOR),
    MessageEntry(waves.FirstReqHeld, "FIRST_REQ_HELD"),
    MessageEntry(waves.StartDpWave, "START_DP_WAVE"),
    MessageEntry(waves.WaveStarted, "WAVE_STARTED", _COORDINATOR),
    MessageEntry(waves.WaveComplete, "WAVE_COMPLETE", _COORDINATOR),
    MessageEntry(update.PlanTransfer, "PLAN_TRANSFER", ("trainer", "observer")),
    MessageEntry(update.TransferPlan, "TRANSFER_PLAN"),
    MessageEntry(update.TransferInit, "TRANSFER_INIT", _TRAINER, Step.TRANSFER_INIT),
    MessageEntry(update.TransferDrain, "TRANSFER_DRAIN", _TRAINER, Step.TRANSFER_DRAIN),
    MessageEntry(update.Arm, "ARM", _TRAINER, Step.ARM),
    MessageEntry(update.Armed, "ARMED", _ENGINE),
    MessageEntry(update.UpdateStart, "UPDATE_START", _TRAINER, Step.START),
    MessageEntry(update.WeightChunkMeta, "WEIGHT_CHUNK_META", _TRAINER, Step.CHUNK),
    MessageEntry(update.ChunkSent, "CHUNK_SENT", _TRAINER, Step.CHUNK),
    MessageEntry(update.ArmPart, "ARM_PART", _TRAINER, Step.PART),
    MessageEntry(update.UpdateFinish, "UPDATE_FINISH", _TRAINER, Step.FINISH),
    MessageEntry(canary.Probe, "PROBE", _TRAINER, Step.PROBE),
    MessageEntry(canary.Probed, "PROBED", _ENGINE),
    MessageEntry(canary.ProbeReport, "PROBE_REPORT"),
    MessageEntry(update.Commit, "COMMIT", _TRAINER, Step.COMMIT),
    MessageEntry(update.Abort, "ABORT", _TRAINER, Step.ABORT),
    MessageEntry(update.StaleEngines, "BEHIND"),
    MessageEntry(replies.TrainerStep, "TRAINER_STEP", _TRAINER),
    MessageEntry(replies.AwaitStep, "AWAIT_STEP", ("follower",)),
    MessageEntry(status.WaitEngines, "WAIT_ENGINES", _TRAINER),
    MessageEntry(status.GroupView, "GROUP_VIEW"),
    MessageEntry(status.StatusRequest, "STATUS_REQUEST", _ALL),
    MessageEntry(status.Status, "STATUS"),
    MessageEntry(status.Routes, "ROUTES"),
    MessageEntry(status.RoutesChange, "ROUTES_CHANGE"),
    MessageEntry(status.RoutesRequest, "ROUTES_REQUEST", ("observer", "scheduler")),
    MessageEntry(status.RoutesTaken, "ROUTES_TAKEN", ("observer", "scheduler")),
    MessageEntry(replies.Ack, "ACK", _ENGINE),
    MessageEntry(replies.Nack, "NACK", _ALL),
    MessageEntry(replies.GroupAck, "GROUP_ACK"),
)

WIRE_NAMES: Final[dict[type[Message], str]] = {each.cls: each.wire_name for each in MESSAGES}
# The step of each message that engines acknowledge.
STEPS: Final[dict[type[Message], Step]] = {e.cls: e.step for e in MESSAGES if e.step is not None}
# The step in the broker's answer to a trainer's command: PAUSE_LOCAL asks for a whole pause.
GROUP_STEPS: Final[dict[type[Message], Step]] = {**STEPS, pause.PauseLocal: Step.PAUSE_GLOBAL}
# The messages that each role of a peer may send to the broker.
VERBS: Final[dict[Role, frozenset[type[Message]]]] = {
    role: frozenset(each.cls for each in MESSAGES if role in each.senders) for role in _ALL
}
