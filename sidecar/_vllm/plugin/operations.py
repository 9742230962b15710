"""Carries operations to an engine's workers, and their answers back.

Workers execute the operations of an update (:mod:`bus.operations`), and those declared here, which
only the adapter of vLLM and the engine core request. Operations and answers are MessagePack.
Decoding is strict: unknown operations, unknown fields and wrong types are refused. There are two
carriers:

- vLLM's ``collective_rpc``, calling a method that the plugin adds to workers (:data:`PERFORM`). Its
  one argument is the operation in base64: a text passes unchanged through vLLM's MessagePack codec
  (in process) and through JSON (over HTTP).
- the workers' staging channels (:mod:`sidecar._vllm.plugin.staging.channel_server`), while the
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
from typing import Annotated, ClassVar, Final, TypeAlias

import msgspec
from msgspec import Meta

from bus.errors import EngineError
from bus.messages import Count, NackCode  # noqa: TC001 - msgspec reads them when it decodes
from bus.operations import (
    AdapterNames,
    Carrier,
    Done,
    LoadChunk,
    Operation,
    SentChunk,
    UpdateOperation,
)

# The worker's method that carries out an operation. Its argument is ``operation``; it returns
# :class:`Done`, as a dict.
PERFORM: Final = "wavebus_perform"
PROTOCOL: Final = 18
MAX_PAYLOAD_CHARS: Final = 32 * 1024 * 1024
DETAIL_CHARS: Final = 2000
TENSOR_CHARS: Final = 512

_MARK = re.compile(r"\[wavebus:([A-Za-z0-9_=-]+)\]")


class Hello(Operation, frozen=True, tag="hello"):
    """Checks that the sidecar and the plugin have the same protocol number; changes nothing."""

    protocol: Count


class VerifyChunk(SentChunk, frozen=True, tag="verify"):
    """Compares a chunk's checksums without loading the chunk.

    Needed where workers of several cores can't verify and load in one operation.
    """


class CheckReady(Operation, frozen=True, tag="ready"):
    """Checks that a swap would succeed: all is staged, and the parameters can be filled."""


class DropAdapters(Operation, frozen=True, tag="drop_adapters"):
    """Removes all LoRA adapters that came over the bus, for good.

    Attributes:
        in_use: as :class:`SettleAdapter`.
    """

    in_use: AdapterNames | None = None


class UndoAdapter(Operation, frozen=True, tag="undo_adapter"):
    """Restores the LoRA adapter that the last load replaced, or the last removal removed.

    Does nothing if there was neither since the last ARM.

    Attributes:
        settled: True also undoes a load that :class:`SettleAdapter` has marked; False leaves it.
    """

    settled: bool


class SettleAdapter(Operation, frozen=True, tag="settle_adapter"):
    """Marks the last load or removal of a LoRA adapter as committed.

    A restarted sidecar then keeps it. Removed adapters that no request uses are freed.

    Attributes:
        in_use: the adapters of the core's requests. The core sets it, because only the core knows
            them (:mod:`sidecar._vllm.plugin.core.adapters`). None: unknown, and nothing is freed.
    """

    in_use: AdapterNames | None = None


class Greet(Operation, frozen=True, tag="greet"):
    """Makes this connection the newest, so that no operation of an older connection begins."""

    carrier: ClassVar[Carrier] = "channel"


class Stage(Operation, frozen=True, tag="stage"):
    """Waits for some chunks, and puts them into the staging memory, in order.

    Chunks that are received in place are staged by one message, because each message delays steps.
    """

    carrier: ClassVar[Carrier] = "channel"

    chunks: tuple[LoadChunk, ...]


WorkerOperation: TypeAlias = (
    UpdateOperation
    | Hello
    | VerifyChunk
    | CheckReady
    | DropAdapters
    | UndoAdapter
    | SettleAdapter
    | Greet
    | Stage
)
OF_ADAPTERS: Final = (DropAdapters, UndoAdapter, SettleAdapter)
_OPERATIONS: Final[msgspec.msgpack.Decoder[WorkerOperation]] = msgspec.msgpack.Decoder(
    WorkerOperation
)
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(operation: WorkerOperation) -> str:
    """Returns the text that carries an operation over ``collective_rpc``."""
    return base64.b64encode(pack(operation)).decode()


def decode(text: str) -> WorkerOperation:
    """Returns the operation that a text of :func:`encode` carries.

    Raises:
        ValueError: the text carries no operation; the error says why.
    """
    if len(text) > MAX_PAYLOAD_CHARS:
        raise ValueError(
            f"the operation has {len(text)} characters; at most {MAX_PAYLOAD_CHARS} are accepted"
        )
    return unpack(base64.b64decode(text, validate=True))


def unpack(blob: bytes) -> WorkerOperation:
    """Returns the operation that MessagePack bytes encode.

    Raises:
        ValueError: the bytes encode no operation; the text says why.
    """
    return _OPERATIONS.decode(blob)


# -- answers ------------------------------------------------------------------------------


class WorkerFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="failure"):
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

    def to_error(self) -> EngineError:
        """Returns the failure as an exception with the same code, text and tensor."""
        return EngineError(self.detail, code=self.code, tensor=self.tensor)

    def to_text(self) -> str:
        """Returns the failure as the text of an exception, which :func:`find_failure` reads."""
        mark = base64.urlsafe_b64encode(pack(self.clipped())).decode()
        return f"{self.detail} [wavebus:{mark}]"


def find_failure(text: str) -> WorkerFailure | None:
    """Returns the failure that :meth:`WorkerFailure.to_text` has put into a text; else None.

    Args:
        text: the text of an exception, or of an HTTP answer.
    """
    found = _MARK.search(text)
    if found is None:
        return None
    try:
        return msgspec.msgpack.decode(base64.urlsafe_b64decode(found[1]), type=WorkerFailure)
    except (ValueError, msgspec.DecodeError):
        return None


def engine_error(text: str) -> EngineError:
    """Returns the exception for a failed vLLM call, by the text of vLLM's error.

    If the plugin put a failure in the text, the exception has that failure's code and tensor.
    """
    failure = find_failure(text)
    return EngineError(text) if failure is None else failure.to_error()


Answer: TypeAlias = Done | WorkerFailure
_ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def pack(said: WorkerOperation | Answer) -> bytes:
    """Returns an operation or answer as MessagePack bytes."""
    return _ENCODER.encode(said)


def unpack_answer(blob: bytes) -> Answer:
    """Returns the answer that MessagePack bytes encode.

    Raises:
        ValueError: the bytes encode no answer; the text says why.
    """
    return _ANSWERS.decode(blob)
