"""Operations that a sidecar has an engine's workers carry out, and the workers' answers.

Both are MessagePack. Decoding is strict: unknown operations, unknown fields and wrong types are
refused. There are two carriers:

- vLLM's ``collective_rpc``, of a method that the plugin adds to workers (:data:`PERFORM`). Its one
  argument is the operation in base64: in process the text crosses vLLM's MessagePack codec, over
  HTTP it is JSON, and one text form passes both.
- the workers' staging channels (:mod:`sidecar.vllm.plugin.staging.channel_server`), while the
  engine serves. Two operations may take either carrier, because they take long: opening a transport
  waits for others, and arming a new manifest runs the loader.

An exception of ``collective_rpc`` arrives as its text, wrapped in more text. So a
:class:`WorkerFailure` is put at the end of the text between marks, in URL-safe base64: no quoting
changes that, and neither does vLLM when it blanks out what looks like a file path in the text of an
HTTP error (0.32).
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

# The method of a worker that carries out an operation, its argument ``operation``; it returns
# :class:`Done`, as a dict.
PERFORM: Final = "wavebus_perform"
PROTOCOL: Final = 12
MAX_PAYLOAD_CHARS: Final = 32 * 1024 * 1024
DETAIL_CHARS: Final = 2000
TENSOR_CHARS: Final = 512

_MARK = re.compile(r"\[wavebus:([A-Za-z0-9_=-]+)\]")


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """Check that both sides speak the same protocol. Changes nothing."""

    protocol: Count


class Open(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """Open the transport; one that is open is replaced.

    ``first_rank`` is that of the engine's first worker in the communicator.
    """

    backend: ShortText
    params: Blob
    communicator: Count
    world_size: Count
    first_rank: Count


class ArmManifest(msgspec.Struct, frozen=True, tag="arm", forbid_unknown_fields=True):
    """Check a manifest against the target; with ``counts``, the manifest of a patch.

    ``staging`` is as in ARM.
    """

    names: TensorNames
    dtypes: Dtypes
    shapes: Shapes
    chunk_ends: Counts
    target: Target
    counts: Counts
    staging: Staging | None = None


class Start(msgspec.Struct, frozen=True, tag="start", forbid_unknown_fields=True):
    """Open an update session of the target.

    ``recover``: first close the session that an earlier update left open, of whichever target, and
        take the target through a whole session, which puts vLLM's own bookkeeping in order after a
        load that broke off. Its weights are then undefined until every chunk is loaded.
    """

    target: Target
    recover: bool


class ReceiveChunk(msgspec.Struct, frozen=True, tag="receive", forbid_unknown_fields=True):
    """Begin to fetch a chunk of the armed manifest; vLLM's own worker engines also load it."""

    seq: Count
    backend: ShortText
    handle: Blob


class VerifyChunk(msgspec.Struct, frozen=True, tag="verify", forbid_unknown_fields=True):
    """Compare a chunk's checksums, where workers can't verify and load in one operation."""

    seq: Count
    verify: VerifyMode
    sums: Counts


class LoadChunk(msgspec.Struct, frozen=True, tag="load", forbid_unknown_fields=True):
    """Load the staged chunk into the model; with ``sums``, only if all workers have these."""

    seq: Count
    verify: VerifyMode
    sums: Counts


class Restore(msgspec.Struct, frozen=True, tag="restore", forbid_unknown_fields=True):
    """Close the session; if none is open, one of the target is opened first.

    Layers that are not complete get their old weights back: without a load, all of them.
    """

    target: Target


class Finish(msgspec.Struct, frozen=True, tag="finish", forbid_unknown_fields=True):
    """Post-process what was loaded, and close the session."""


class CheckReady(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """Check that a swap would succeed: all is staged, and its targets are there."""


class SwapStaged(msgspec.Struct, frozen=True, tag="swap", forbid_unknown_fields=True):
    """Replace the served weights by the staged ones.

    The engine core sends this operation to its workers between two steps.
    """


class ReleaseStaging(msgspec.Struct, frozen=True, tag="let_go", forbid_unknown_fields=True):
    """Drop what is staged."""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", forbid_unknown_fields=True):
    """Put the staged LoRA adapter in the place of the one before, which is kept.

    ``sums`` are as in :class:`LoadChunk`.
    """

    seq: Count
    verify: VerifyMode
    sums: Counts


class UndoAdapter(msgspec.Struct, frozen=True, tag="undo_adapter", forbid_unknown_fields=True):
    """Go back to the LoRA adapter before the one that was loaded last.

    Does nothing unless an update has loaded one and the next has not been armed. ``settled``: go
    back even from an adapter that is settled.
    """

    settled: bool


class SettleAdapter(msgspec.Struct, frozen=True, tag="settle_adapter", forbid_unknown_fields=True):
    """Mark the LoRA adapter that was loaded last as being committed."""


# -- by the staging channel, while the engine serves -----------------------------------------


class Greet(msgspec.Struct, frozen=True, tag="greet", forbid_unknown_fields=True):
    """Change nothing. Once it is answered, older connections are ignored."""


class Rearm(msgspec.Struct, frozen=True, tag="arm_again", forbid_unknown_fields=True):
    """Arm the manifest of this digest for another update of the model.

    It must be the one that was armed last: then there is nothing to check in it.
    """

    manifest: ShortText
    staging: Staging


class StartStaging(msgspec.Struct, frozen=True, tag="start_staging", forbid_unknown_fields=True):
    """Allocate memory for the armed update beside the weights; an earlier update is dropped."""


class SentChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chunk that was received, or is on its way; with ``sums``, it must have these."""

    seq: Count
    verify: VerifyMode
    sums: Counts


class Stage(msgspec.Struct, frozen=True, tag="stage", forbid_unknown_fields=True):
    """Put these chunks into that memory, in their order."""

    chunks: tuple[SentChunk, ...]


class Seal(msgspec.Struct, frozen=True, tag="seal", forbid_unknown_fields=True):
    """Check that all chunks are staged."""


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
    """Return the text that carries an operation."""
    return base64.b64encode(pack(operation)).decode()


def decode(text: str) -> Operation:
    """Return the operation in a text.

    Raises:
        ValueError: says what is wrong with the text.
    """
    if len(text) > MAX_PAYLOAD_CHARS:
        raise ValueError(f"an operation of {len(text)} characters, at most {MAX_PAYLOAD_CHARS}")
    return unpack(base64.b64decode(text, validate=True))


def unpack(blob: bytes) -> Operation:
    """Return the operation in these bytes.

    Raises:
        ValueError: says what is wrong with them.
    """
    return _OPERATIONS.decode(blob)


# -- answers ------------------------------------------------------------------------------


class Done(msgspec.Struct, frozen=True, tag="done", forbid_unknown_fields=True):
    """The operation was carried out.

    Attributes:
        ahead: after :class:`Open`, how many chunks may be received ahead.
        room: after arming, what staging takes.
        channel: after :class:`Hello`, the name of the worker's staging channel; empty without one.
        in_place: after :class:`StartStaging`, chunks are received where they are staged. Then
            nothing is left to do for a chunk that has come, and all may be staged at once, after
            the last one.
    """

    ahead: Count = 1
    room: StagingCapacity | None = None
    in_place: bool = False
    channel: ShortText = ""


class WorkerFailure(msgspec.Struct, frozen=True, tag="failure", forbid_unknown_fields=True):
    """Says what went wrong in a worker."""

    code: NackCode
    detail: Annotated[str, Meta(max_length=DETAIL_CHARS)]
    tensor: Annotated[str, Meta(max_length=TENSOR_CHARS)] = ""

    def clipped(self) -> WorkerFailure:
        """Return the same within the bounds of the wire."""
        return WorkerFailure(self.code, self.detail[:DETAIL_CHARS], self.tensor[:TENSOR_CHARS])

    def to_bytes(self) -> bytes:
        """Return the failure in MessagePack, within the bounds of the wire."""
        return msgspec.msgpack.encode(self.clipped())

    @classmethod
    def from_bytes(cls, blob: bytes) -> WorkerFailure:
        """Return the failure in these bytes."""
        return msgspec.msgpack.decode(blob, type=cls)

    def to_text(self) -> str:
        """Return a text for an exception: readable, and found again by :func:`find_failure`."""
        mark = base64.urlsafe_b64encode(self.to_bytes()).decode()
        return f"{self.detail} [wavebus:{mark}]"


def find_failure(text: str) -> WorkerFailure | None:
    """Return the failure inside the text of an exception or an HTTP answer, if there is one."""
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
    """Return the bytes that carry an operation or an answer."""
    return _ENCODER.encode(said)


def unpack_answer(blob: bytes) -> Answer:
    """Return the answer in these bytes.

    Raises:
        ValueError: says what is wrong with them.
    """
    return _ANSWERS.decode(blob)
