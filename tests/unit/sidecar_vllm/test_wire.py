"""What crosses vLLM's calls, and what comes back in the text of its exceptions."""

from __future__ import annotations

import base64
import json

import msgspec
import pytest

from bus.messages import NackCode
from sidecar.vllm_plugin import wire

FAILURE = wire.Failure(NackCode.MANIFEST_REFUSED, 'it\'s "too" /tmp/big\nby half ü', "a.b.weight")


@pytest.mark.parametrize(
    "operation",
    [
        wire.Hello(1),
        wire.Expect(True),
        wire.Open("gloo", b"\x00\xff", 1 << 62, 9, 3),
        wire.Verify(3, "full", (0, (1 << 64) - 1)),
        wire.ArmManifest(("a",), ("float32",), ((2, 3),), (1,), "draft", (4,)),
        wire.Receive(3, "shm", ("a",), ("float32",), ((2, 3),), b"\x80"),
        wire.Settle(),
        wire.Discard(),
        wire.LoadAdapter(3),
        wire.UndoAdapter(settled=True),
        wire.SettleAdapter(),
    ],
)
def test_operations_survive_json(operation: wire.InitOp) -> None:
    """The dict crosses JSON over HTTP, and MessagePack in process."""
    info = json.loads(json.dumps(wire.encode(operation)))
    assert wire.decode(info, wire.InitOp) == operation


def test_what_is_loaded_when_received_goes_by_the_other_door() -> None:
    """Where vLLM wants an update session."""
    operation = wire.Receive(3, "vllm:nccl", ("a",), ("float32",), ((2, 3),), b"")
    assert wire.decode(wire.encode(operation), wire.UpdateOp) == operation
    assert wire.decode(wire.encode(wire.Load(3)), wire.UpdateOp) == wire.Load(3)


def _packed(content: object) -> dict[str, str]:
    return {"wavebus": base64.b64encode(msgspec.msgpack.encode(content)).decode()}


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"wavebus": 5},
        {"wavebus": "%%%"},
        {"wavebus": "", "more": ""},
        {"master_address": "127.0.0.1"},
        _packed({"type": "unheard of"}),
        _packed({"type": "expect", "active": 1}),
        _packed({"type": "expect", "active": True, "more": 1}),
        _packed({"type": "hello"}),
        _packed({"type": "open", "backend": "s" * 300, "params": b""}),
        _packed({"type": "load", "seq": 0}),
    ],
)
def test_anything_else_is_refused(info: dict[str, object]) -> None:
    """Unknown, ill-typed, oversized, or an update operation at the wrong door."""
    with pytest.raises(ValueError, match=r"."):
        wire.decode(info, wire.InitOp)


@pytest.mark.parametrize(
    "wrap",
    [
        str,
        lambda text: (
            f"Call to collective_rpc method failed: Worker failed with error '{text}', "
            "please check the stack trace above for the root cause"
        ),
        lambda text: json.dumps({"error": {"message": text, "code": 500}}),
        repr,
    ],
)
def test_failures_are_found_again_in_other_peoples_text(wrap: object) -> None:
    """As vLLM's executor, its engine core and its HTTP server wrap them."""
    assert callable(wrap)
    assert wire.find_failure(wrap(FAILURE.to_text())) == FAILURE


@pytest.mark.parametrize("text", ["", "no mark", "[wavebus:AAAA]", "[wavebus:abc]"])
def test_no_failure_is_made_up(text: str) -> None:
    """Broken marks count as none."""
    assert wire.find_failure(text) is None


def test_long_failures_are_clipped() -> None:
    """An exception's text may be of any length; the slot between workers is not."""
    long = wire.Failure(NackCode.ENGINE_FAILED, "\U0001f30a" * 10_000, "t" * 10_000)
    found = wire.find_failure(long.to_text())
    assert found is not None
    assert (len(found.detail), len(found.tensor)) == (wire.DETAIL_CHARS, wire.TENSOR_CHARS)
    assert len(long.to_bytes()) < 12 * 1024 - 4
