"""Acknowledgements and refusals, and the steps that a trainer's rank 0 announces."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from bus.messages.types import (
    MAX_MEETING_BYTES,
    Count,
    LongText,
    Message,
    RequestIds,
    Serial,
    ShortText,
    TrainerPoint,
    UpdateId,
)


class Step(StrEnum):
    """The steps of a pause and an update, as acknowledgements, errors and status name them."""

    PAUSE_LOCAL = "pause_local"
    PAUSE_GLOBAL = "pause_global"
    SLEEP = "sleep"
    WAKE = "wake"
    RESUME = "resume"
    TRANSFER_INIT = "transfer_init"
    TRANSFER_DRAIN = "transfer_drain"
    ARM = "arm"
    START = "start"
    CHUNK = "chunk"
    PART = "part"
    FINISH = "finish"
    PROBE = "probe"
    COMMIT = "commit"
    ABORT = "abort"


def step_name(step: str, chunk: int) -> str:
    """Returns a step's name for texts; for a chunk, with the chunk's number."""
    return f"chunk {chunk}" if step == Step.CHUNK else step


class Ack(Message, frozen=True):
    """Engine to broker: the step is done.

    Attributes:
        step: the step.
        update_id: the pause or update of the step.
        chunk: the chunk's number; used only for the step ``chunk``.
        in_flight: how many requests the engine has.
        duration_ms: how long the engine took, in ms.
        outcome: how the step ended, where it can end in several ways; else empty. ABORT:
            ``untouched`` (the served weights were not touched), ``restored`` (the old weights are
            back), ``partial`` (the engine lacks weights), or ``committed`` (a staged update had
            been swapped in before). COMMIT: ``partial`` if the engine lacks weights of another
            part. A ``wait`` pause: ``drained`` or ``escalated``. RESUME: ``closed`` if the engine
            is stale and keeps admission closed.
        waited_for: ids of the requests that still ran at the deadline of a ``wait`` pause.
    """

    step: Step
    update_id: UpdateId
    chunk: Count
    in_flight: Serial
    duration_ms: float
    outcome: ShortText
    waited_for: RequestIds


class NackCode(StrEnum):
    """Reason codes of refusals. Programs read the code; people read the text."""

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
    DTYPE_KEPT = "dtype_kept"
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


class Nack(Message, frozen=True):
    """Peer or broker, to the sender: the request is refused, or its step has failed.

    Attributes:
        code: the reason, for programs.
        step: the refused step of a pause or an update; empty: none.
        update_id: the pause or update of that step.
        chunk: the chunk's number; used only for the step ``chunk``.
        detail: the reason, as text.
        field: the message field or option at fault; empty: none.
        peer: the peer that refused.
        tensor: the tensor at fault; empty: none.
        hint: what to do.
        retry_after_ms: when to try again, in ms; 0: unknown.
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


class TrainerStep(Message, frozen=True):
    """Rank 0 of a trainer to broker to followers: the progress of an update.

    Attributes:
        number: the number of the update among rank 0's updates, from 1.
        point: ``go``: all ranks gather the tensors now. ``end``: the update is over.
        version: with ``end``: the committed version.
        failure: with ``end``: the error that rank 0 raised; None: the update was committed.
        meeting: with ``go``: where the ranks connect to the engines; empty if rank 0 alone sends.
    """

    number: Count
    point: TrainerPoint
    version: Count
    failure: Nack | None
    meeting: Annotated[bytes, Meta(max_length=MAX_MEETING_BYTES)]


class AwaitStep(Message, frozen=True):
    """Follower to broker: answer with this TRAINER_STEP as soon as rank 0 has sent it.

    Attributes:
        number: the number of the update, as in :class:`TrainerStep`.
        point: the point of the update for which the follower waits.
    """

    number: Count
    point: TrainerPoint


class GroupAck(Message, frozen=True):
    """Broker to trainer: every engine of the group has done the step.

    Attributes:
        step: the step.
        update_id: the pause or update of the step.
        version: the version that the update has, or that the group serves.
        engines: how many engines have done the step.
        excluded: engines that dropped out on the way: dead, quarantined, or (with ``resume``) still
            paused.
        in_flight: how many requests all engines have.
        slowest: the engine that acknowledged last.
        slowest_ms: how long ``slowest`` took, from the request to its acknowledgement, in ms.
        duration_ms: how long the step took, in ms.
        paused_ms: with ``resume``: from PAUSE_LOCAL to the last engine's ACK of RESUME, in ms.
        escalated: engines whose ``wait`` pause came to its deadline.
        waited_for: ids of the requests that still ran at that deadline.
        staging_bytes: with ``arm``: the memory that staging takes in the worker that needs most, in
            bytes.
        why_paused: with ``arm``: why the update can't be staged, with the engine; empty: it can.
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
