"""Defines the operations of a weight update that a sidecar requests from an engine's workers.

The sidecar's state machine (:mod:`bus._protocol.engine`) issues an operation, the engine adapter
carries it without reading it, and the workers execute it. Each operation has two properties:

============== ======= ===============
operation      carrier changes weights
============== ======= ===============
Open           either  no
Drain          either  no
ArmManifest    either  no
Extend         either  no
Start          core    yes
  staged       channel no
ReceiveChunk   core    yes: vLLM's own transports load what they receive
  staged       channel no
LoadChunk      core    yes
  staged       channel no
Finish         core    yes
  staged       channel no
Restore        core    no: it undoes changes, or drops what is staged
SwapStaged     core    no: it replaces all of them at once, between two steps
============== ======= ===============

An engine that runs in the sidecar's process needs no carrier, and executes operations itself.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from bus._manifest import Manifest  # noqa: TC001 - msgspec reads them when it decodes
from bus._weight_transfer.allocation import RankAssignment, StagingCapacity
from bus.messages import (  # noqa: TC001 - as above
    Blob,
    Count,
    Counts,
    ShortText,
    Staging,
    Target,
    UpdateId,
)
from bus.messages import Verify as VerifyMode  # noqa: TC001 - as above

Carrier: TypeAlias = Literal["core", "channel", "either"]
AdapterNames: TypeAlias = tuple[Annotated[str, Meta(max_length=128)], ...]


class Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all operations of a weight update. Decoding refuses unknown fields.

    Attributes:
        carrier: how it reaches the workers. ``core``: by a call of the engine core, between two
            steps. ``channel``: by the workers' staging channels, while the engine steps.
            ``either``: by the channels where the engine has them and the operation is not a
            collective of the workers, else by the core.
        changes_weights: whether the served weights may be incomplete after it, until a commit.
            Such an operation is refused once the pause's lease is over.
    """

    carrier: ClassVar[Carrier] = "core"
    changes_weights: ClassVar[bool] = False


class _Loading(Operation, frozen=True, kw_only=True):
    """An operation that loads: into spare memory if ``staged``, otherwise into served weights."""

    staged: bool = False

    @property
    def carrier(self) -> Carrier:  # type: ignore[override]
        return "channel" if self.staged else "core"

    @property
    def changes_weights(self) -> bool:  # type: ignore[override]
        return not self.staged


class Open(Operation, frozen=True, tag="open"):
    """Connects the engine to the sender of the weights; replaces an open transport.

    The answer says how many chunks may be received ahead. A backend ``lora-removal:NAME`` connects
    to nothing: the update has no tensors, and :class:`Finish` removes the adapter.

    Attributes:
        update_id: the id that the trainer has chosen for this opening. No weights are updated.
        backend: the transfer backend's name.
        params: the sender's parameters, encoded for that backend.
        communicator: the communicator's number; 0: no collectives.
        world_size: how many ranks the communicator has.
        first_rank: the rank of the engine's first worker. The others have the ranks after it.
    """

    carrier: ClassVar[Carrier] = "either"

    update_id: UpdateId
    backend: ShortText
    params: Blob
    communicator: Count = 0
    world_size: Count = 1
    first_rank: Count = 0

    @property
    def place(self) -> RankAssignment:
        """The ranks of the engine's workers in the communicator."""
        return RankAssignment(self.communicator, self.world_size, self.first_rank)


class Drain(Operation, frozen=True, tag="drain"):
    """Receives the sender's chunk over the open transport, and discards the data.

    Weights and an armed update stay as they are. If the drain fails, the transport is closed.

    Attributes:
        update_id: the id that the trainer has chosen for the drain, as in :class:`Open`.
        backend: the transport's name.
        handle: what the sender sends, encoded for that backend.
        timeout_ms: how long to wait for the sender, in ms.
    """

    carrier: ClassVar[Carrier] = "either"

    update_id: UpdateId
    backend: ShortText
    handle: Blob
    timeout_ms: Count


class ArmManifest(Operation, frozen=True, tag="arm"):
    """Checks whether an update fits the engine. Loads and changes nothing.

    The answer says how much memory staging needs, or why the update can't be staged.

    Attributes:
        manifest: the update's tensors. None: the manifest that was armed last, if it has this
            digest; any other is refused.
        target: what the update replaces: the model, or its draft model.
        staging: how the update may be staged; None: it is loaded in a pause.
        drops_adapters: whether the engine first drops all LoRA adapters that came over the bus.
        digest: the manifest's digest.
    """

    carrier: ClassVar[Carrier] = "either"

    manifest: Manifest | None
    target: Target = "model"
    staging: Staging | None = None
    drops_adapters: bool = False
    digest: ShortText = ""


class Extend(Operation, frozen=True, tag="extend"):
    """Checks further tensors of an open update, after all known chunks were loaded.

    ``part``: the manifest of these tensors alone.
    """

    carrier: ClassVar[Carrier] = "either"

    part: Manifest


class Start(_Loading, frozen=True, tag="start"):
    """Begins the armed update, so that chunks can be loaded.

    If the update is staged, allocates spare memory for its tensors.

    Attributes:
        target: what the update replaces: the model, or its draft model.
        recover: whether some weights are incomplete, because an earlier update was interrupted or a
            sleep discarded them. The target's weights are undefined until every chunk is loaded.
    """

    target: Target = "model"
    recover: bool = False


class ReceiveChunk(_Loading, frozen=True, tag="receive"):
    """Receives a chunk of the armed manifest; may return before the tensors are there.

    Transports of vLLM's own also load or stage the chunk. For all other transports a
    :class:`LoadChunk` follows.

    Attributes:
        seq: number of the chunk.
        backend: the backend that brings the chunk.
        handle: where to find the chunk, encoded by the sender for this backend.
        update_id: the update; the same for all engines, and for no other update.
    """

    seq: Count
    backend: ShortText
    handle: Blob
    update_id: UpdateId = ""


class SentChunk(_Loading, frozen=True):
    """Base of operations on a chunk that the trainer has sent.

    Attributes:
        seq: number of the chunk.
        verify: what the checksums cover: all of each tensor, a sample, or nothing.
        sums: the sender's checksums, one per tensor. All workers compare them before any of them
            loads. Empty: nothing is compared.
    """

    seq: Count
    verify: VerifyMode = "off"
    sums: Counts = ()


class LoadChunk(SentChunk, frozen=True, tag="load"):
    """Loads or stages a received chunk, if its checksums match, and frees its memory."""


class Finish(_Loading, frozen=True, tag="finish"):
    """Completes the loaded weights, or checks that all are staged, after the last chunk.

    Refuses an open manifest of which tensors are missing.
    """


class Restore(Operation, frozen=True, tag="restore"):
    """Ends a started update that has not changed the served weights; frees staged weights.

    Attributes:
        target: what the update was to replace: the model, or its draft model.
        staged: whether the update was staged.
    """

    target: Target = "model"
    staged: bool = False


class SwapStaged(Operation, frozen=True, tag="swap"):
    """Replaces the served weights by the staged weights, between the same two steps on all ranks.

    The answer says how many requests the engine had. Code ``called_off``: nothing has changed;
    after any other code the weights may be a mix of both versions.

    Attributes:
        version: the version that the engine serves then.
        clear_cache: whether requests drop their KV cache and compute it again.
    """

    version: Count
    clear_cache: bool = False


UpdateOperation: TypeAlias = (
    Open
    | Drain
    | ArmManifest
    | Extend
    | Start
    | ReceiveChunk
    | LoadChunk
    | Finish
    | Restore
    | SwapStaged
)


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="done"):
    """The result of an operation that has succeeded.

    Attributes:
        ahead: after :class:`Open`, how many chunks may be received before the first is loaded.
        room: after :class:`ArmManifest`, the memory that staging needs, or why it is impossible.
        in_flight: after :class:`SwapStaged`, how many requests the engine had.
        in_place: after a staged :class:`Start`, whether chunks are received directly into staging
            memory. If so, an arrived chunk needs no further work, and one operation after the last
            chunk may stage all of them.
        channel: in a worker's first answer, the name of its staging channel; empty without one.
        adapters: after an operation on LoRA adapters, the names of those that the worker holds,
            whether for new requests or for the last ones of a removed adapter. Else None.
    """

    ahead: Count = 1
    room: StagingCapacity | None = None
    in_flight: Count = 0
    in_place: bool = False
    channel: ShortText = ""
    adapters: AdapterNames | None = None
