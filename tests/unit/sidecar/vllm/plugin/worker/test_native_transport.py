"""A worker engine of vLLM's form hands over what it receives, and does not load it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bus.errors import EngineError
from bus.manifest import TensorMeta
from bus.messages import NackCode
from sidecar.vllm.plugin.worker.native_transport import VllmTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.weight_transfer.packing import Tensors

CPU = torch.device("cpu")
METAS = tuple(TensorMeta(name, "float32", (2,)) for name in "abcd")
COLLECTIVE = {"world_size": 3}


class TheirEngine:
    """Receives as vLLM's ``nccl`` does: one tensor after the other, each from all ends."""

    parallel_config = "own"

    def __init__(self) -> None:
        self.model: Any = SimpleNamespace(load_weights=self._load)
        self.loaded: list[str] = []
        self.received = 0
        self.closed = 0
        self.silent_from = len(METAS)  # of the sender
        self.waits = threading.Event()
        self.aborted = threading.Event()
        self._packed_importer = SimpleNamespace(close=lambda: None)

    def init_transfer_engine(self, info: Any) -> None:  # noqa: ARG002 - vLLM's
        assert self.parallel_config == "the bus's"

    def parse_update_info(self, info: dict[str, Any]) -> dict[str, Any]:
        return info

    def receive_weights(self, info: dict[str, Any]) -> None:
        for number, name in enumerate(info["names"]):
            if number == self.silent_from:
                self.waits.set()
                self.aborted.wait()
                return
            shared = info["counter"]
            shared.received += 1
            self.model.load_weights([(name, torch.full((2,), float(number)))])

    def shutdown(self) -> None:
        self.closed += 1
        self.aborted.set()

    def _load(self, weights: Tensors) -> None:
        self.loaded += [name for name, _ in weights]


def opened(engine: TheirEngine, name: str = "nccl", **info: Any) -> VllmTransport:
    transport = VllmTransport(name, engine, engine, CPU)
    transport.open(SimpleNamespace(**(info or COLLECTIVE)), "the bus's")
    return transport


def receive(
    transport: VllmTransport,
    engine: TheirEngine,
    put: Callable[[Tensors], None],
    names: str = "abcd",
) -> None:
    info = {"names": list(names), "counter": engine}
    transport.receive(info, METAS, put, is_last=True)


def test_tensors_are_handed_over_and_the_served_model_gets_none() -> None:
    """As often as there are updates."""
    engine = TheirEngine()
    transport = opened(engine)
    for _ in range(2):
        got: dict[str, float] = {}
        receive(transport, engine, lambda part: got.update((n, float(t[0])) for n, t in part))  # noqa: B023
        assert got == {"a": 0.0, "b": 1.0, "c": 2.0, "d": 3.0}
    assert engine.loaded == []
    assert engine.parallel_config == "own"
    engine.receive_weights({"names": ["a"], "counter": engine})
    assert engine.loaded == ["a"], "in a pause it loads, as ever"


def test_who_can_not_stage_a_tensor_takes_the_others_nonetheless() -> None:
    """All ends are in one collective: whoever leaves it, leaves the others waiting."""
    engine = TheirEngine()
    transport = opened(engine)
    asked = 0

    def put(_: Tensors) -> None:
        nonlocal asked
        asked += 1
        raise EngineError("it is another one", code=NackCode.ENGINE_FAILED)

    with pytest.raises(EngineError, match="another one") as failed:
        receive(transport, engine, put)
    assert failed.value.code is NackCode.ENGINE_FAILED
    assert (engine.received, asked) == (len(METAS), 1)
    assert transport.is_open


@pytest.mark.parametrize("names", ["abdc", "abc"])
def test_other_tensors_than_were_armed_are_refused(names: str) -> None:
    engine = TheirEngine()
    with pytest.raises(EngineError) as failed:
        receive(opened(engine), engine, lambda _: None, names)
    assert failed.value.code is NackCode.TRANSFER_FAILED


def test_a_receive_that_waits_for_a_sender_is_aborted() -> None:
    """By the second interruption; after the first one it may end by itself. The transport is closed
    once, and nothing is received over it."""
    engine = TheirEngine()
    engine.silent_from = 2
    transport = opened(engine)
    failed: list[EngineError] = []

    def receives() -> None:
        try:
            receive(transport, engine, lambda _: None)
        except EngineError as error:
            failed.append(error)

    thread = threading.Thread(target=receives, daemon=True)
    thread.start()
    engine.waits.wait()
    transport.interrupt()
    assert (engine.closed, transport.is_open) == (0, True)
    transport.interrupt()
    assert engine.aborted.is_set()
    thread.join()
    assert [each.code for each in failed] == [NackCode.TRANSFER_FAILED]
    assert "given up" in failed[0].detail
    assert (engine.closed, transport.is_open) == (1, False)
    assert "closed" in transport.unstaged_reason
    with pytest.raises(EngineError, match="not open"):
        receive(transport, engine, lambda _: None)


def test_an_interrupted_receive_ends_at_the_next_tensor() -> None:
    engine = TheirEngine()
    transport = opened(engine)
    with pytest.raises(EngineError, match="given up"):
        receive(transport, engine, lambda _: transport.interrupt())
    assert engine.received == 2
    assert not transport.is_open


def test_who_receives_nothing_is_not_interrupted() -> None:
    engine = TheirEngine()
    transport = opened(engine)
    transport.interrupt()
    transport.interrupt()
    assert transport.is_open
    receive(transport, engine, lambda _: None)


def test_what_loads_at_once_is_not_staged() -> None:
    assert "loads what it receives" in opened(TheirEngine(), "sparse_nccl").unstaged_reason


@pytest.mark.parametrize(
    ("info", "size_bytes"),
    [
        (COLLECTIVE, 16),
        ({"packed": False}, 0),
        ({"packed": True}, 24),
        (
            {
                **COLLECTIVE,
                "packed": True,
                "packed_buffer_size_bytes": 0,
                "packed_num_buffers": 1,
            },
            16,
        ),
        (
            {
                **COLLECTIVE,
                "packed": True,
                "packed_buffer_size_bytes": 1 << 30,
                "packed_num_buffers": 2,
            },
            24,
        ),
    ],
)
def test_what_vllm_allocates_is_counted(info: dict[str, Any], size_bytes: int) -> None:
    """Two chunks, of one and of three tensors with 8 bytes each."""
    transport = opened(TheirEngine(), **info)
    assert transport.buffer_bytes((METAS[:1], METAS[1:])) == size_bytes
