"""Messages of a weight update, step by step."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from bus.messages.canary import Differing
from bus.messages.types import (
    MAX_PROBED,
    Blob,
    CanaryMode,
    Count,
    Counts,
    Dtypes,
    LongText,
    Message,
    Scope,
    Serial,
    Shapes,
    ShortText,
    Target,
    TensorNames,
    UpdateId,
    Verify,
)

FirstRanks: TypeAlias = Annotated[dict[ShortText, Count], Meta(max_length=16_384)]


class PlanTransfer(Message, frozen=True):
    """Trainer or observer to broker: assign the ranks of a collective transport such as ``nccl``.

    The answer is TRANSFER_PLAN; nothing changes. ``scope`` names the DP groups whose workers get
    ranks; empty: all.
    """

    scope: Scope = ()


class TransferPlan(Message, frozen=True):
    """Broker to trainer or observer: the communicator that PLAN_TRANSFER asked for.

    The trainer's sender is its rank 0.

    Attributes:
        communicator: the communicator's number. It identifies these engines in this order.
        world_size: how many ranks it has, with the sender's.
        first_ranks: the rank of each engine's first worker. The engine's other workers follow it.
    """

    communicator: Count
    world_size: Count
    first_ranks: FirstRanks


class TransferInit(Message, frozen=True):
    """Trainer to broker to engines: open the transport.

    Attributes:
        update_id: the id of this opening, not of an update. It keeps a slow engine's answer to an
            earlier opening apart from the answer to this one.
        backend: the transport's name.
        params: the sender's parameters, encoded; only the backend reads them.
        communicator: the number of the transport's communicator; 0: no collectives.
        world_size: the communicator's size; set by the broker.
        first_ranks: the rank of each engine's first worker; set by the broker.
        scope: as in :class:`Arm`.
    """

    update_id: UpdateId
    backend: ShortText
    params: Blob
    communicator: Count
    world_size: Count
    first_ranks: FirstRanks
    scope: Scope = ()


class TransferDrain(Message, frozen=True):
    """Trainer to broker to engines: receive over the open transport, and discard what comes.

    It ends the broadcast of a sender that has entered it although its update was refused. No
    weights are touched, and no pause is needed.

    Attributes:
        update_id: the id of this drain, not of an update.
        transfer: the id of the TRANSFER_INIT that opened the transport.
        backend: the transport's name.
        communicator: the number of the transport's communicator.
        handle: data that only the transport's backend reads: what the sender sends.
        timeout_ms: how long engines wait for the sender, in ms.
        scope: as in :class:`Arm`.
    """

    update_id: UpdateId
    transfer: UpdateId
    backend: ShortText
    communicator: Count
    handle: Blob
    timeout_ms: Count
    scope: Scope = ()


class Staging(Struct, frozen=True):
    """Options of a staged update: loaded into spare memory, then swapped in between two steps.

    :mod:`bus._protocol.group.staging` says when staging is possible.

    Attributes:
        required: True: an engine that can't stage the update refuses the ARM. False: the engine
            accepts the ARM and reports why it can't stage, so that the update is loaded in a pause.
        budget_bytes: the most memory per worker, in bytes; 0: the free memory.
        keep: True keeps the spare memory for the next update; False frees it after the swap.
        clear_cache: at the swap, requests drop their KV cache and compute it again.
    """

    required: bool
    budget_bytes: Count
    keep: bool
    clear_cache: bool


class Arm(Message, frozen=True):
    """Trainer to broker to engines: check this manifest and version of an update.

    Engines answer with ACK, or with ARMED if ``staging`` is set. An ARM has the digest alone if
    it is repeated, or if its manifest was armed before. Broker and engines that don't have the
    manifest refuse with ``manifest_unknown``, and get the tensors.

    Attributes:
        update_id: the update's id.
        version: from the trainer, the last version it knows. The broker assigns a greater one, even
            after a restart, before engines of that version have joined.
        label: the trainer's own name of the weights.
        target: the model that the update is for.
        backend: the transport that brings the weights.
        communicator: the number of the transport's communicator; 0: no collectives.
        names, dtypes, shapes, chunk_ends: see :class:`bus._manifest.Manifest`. Empty: the manifest
            is known by its digest.
        counts: a patch's number of changed elements per tensor; empty: a whole set of weights.
        base: the only version that a patch applies to; 0: no patch.
        quorum: how many DP groups must finish for a commit; with fewer the update is aborted. 0:
            all that are armed.
        canary: how the pause treats requests if probes run before the COMMIT; empty: none run.
        digest: the digest of the manifest.
        scope: these stale DP groups catch up with the group's ``version``, and the broker assigns
            no other (:mod:`bus._protocol.group.catch_up`). Empty: all DP groups.
        staging: how the update may be staged; None: it is loaded in a pause.
        default_quorum: True: the user has not chosen ``quorum``, so the broker raises it to all DP
            groups if some engines prefill for others.
        is_cast: True: the trainer has cast tensors to the dtype of the engines' models, and an
            engine that keeps one in float32 refuses with ``dtype_kept``.
        transfer: the id of the TRANSFER_INIT that opened the transport. An engine that has any
            other transport open refuses with ``transfer_closed``.
        is_open: True: more tensors may follow, by :class:`ArmPart`. Engines then accept tensors of
            which others are missing, and check at UPDATE_FINISH that all have come.
        after: the version that the group serves before the update, from the broker. An engine at
            another one has missed an update, and drops its LoRA adapters (:mod:`bus._lora`).
    """

    update_id: UpdateId
    version: Serial
    label: ShortText
    target: Target
    backend: ShortText
    communicator: Count
    names: TensorNames
    dtypes: Dtypes
    shapes: Shapes
    chunk_ends: Counts
    counts: Counts
    base: Count
    quorum: Count
    canary: CanaryMode
    digest: ShortText
    scope: Scope = ()
    staging: Staging | None = None
    default_quorum: bool = False
    transfer: UpdateId = ""
    is_cast: bool = False
    is_open: bool = False
    after: Count = 0


class Armed(Message, frozen=True):
    """Engine to broker: the update is armed; whether it can be staged.

    Attributes:
        update_id: the update.
        duration_ms: how long the engine took to check the manifest, in ms.
        staging_bytes: the memory for staging in the worker that needs most, in bytes.
        why_paused: why the engine can't stage; empty: it can.
    """

    update_id: UpdateId
    duration_ms: float
    staging_bytes: Count
    why_paused: LongText


class UpdateStart(Message, frozen=True):
    """Trainer to broker to engines: begin the update, so that chunks can be loaded.

    ``staged``: True: chunks go into spare memory while the engine serves. False: the engine is
    paused, and chunks overwrite its weights.
    """

    update_id: UpdateId
    staged: bool = False


class WeightChunkMeta(Message, frozen=True):
    """Trainer to broker to engines: receive one chunk of the armed manifest over the transport.

    Attributes:
        update_id: the update.
        chunk: the chunk's number, from 0.
        digest: the digest of the armed manifest; in an open update, of all armed parts together. A
            chunk with another digest is refused.
        handle: data that only the transport's backend reads, such as where the chunk is.
    """

    update_id: UpdateId
    chunk: Count
    digest: ShortText
    handle: Blob


class ArmPart(Message, frozen=True):
    """Trainer to broker to engines: further tensors of an update that was armed open.

    Sent when all engines have applied all chunks of the earlier parts. If the broker repeats
    ARM_PART, it leaves out the tensors, as in a repeated ARM.

    Attributes:
        update_id: the update.
        part: the part's number; the tensors of ARM are part 0.
        names, dtypes, shapes, chunk_ends: the part's tensors, as :class:`bus._manifest.Manifest`.
            The indexes of ``chunk_ends`` count from the part's first tensor.
        digest: the digest of the manifest of all parts so far, with this one.
    """

    update_id: UpdateId
    part: Count
    names: TensorNames
    dtypes: Dtypes
    shapes: Shapes
    chunk_ends: Counts
    digest: ShortText


class ChunkSent(Message, frozen=True):
    """Trainer to broker to engines: the chunk is sent; verify and load it.

    Attributes:
        update_id: the update.
        chunk: the chunk's number, from 0.
        verify: how much of the chunk is verified.
        sums: one checksum per tensor (:mod:`bus._weight_transfer.checksum`); empty: nothing is
            verified.
    """

    update_id: UpdateId
    chunk: Count
    verify: Verify
    sums: Counts


class UpdateFinish(Message, frozen=True):
    """Trainer to broker to engines: all chunks are sent; post-process the loaded weights."""

    update_id: UpdateId


class Commit(Message, frozen=True):
    """Trainer to broker to engines: serve this version from now on.

    Attributes:
        update_id: the update.
        version: the version that the broker assigned to the update.
        label: the trainer's own name of the weights.
        differing: the engines that failed the canary and must not commit. The broker removes this
            list before it sends COMMIT to engines.
    """

    update_id: UpdateId
    version: Serial
    label: ShortText
    differing: Annotated[tuple[Differing, ...], Meta(max_length=MAX_PROBED)]


class Abort(Message, frozen=True):
    """Trainer to broker to engines: end the update without a commit."""

    update_id: UpdateId
    reason: LongText


class StaleEngines(Message, frozen=True):
    """Broker to trainer: these DP groups do not serve the group's ``version``.

    Sent to a trainer that has that version's weights, while no pause or update is under way.
    """

    version: Serial
    dp_groups: Scope
