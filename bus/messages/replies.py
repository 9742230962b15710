"""What was done, and what was refused; and what rank 0 of a trainer tells the others."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from bus.messages.types import (
    MAX_MEETING_BYTES,
    Count,
    LongText,
    RequestIds,
    ShortText,
    TrainerPoint,
    UpdateId,
)


class Step(StrEnum):
    """What an ACK or GROUP_ACK says has been done."""

    PAUSE_LOCAL = "pause_local"
    PAUSE_GLOBAL = "pause_global"
    SLEEP = "sleep"
    WAKE = "wake"
    RESUME = "resume"
    TRANSFER_INIT = "transfer_init"
    ARM = "arm"
    START = "start"
    CHUNK = "chunk"
    FINISH = "finish"
    PROBE = "probe"
    COMMIT = "commit"
    ABORT = "abort"


def step_name(step: str, chunk: int) -> str:
    """In texts: which step, and of which chunk if it is one's."""
    return f"chunk {chunk}" if step == Step.CHUNK else step


class Ack(msgspec.Struct, frozen=True):
    """An engine has done ``step``. No dataclass, for the reason that the envelope is none.

    ``chunk`` counts only for the step ``chunk``. ``duration_ms`` is what the
    engine took. ``in_flight`` is the number of requests it holds. ``outcome``
    says what an ABORT found: ``untouched``, ``restored`` or ``partial``; of a COMMIT whether
    the engine is still ``partial``, by an update of its other model; of an ABORT that came after
    the swap of a staged update, that it was ``committed``; and of a
    ``wait`` pause whether it ``drained``, or was ``escalated``; of a RESUME whether admission is
    still ``closed``, since the engine is behind the group. ``waited_for`` are
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
    RATE_LIMITED = "rate_limited"
    FENCED = "fenced"
    WRONG_STATE = "wrong_state"
    STAGING_REFUSED = "staging_refused"
    CALLED_OFF = "called_off"
    MANIFEST_REFUSED = "manifest_refused"
    MANIFEST_UNKNOWN = "manifest_unknown"
    OTHER_BASE = "other_base"
    BACKEND_MISSING = "backend_missing"
    DRAFT_MISSING = "draft_missing"
    KV_CONNECTOR_REFUSED = "kv_connector_refused"
    TRANSFER_CLOSED = "transfer_closed"
    TRANSFER_FAILED = "transfer_failed"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    CANARY_FAILED = "canary_failed"
    ENGINE_ASLEEP = "engine_asleep"
    ENGINE_FAILED = "engine_failed"
    ENGINE_DEAD = "engine_dead"
    PEER_LOST = "peer_lost"
    QUORUM_MISSING = "quorum_missing"
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
    committed; ``failure`` is what rank 0 raised instead. ``meeting`` (with ``go``) is where the
    ranks meet engines, if that is what they are to do: only they read it."""

    number: Count
    point: TrainerPoint
    version: Count
    failure: Nack | None
    meeting: Annotated[bytes, Meta(max_length=MAX_MEETING_BYTES)]


@dataclass(frozen=True, slots=True)
class AwaitStep:
    number: Count
    point: TrainerPoint


@dataclass(frozen=True, slots=True)
class GroupAck:
    """Every engine of the group has done ``step``.

    ``excluded`` names engines that fell out on the way: dead, quarantined, or (with
    ``resume``) still paused, since they could not resume.
    ``in_flight`` is summed over the engines; ``slowest`` is who acked last.
    ``paused_ms`` (with ``resume`` only) is the time from the first PAUSE_LOCAL to
    the last RESUME ack. ``escalated`` names engines whose ``wait`` pause came to its
    deadline, ``waited_for`` the requests that it waited for until then.
    With ``arm``, of an update that may be staged: ``staging_bytes`` is what that takes in the
    worker that needs most, ``why_paused`` why it can't be, with the engine; empty if it can.
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
    staging_bytes: Count = 0
    why_paused: LongText = ""
