"""Operations that a sidecar has an engine's workers carry out, and how a failure travels back.

Each is one call of vLLM's ``collective_rpc``, of a method that the plugin adds to workers
(:data:`PERFORM`), with one argument: the operation in MessagePack,
in base64. In process the text crosses vLLM's MessagePack codec, over HTTP it is JSON, and one text
form passes both. Decoding is strict: unknown operations, unknown fields and wrong types are
refused. What comes while an engine serves, goes another way
(:mod:`sidecar.vllm.plugin.staging.channel_messages`).

An exception arrives as its text, wrapped in more text. So a :class:`Failure` is put at the end of
the text between marks, in the URL-safe base64: no quoting changes that, and neither does vLLM when
it blanks out what looks like a file path in the text of an HTTP error (0.32).
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

# The method of a worker that carries out an operation, its argument ``operation``; it returns how
# many chunks may be received ahead.
PERFORM: Final = "wavebus_perform"
PROTOCOL: Final = 11
MAX_PAYLOAD_CHARS: Final = 32 * 1024 * 1024
DETAIL_CHARS: Final = 2000
TENSOR_CHARS: Final = 512

_MARK = re.compile(r"\[wavebus:([A-Za-z0-9_=-]+)\]")


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """Do both sides speak the same protocol? Changes nothing."""

    protocol: Count


class Open(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """Open the transport; one that is open is replaced. ``first_rank`` is that of the engine's
    first worker in the communicator."""

    backend: ShortText
    params: Blob
    communicator: Count
    world_size: Count
    first_rank: Count


class ArmManifest(msgspec.Struct, frozen=True, tag="arm", forbid_unknown_fields=True):
    """Check a manifest against the target; of a patch, if there are ``counts``. ``staging``: as ARM
    has it."""

    names: TensorNames
    dtypes: Dtypes
    shapes: Shapes
    chunk_ends: Counts
    target: Target
    counts: Counts
    staging: Staging | None = None


class Start(msgspec.Struct, frozen=True, tag="start", forbid_unknown_fields=True):
    """Open an update session of the target. ``recover``: the one that an update left open, of
    whichever target, is closed first; and the target goes through a whole one, which puts vLLM's
    own bookkeeping in order after a load that broke off. Its weights are then undefined until
    every chunk is loaded."""

    target: Target
    recover: bool


class ReceiveChunk(msgspec.Struct, frozen=True, tag="receive", forbid_unknown_fields=True):
    """Fetch one chunk; by vLLM's own worker engine, into the model."""

    seq: Count
    backend: ShortText
    names: TensorNames
    dtypes: Dtypes
    shapes: Shapes
    handle: Blob


class VerifyChunk(msgspec.Struct, frozen=True, tag="verify", forbid_unknown_fields=True):
    """Compare the staged chunk's checksums, where not all workers load in one operation."""

    seq: Count
    verify: VerifyMode
    sums: Counts


class LoadChunk(msgspec.Struct, frozen=True, tag="load", forbid_unknown_fields=True):
    """Load the staged chunk into the model; with ``sums``, only if it has these in all workers."""

    seq: Count
    verify: VerifyMode
    sums: Counts


class Restore(msgspec.Struct, frozen=True, tag="restore", forbid_unknown_fields=True):
    """Close the session; one of the target is opened first if none is. Layers that are not
    complete get their old weights back: without a load, all of them."""

    target: Target


class Finish(msgspec.Struct, frozen=True, tag="finish", forbid_unknown_fields=True):
    """Post-process what was loaded, and close the session."""


class CheckReady(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """Would a swap go through? All is staged, and where it goes is there."""


class SwapStaged(msgspec.Struct, frozen=True, tag="swap", forbid_unknown_fields=True):
    """Serve what is staged. Between two steps: it is the core that asks for it."""


class ReleaseStaging(msgspec.Struct, frozen=True, tag="let_go", forbid_unknown_fields=True):
    """Nothing is staged any more."""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", forbid_unknown_fields=True):
    """Have the staged LoRA adapter in the place of the one before, which is kept. ``sums`` as of
    :class:`Load`."""

    seq: Count
    verify: VerifyMode
    sums: Counts


class UndoAdapter(msgspec.Struct, frozen=True, tag="undo_adapter", forbid_unknown_fields=True):
    """Go back to the LoRA adapter before the one that was loaded last, if an update has loaded one
    and the next has not been armed. ``settled``: even from one that is settled."""

    settled: bool


class SettleAdapter(msgspec.Struct, frozen=True, tag="settle_adapter", forbid_unknown_fields=True):
    """The LoRA adapter that was loaded last is being committed."""


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
)
_DECODER: Final[msgspec.msgpack.Decoder[Operation]] = msgspec.msgpack.Decoder(Operation)


def encode(operation: Operation) -> str:
    """The text that carries an operation."""
    return base64.b64encode(msgspec.msgpack.encode(operation)).decode()


def decode(text: str) -> Operation:
    """The operation in a text.

    Raises:
        ValueError: says what is wrong with it.
    """
    if len(text) > MAX_PAYLOAD_CHARS:
        raise ValueError(f"an operation of {len(text)} characters, at most {MAX_PAYLOAD_CHARS}")
    return _DECODER.decode(base64.b64decode(text, validate=True))


class WorkerFailure(msgspec.Struct, frozen=True, tag="failure", forbid_unknown_fields=True):
    """What went wrong in a worker."""

    code: NackCode
    detail: Annotated[str, Meta(max_length=DETAIL_CHARS)]
    tensor: Annotated[str, Meta(max_length=TENSOR_CHARS)] = ""

    def clipped(self) -> WorkerFailure:
        """The same within the bounds of the wire."""
        return WorkerFailure(self.code, self.detail[:DETAIL_CHARS], self.tensor[:TENSOR_CHARS])

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self.clipped())

    @classmethod
    def from_bytes(cls, blob: bytes) -> WorkerFailure:
        return msgspec.msgpack.decode(blob, type=cls)

    def to_text(self) -> str:
        """For an exception: readable, and found again by :func:`find_failure`."""
        mark = base64.urlsafe_b64encode(self.to_bytes()).decode()
        return f"{self.detail} [wavebus:{mark}]"


def find_failure(text: str) -> WorkerFailure | None:
    """The failure inside the text of an exception or of an HTTP answer, if there is one."""
    found = _MARK.search(text)
    if found is None:
        return None
    try:
        return WorkerFailure.from_bytes(base64.urlsafe_b64decode(found[1]))
    except (ValueError, msgspec.DecodeError):
        return None
