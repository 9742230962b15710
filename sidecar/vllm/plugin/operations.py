"""The operations that a sidecar requests from an engine's workers, and their answers.

Operations and answers are MessagePack. Decoding is strict: unknown operations, unknown fields and
wrong types are refused. There are two carriers:

- vLLM's ``collective_rpc``, calling a method that the plugin adds to workers (:data:`PERFORM`). Its
  one argument is the operation in base64: a text passes unchanged through vLLM's MessagePack codec
  (in process) and through JSON (over HTTP).
- the workers' staging channels (:mod:`sidecar.vllm.plugin.staging.channel_server`), while the
  engine serves. Two operations may take either carrier, because they take long: opening a transport
  waits for other processes, and arming a new manifest runs the loader.

An exception of ``collective_rpc`` arrives as text, wrapped in more text. So a
:class:`WorkerFailure` is put between marks at the end of the text, in URL-safe base64. Quoting does
not change that, and neither does vLLM when it removes strings that look like file paths from the
text of an HTTP error (0.32).
"""

from __future__ import annotations

import base64
import re
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from bus.errors import EngineError
from bus.messages import (  # noqa: TC001 - msgspec reads them when it decodes
    Blob,
    Count,
    Counts,
    Dtypes,
    NackCode,
    Shapes,
    ShortText,
    Staging,
    Target,
    TensorNames,
)
from bus.messages import Verify as VerifyMode  # noqa: TC001 - as above
from bus.weight_transfer.allocation import StagingCapacity  # noqa: TC001 - as above

# The worker's method that carries out an operation. Its argument is ``operation``; it returns
# :class:`Done`, as a dict.
PERFORM: Final = "wavebus_perform"
PROTOCOL: Final = 17
MAX_PAYLOAD_CHARS: Final = 32 * 1024 * 1024
DETAIL_CHARS: Final = 2000
TENSOR_CHARS: Final = 512

AdapterNames: TypeAlias = tuple[Annotated[str, Meta(max_length=128)], ...]

_MARK = re.compile(r"\[wavebus:([A-Za-z0-9_=-]+)\]")


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of all operations and answers: fields that a class lacks are refused."""


class SentChunk(_Strict, frozen=True):
    """Names a chunk that has arrived or is on its way.

    Attributes:
        seq: number of the chunk.
        verify: what the checksums cover.
        sums: the sender's checksums, one per tensor. All must match. Empty: nothing is compared.
    """

    seq: Count
    verify: VerifyMode
    sums: Counts


class Hello(_Strict, frozen=True, tag="hello"):
    """Checks that the sidecar and the plugin have the same protocol number; changes nothing."""

    protocol: Count


class Open(_Strict, frozen=True, tag="open"):
    """Connects the workers to the sender of the weights; replaces an open transport.

    Attributes:
        backend: the transfer backend's name.
        params: the sender's parameters, encoded for that backend.
        communicator: the communicator's number.
        world_size: how many ranks the communicator has.
        first_rank: the communicator rank of the engine's first worker.
    """

    backend: ShortText
    params: Blob
    communicator: Count
    world_size: Count
    first_rank: Count


class Drain(_Strict, frozen=True, tag="drain"):
    """Receives over vLLM's own transport, and discards what comes; no weights are touched.

    If it fails, the transport is closed.

    Attributes:
        backend: the transport's name.
        handle: vLLM's ``update_info``, encoded as by :func:`bus.vllm_payloads.encode_info`.
        timeout_ms: how long to wait for the sender, in ms.
    """

    backend: ShortText
    handle: Blob
    timeout_ms: Count


class ArmManifest(_Strict, frozen=True, tag="arm"):
    """Operation at ARM: each worker checks whether an update fits its model, and loads nothing.

    Attributes:
        names, dtypes, shapes, chunk_ends, counts: the update's tensors, as the fields of
            :class:`bus.manifest.Manifest` describe them.
        target: what the update replaces: the model, or its draft model.
        staging: the options of a staged update; None if it is loaded in a pause.
        is_cast, is_open: as :class:`bus.manifest.Manifest`.
    """

    names: TensorNames
    dtypes: Dtypes
    shapes: Shapes
    chunk_ends: Counts
    target: Target
    counts: Counts
    staging: Staging | None = None
    is_cast: bool = False
    is_open: bool = False


class Extend(_Strict, frozen=True, tag="extend"):
    """Checks further tensors of the open update; fields as :class:`ArmManifest`, of these alone."""

    names: TensorNames
    dtypes: Dtypes
    shapes: Shapes
    chunk_ends: Counts


class Start(_Strict, frozen=True, tag="start"):
    """Opens an update session for the target, in which chunks are loaded.

    Attributes:
        target: what the update replaces: the model, or its draft model.
        recover: True first closes the session that an earlier update left open, for whichever
            target, and runs a whole session for the target. This repairs vLLM's own state after an
            interrupted load. The target's weights are then undefined until every chunk is loaded.
    """

    target: Target
    recover: bool


class ReceiveChunk(_Strict, frozen=True, tag="receive"):
    """Begins to fetch a chunk of the armed manifest; vLLM's worker engines also load it.

    Attributes:
        seq: number of the chunk.
        backend: the backend that brings the chunk.
        handle: where to find the chunk, encoded by the sender for this backend.
    """

    seq: Count
    backend: ShortText
    handle: Blob


class VerifyChunk(SentChunk, frozen=True, tag="verify"):
    """Compares a chunk's checksums without loading the chunk.

    Needed where workers of several cores can't verify and load in one operation.
    """


class LoadChunk(SentChunk, frozen=True, tag="load"):
    """Loads a received chunk into the model.

    If it has checksums, all workers compare them before any of them loads.
    """


class Restore(_Strict, frozen=True, tag="restore"):
    """Closes the update session; layers that vLLM's loader has not completed get old weights.

    So all old weights are back only if no layer was loaded. If no session is open, one is opened
    for the target first.

    Attributes:
        target: what the update was to replace: the model, or its draft model.
    """

    target: Target


class Finish(_Strict, frozen=True, tag="finish"):
    """Post-processes the loaded weights, and closes the session."""


class CheckReady(_Strict, frozen=True, tag="ready"):
    """Checks that a swap would succeed: all is staged, and the parameters can be filled."""


class SwapStaged(_Strict, frozen=True, tag="swap"):
    """Replaces the served weights by the staged ones.

    The engine core sends this operation to its workers between two steps.
    """


class ReleaseStaging(_Strict, frozen=True, tag="let_go"):
    """Drops the staged weights; the served ones stay as they are."""


class LoadAdapter(SentChunk, frozen=True, tag="load_adapter"):
    """Keeps a received chunk of a LoRA adapter; the last one replaces the adapter.

    The old adapter is kept for an undo. Checksums are compared as for :class:`LoadChunk`.
    """


class RemoveAdapter(_Strict, frozen=True, tag="remove_adapter"):
    """Removes the LoRA adapter for which the transport was opened, until an undo."""


class DropAdapters(_Strict, frozen=True, tag="drop_adapters"):
    """Removes all LoRA adapters that came over the bus, for good.

    Attributes:
        in_use: as :class:`SettleAdapter`.
    """

    in_use: AdapterNames | None = None


class UndoAdapter(_Strict, frozen=True, tag="undo_adapter"):
    """Restores the LoRA adapter that the last load replaced, or the last removal removed.

    Does nothing if there was neither since the last ARM.

    Attributes:
        settled: True also undoes a load that :class:`SettleAdapter` has marked; False leaves it.
    """

    settled: bool


class SettleAdapter(_Strict, frozen=True, tag="settle_adapter"):
    """Marks the last load or removal of a LoRA adapter as committed.

    A restarted sidecar then keeps it. Removed adapters that no request uses are freed.

    Attributes:
        in_use: the adapters of the core's requests. The core sets it, because only the core knows
            them (:mod:`sidecar.vllm.plugin.core.adapters`). None: unknown, and nothing is freed.
    """

    in_use: AdapterNames | None = None


# -- by the staging channel, while the engine serves -----------------------------------------


class Greet(_Strict, frozen=True, tag="greet"):
    """Makes this connection the newest, so that no operation of an older connection begins."""


class Rearm(_Strict, frozen=True, tag="arm_again"):
    """Arms the last manifest again, for another update of the model, without a check.

    Attributes:
        manifest: the manifest's digest; that of any other manifest is refused.
        staging: the options of the staged update.
    """

    manifest: ShortText
    staging: Staging


class StartStaging(_Strict, frozen=True, tag="start_staging"):
    """Allocates staging memory for the armed update, and drops an earlier staged update."""


class Stage(_Strict, frozen=True, tag="stage"):
    """Waits for some chunks, and puts them into the staging memory, in order."""

    chunks: tuple[SentChunk, ...]


class Seal(_Strict, frozen=True, tag="seal"):
    """Checks that all chunks are staged, and prepares the swap."""


Operation: TypeAlias = (
    Hello
    | Open
    | Drain
    | ArmManifest
    | Extend
    | Start
    | ReceiveChunk
    | VerifyChunk
    | LoadChunk
    | Restore
    | Finish
    | CheckReady
    | SwapStaged
    | ReleaseStaging
    | LoadAdapter
    | RemoveAdapter
    | DropAdapters
    | UndoAdapter
    | SettleAdapter
    | Greet
    | Rearm
    | StartStaging
    | Stage
    | Seal
)
OF_ADAPTERS: Final = (LoadAdapter, RemoveAdapter, DropAdapters, UndoAdapter, SettleAdapter)
_OPERATIONS: Final[msgspec.msgpack.Decoder[Operation]] = msgspec.msgpack.Decoder(Operation)
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(operation: Operation) -> str:
    """Returns the text that carries an operation over ``collective_rpc``."""
    return base64.b64encode(pack(operation)).decode()


def decode(text: str) -> Operation:
    """Returns the operation that a text of :func:`encode` carries.

    Raises:
        ValueError: the text carries no operation; the error says why.
    """
    if len(text) > MAX_PAYLOAD_CHARS:
        raise ValueError(f"an operation of {len(text)} characters, at most {MAX_PAYLOAD_CHARS}")
    return unpack(base64.b64decode(text, validate=True))


def unpack(blob: bytes) -> Operation:
    """Returns the operation that MessagePack bytes encode.

    Raises:
        ValueError: the bytes encode no operation; the text says why.
    """
    return _OPERATIONS.decode(blob)


# -- answers ------------------------------------------------------------------------------


class Done(_Strict, frozen=True, tag="done"):
    """The answer of an operation that was carried out.

    Attributes:
        ahead: after :class:`Open`, how many chunks may be received ahead.
        room: after arming, the memory that staging needs, or why the update can't be staged.
        channel: after :class:`Hello`, the name of the worker's staging channel; empty without one.
        adapters: after an operation on LoRA adapters, the names of those that the worker holds,
            whether for new requests or for the last ones of a removed adapter. Else None.
        in_place: after :class:`StartStaging`, whether chunks are received directly into staging
            memory. If so, an arrived chunk needs no further work, and one operation after the last
            chunk may stage all of them.
    """

    ahead: Count = 1
    room: StagingCapacity | None = None
    in_place: bool = False
    channel: ShortText = ""
    adapters: AdapterNames | None = None


class WorkerFailure(_Strict, frozen=True, tag="failure"):
    """The answer of an operation that failed in a worker.

    Attributes:
        code: the code of the NACK that the trainer gets.
        detail: what went wrong, for people.
        tensor: the name of the tensor at fault; empty if there is none.
    """

    code: NackCode
    detail: Annotated[str, Meta(max_length=DETAIL_CHARS)]
    tensor: Annotated[str, Meta(max_length=TENSOR_CHARS)] = ""

    def clipped(self) -> WorkerFailure:
        """Returns a copy whose texts are cut to the lengths that the message allows."""
        return WorkerFailure(self.code, self.detail[:DETAIL_CHARS], self.tensor[:TENSOR_CHARS])

    def to_bytes(self) -> bytes:
        """Returns the failure in MessagePack, with its texts cut."""
        return msgspec.msgpack.encode(self.clipped())

    def to_error(self) -> EngineError:
        """Returns the failure as an exception with the same code, text and tensor."""
        return EngineError(self.detail, code=self.code, tensor=self.tensor)

    @classmethod
    def from_bytes(cls, blob: bytes) -> WorkerFailure:
        """Returns the failure that MessagePack bytes encode."""
        return msgspec.msgpack.decode(blob, type=cls)

    def to_text(self) -> str:
        """Returns the failure as the text of an exception, which :func:`find_failure` reads."""
        mark = base64.urlsafe_b64encode(self.to_bytes()).decode()
        return f"{self.detail} [wavebus:{mark}]"


def find_failure(text: str) -> WorkerFailure | None:
    """Returns the failure that a text of :meth:`WorkerFailure.to_text` contains; None without one.

    Args:
        text: the text of an exception, or of an HTTP answer.
    """
    found = _MARK.search(text)
    if found is None:
        return None
    try:
        return WorkerFailure.from_bytes(base64.urlsafe_b64decode(found[1]))
    except (ValueError, msgspec.DecodeError):
        return None


Answer: TypeAlias = Done | WorkerFailure
_ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def pack(said: Operation | Answer) -> bytes:
    """Returns an operation or answer as MessagePack bytes."""
    return _ENCODER.encode(said)


def unpack_answer(blob: bytes) -> Answer:
    """Returns the answer that MessagePack bytes encode.

    Raises:
        ValueError: the bytes encode no answer; the text says why.
    """
    return _ANSWERS.decode(blob)
