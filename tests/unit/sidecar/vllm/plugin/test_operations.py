"""What crosses vLLM's calls, and what comes back in the text of its exceptions."""

from __future__ import annotations

import base64
import json

import msgspec
import pytest

from bus import operations as ops
from bus._manifest import Manifest
from bus._weight_transfer.allocation import StagingCapacity
from bus.messages import NackCode, Staging
from sidecar._vllm.plugin import operations

MANIFEST = Manifest(("a",), ("float32",), ((2, 3),), (1,), (4,))
STAGING = Staging(True, 1, keep=False, clear_cache=True)
FAILURE = operations.WorkerFailure(
    NackCode.MANIFEST_REFUSED, 'it\'s "too" /tmp/big\nby half ü', "a.b.weight"
)


@pytest.mark.parametrize(
    "operation",
    [
        operations.Hello(1),
        ops.Open("o1", "gloo", b"\x00\xff", 1 << 62, 9, 3),
        operations.VerifyChunk(3, "full", (0, (1 << 64) - 1)),
        ops.ArmManifest(MANIFEST, "draft", digest="d" * 64),
        ops.Start("draft", True),
        ops.ReceiveChunk(3, "shm", b"\x80", "u1"),
        ops.LoadChunk(3, "sample", (0, (1 << 64) - 1)),
        ops.Restore("draft"),
        ops.Finish(),
        ops.SwapStaged(4, clear_cache=True),
        operations.UndoAdapter(settled=True),
        operations.SettleAdapter(),
    ],
)
def test_operations_survive_json(operation: operations.WorkerOperation) -> None:
    """The text crosses JSON over HTTP, and MessagePack in process."""
    assert operations.decode(json.loads(json.dumps(operations.encode(operation)))) == operation


def _packed(content: object) -> str:
    return base64.b64encode(msgspec.msgpack.encode(content)).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "%%%",
        _packed({"type": "unheard of"}),
        _packed({"type": "start", "target": "model", "recover": 1}),
        _packed({"type": "start", "target": "model", "recover": True, "more": 1}),
        _packed({"type": "start", "target": "moodel", "recover": True}),
        _packed({"type": "arm", "manifest": {"names": "a"}}),
        _packed({"type": "hello"}),
        _packed({"type": "open", "backend": "s" * 300, "params": b""}),
        _packed({"type": "load", "seq": 0, "verify": "half", "sums": []}),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    """Unknown, ill-typed, or oversized."""
    with pytest.raises(ValueError, match=r"."):
        operations.decode(text)


def test_an_operation_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not even looked at beyond."""
    text = operations.encode(ops.Finish())
    monkeypatch.setattr(operations, "MAX_PAYLOAD_CHARS", len(text) - 1)
    with pytest.raises(ValueError, match="characters"):
        operations.decode(text)


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
    assert operations.find_failure(wrap(FAILURE.to_text())) == FAILURE


@pytest.mark.parametrize("text", ["", "no mark", "[wavebus:AAAA]", "[wavebus:abc]"])
def test_no_failure_is_made_up(text: str) -> None:
    """Broken marks count as none."""
    assert operations.find_failure(text) is None


def test_long_failures_are_clipped() -> None:
    """An exception's text may be of any length; the slot between workers is not."""
    long = operations.WorkerFailure(NackCode.ENGINE_FAILED, "\U0001f30a" * 10_000, "t" * 10_000)
    found = operations.find_failure(long.to_text())
    assert found is not None
    assert (len(found.detail), len(found.tensor)) == (
        operations.DETAIL_CHARS,
        operations.TENSOR_CHARS,
    )
    assert len(operations.pack(long.clipped())) < 12 * 1024 - 4


@pytest.mark.parametrize(
    "said",
    [
        operations.Greet(),
        ops.ArmManifest(None, "model", STAGING, digest="d" * 64),
        ops.Open("o1", "gloo", b"\x00\xff", 1 << 62, 9, 3),
        ops.ArmManifest(MANIFEST),
        ops.Start(staged=True),
        ops.ReceiveChunk(3, "nccl", b"\x80", staged=True),
        operations.Stage((ops.LoadChunk(3, "full", (0, (1 << 64) - 1), staged=True),)),
        ops.Finish(staged=True),
    ],
)
def test_what_a_lane_is_asked_survives_its_way(said: operations.WorkerOperation) -> None:
    assert operations.unpack(operations.pack(said)) == said


@pytest.mark.parametrize("said", [ops.Done(), ops.Done(room=StagingCapacity(3, "no")), FAILURE])
def test_so_does_what_it_answers(said: operations.Answer) -> None:
    assert operations.unpack_answer(operations.pack(said)) == said


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        msgspec.msgpack.encode({"type": "unheard of"}),
        msgspec.msgpack.encode({"type": "finish", "more": 1}),
        msgspec.msgpack.encode({"type": "stage", "chunks": [3]}),
    ],
)
def test_a_lane_takes_nothing_else(blob: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        operations.unpack(blob)
