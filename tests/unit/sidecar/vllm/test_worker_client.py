"""Each step of an update is one call of the engine's workers."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec
import pytest
from msgspec import structs

from bus import operations as ops
from bus._lora import adapter_backend, removal_backend
from bus._manifest import NO_TENSORS, Manifest, TensorMeta
from bus._weight_transfer.allocation import NO_RANK, StagingCapacity
from bus.errors import EngineError
from bus.messages import NO_LIMITS, NackCode, Staging
from bus.operations import ReceiveChunk
from sidecar._vllm.plugin import kv_connectors, operations, worker_rpc
from sidecar._vllm.plugin.staging.channel_server import StagingChannelServer
from sidecar._vllm.plugin.vllm_names import ADAPTER_PATHS
from sidecar._vllm.worker_client import WorkerClient
from tests.support.steps import steps

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    Told: TypeAlias = operations.WorkerOperation | str

MANIFEST = Manifest(("a",), ("float32",), ((2,),), (1,))
META = TensorMeta("a", "float32", (2,))
MAY = Staging(required=False, budget_bytes=0, keep=False, clear_cache=False)


def facts(
    features: dict[str, str] | None = None, connectors: dict[str, str] | None = None
) -> worker_rpc.WorkerFacts:
    """What the plugin says of a vLLM."""
    return worker_rpc.WorkerFacts(
        "vllm", "", 0, 0, "", (), features or {}, NO_LIMITS, connectors or {}
    )


class Workers:
    """The workers of an engine, and what they were told."""

    def __init__(self, *, fails: type[Any] | None = None) -> None:
        self.told: list[Told] = []
        self.found = StagingCapacity(64)
        self.calls_off: bool | None = False
        self.is_in_lockstep = False
        self.peers: list[StagingChannelServer] = []
        self.by_lane: list[operations.WorkerOperation] = []
        self.held: tuple[str, ...] | None = None  # adapters
        self.in_place = False
        self.forgets = False  # what was armed
        self.channel = StagingChannelServer(self._carry_out, lambda: None)
        self.channel_name = ""  # of another one
        self._fails = fails

    async def ask(self, method: str, kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        match method:
            case operations.PERFORM:
                asked = operations.decode(kwargs["operation"])
                self._perform(asked)
                armed = isinstance(asked, ops.ArmManifest)
                room = self.found if armed else None
                done = ops.Done(ahead=2, room=room, adapters=self.held)
                if not isinstance(asked, operations.Hello):
                    return [msgspec.to_builtins(done)]
                names = [self.channel_name or self.channel.name, *(p.name for p in self.peers)]
                return [msgspec.to_builtins(ops.Done(channel=name)) for name in names]
            case worker_rpc.SWAP:
                self.told.append(operations.decode(kwargs["operation"]))
                return [True]
            case worker_rpc.CALL_OFF:
                self.told.append("call off")
                return [self.calls_off]
            case worker_rpc.EXPECT_SWAP:
                if self.is_in_lockstep:
                    self.told.append(f"expect a swap: {kwargs['expected']}")
                return [self.is_in_lockstep]
        raise AssertionError(method)

    def _carry_out(self, told: operations.WorkerOperation) -> ops.Done:
        if isinstance(told, operations.Greet):
            return ops.Done()
        self.told.append(told)
        self.by_lane.append(told)
        if isinstance(told, ops.ArmManifest):
            if self.forgets:
                raise EngineError("another update was armed later", code=NackCode.WRONG_STATE)
            return ops.Done(room=self.found)
        return ops.Done(in_place=self.in_place, ahead=3)

    def _perform(self, told: operations.WorkerOperation) -> None:
        self.told.append(told)
        if self._fails is not None and isinstance(told, self._fails):
            raise EngineError("another sum", code=NackCode.CHECKSUM_MISMATCH)

    async def check_adapter(self, name: str) -> None:
        self.told.append(f"check {name}")

    async def load_adapter(self, name: str, path: str) -> None:
        self.told.append(f"load {name} from {path}")

    async def undo_adapter(self, name: str) -> None:
        self.told.append(f"undo {name}")

    async def remove_adapter(self, name: str) -> None:
        self.told.append(f"remove {name}")


@pytest.fixture
def closed() -> Iterator[list[WorkerClient | StagingChannelServer]]:
    """Both ends of channels, which go when a test ends."""
    made: list[WorkerClient | StagingChannelServer] = []
    yield made
    for each in made:
        if isinstance(each, WorkerClient):
            each._channels.close()
        else:
            each.close()


def client_of(workers: Workers, closed: list[WorkerClient | StagingChannelServer]) -> WorkerClient:
    """Of these workers, until the test ends."""
    client = WorkerClient(cast("Any", workers))
    closed += client, workers.channel, *workers.peers
    return client


def armed(manifest: Manifest, staging: Staging | None = None) -> ops.ArmManifest:
    return ops.ArmManifest(manifest, "model", staging, False, manifest.digest)


def told(workers: Workers, *steps: Coroutine[Any, Any, object]) -> list[Told]:
    """What these steps came to."""

    async def scenario() -> None:
        for step in steps:
            await step

    workers.told.clear()
    asyncio.run(scenario())
    return workers.told


def test_an_update_is_one_call_for_each_step(
    closed: list[WorkerClient | StagingChannelServer],
) -> None:
    """A chunk is two: it is verified where it is loaded."""
    workers = Workers()
    client = client_of(workers, closed)
    told(workers, client._hello(facts(), cores=1), steps(client).open_transfer("shm", b"", NO_RANK))
    todo = (
        steps(client).arm(MANIFEST, "model"),
        steps(client).start_update(recover=False, target="model"),
        steps(client).receive(ReceiveChunk(0, "shm", b"h")),
        steps(client).load(0, "full", (7,)),
        steps(client).finish_update(),
        client._adapter.settle(),
    )
    assert told(workers, *todo) == [
        armed(MANIFEST),
        ops.Start("model", recover=False),
        ops.ReceiveChunk(0, "shm", b"h"),
        ops.LoadChunk(0, "full", (7,)),
        ops.Finish(),
    ]


def test_a_part_is_checked_before_its_chunks_come(
    closed: list[WorkerClient | StagingChannelServer],
) -> None:
    """Its chunks follow those before it."""
    workers = Workers()
    client = client_of(workers, closed)
    told(workers, steps(client).open_transfer("vllm:nccl", b"", NO_RANK))
    other = TensorMeta("b", "float32", (2,))
    part = Manifest.plan([other], chunk_bytes=8)
    todo = (
        steps(client).arm(replace(MANIFEST, is_open=True), "model"),
        steps(client).start_update(recover=False, target="model"),
        steps(client).extend(part),
        steps(client).receive(ReceiveChunk(1, "vllm:nccl", b"h")),
    )
    assert told(workers, *todo)[2:] == [
        ops.Extend(part),
        ops.ReceiveChunk(1, "vllm:nccl", b"h"),
    ]


@pytest.mark.parametrize("peers", [0, 1])
def test_a_part_of_a_staged_update_is_checked_by_the_channel_of_a_lone_worker(
    closed: list[WorkerClient | StagingChannelServer], peers: int
) -> None:
    """Workers that are peers ask each other, and do so where no step of theirs does."""
    workers = Workers()
    workers.peers = [StagingChannelServer(workers._carry_out, lambda: None) for _ in range(peers)]
    client = client_of(workers, closed)
    told(workers, client._hello(facts(), cores=1), steps(client).open_transfer("shm", b"", NO_RANK))
    todo = (
        steps(client).arm(replace(MANIFEST, is_open=True), "model", MAY),
        steps(client).start_update(recover=False, target="model", staged=True),
    )
    told(workers, *todo)
    workers.by_lane.clear()
    part = Manifest.plan([TensorMeta("b", "float32", (2,))], chunk_bytes=8)
    extend = ops.Extend(part)
    assert told(workers, steps(client).extend(part)) == [extend]
    assert workers.by_lane == ([] if peers else [extend])


@pytest.mark.parametrize("is_in_lockstep", [False, True])
def test_a_staged_update_asks_nothing_of_the_serving_model_but_the_swap(
    closed: list[WorkerClient | StagingChannelServer], is_in_lockstep: bool
) -> None:
    """Chunks come by the channel, so that no step waits for them. Ranks in lockstep expect it."""
    workers = Workers()
    workers.is_in_lockstep = is_in_lockstep
    client = client_of(workers, closed)
    told(workers, client._hello(facts(), cores=1), steps(client).open_transfer("shm", b"", NO_RANK))
    todo = (
        steps(client).arm(MANIFEST, "model", MAY),
        steps(client).start_update(recover=False, target="model", staged=True),
        steps(client).receive(ReceiveChunk(0, "shm", b"h")),
        steps(client).load(0, "full", (7,)),
        steps(client).finish_update(),
        steps(client).swap(3, clear_cache=False),
        steps(client).restore("model"),
    )
    assert told(workers, *todo) == [
        armed(MANIFEST, MAY),
        *(["expect a swap: True"] if is_in_lockstep else []),
        ops.Start(staged=True),
        ops.ReceiveChunk(0, "shm", b"h", staged=True),
        operations.Stage((ops.LoadChunk(0, "full", (7,), staged=True),)),
        ops.Finish(staged=True),
        ops.SwapStaged(3),
        ops.Restore(staged=True),
        *(["expect a swap: False"] if is_in_lockstep else []),
    ]


def test_chunks_that_are_received_where_they_are_staged_are_told_of_together(
    closed: list[WorkerClient | StagingChannelServer],
) -> None:
    """Each word takes its time from a step."""
    workers = Workers()
    workers.in_place = True
    client = client_of(workers, closed)
    told(
        workers, client._hello(facts(), cores=1), steps(client).open_transfer("nccl", b"", NO_RANK)
    )
    manifest = replace(
        MANIFEST, names=tuple("abc"), dtypes=("int8",) * 3, shapes=((1,),) * 3, chunk_ends=(1, 2, 3)
    )
    chunks = [ReceiveChunk(seq, "nccl", b"h") for seq in range(3)]
    told(workers, steps(client).arm(manifest, "model", MAY))
    todo = (
        steps(client).start_update(recover=False, target="model", staged=True),
        steps(client).receive(chunks[0]),
        steps(client).receive(chunks[1]),
        steps(client).load(0, "sample", (7,)),
        steps(client).receive(chunks[2]),
        steps(client).load(1, "sample", (8,)),
        steps(client).load(2, "sample", (9,)),
        steps(client).finish_update(),
    )
    sent = [ops.LoadChunk(seq, "sample", (7 + seq,), staged=True) for seq in range(3)]
    assert told(workers, *todo) == [
        ops.Start(staged=True),
        ops.ReceiveChunk(0, "nccl", b"h", staged=True),
        ops.ReceiveChunk(1, "nccl", b"h", staged=True),
        ops.ReceiveChunk(2, "nccl", b"h", staged=True),
        operations.Stage(tuple(sent)),
        ops.Finish(staged=True),
    ]


def test_a_manifest_that_was_armed_before_is_not_sent_again(
    closed: list[WorkerClient | StagingChannelServer],
) -> None:
    """Whether it was staged then, or loaded in a pause. Unless workers know another one, or the
    tensors were an adapter's."""
    workers = Workers()
    client = client_of(workers, closed)
    told(workers, client._hello(facts(), cores=1), steps(client).open_transfer("shm", b"", NO_RANK))
    arm = armed(MANIFEST, MAY)
    again = msgspec.structs.replace(armed(MANIFEST, MAY), manifest=None)
    other = replace(MANIFEST, shapes=((3,),))
    assert told(workers, steps(client).arm(MANIFEST, "model", MAY)) == [arm]
    assert told(workers, steps(client).arm(MANIFEST, "model", MAY)) == [again]
    assert len(told(workers, steps(client).arm(other, "model", MAY))) == 1
    assert told(workers, steps(client).arm(MANIFEST, "model", MAY)) == [arm]
    workers.forgets = True
    assert told(workers, steps(client).arm(MANIFEST, "model", MAY)) == [again, arm, arm]
    workers.forgets, workers.found = False, StagingCapacity(64, "no room")
    assert asyncio.run(steps(client).arm(MANIFEST, "model", MAY)) == workers.found
    assert told(workers, steps(client).arm(MANIFEST, "model", MAY)) == [again]
    told(workers, steps(client).arm(MANIFEST, "model"))
    assert told(workers, steps(client).arm(MANIFEST, "model", MAY)) == [again]
    told(workers, steps(client).arm(other, "model"))
    theirs = msgspec.structs.replace(armed(other, MAY), manifest=None)
    assert told(workers, steps(client).arm(other, "model", MAY)) == [theirs]
    told(workers, steps(client).arm(MANIFEST, "draft"))
    assert told(workers, steps(client).arm(MANIFEST, "model", MAY)) == [arm]
    told(workers, steps(client).open_transfer(adapter_backend("mine"), b"", NO_RANK))
    assert again not in told(workers, steps(client).arm(MANIFEST, "model", MAY))
    told(workers, steps(client).open_transfer("shm", b"", NO_RANK))
    assert told(workers, steps(client).arm(MANIFEST, "model", MAY)) == [arm]


@pytest.mark.parametrize("workers_there", [1, 2])
def test_what_may_take_long_is_asked_of_lanes(
    workers_there: int, closed: list[WorkerClient | StagingChannelServer]
) -> None:
    """Who opens a transport waits for others. Of a manifest that is new, workers with peers ask
    each other, as the core has them do; and one that can't look at it meanwhile, says so."""
    workers = Workers()
    workers.peers += [
        StagingChannelServer(workers._carry_out, lambda: None) for _ in range(workers_there - 1)
    ]
    client = client_of(workers, closed)
    told(workers, client._hello(facts(), cores=1))
    for backend in (adapter_backend("mine"), "shm"):
        assert asyncio.run(steps(client).open_transfer(backend, b"", NO_RANK)) == 3
        assert workers.by_lane[-workers_there:] == [ops.Open("o1", backend, b"")] * workers_there
    told(workers, steps(client).arm(MANIFEST, "model", MAY))
    arm = armed(MANIFEST, MAY)
    assert workers.told == [arm]
    assert (workers.by_lane[-1] == arm) == (workers_there == 1)
    workers.by_lane.clear()
    told(workers, steps(client).arm(MANIFEST, "draft", MAY))
    told(workers, steps(client).arm(replace(MANIFEST, counts=(1,)), "model", MAY))
    told(workers, steps(client).open_transfer("vllm:nccl", b"", NO_RANK))
    assert workers.by_lane == []
    workers.forgets = True
    assert told(workers, steps(client).arm(MANIFEST, "model", MAY)) == [arm] * (3 - workers_there)


@pytest.mark.parametrize("cores", [1, 2, 0])
def test_an_engine_without_room_says_so_and_refuses_what_must_be_staged(
    cores: int, closed: list[WorkerClient | StagingChannelServer]
) -> None:
    """Behind several cores nobody can agree on a moment; and some cores know of no swaps."""
    workers = Workers()
    workers.found = StagingCapacity(64, "no room" if cores == 1 else "")
    workers.calls_off = False if cores else None
    client = client_of(workers, closed)
    told(workers, client._hello(facts(), cores=cores))
    found = asyncio.run(steps(client).arm(MANIFEST, "model", MAY))
    why_not = {1: "no room", 2: "several cores", 0: "can't swap"}[cores]
    assert why_not in found.why_not
    with pytest.raises(EngineError) as refused:
        asyncio.run(steps(client).arm(MANIFEST, "model", structs.replace(MAY, required=True)))
    assert refused.value.code is NackCode.STAGING_REFUSED


def test_a_vllm_that_takes_no_staged_updates_is_named_with_the_reason(
    closed: list[WorkerClient | StagingChannelServer],
) -> None:
    """Nobody has to look for it in a core's log."""
    workers = Workers()
    client = client_of(workers, closed)
    why = "ParallelConfig.sync_dp_state takes more"
    told(workers, client._hello(facts({"staged_updates": why, "admission": ""}), cores=1))
    found = asyncio.run(steps(client).arm(MANIFEST, "model", MAY))
    assert found.why_not == f"this vLLM can't stage updates: {why}"


@pytest.mark.parametrize("mixes", ["", "EngineCoreProc.preprocess_add_request takes more"])
def test_where_versions_would_share_a_prefix_cache_it_is_always_cleared(
    mixes: str, closed: list[WorkerClient | StagingChannelServer]
) -> None:
    workers = Workers()
    client = client_of(workers, closed)
    told(workers, client._hello(facts({"prefix_cache_versions": mixes}), cores=1))
    assert client._caches.clears(True)
    assert client._caches.clears(False) == bool(mixes)
    swap = ops.SwapStaged(5, clear_cache=bool(mixes))
    assert told(workers, steps(client).swap(5, clear_cache=False)) == [swap]


def test_workers_that_cannot_be_reached_stage_nothing(
    closed: list[WorkerClient | StagingChannelServer],
) -> None:
    """As on another host; the reason says so."""
    workers = Workers()
    workers.channel_name = "wavebus-channel-nobody"
    client = client_of(workers, closed)
    told(workers, client._hello(facts(), cores=1))
    found = asyncio.run(steps(client).arm(MANIFEST, "model", MAY))
    assert "must run on one host" in found.why_not


def test_a_recovery_and_a_restore_are_one_call(
    closed: list[WorkerClient | StagingChannelServer],
) -> None:
    """The workers know what is open, and of which model."""
    workers = Workers()
    client = client_of(workers, closed)
    recovered = steps(client).start_update(recover=True, target="draft")
    assert told(workers, recovered) == [ops.Start("draft", recover=True)]
    assert told(workers, steps(client).restore("draft")) == [ops.Restore("draft")]


class Waiting(Workers):
    """A chunk does not come, until the core interrupts the staging channel."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.interrupted = threading.Event(), threading.Event()

    def _carry_out(self, told: operations.WorkerOperation) -> ops.Done:
        if isinstance(told, ops.ReceiveChunk):
            self.waits.set()
            self.interrupted.wait()
        return super()._carry_out(told)

    def _perform(self, told: operations.WorkerOperation) -> None:
        super()._perform(told)
        if told == ops.Restore(staged=True):
            self.interrupted.set()


def test_a_staged_receive_of_vllms_own_is_called_off_through_the_core(
    closed: list[WorkerClient | StagingChannelServer],
) -> None:
    """The staging channel is busy with it. What vLLM's own engine has open, the core closes."""
    workers = Waiting()
    client = client_of(workers, closed)

    async def scenario() -> None:
        await client._hello(facts(), cores=1, backend="nccl")
        workers.interrupted.clear()
        for backend in ("shm", "vllm:nccl"):
            await steps(client).open_transfer(backend, b"", NO_RANK)
        assert workers.by_lane == []
        await steps(client).arm(MANIFEST, "model", MAY)
        await steps(client).start_update(recover=False, staged=True)
        receiving = asyncio.create_task(steps(client).receive(ReceiveChunk(0, "vllm:nccl", b"")))
        await asyncio.to_thread(workers.waits.wait)
        await client.call_off()
        await receiving
        assert workers.told.count(ops.Restore(staged=True)) == 2, "the first one is the hello's"
        await client.call_off()
        assert workers.told[-1] == "call off"

    asyncio.run(scenario())


@pytest.mark.parametrize("cores", [1, 2])
def test_engines_step_on_while_their_workers_drain_a_transport(
    cores: int, closed: list[WorkerClient | StagingChannelServer]
) -> None:
    """Unless they have no staging channels: several cores have none."""
    workers = Workers()
    client = client_of(workers, closed)
    drain = ops.Drain("d1", "vllm:nccl", b"h", 1500)

    async def scenario() -> None:
        await client._hello(facts(), cores=cores, backend="nccl")
        await steps(client).drain_transfer("vllm:nccl", b"h", 1.5)
        assert workers.told[-1] == drain
        assert workers.by_lane == ([drain] if cores == 1 else [])

    asyncio.run(scenario())


@pytest.mark.parametrize("fails", [None, operations.VerifyChunk])
def test_cores_that_cannot_agree_verify_before_any_of_them_loads(
    fails: type[Any] | None, closed: list[WorkerClient | StagingChannelServer]
) -> None:
    """One that finds another sum keeps all of them from loading."""
    workers = Workers(fails=fails)
    client = client_of(workers, closed)
    told(workers, client._hello(facts(), cores=2))
    if fails:
        with pytest.raises(EngineError, match="another sum"):
            told(workers, steps(client).load(0, "full", (7,)))
        assert workers.told == [operations.VerifyChunk(0, "full", (7,))]
    else:
        loaded = [operations.VerifyChunk(0, "full", (7,)), ops.LoadChunk(0, "off", ())]
        assert told(workers, steps(client).load(0, "full", (7,))) == loaded
        assert told(workers, steps(client).load(1)) == [ops.LoadChunk(1, "off", ())]


def test_an_adapter_is_collected_by_the_workers_and_loaded_by_vllm(
    closed: list[WorkerClient | StagingChannelServer],
) -> None:
    """When its last chunk has come, and under a path that no other update has. Over one transport
    it comes any number of times, and vLLM is looked at each time."""
    workers = Workers()
    client = client_of(workers, closed)
    mine = adapter_backend("mine")
    manifest = replace(
        MANIFEST, names=("a", "b"), dtypes=("int8",) * 2, shapes=((1,),) * 2, chunk_ends=(1, 2)
    )
    chunks = [ReceiveChunk(seq, mine, b"h", "u7") for seq in range(2)]
    told(
        workers,
        client._hello(facts(), cores=1),
        steps(client).open_transfer(mine, b"", NO_RANK),
    )
    assert told(workers, steps(client).arm(manifest, "model"))[0] == "check mine"
    todo = (
        steps(client).arm(manifest, "model"),
        steps(client).start_update(recover=False, target="model"),
        steps(client).receive(chunks[0]),
        steps(client).load(0, "full", (7,)),
        steps(client).receive(chunks[1]),
        steps(client).load(1, "full", (8,)),
        steps(client).finish_update(),
        client._adapter.settle(),
        steps(client).restore("model"),
    )
    assert told(workers, *todo) == [
        "check mine",
        armed(manifest),
        ops.Start(),
        ops.ReceiveChunk(0, mine, b"h", "u7"),
        ops.LoadChunk(0, "full", (7,)),
        ops.ReceiveChunk(1, mine, b"h", "u7"),
        ops.LoadChunk(1, "full", (8,)),
        f"load mine from {ADAPTER_PATHS}u7",
        ops.Finish(),
        operations.SettleAdapter(),
        ops.Restore(),
        "undo mine",
    ]


def test_a_removal_is_the_front_ends_before_it_is_settled(
    closed: list[WorkerClient | StagingChannelServer],
) -> None:
    """So a sidecar that dies in between leaves no name that workers lack. It needs no chunk."""
    workers = Workers()
    client = client_of(workers, closed)
    removal = removal_backend("mine")
    told(
        workers, client._hello(facts(), cores=1), steps(client).open_transfer(removal, b"", NO_RANK)
    )
    todo = (
        steps(client).arm(NO_TENSORS, "model"),
        steps(client).start_update(recover=False, target="model"),
        steps(client).finish_update(),
        client._adapter.settle(),
        steps(client).restore("model"),
    )
    assert told(workers, *todo) == [
        "check mine",
        armed(NO_TENSORS),
        ops.Start(),
        ops.Finish(),
        "remove mine",
        operations.SettleAdapter(),
        ops.Restore(),
        "undo mine",
    ]


@pytest.mark.parametrize("held", [("a", "b"), ()])
def test_adapters_are_dropped_by_the_front_end_first(
    closed: list[WorkerClient | StagingChannelServer], held: tuple[str, ...]
) -> None:
    workers = Workers()
    workers.held = held
    client = client_of(workers, closed)
    told(workers, client._hello(facts(), cores=1))
    dropped = ["remove a", "remove b", operations.DropAdapters()] if held else []
    asked = operations.UndoAdapter(settled=False)
    arm = msgspec.structs.replace(armed(MANIFEST), drops_adapters=True)
    assert told(workers, steps(client).arm(MANIFEST, drops_adapters=True)) == [asked, *dropped, arm]


def test_an_engine_with_a_refused_connector_is_armed_with_nothing(
    closed: list[WorkerClient | StagingChannelServer],
) -> None:
    """Its workers are asked nothing, and the text names the connector."""
    workers = Workers()
    client = client_of(workers, closed)
    found = {"ExampleConnector": kv_connectors.BY_TOKENS, "NixlConnector": kv_connectors.TAGGED}
    before = told(workers, client._hello(facts(connectors=found), cores=1))
    for staging in (None, MAY):
        with pytest.raises(EngineError, match="ExampleConnector: keyed by") as refused:
            asyncio.run(steps(client).arm(MANIFEST, "model", staging))
        assert refused.value.code is NackCode.KV_CONNECTOR_REFUSED
    assert workers.told == before
