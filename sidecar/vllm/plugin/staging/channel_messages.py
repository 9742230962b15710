"""What a sidecar asks of a worker by its staging channel
(:mod:`sidecar.vllm.plugin.staging.channel_server`), and the answers.

Both are MessagePack, and nothing else is around it. Decoding is strict, as in
:mod:`sidecar.vllm.plugin.operations`, two of whose operations may come this way, too: who opens a
transport, waits for others; and who is armed for the first time, has its loader looked at.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from bus.messages import (  # noqa: TC001 - msgspec reads them when it decodes
    Blob,
    Count,
    Counts,
    ShortText,
    Staging,
    Verify,
)
from bus.weight_transfer.allocation import StagingCapacity  # noqa: TC001 - as above
from sidecar.vllm.plugin.operations import ArmManifest, Open, WorkerFailure


class Greet(msgspec.Struct, frozen=True, tag="greet", forbid_unknown_fields=True):
    """Changes nothing. Once it is answered, nobody who came before is heard any more."""


class Rearm(msgspec.Struct, frozen=True, tag="arm_again", forbid_unknown_fields=True):
    """Arm the manifest of this digest for another update of the model, if it is the one that was
    armed last: then there is nothing to check in it."""

    manifest: ShortText
    staging: Staging


class StartStaging(msgspec.Struct, frozen=True, tag="start_staging", forbid_unknown_fields=True):
    """Have memory for the armed update beside the weights; of an earlier one, nothing is left."""


class SentChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chunk that was received, or is on its way and will be there soon; with ``sums``, it has
    these."""

    seq: Count
    verify: Verify
    sums: Counts


class ReceiveStaged(msgspec.Struct, frozen=True, tag="receive", forbid_unknown_fields=True):
    """Begin to fetch a chunk of the armed manifest."""

    seq: Count
    backend: ShortText
    handle: Blob


class Stage(msgspec.Struct, frozen=True, tag="stage", forbid_unknown_fields=True):
    """Have these chunks in that memory, in their order."""

    chunks: tuple[SentChunk, ...]


class Seal(msgspec.Struct, frozen=True, tag="seal", forbid_unknown_fields=True):
    """All chunks are staged."""


Operation: TypeAlias = (
    Greet | Open | ArmManifest | Rearm | StartStaging | ReceiveStaged | Stage | Seal
)


class Done(msgspec.Struct, frozen=True, tag="done", forbid_unknown_fields=True):
    """It was carried out.

    ``ahead``: of what was opened, how many chunks may be received ahead. ``room``: of what was
    armed. ``in_place``: of what was started, that chunks are received where they are staged, so
    that there is nothing to do for one that has come: they may be staged all at once, when the last
    one has.
    """

    ahead: Count = 1
    room: StagingCapacity | None = None
    in_place: bool = False


Answer: TypeAlias = Done | WorkerFailure

_OPERATIONS: Final[msgspec.msgpack.Decoder[Operation]] = msgspec.msgpack.Decoder(Operation)
_ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(said: Operation | Answer) -> bytes:
    """The blob that carries it."""
    return _ENCODER.encode(said)


def decode(blob: bytes) -> Operation:
    """The operation in a blob.

    Raises:
        ValueError: says what is wrong with it.
    """
    return _OPERATIONS.decode(blob)


def decode_answer(blob: bytes) -> Answer:
    """The answer in a blob.

    Raises:
        ValueError: as :func:`decode`.
    """
    return _ANSWERS.decode(blob)
