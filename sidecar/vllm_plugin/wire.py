"""Operations that travel inside vLLM's own calls, and how a failure travels back.

vLLM gives a weight transfer backend two dicts: ``init_info`` (any time) and
``update_info`` (only between start and finish). Each carries one key, ``wavebus``,
with an operation in MessagePack, in base64: in process the dict crosses vLLM's
MessagePack codec, over HTTP it is JSON, and one text form passes both. Decoding is
strict: unknown operations, unknown fields and wrong types are refused.

Everything but :class:`Load` goes through ``init_info``: vLLM ends the update
session of a worker whose ``update_weights`` raised, and refuses that call outside
of one, while receiving must be possible without a pause. Only what vLLM's own worker
engines receive, they also load: then :class:`Receive` goes through ``update_info``.

vLLM's calls return nothing to the caller, and an exception arrives as its text,
wrapped in more text. So a :class:`Failure` is put at the end of the text between
marks, in the URL-safe base64: no quoting changes that, and neither does vLLM when it
blanks out what looks like a file path in the text of an HTTP error (0.32).
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar

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
    Target,
    TensorNames,
)
from bus.messages import Verify as VerifyMode  # noqa: TC001 - as above

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY: Final = "wavebus"
PROTOCOL: Final = 5
MAX_PAYLOAD_CHARS: Final = 32 * 1024 * 1024
DETAIL_CHARS: Final = 2000
TENSOR_CHARS: Final = 512

_MARK = re.compile(r"\[wavebus:([A-Za-z0-9_=-]+)\]")


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """Do both sides speak the same protocol? Changes nothing."""

    protocol: Count


class Expect(msgspec.Struct, frozen=True, tag="expect", forbid_unknown_fields=True):
    """Fail unless an update session is open (or not) in every worker. Changes nothing."""

    active: bool


class Open(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """Open the transport; one that is open is replaced. ``first_rank`` is that of the engine's
    first worker in the communicator."""

    backend: ShortText
    params: Blob
    communicator: Count
    world_size: Count
    first_rank: Count


class ArmManifest(msgspec.Struct, frozen=True, tag="arm", forbid_unknown_fields=True):
    """Check a manifest against the target; of a patch, if there are ``counts``."""

    names: TensorNames
    dtypes: Dtypes
    shapes: Shapes
    chunk_ends: Counts
    target: Target
    counts: Counts


class Receive(msgspec.Struct, frozen=True, tag="receive", forbid_unknown_fields=True):
    """Fetch one chunk, into staging; through ``update_info``, by vLLM's own worker engine, into
    the model."""

    seq: Count
    backend: ShortText
    names: TensorNames
    dtypes: Dtypes
    shapes: Shapes
    handle: Blob


class Verify(msgspec.Struct, frozen=True, tag="verify", forbid_unknown_fields=True):
    """Compare the staged chunk's checksums."""

    seq: Count
    verify: VerifyMode
    sums: Counts


class Settle(msgspec.Struct, frozen=True, tag="settle", forbid_unknown_fields=True):
    """Raise what the last start, load or finish failed with, if it did."""


class Discard(msgspec.Struct, frozen=True, tag="discard", forbid_unknown_fields=True):
    """Forget what was loaded into layers that are not complete; they keep their old weights."""


class Load(msgspec.Struct, frozen=True, tag="load", forbid_unknown_fields=True):
    """Load the staged chunk into the model; nothing is left of one that vLLM's own worker engine
    received."""

    seq: Count


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", forbid_unknown_fields=True):
    """Have the staged LoRA adapter in the place of the one before, which is kept."""

    seq: Count


class UndoAdapter(msgspec.Struct, frozen=True, tag="undo_adapter", forbid_unknown_fields=True):
    """Go back to the LoRA adapter before the one that was loaded last, if an update has loaded one
    and the next has not been armed. ``settled``: even from one that is settled."""

    settled: bool


class SettleAdapter(msgspec.Struct, frozen=True, tag="settle_adapter", forbid_unknown_fields=True):
    """The LoRA adapter that was loaded last is being committed."""


InitOp: TypeAlias = (
    Hello
    | Expect
    | Open
    | ArmManifest
    | Receive
    | Verify
    | Settle
    | Discard
    | LoadAdapter
    | UndoAdapter
    | SettleAdapter
)
UpdateOp: TypeAlias = Receive | Load
T = TypeVar("T")


def encode(operation: InitOp | UpdateOp) -> dict[str, str]:
    """The dict that carries an operation."""
    return {KEY: base64.b64encode(msgspec.msgpack.encode(operation)).decode()}


def decode(info: Mapping[str, Any], type_: Any) -> Any:
    """The operation in a dict, one of ``type_``.

    Raises:
        ValueError: says what is wrong with it.
    """
    payload = info.get(KEY)
    if set(info) != {KEY} or not isinstance(payload, str):
        raise ValueError(
            f"expected one key {KEY!r} with a string, got {sorted(map(str, info))}: "
            "this engine's weights are updated through wavebus"
        )
    if len(payload) > MAX_PAYLOAD_CHARS:
        raise ValueError(f"payload of {len(payload)} characters, at most {MAX_PAYLOAD_CHARS}")
    blob = base64.b64decode(payload, validate=True)
    return msgspec.msgpack.decode(blob, type=type_)


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong in a worker."""

    code: NackCode
    detail: Annotated[str, Meta(max_length=DETAIL_CHARS)]
    tensor: Annotated[str, Meta(max_length=TENSOR_CHARS)] = ""

    def clipped(self) -> Failure:
        """The same within the bounds of the wire."""
        return Failure(self.code, self.detail[:DETAIL_CHARS], self.tensor[:TENSOR_CHARS])

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self.clipped())

    @classmethod
    def from_bytes(cls, blob: bytes) -> Failure:
        return msgspec.msgpack.decode(blob, type=cls)

    def to_text(self) -> str:
        """For an exception: readable, and found again by :func:`find_failure`."""
        mark = base64.urlsafe_b64encode(self.to_bytes()).decode()
        return f"{self.detail} [wavebus:{mark}]"


def find_failure(text: str) -> Failure | None:
    """The failure inside the text of an exception or of an HTTP answer, if there is one."""
    found = _MARK.search(text)
    if found is None:
        return None
    try:
        return Failure.from_bytes(base64.urlsafe_b64decode(found[1]))
    except (ValueError, msgspec.DecodeError):
        return None
