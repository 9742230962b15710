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
PROTOCOL: Final = 12
MAX_PAYLOAD_CHARS: Final = 32 * 1024 * 1024
DETAIL_CHARS: Final = 2000
TENSOR_CHARS: Final = 512

_MARK = re.compile(r"\[wavebus:([A-Za-z0-9_=-]+)\]")


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """Checks that the sidecar and the plugin have the same protocol number; changes nothing."""

    protocol: Count


class Open(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
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


class ArmManifest(msgspec.Struct, frozen=True, tag="arm", forbid_unknown_fields=True):
    """Operation at ARM: each worker checks whether an update fits its model, and loads nothing.

    Attributes:
        names, dtypes, shapes, chunk_ends, counts: the update's tensors, as the fields of
            :class:`bus.manifest.Manifest` describe them.
        target: what the update replaces: the model, or its draft model.
        staging: the options of a staged update; None if it is loaded in a pause.
    """

    names: TensorNames
    dtypes: Dtypes
    shapes: Shapes
    chunk_ends: Counts
    target: Target
    counts: Counts
    staging: Staging | None = None


class Start(msgspec.Struct, frozen=True, tag="start", forbid_unknown_fields=True):
    """Opens an update session for the target, in which chunks are loaded.

    Attributes:
        target: what the update replaces: the model, or its draft model.
        recover: True first closes the session that an earlier update left open, for whichever
            target, and runs a whole session for the target. This repairs vLLM's own state after an
            interrupted load. The target's weights are then undefined until every chunk is loaded.
    """

    target: Target
    recover: bool


class ReceiveChunk(msgspec.Struct, frozen=True, tag="receive", forbid_unknown_fields=True):
    """Begins to fetch a chunk of the armed manifest; vLLM's own engines also load it.

    Attributes:
        seq: number of the chunk.
        backend: the backend that brings the chunk.
        handle: where to find the chunk, encoded by the sender for this backend.
    """

    seq: Count
    backend: ShortText
    handle: Blob


class VerifyChunk(msgspec.Struct, frozen=True, tag="verify", forbid_unknown_fields=True):
    """Compares a chunk's checksums without loading the chunk.

    Needed where workers of several cores can't verify and load in one operation.

    Attributes:
        seq: number of the chunk.
        verify: what the checksums cover.
        sums: the sender's checksums, one per tensor.
    """

    seq: Count
    verify: VerifyMode
    sums: Counts


class LoadChunk(msgspec.Struct, frozen=True, tag="load", forbid_unknown_fields=True):
    """Loads a received chunk into the model.

    Attributes:
        seq: number of the chunk.
        verify: what the checksums cover.
        sums: the sender's checksums, one per tensor. All workers compare them before any of them
            loads. Empty: nothing is compared.
    """

    seq: Count
    verify: VerifyMode
    sums: Counts


class Restore(msgspec.Struct, frozen=True, tag="restore", forbid_unknown_fields=True):
    """Closes the update session; incomplete layers get their old weights back.

    If no session is open, one is opened for the target first. If nothing was loaded, all layers
    keep their old weights.

    Attributes:
        target: what the update was to replace: the model, or its draft model.
    """

    target: Target


class Finish(msgspec.Struct, frozen=True, tag="finish", forbid_unknown_fields=True):
    """Post-processes the loaded weights, and closes the session."""


class CheckReady(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """Checks that a swap would succeed: all is staged, and the parameters can be filled."""


class SwapStaged(msgspec.Struct, frozen=True, tag="swap", forbid_unknown_fields=True):
    """Replaces the served weights by the staged ones.

    The engine core sends this operation to its workers between two steps.
    """


class ReleaseStaging(msgspec.Struct, frozen=True, tag="let_go", forbid_unknown_fields=True):
    """Drops the staged weights; the served ones stay as they are."""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", forbid_unknown_fields=True):
    """Replaces a LoRA adapter by the received one; keeps the old one for an undo.

    The attributes are as in :class:`LoadChunk`.
    """

    seq: Count
    verify: VerifyMode
    sums: Counts


class UndoAdapter(msgspec.Struct, frozen=True, tag="undo_adapter", forbid_unknown_fields=True):
    """Restores the LoRA adapter that the last load replaced.

    Does nothing if no adapter was loaded since the last ARM.

    Attributes:
        settled: True also undoes a load that :class:`SettleAdapter` has marked; False leaves it.
    """

    settled: bool


class SettleAdapter(msgspec.Struct, frozen=True, tag="settle_adapter", forbid_unknown_fields=True):
    """Marks the last loaded LoRA adapter as committed, so that a restarted sidecar keeps it."""


# -- by the staging channel, while the engine serves -----------------------------------------


class Greet(msgspec.Struct, frozen=True, tag="greet", forbid_unknown_fields=True):
    """Makes this connection the newest, so that operations of older ones are not begun."""


class Rearm(msgspec.Struct, frozen=True, tag="arm_again", forbid_unknown_fields=True):
    """Arms the last manifest again, for another update of the model, without a check.

    Attributes:
        manifest: the manifest's digest; that of any other manifest is refused.
        staging: the options of the staged update.
    """

    manifest: ShortText
    staging: Staging


class StartStaging(msgspec.Struct, frozen=True, tag="start_staging", forbid_unknown_fields=True):
    """Allocates staging memory for the armed update, and drops an earlier staged update."""


class SentChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names a chunk that has arrived or is on its way.

    Attributes:
        seq: number of the chunk.
        verify: what the checksums cover.
        sums: the sender's checksums, which must match. Empty: nothing is compared.
    """

    seq: Count
    verify: VerifyMode
    sums: Counts


class Stage(msgspec.Struct, frozen=True, tag="stage", forbid_unknown_fields=True):
    """Waits for some chunks, and puts them into the staging memory, in order."""

    chunks: tuple[SentChunk, ...]


class Seal(msgspec.Struct, frozen=True, tag="seal", forbid_unknown_fields=True):
    """Checks that all chunks are staged, and prepares the swap."""


Operation: TypeAlias = (
    Hello
    | Open
    | ArmManifest
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
    | UndoAdapter
    | SettleAdapter
    | Greet
    | Rearm
    | StartStaging
    | Stage
    | Seal
)
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


class Done(msgspec.Struct, frozen=True, tag="done", forbid_unknown_fields=True):
    """The answer of an operation that was carried out.

    Attributes:
        ahead: after :class:`Open`, how many chunks may be received ahead.
        room: after arming, the memory that staging needs, or why the update can't be staged.
        channel: after :class:`Hello`, the name of the worker's staging channel; empty without one.
        in_place: after :class:`StartStaging`, whether chunks are received directly into staging
            memory. If so, an arrived chunk needs no further work, and one operation after the last
            chunk may stage all of them.
    """

    ahead: Count = 1
    room: StagingCapacity | None = None
    in_place: bool = False
    channel: ShortText = ""


class WorkerFailure(msgspec.Struct, frozen=True, tag="failure", forbid_unknown_fields=True):
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
