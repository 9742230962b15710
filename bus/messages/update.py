"""One weight update, step by step, as the trainer asks for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from bus.messages.canary import Differing
from bus.messages.types import (
    MAX_PROBED,
    Blob,
    CanaryMode,
    Count,
    Counts,
    Dtypes,
    LongText,
    Scope,
    Serial,
    Shapes,
    ShortText,
    Target,
    TensorNames,
    UpdateId,
    Verify,
)


@dataclass(frozen=True, slots=True)
class PlanTransfer:
    """``scope``: as ARM has it."""

    scope: Scope = ()


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """See :mod:`bus.protocol.group.engine_registry`. The trainer's sender is rank 0."""

    communicator: Count
    world_size: Count


@dataclass(frozen=True, slots=True)
class TransferInit:
    """``params`` is a MessagePack blob that only the backend reads (bounded, typed).

    ``communicator`` is the number of the one that the transport is made for, 0 for a backend
    without collectives. The broker adds ``world_size`` and where each engine stands in it.
    ``update_id`` is of this opening alone: an end that took long may open, or fail to, when
    the next is asked for. ``scope``: as ARM has it.
    """

    update_id: UpdateId
    backend: ShortText
    params: Blob
    communicator: Count
    world_size: Count
    first_ranks: Annotated[dict[ShortText, Count], Meta(max_length=16_384)]
    scope: Scope = ()


@dataclass(frozen=True, slots=True)
class Staging:
    """How an update may come while the engine serves: into memory beside the weights, and from
    there into them between two steps (:mod:`bus.protocol.group.staging`).

    ``required``: an engine that can't refuses the ARM; else its answer says why not.
    ``budget_bytes``: at most so much in each of an engine's workers; 0: what is free there.
    ``keep``: the memory stays, for the next update.
    ``clear_cache``: at the swap, requests drop keys and values, and compute them anew.
    """

    required: bool
    budget_bytes: Count
    keep: bool
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class Arm:
    """The manifest of an update (see :class:`bus.manifest.Manifest`) and its version; ``target``
    is the model that it is for.

    The trainer sends the last ``version`` it knows, the broker puts the one it assigned, which
    is greater: also when it is a new broker, and whoever serves that version is yet to join.

    A patch changes ``counts`` elements of each tensor, and nothing of the others: it is a
    difference from the weights of version ``base``, and from no others. Both are empty (and 0)
    for a whole set of weights.

    ``quorum``: of so many DP groups at least all ranks must have finished for a commit; 0: of all
    that are armed. With fewer the update is given up. ``default_quorum``: nobody has asked for one,
    and it is all of them if some engines prefill for others that decode.

    ``canary``: what the pause leaves of requests, if probes are to run before the COMMIT.

    ``scope`` names DP groups that are behind and catch up, while all others go on: with the weights
    of the version that the group serves, which ``version`` then is, and the broker gives no other
    (see :mod:`bus.protocol.group.catch_up`). Empty: it is for all, and gives a new version.

    ``staging``: how it may be staged; None: it is loaded in a pause. Engines answer with ARMED.

    The broker asks an engine again without the tensors (:meth:`without_tensors`): the engine has
    them, or refuses with ``manifest_unknown`` and gets them again.
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

    def without_tensors(self) -> Arm:
        """The same by its digest alone."""
        return replace(self, names=(), dtypes=(), shapes=(), chunk_ends=(), counts=())


@dataclass(frozen=True, slots=True)
class Armed:
    """An engine has armed an update that may be staged. ``staging_bytes``: what that takes in the
    worker that needs most; ``why_paused``: why the engine can't; empty if it can."""

    update_id: UpdateId
    duration_ms: float
    staging_bytes: Count
    why_paused: LongText


@dataclass(frozen=True, slots=True)
class UpdateStart:
    """``staged``: beside the weights that are served, without a pause."""

    update_id: UpdateId
    staged: bool = False


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
    """Every byte of the chunk has left. ``sums`` are its tensors' (see
    :mod:`bus.weight_transfer.checksum`),
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
    """``differing``: who is not to serve it, by the canary. Engines are told of none."""

    update_id: UpdateId
    version: Serial
    label: ShortText
    differing: Annotated[tuple[Differing, ...], Meta(max_length=MAX_PROBED)]


@dataclass(frozen=True, slots=True)
class Abort:
    update_id: UpdateId
    reason: LongText


@dataclass(frozen=True, slots=True)
class StaleEngines:
    """These DP groups do not serve the group's ``version``; told to a trainer that has its weights,
    for as long as it is so, and nothing else is under way."""

    version: Serial
    dp_groups: Scope
