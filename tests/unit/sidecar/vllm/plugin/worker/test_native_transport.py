"""A worker engine of vLLM's form hands over what it receives, and does not load it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bus import operations as ops
from bus._manifest import TensorMeta
from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._vllm.plugin.staging.channel_server import StagingChannelServer
from sidecar._vllm.plugin.worker.native_transport import VllmTransport
from sidecar._vllm.staging_channel import StagingChannels

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus._weight_transfer.packing import Tensors

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
        self.users = 0  # of the communicator
        self.closed = 0
        self.silent_from = len(METAS)  # of the sender
        self.waits = threading.Event()
        self.aborted = threading.Event()
        self.unmapped = 0
        self._packed_importer = SimpleNamespace(close=self._unmap)

    def init_transfer_engine(self, info: Any) -> None:  # noqa: ARG002 - vLLM's
        assert self.parallel_config == "the bus's"

    def parse_update_info(self, info: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(**info)

    def receive_weights(self, info: SimpleNamespace) -> None:
        shared = info.counter  # the engine itself: this may be a copy
        shared.users += 1
        try:
            for number, name in enumerate(info.names):
                if number == self.silent_from:
                    self.waits.set()
                    self.aborted.wait()
                    return
                if name == "broken":
                    raise ValueError("broken")
                shared.received += 1
                self.model.load_weights([(name, torch.full((2,), float(number)))])
        finally:
            shared.users -= 1

    def shutdown(self) -> None:
        self.closed += 1
        self.aborted.set()

    def _unmap(self) -> None:
        self.unmapped += 1

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
    transport.receive(info, METAS, put)


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
    engine.receive_weights(SimpleNamespace(names=["a"], counter=engine))
    assert engine.loaded == ["a"], "in a pause it loads, as ever"


@pytest.mark.parametrize(("info", "unmapped"), [(COLLECTIVE, 0), ({"packed": True}, 1)])
def test_the_trainers_buffer_is_let_go_once_and_not_before_the_update_ends(
    info: dict[str, Any], unmapped: int
) -> None:
    """Each time that it is, the trainer's count of its users goes down by one."""
    engine = TheirEngine()
    transport = opened(engine, **info)
    for _ in range(2):  # its parts
        receive(transport, engine, lambda _: None)
    assert engine.unmapped == 0
    transport.finish()
    assert engine.unmapped == unmapped


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
    assert "interrupted" in failed[0].detail
    assert (engine.closed, transport.is_open) == (1, False)
    assert "closed" in transport.unstaged_reason
    with pytest.raises(EngineError, match="not open"):
        receive(transport, engine, lambda _: None)


def test_an_interrupted_receive_ends_at_the_next_tensor() -> None:
    engine = TheirEngine()
    transport = opened(engine)
    with pytest.raises(EngineError, match="interrupted"):
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


def sent(engine: TheirEngine, *names: str, dtype: str = "float32", shape: object = (2,)) -> Any:
    """What a client says that it sends."""
    dtypes, shapes = [dtype] * len(names), [shape] * len(names)
    return {"names": list(names), "dtype_names": dtypes, "shapes": shapes, "counter": engine}


def test_what_is_discarded_reaches_no_model() -> None:
    """And the transport stays open."""
    engine = TheirEngine()
    transport = opened(engine)
    for dtype in ("float32", "float"):
        transport.discard(sent(engine, "", "", "", dtype=dtype), 60.0)
    assert (engine.received, engine.loaded, engine.closed) == (6, [], 0)
    receive(transport, engine, lambda _: None)


def test_a_sender_that_is_late_is_left() -> None:
    engine = TheirEngine()
    engine.silent_from = 1
    transport = opened(engine)
    with pytest.raises(EngineError, match=r"not sent all within 0\.01 s") as failed:
        transport.discard(sent(engine, "a", "b"), 0.01)
    assert failed.value.code is NackCode.TRANSFER_FAILED
    assert (engine.users, engine.closed, engine.loaded) == (0, 1, [])


def test_a_broadcast_that_fails_says_so() -> None:
    engine = TheirEngine()
    with pytest.raises(EngineError, match="ValueError: broken"):
        opened(engine).discard(sent(engine, "broken"), 60.0)


@pytest.mark.parametrize("wrong", [{"dtype": "float99"}, {"dtype": "nn"}, {"shape": (2, -1)}])
def test_what_has_no_size_is_not_received(wrong: dict[str, Any]) -> None:
    engine = TheirEngine()
    with pytest.raises(EngineError, match=r"unknown|must be a list of lengths"):
        opened(engine).discard(sent(engine, "a", **wrong), 60.0)
    assert engine.received == 0


def test_what_is_no_broadcast_is_not_discarded() -> None:
    engine = TheirEngine()
    with pytest.raises(EngineError, match="has no broadcast"):
        opened(engine, "ipc", packed=False).discard(sent(engine, "a"), 60.0)


def test_nobody_uses_the_communicator_beside_a_drain() -> None:
    """Who has the channel's lock, as a staged receive has, finds that the drain has ended."""
    engine = TheirEngine()
    engine.silent_from = 1
    transport = opened(engine)

    def execute(operation: ops.Operation) -> ops.Done:
        if isinstance(operation, ops.Drain):
            transport.discard(sent(engine, "a", "b"), operation.timeout_ms / 1000)
        return ops.Done()

    channel = StagingChannelServer(execute, transport.interrupt)

    def preempt() -> int:
        with channel.preempted():
            return engine.users

    async def scenario() -> None:
        channels = StagingChannels()
        await channels.open([channel.name])
        draining = asyncio.create_task(channels.perform(ops.Drain("d1", "vllm:nccl", b"", 600_000)))
        await asyncio.to_thread(engine.waits.wait)
        assert engine.users == 1
        assert await asyncio.to_thread(preempt) == 0
        with pytest.raises(EngineError, match="interrupted"):
            await draining
        channels.close()

    try:
        asyncio.run(scenario())
    finally:
        channel.close()
