"""The coordinator's frames: vLLM's own bytes, and nothing else."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus._protocol.dp.coordinator import Publish, StartCores
from sidecar._dp_coordinator import frames
from sidecar._dp_coordinator.frames import BadFrame, CoreReport, FirstRequest

if TYPE_CHECKING:
    from collections.abc import Callable

encode = msgspec.msgpack.encode
waves = st.integers(0, 2**53)


def test_vllms_own_bytes() -> None:
    """Seen on the wire of vLLM 0.32."""
    assert frames.decode_front_frame([bytes.fromhex("92c402000000")], 2) == FirstRequest(0, 0)
    assert frames.decode_front_frame([b"\x01"], 2) is True
    assert frames.decode_front_frame([b"\x00"], 2) is False
    complete = bytes.fromhex("990190c0cb3ff0000000000000c0c005c0c0")
    assert frames.decode_core_frame([complete], 2) == CoreReport(1, complete=5)
    started = bytes.fromhex("990190c0cb3ff0000000000000c0c0c005c0")
    assert frames.decode_core_frame([started], 2) == CoreReport(1, started=5)
    assert frames.encode_start_wave(StartCores(0, 0)) == (b"\x02", b"\x92\x00\x00")
    assert frames.encode_wave_status(Publish(1, running=False)) == b"\x93\xc0\x01\xc2"


@given(st.integers(0, 65_535), waves)
def test_first_requests_arrive(rank: int, wave: int) -> None:
    told = FirstRequest(rank, wave)
    assert frames.decode_front_frame([frames.encode_first_request(told)], 65_536) == told
    assert frames.decode_front_frame([encode((rank, wave))], 65_536) == told


@given(st.integers(0, 7), st.none() | waves, st.none() | waves)
def test_reports_arrive(rank: int, complete: int | None, started: int | None) -> None:
    told = CoreReport(rank, complete, started)
    assert frames.decode_core_frame([frames.encode_core_report(told)], 8) == told


@given(waves, st.booleans(), st.none() | st.integers(0, 7))
def test_what_the_coordinator_says_arrives(wave: int, running: bool, excluded: int | None) -> None:
    standing, start = Publish(wave, running), StartCores(wave, excluded)
    assert frames.decode_frame_to_front([frames.encode_wave_status(standing)]) == standing
    assert frames.decode_frame_to_core(frames.encode_start_wave(start)) == start


def test_ready_is_no_start() -> None:
    assert frames.decode_frame_to_core([frames.READY]) is None


@pytest.mark.parametrize("length", [1, 6, 7, 12])
def test_reports_of_other_versions_are_read(length: int) -> None:
    """Shorter in earlier ones, longer in later ones; what stands elsewhere is not read."""
    items = [1, [], {"stats": [1, 2]}, 1.5, None, ["x"], 4, None, b"", 9, 9, 9][:length]
    expected = CoreReport(1, 4 if length > 6 else None)
    assert frames.decode_core_frame([encode(items)], 2) == expected


BAD_FRONT = {
    "empty": b"",
    "no msgpack": b"\xc1",
    "cut off": encode((b"\0\0", 7))[:-1],
    "one too many": encode((b"\0\0", 7, 7)),
    "one too few": encode((b"\0\0",)),
    "trailing": encode((b"\0\0", 7)) + b"\0",
    "rank of one byte": encode((b"\0", 7)),
    "rank of three bytes": encode((b"\0\0\0", 7)),
    "rank outside": encode((b"\2\0", 7)),
    "rank below": encode((-1, 7)),
    "wave below": encode((b"\0\0", -1)),
    "wave too great": encode((b"\0\0", 2**53 + 1)),
    "wave a flag": encode((b"\0\0", True)),
    "elastic": encode(("SCALE_ELASTIC_EP", 4)),
    "a map": encode({"rank": 0}),
    "huge": b"\x92" + bytes(70_000),
}
BAD_CORE = {
    "empty": b"",
    "no array": encode({"0": 1}),
    "no element": encode([]),
    "rank a text": encode(["0", []]),
    "rank outside": encode([2, []]),
    "complete a text": encode([0, [], None, 0.0, None, None, "5", None]),
    "complete below": encode([0, [], None, 0.0, None, None, -5, None]),
    "started a float": encode([0, [], None, 0.0, None, None, None, 1.5]),
    "too many": encode([0] * 65),
    "deep": b"\x91" * 5_000,
    "huge": encode([0, bytes(70_000)]),
}


@pytest.mark.parametrize("frame", BAD_FRONT.values(), ids=BAD_FRONT)
def test_other_frames_of_front_ends_are_refused(frame: bytes) -> None:
    with pytest.raises(BadFrame):
        frames.decode_front_frame([frame], 2)


@pytest.mark.parametrize("frame", BAD_CORE.values(), ids=BAD_CORE)
def test_other_frames_of_cores_are_refused(frame: bytes) -> None:
    with pytest.raises(BadFrame):
        frames.decode_core_frame([frame], 2)


@pytest.mark.parametrize(
    "read",
    [
        lambda parts: frames.decode_front_frame(parts, 2),
        lambda parts: frames.decode_core_frame(parts, 2),
        frames.is_core_subscription,
        frames.decode_frame_to_core,
        frames.decode_frame_to_front,
    ],
)
@given(st.lists(st.binary(max_size=32), max_size=3))
def test_noise_raises_nothing_else(
    read: Callable[[list[bytes]], object], parts: list[bytes]
) -> None:
    """Whatever comes, it is read or refused."""
    with contextlib.suppress(BadFrame):
        read(parts)


@pytest.mark.parametrize("parts", [[], [b"\x01", b"\x01"], [b"x"], [b""]])
def test_cores_only_subscribe_there(parts: list[bytes]) -> None:
    with pytest.raises(BadFrame):
        frames.is_core_subscription(parts)
