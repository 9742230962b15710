"""The frames between a DP group and its coordinator, as vLLM 0.32 speaks them.

======================= ============================ ==================================
way                     frames                       meaning
======================= ============================ ==================================
core → coordinator      ``01``                       subscribes (its first frame)
coordinator → cores     ``READY``                    all cores have subscribed
coordinator → cores     ``02``, ``[wave, excluded]`` START_DP_WAVE
core → coordinator      ``[rank, [], …]``            a report: element 6 is the wave that
                                                     is complete, 7 one that has started
front end → coordinator ``01``, ``00``               subscribes, unsubscribes
front end → coordinator ``[rank, wave]``             FIRST_REQ
coordinator → front end ``[counts, wave, running]``  the wave, and whether it runs
======================= ============================ ==================================

Numbers and arrays are MessagePack. A front end names the rank by its ZeroMQ identity,
two bytes, little endian; a plain number is accepted as well. Reports are vLLM's
``EngineCoreOutputs``. They are longer in later versions and shorter in earlier ones, so
their other elements are ignored.

Decoding is strict and bounded. Callers drop frames that can't be decoded
(:func:`bad_frames_logged`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from bus._protocol.dp.coordinator import Publish, StartCores
from bus.errors import WavebusError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

SUBSCRIBE: Final = b"\x01"
UNSUBSCRIBE: Final = b"\x00"
READY: Final = b"READY"
MAX_COORDINATOR_FRAME_BYTES: Final = 64 * 1024
_START: Final = b"\x02"
_COMPLETE_AT: Final = 6
_STARTED_AT: Final = 7
_REPORT_LENGTH: Final = 9

_Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
_Identity: TypeAlias = Annotated[bytes, Meta(min_length=2, max_length=2)]
_Report: TypeAlias = Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=64)]

_encode = msgspec.msgpack.Encoder().encode
_first_req = msgspec.msgpack.Decoder(tuple[_Number | _Identity, _Number])
_report = msgspec.msgpack.Decoder(_Report)
_number = msgspec.msgpack.Decoder(_Number)
_optional = msgspec.msgpack.Decoder(_Number | None)
_start = msgspec.msgpack.Decoder(tuple[_Number, _Number | None])
_status_decoder = msgspec.msgpack.Decoder(tuple[Any, _Number, bool])


class BadFrame(WavebusError):
    """A frame that can't be decoded; the text says why."""


@dataclass(frozen=True, slots=True)
class FirstRequest:
    """FIRST_REQ: a front end sends a rank a request while no wave runs.

    Attributes:
        rank: the rank that gets the request, and steps without being woken.
        wave: the wave that the front end expects to start.
    """

    rank: int
    wave: int


@dataclass(frozen=True, slots=True)
class CoreReport:
    """A core's report that a wave is complete, or has started.

    Attributes:
        rank: the core's rank.
        complete: the number of the wave that is complete; None: the report names none.
        started: the number of the wave that has started; None: the report names none.
    """

    rank: int
    complete: int | None = None
    started: int | None = None


@contextlib.contextmanager
def bad_frames_logged(log: Any) -> Iterator[None]:
    """Drops a frame that can't be decoded in a block, and logs the reason.

    Args:
        log: the logger of the receiving process.
    """
    try:
        yield
    except BadFrame as error:
        log.warning("bad_frame", detail=str(error))


# -- the coordinator's side ----------------------------------------------------------


def decode_front_frame(parts: Sequence[bytes], size: int) -> FirstRequest | bool:
    """Decodes a message from a front end to the coordinator.

    Args:
        parts: the parts of the ZeroMQ message.
        size: how many ranks the DP group has.

    Returns:
        True if the front end subscribes, False if it unsubscribes. Any other message is a request
            for a wave: the decoded :class:`FirstRequest`.

    Raises:
        BadFrame: the message is none of these, or names a rank that does not exist.
    """
    frame = _only(parts)
    if frame in (SUBSCRIBE, UNSUBSCRIBE):
        return frame == SUBSCRIBE
    rank, wave = _decoded(_first_req, frame, "a front end")
    number = rank if isinstance(rank, int) else int.from_bytes(rank, "little")
    return FirstRequest(_checked(number, size), wave)


def decode_core_frame(parts: Sequence[bytes], size: int) -> CoreReport:
    """Decodes a core's report to the coordinator.

    Args:
        parts: the parts of the ZeroMQ message.
        size: how many ranks the DP group has.

    Raises:
        BadFrame: the message is not a valid report, or its rank does not exist.
    """
    items = _decoded(_report, _only(parts), "a core")
    rank = _decoded(_number, items[0], "a core")
    complete, started = (
        _decoded(_optional, items[at], "a core") if at < len(items) else None
        for at in (_COMPLETE_AT, _STARTED_AT)
    )
    return CoreReport(_checked(rank, size), complete, started)


def is_core_subscription(parts: Sequence[bytes]) -> bool:
    """Decodes a core's subscription message.

    Args:
        parts: the parts of the ZeroMQ message.

    Returns:
        True if the core subscribes, False if it unsubscribes.

    Raises:
        BadFrame: the message is neither.
    """
    frame = _only(parts)
    if frame not in (SUBSCRIBE, UNSUBSCRIBE):
        raise BadFrame("from a core: the frame is no subscription")
    return frame == SUBSCRIBE


def encode_start_wave(message: StartCores) -> tuple[bytes, bytes]:
    """Encodes START_DP_WAVE for all cores; returns the two parts of the ZeroMQ message."""
    return _START, _encode((message.wave, message.excluded))


def encode_wave_status(message: Publish) -> bytes:
    """Encodes the status of the wave for all front ends.

    vLLM's message also has each core's number of requests, for its own load balancer. They are left
    out.
    """
    return _encode((None, message.wave, message.running))


# -- the other side: cores and front ends of the embedded engine -----------------------


def encode_first_request(message: FirstRequest) -> bytes:
    """Encodes FIRST_REQ, for the embedded engine's front end."""
    return _encode((message.rank.to_bytes(2, "little"), message.wave))


def encode_core_report(message: CoreReport) -> bytes:
    """Encodes a core's report, for the embedded engine's core."""
    items: list[object] = [None] * _REPORT_LENGTH
    items[:4] = [message.rank, [], None, 0.0]
    items[_COMPLETE_AT], items[_STARTED_AT] = message.complete, message.started
    return _encode(items)


def decode_frame_to_core(parts: Sequence[bytes]) -> StartCores | None:
    """Decodes a message from the coordinator to the cores.

    Args:
        parts: the parts of the ZeroMQ message.

    Returns:
        The wave to start; None for READY, which says that all cores have subscribed.

    Raises:
        BadFrame: the message is neither.
    """
    if list(parts) == [READY]:
        return None
    if len(parts) != len(encode_start_wave(StartCores(0))) or parts[0] != _START:
        raise BadFrame("from the coordinator: neither READY nor START_DP_WAVE")
    return StartCores(*_decoded(_start, _only(parts[1:]), "the coordinator"))


def decode_frame_to_front(parts: Sequence[bytes]) -> Publish:
    """Decodes the coordinator's message to front ends, which is the status of the wave.

    Args:
        parts: the parts of the ZeroMQ message.

    Raises:
        BadFrame: the message is no status of a wave.
    """
    _, wave, running = _decoded(_status_decoder, _only(parts), "the coordinator")
    return Publish(wave, running)


def _decoded(decoder: msgspec.msgpack.Decoder[T], frame: bytes | msgspec.Raw, sender: str) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"from {sender}: {error}") from error


def _only(parts: Sequence[bytes]) -> bytes:
    if len(parts) != 1:
        raise BadFrame(f"the message has {len(parts)} parts, expected one")
    if len(parts[0]) > MAX_COORDINATOR_FRAME_BYTES:
        raise BadFrame(
            f"the frame has {len(parts[0])} bytes, more than {MAX_COORDINATOR_FRAME_BYTES}"
        )
    return parts[0]


def _checked(rank: int, size: int) -> int:
    if rank >= size:
        raise BadFrame(f"rank {rank} in a DP group of {size}")
    return rank
