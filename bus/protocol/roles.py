"""Who may say what: the roles of peers, the roles of keys, and the verbs of each.

A peer says its role when it joins. Where the broker has keys, its key says which roles
those can be, and nothing that the peer says of itself counts for more:

========= ==================== ==========================================================
key       may join as          its verbs
========= ==================== ==========================================================
trainer   trainer, follower    all commands of a trainer, and what its other ranks ask
engine    engine, gateway      acks and status of an engine, the waves of its DP group
observer  observer             STATUS_REQUEST
scheduler scheduler            STATUS_REQUEST
========= ==================== ==========================================================

Every role has JOIN, HEARTBEAT, LEAVE, STATUS_REQUEST and NACK beside these. SLEEP and WAKE are
steps of a pause, which is its trainer's alone; a scheduler may watch.

Invariants: what is refused here has changed nothing; a frame counts for the peer that it names
only under the key with which that peer has joined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from bus.messages import (
    WIRE_NAMES,
    Abort,
    Ack,
    Arm,
    Armed,
    AwaitStep,
    ChunkSent,
    Commit,
    CoreStatus,
    FirstReq,
    Heartbeat,
    Join,
    Leave,
    Message,
    Nack,
    NackCode,
    PauseLocal,
    PlanTransfer,
    Probe,
    Probed,
    Resume,
    Role,
    Sleep,
    StatusRequest,
    TrainerStep,
    TransferInit,
    UpdateFinish,
    UpdateStart,
    WaitEngines,
    Wake,
    WaveComplete,
    WaveStarted,
    WeightChunkMeta,
)
from bus.protocol.instructions import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

KeyRole: TypeAlias = Literal["trainer", "engine", "observer", "scheduler"]
Verbs: TypeAlias = frozenset[type[Message]]

_EVERYBODY: Final[Verbs] = frozenset({Join, Heartbeat, Leave, StatusRequest, Nack})

VERBS: Final[dict[Role, Verbs]] = {
    "trainer": _EVERYBODY
    | {
        PauseLocal,
        Sleep,
        Wake,
        Resume,
        PlanTransfer,
        TransferInit,
        Arm,
        UpdateStart,
        WeightChunkMeta,
        ChunkSent,
        UpdateFinish,
        Probe,
        Commit,
        Abort,
        TrainerStep,
        WaitEngines,
    },
    "follower": _EVERYBODY | {AwaitStep},
    "engine": _EVERYBODY | {Ack, Armed, CoreStatus, Probed},
    "gateway": _EVERYBODY | {FirstReq, WaveStarted, WaveComplete},
    "observer": _EVERYBODY,
    "scheduler": _EVERYBODY,
}

JOINS_AS: Final[dict[KeyRole, frozenset[Role]]] = {
    "trainer": frozenset({"trainer", "follower"}),
    "engine": frozenset({"engine", "gateway"}),
    "observer": frozenset({"observer"}),
    "scheduler": frozenset({"scheduler"}),
}

KEY_VERBS: Final[dict[KeyRole, Verbs]] = {
    key: frozenset[type[Message]]().union(*(VERBS[role] for role in roles))
    for key, roles in JOINS_AS.items()
}


def outside_role(role: Role, message: Message) -> Failure | None:
    """Why a peer that has joined in this role does not send that; None: it may."""
    if type(message) in VERBS[role]:
        return None
    return _forbidden(f"a peer of role {role} does not send {WIRE_NAMES[type(message)]}")


def outside_key(keys: Mapping[str, KeyRole], user: str, message: Message) -> Failure | None:
    """Why a key does not let that in; None: it does.

    Args:
        keys: the authorised ones, with their roles.
        user: the key that the sender has proven to have.
    """
    role = keys.get(user)
    if role is None:
        return _forbidden("the key is not authorised", field="sender")
    if type(message) not in KEY_VERBS[role]:
        return _forbidden(f"a key of role {role} does not send {WIRE_NAMES[type(message)]}")
    if isinstance(message, Join) and message.role not in JOINS_AS[role]:
        return _forbidden(f"a key of role {role} does not join as {message.role}", field="role")
    return None


def _forbidden(detail: str, field: str = "kind") -> Failure:
    hints = {
        "sender": "copy its public file into the broker's folder of authorised keys, then SIGHUP",
        "role": "make a key for it: wavebus keygen NAME --role ROLE",
    }
    return Failure(NackCode.FORBIDDEN, detail, field=field, hint=hints.get(field, ""))
