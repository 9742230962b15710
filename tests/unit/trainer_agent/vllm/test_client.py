"""The client and source for vLLM's trainer engines, called as those call them, without vLLM:
on a real bus, with a real engine."""

from __future__ import annotations

import asyncio
import functools
import itertools
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bus._weight_transfer.allocation import ALONE
from bus._weight_transfer.shm import ShmSender
from bus.errors import BusClosed, BusTimeout, EngineError, ManifestRefused, UpdateFailed, UsageError
from bus.messages import ChunkSent, NackCode, TransferInit, WeightChunkMeta
from bus.operations import Start
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.serving import an_engine, assert_serve
from trainer_agent import SyncTrainerAgent, TrainerAgent
from trainer_agent._update.plan import UpdatePlan
from trainer_agent._update.update import Update, Updates
from trainer_agent._vllm import native_payloads, session
from trainer_agent._vllm.native_payloads import NativeTransport
from trainer_agent._weights.source import PairSource, tensor_metas

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping

    from torch import Tensor

    from bus.messages import Target
    from bus.operations import Done, UpdateOperation
    from sidecar.embedded import EmbeddedEngine
    from tests.support.checkpoints import Checkpoint
    from trainer_agent._options import UpdateOptions
    from trainer_agent._vllm.client import BusWeightSyncClient
    from trainer_agent._vllm.source import BusWeightSource

CHUNK_BYTES = 1 << 14
LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def over_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trainer engine here gives its client goes over ``shm``, because the embedded engine
    has no worker engine of vLLM's. Everything else is refused as ever."""
    views: list[Any] = []

    def engine_of_all(found: Any) -> str:
        views[:] = found
        return "shm"

    def transfer_init(info: Any, _engine: str, _world: object, update_id: str) -> TransferInit:
        if "shm" not in info:
            native_payloads.engine_of_all(views)
        return TransferInit(update_id, "shm", info["shm"], 0, 0, {})

    def chunk_messages(info: Any, plan: UpdatePlan, seq: int, update_id: str) -> Any:
        if "shm" not in info:
            return native_payloads.chunk_messages(info, plan, seq, update_id)
        meta = WeightChunkMeta(update_id, seq, plan.manifest.digest, info["shm"])
        return meta, ChunkSent(update_id, seq, "off", ())

    changed = (engine_of_all, transfer_init, chunk_messages)
    names = vars(native_payloads) | {each.__name__: each for each in changed}
    monkeypatch.setattr(session, "native_payloads", SimpleNamespace(**names))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=3)


def run(scenario: Coroutine[object, object, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, LIMIT_S)

    asyncio.run(bounded())


class Counted(PairSource):
    """Counts what is taken, and breaks off before the ``until``-th."""

    def __init__(self, pairs: Mapping[str, Tensor], until: int | None = None) -> None:
        super().__init__(pairs)
        self.taken = 0
        self.until = until

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for pair in super().__iter__():
            if self.taken == self.until:
                raise ValueError("the disk is gone")
            self.taken += 1
            yield pair


class TrainerEngine:
    """Does with client and source what a trainer engine of vLLM's does, from a thread."""

    def __init__(self, client: BusWeightSyncClient, source: BusWeightSource) -> None:
        self.client = client
        self.source = source
        self.sender = ShmSender()

    def init(self) -> None:
        plan = self.plan()
        params = self.sender.open(plan.buffer_bytes(self.sender), ALONE)
        self.client.init_weight_transfer_engine({"shm": params})
        self.sender.on_opened()

    def plan(self) -> UpdatePlan:
        return UpdatePlan.of_source(tensor_metas(self.metadata()), chunk_bytes=CHUNK_BYTES)

    def metadata(self) -> list[Any]:
        return self.source.metadata()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.source)

    def send_weights(self, label: str | None = None) -> None:
        plan = self.plan()
        self.client.start_weight_update()
        with closing(self.tensors()) as tensors:  # type: ignore[type-var]
            for seq in range(plan.chunks):
                self.send_chunk(plan, seq, tensors)
        self.client.finish_weight_update(label)

    def send_chunk(self, plan: UpdatePlan, seq: int, tensors: Iterator[tuple[str, Tensor]]) -> None:
        chunk = [tensor for _, tensor in itertools.islice(tensors, plan.tensor_count(seq))]
        handle = self.sender.put(seq, chunk)
        self.client.update_weights({"shm": handle})
        self.sender.on_taken(seq)


class NewerTrainerEngine(TrainerEngine):
    """The same, as vLLM's read their source from 0.33 on."""

    def metadata(self) -> list[Any]:
        assert self.source.implements_iter_full()
        return self.source.metadata

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self.source.iter_full()


class Bench:
    """A broker, an engine and a trainer's agent."""

    def __init__(
        self, checkpoint: Checkpoint, engine: EmbeddedEngine, agent: TrainerAgent, broker: str
    ) -> None:
        self.checkpoint = checkpoint
        self.engine = engine
        self.agent = agent
        self.broker = broker

    def source(self, seed: int, **extra: Tensor) -> tuple[dict[str, Tensor], Counted]:
        weights = {**perturbed(self.checkpoint.weights, seed), **extra}
        return weights, Counted(weights)

    async def trainer(
        self, source: Any, make: type[TrainerEngine] = TrainerEngine
    ) -> TrainerEngine:
        client = self.agent.client(chunk_bytes=CHUNK_BYTES)
        trainer = make(client, self.agent.source(source))
        await asyncio.to_thread(trainer.init)
        return trainer

    async def assert_serves(self, weights: Mapping[str, Tensor], version: int) -> None:
        """And so it is not paused."""
        await assert_serve(self.checkpoint, weights, version, self.engine)

    async def assert_at_rest(self) -> None:
        group = (await self.agent.status()).groups[0]
        assert (group.pause, group.update) == ("running", "idle")


@asynccontextmanager
async def a_bench(checkpoint: Checkpoint, **options: Any) -> AsyncIterator[Bench]:
    async with (
        a_broker() as (_, broker),
        an_engine(checkpoint, broker, "e0") as engine,
        TrainerAgent(broker, chunk_bytes=CHUNK_BYTES, **options) as agent,
    ):
        if not options.get("rank"):
            await agent.wait_for_engines(1)
        yield Bench(checkpoint, engine, agent, broker)


def test_each_send_is_one_update(checkpoint: Checkpoint) -> None:
    """Beside those that the agent sends itself, after which the transport is opened anew."""

    async def scenario() -> None:
        async with a_bench(checkpoint) as bench:
            first, source = bench.source(1)
            trainer = await bench.trainer(source)
            await asyncio.to_thread(trainer.send_weights, "step 1")
            await bench.assert_serves(first, 1)
            report = bench.agent.last_update
            assert report is not None
            assert (report.version, report.label, report.engines) == (1, "step 1", 1)
            assert (report.chunks, report.verified) == (trainer.plan().chunks, "unsupported")
            assert report.chunks > 2
            assert (report.how, report.paused_ms) == ("staged", 0)
            await asyncio.to_thread(trainer.send_weights)

            own = perturbed(checkpoint.weights, 2)
            assert await bench.agent.update_weights(own) == 3
            with pytest.raises(UpdateFailed, match="not open any more") as closed:
                await asyncio.to_thread(trainer.send_weights)
            assert closed.value.code is NackCode.TRANSFER_CLOSED
            await bench.assert_serves(own, 3)
            await asyncio.to_thread(trainer.init)
            await asyncio.to_thread(trainer.send_weights)
            await bench.assert_serves(first, 4)

    run(scenario())


def test_without_an_event_loop(checkpoint: Checkpoint) -> None:
    """As most trainers are."""

    def train(broker: str, weights: Mapping[str, Tensor]) -> int:
        with SyncTrainerAgent(broker, name="sync", chunk_bytes=CHUNK_BYTES) as agent:
            agent.wait_for_engines(1)
            client = agent.client(chunk_bytes=CHUNK_BYTES)
            trainer = TrainerEngine(client, agent.source(weights))
            trainer.init()
            trainer.send_weights()
            assert agent.last_update is not None
            return agent.last_update.version

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            an_engine(checkpoint, broker, "e0"),
        ):
            weights = perturbed(checkpoint.weights, 3)
            assert await asyncio.to_thread(train, broker, weights) == 1

    run(scenario())


def test_weights_that_do_not_fit_are_refused_at_the_start(checkpoint: Checkpoint) -> None:
    """Nobody is paused, and the source is never read; the next update goes through."""

    async def scenario() -> None:
        async with a_bench(checkpoint) as bench:
            name = "model.layers.9.mlp.up_proj.weight"
            _, unknown = bench.source(4, **{name: torch.ones(64, 64)})
            trainer = await bench.trainer(unknown)
            with pytest.raises(ManifestRefused) as refused:
                await asyncio.to_thread(trainer.client.start_weight_update)
            assert (refused.value.nack.peer, refused.value.nack.tensor) == ("e0", name)
            with pytest.raises(ManifestRefused):  # who reads it nevertheless hears the same
                await asyncio.to_thread(next, iter(trainer.source))
            assert unknown.taken == 0
            await bench.assert_at_rest()
            await bench.assert_serves(checkpoint.weights, 0)
            good, source = bench.source(5)
            trainer = await bench.trainer(source)
            await asyncio.to_thread(trainer.send_weights)
            await bench.assert_serves(good, 2)

    run(scenario())


@pytest.mark.parametrize("loaded", [False, True])
def test_a_source_that_raises_ends_the_update(checkpoint: Checkpoint, loaded: bool) -> None:
    """With its own error, at once. With nothing loaded the old weights serve on; otherwise the
    engine is quarantined, until a whole update frees it."""

    async def scenario() -> None:
        async with a_bench(checkpoint) as bench:
            weights, source = bench.source(6)
            trainer = await bench.trainer(source)
            source.until = len(weights) // 2 if loaded else 0
            with pytest.raises(ValueError, match="the disk is gone"):
                await asyncio.to_thread(trainer.send_weights)
            await bench.assert_at_rest()
            if not loaded:
                await bench.assert_serves(checkpoint.weights, 0)
            with pytest.raises(UpdateFailed, match="the disk is gone"):
                await asyncio.to_thread(trainer.client.finish_weight_update)
            source.until = None
            await asyncio.to_thread(trainer.send_weights)
            await bench.assert_serves(weights, 2)

    run(scenario())


def _take_one(passes: list[Any]) -> None:
    next(passes[0])


def test_a_pass_that_is_left_undoes_the_update(checkpoint: Checkpoint) -> None:
    """Also where the collector closes it, in the agent's own loop."""

    async def scenario() -> None:
        async with a_bench(checkpoint) as bench:
            _, source = bench.source(7)
            trainer = await bench.trainer(source)
            passes: list[Any] = []
            # A pool's thread may hold what it was given a moment longer than its answer.
            take_one = functools.partial(_take_one, passes)
            for close_here in (False, True):
                await asyncio.to_thread(trainer.client.start_weight_update)
                passes.append(iter(trainer.source))
                await asyncio.to_thread(take_one)
                if not close_here:
                    await asyncio.to_thread(passes[0].close)
                passes.clear()
                with pytest.raises(UpdateFailed, match="not read to its end"):
                    await asyncio.to_thread(trainer.client.finish_weight_update)
                await asyncio.to_thread(trainer.client.shutdown_weight_transfer_engine)
                await bench.assert_at_rest()
                await bench.assert_serves(checkpoint.weights, 0)
                await asyncio.to_thread(trainer.init)

    run(scenario())


PATCH = SimpleNamespace(
    name="a",
    indices=torch.zeros(1, dtype=torch.int32),
    values=torch.zeros(1),
    full_shape=(1,),
)


def test_a_patch_of_a_draft_is_none_of_the_model(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine here takes patches."""
    begun: list[Target] = []

    class Noted(Updates):
        def begin(self, options: UpdateOptions, target: Target = "model", **more: Any) -> Update:
            begun.append(target)
            return super().begin(options, target, **more)

    monkeypatch.setattr("trainer_agent._agent.Updates", Noted)

    async def scenario() -> None:
        async with a_bench(checkpoint) as bench:
            await bench.trainer(bench.source(9)[1])
            session = bench.agent._engine_session
            session._native_transport = NativeTransport("vllm:sparse_nccl", None)
            assert list(bench.agent.patches([PATCH], base=1)) == [PATCH]
            drafts = bench.agent.client(target="draft")
            await _raises(UpdateFailed, "can't send patches", drafts.start_weight_update)

    run(scenario())
    assert begun == ["draft"]


def test_a_patch_is_no_update_of_the_other_ranks(checkpoint: Checkpoint) -> None:
    """Who does not count it, is not behind by one afterwards. No engine here takes patches."""

    async def scenario() -> None:
        options: dict[str, Any] = {"ranks": 2, "timeout_s": 10.0}
        async with (
            a_bench(checkpoint, **options) as bench,
            TrainerAgent(bench.broker, name="second", rank=1, **options) as second,
        ):
            bench.agent._engine_session._native_transport = NativeTransport(
                "vllm:sparse_nccl", None
            )
            assert list(bench.agent.patches([PATCH], base=1)) == [PATCH]
            with pytest.raises(UpdateFailed, match="not open any more"):
                await asyncio.to_thread(bench.agent.client().start_weight_update)
            weights, _ = bench.source(9)
            both = (bench.agent, second)
            calls = (each.update_weights(weights) for each in both)
            assert await asyncio.gather(*calls) == [1, 1]
            await bench.assert_serves(weights, 1)

    run(scenario())


def test_who_takes_all_and_asks_for_no_more_has_left_nothing(checkpoint: Checkpoint) -> None:
    """As ``zip(names, source)`` does."""

    async def scenario() -> None:
        async with a_bench(checkpoint) as bench:
            weights, source = bench.source(8)
            trainer = await bench.trainer(source)

            def send() -> None:
                plan = trainer.plan()
                trainer.client.start_weight_update()
                tensors = iter(trainer.source)
                for seq in range(plan.chunks):
                    trainer.send_chunk(plan, seq, tensors)
                del tensors
                trainer.client.finish_weight_update()

            await asyncio.to_thread(send)
            await bench.assert_serves(weights, 1)

    run(scenario())


def test_a_start_undoes_what_was_never_finished(checkpoint: Checkpoint) -> None:
    async def scenario() -> None:
        async with a_bench(checkpoint) as bench:
            weights, source = bench.source(9)
            trainer = await bench.trainer(source)
            await asyncio.to_thread(trainer.client.start_weight_update)
            old = iter(trainer.source)
            await asyncio.to_thread(next, old)
            await asyncio.to_thread(trainer.send_weights)
            await bench.assert_serves(weights, 2)
            with pytest.raises(UpdateFailed, match="never finished"):
                await asyncio.to_thread(next, old)
            await bench.assert_serves(weights, 2)

    run(scenario())


NCCL_INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
NCCL_UPDATE = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}


def test_infos_of_other_worker_engines_are_refused(checkpoint: Checkpoint) -> None:
    """By what they hold, and with what engines were booted with; the update is undone."""

    async def scenario() -> None:
        async with a_bench(checkpoint) as bench:
            _, source = bench.source(10)
            trainer = await bench.trainer(source)
            client = trainer.client
            for foreign in (NCCL_INIT, {"packed": True}):
                with pytest.raises(UsageError, match="they were booted e0 with wavebus"):
                    await asyncio.to_thread(client.init_weight_transfer_engine, foreign)
            for update in (NCCL_UPDATE, [NCCL_UPDATE]):
                await asyncio.to_thread(client.start_weight_update)
                with pytest.raises(UsageError, match=r"were armed|not a dict"):
                    await asyncio.to_thread(client.update_weights, update)
                await bench.assert_at_rest()
            await bench.assert_serves(checkpoint.weights, 0)

    run(scenario())


def test_ranks_that_send_shards_wait_until_engines_have_started(checkpoint: Checkpoint) -> None:
    """They would stay in a collective that engines never enter. No engine here takes shards."""

    async def scenario() -> None:
        async with (
            a_bench(checkpoint, ranks=2) as bench,
            TrainerAgent(bench.broker, name="other", rank=1, ranks=2) as other,
        ):
            _, source = bench.source(21)
            trainer = await bench.trainer(source)
            bench.agent._engine_session._native_transport = NativeTransport(
                "vllm:nccl_m2n", CHUNK_BYTES
            )
            perform = bench.engine.perform

            async def broken(operation: UpdateOperation) -> Done:
                if isinstance(operation, Start):
                    raise EngineError(f"no start of the {operation.target}")
                return await perform(operation)

            bench.engine.perform = broken  # type: ignore[method-assign]
            _, theirs = bench.source(21)
            reading = asyncio.create_task(asyncio.to_thread(list, other.source(theirs)))
            await asyncio.to_thread(trainer.client.start_weight_update)
            with pytest.raises(UpdateFailed, match="no start"):
                await asyncio.to_thread(list, trainer.source)
            with pytest.raises(UpdateFailed, match="no start"):
                await reading
            assert source.taken == theirs.taken == 0

    run(scenario())


def test_inside_a_pause_of_the_trainers_own(checkpoint: Checkpoint) -> None:
    async def scenario() -> None:
        async with a_bench(checkpoint) as bench:
            weights, source = bench.source(11)
            trainer = await bench.trainer(source)
            async with bench.agent.paused():
                await asyncio.to_thread(trainer.send_weights)
                assert (await bench.agent.status()).groups[0].pause == "paused"
            await bench.assert_serves(weights, 1)

    run(scenario())


@dataclass
class Param:
    """vLLM's way to tell of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class VllmSource(Counted):
    """Tells of its tensors as vLLM's sources do, and may yield others."""

    def __init__(self, told: Mapping[str, Tensor], yielded: Mapping[str, Tensor]) -> None:
        super().__init__(yielded)
        self._told = told

    def metadata(self) -> list[Any]:
        return [Param(n, t.dtype, tuple(t.shape)) for n, t in self._told.items()]


class NewerVllmSource:
    """The same in the form that vLLM has from 0.33 on."""

    def __init__(self, told: Mapping[str, Tensor], yielded: Mapping[str, Tensor]) -> None:
        self._source = VllmSource(told, yielded)

    @property
    def metadata(self) -> list[Any]:
        return self._source.metadata()

    def implements_iter_full(self) -> bool:
        return True

    def implements_iter_local(self) -> bool:
        return False

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._source)


@pytest.mark.parametrize("make", [TrainerEngine, NewerTrainerEngine])
@pytest.mark.parametrize("kind", [VllmSource, NewerVllmSource])
def test_a_source_of_vllms_kind(
    checkpoint: Checkpoint, kind: type[Any], make: type[TrainerEngine]
) -> None:
    """It is read as it is; one that yields what it did not tell of is stopped there. The agent
    itself takes it as well."""

    async def scenario() -> None:
        async with a_bench(checkpoint) as bench:
            weights, _ = bench.source(12)
            source = kind(weights, weights)
            trainer = await bench.trainer(source, make)
            metas = trainer.metadata()
            assert [(m.name, m.dtype) for m in metas] == [(n, torch.float32) for n in weights]
            await asyncio.to_thread(trainer.send_weights)
            await bench.assert_serves(weights, 1)
            first, *others = weights
            for told in ({n: weights[n] for n in (*others, first)}, weights | {"w": torch.ones(1)}):
                trainer = await bench.trainer(kind(weights, {**told}), make)
                if told.keys() == weights.keys():
                    with pytest.raises(UsageError, match="its metadata says"):
                        await asyncio.to_thread(trainer.send_weights)
                else:  # what nobody announced, nobody takes
                    await asyncio.to_thread(trainer.send_weights)
            await bench.agent.update_weights(source)
            assert bench.agent.last_update is not None
            await bench.assert_serves(weights, bench.agent.last_update.version)

    run(scenario())


def test_calls_that_make_no_sense(checkpoint: Checkpoint) -> None:
    """Each says what to do."""

    async def scenario() -> None:
        async with a_bench(checkpoint) as bench:
            client = bench.agent.client()
            await _raises(UsageError, r"source=agent\.source", client.start_weight_update)
            _, source = bench.source(13)
            trainer = await bench.trainer(source)
            await _raises(UsageError, "comes first", trainer.client.finish_weight_update)
            await _raises(UsageError, "comes first", trainer.client.update_weights, {})
            with pytest.raises(UsageError, match="in a thread"):
                trainer.client.start_weight_update()
            drafts = bench.agent.client(target="draft")
            await _raises(UpdateFailed, "no draft model", drafts.start_weight_update)
            bench.agent.source(source)
            await _raises(UsageError, "another source", next, iter(trainer.source))
        client = TrainerAgent("tcp://127.0.0.1:1").client()
        await _raises(BusClosed, "connect", client.finish_weight_update)

    run(scenario())


def test_a_pass_without_an_update_ends(checkpoint: Checkpoint) -> None:
    async def scenario() -> None:
        async with a_bench(checkpoint) as bench:
            bench.agent._engine_session._timeout_s = 0.1
            source = bench.agent.source(checkpoint.weights)
            await _raises(BusTimeout, "no start_weight_update", next, iter(source))

    run(scenario())


async def _raises(
    error: type[Exception], match: str, call: Callable[..., Any], *args: object
) -> None:
    with pytest.raises(error, match=match):
        await asyncio.to_thread(call, *args)


def test_other_ranks_read_nothing_before_every_engine_is_armed(checkpoint: Checkpoint) -> None:
    """They hear of a refusal too, and of metadata that rank 0 can't even plan with."""

    async def scenario() -> None:
        async with (
            a_bench(checkpoint, ranks=2) as bench,
            TrainerAgent(bench.broker, name="other", rank=1, ranks=2) as other,
        ):
            weights, source = bench.source(14)
            trainer = await bench.trainer(source)
            _, theirs = bench.source(14)
            beside = other.source(theirs)
            reading = asyncio.create_task(asyncio.to_thread(list, beside))
            await asyncio.to_thread(trainer.client.start_weight_update)
            assert len(await reading) == len(weights) == theirs.taken
            # Undone: rank 0 reads to the end, since others may wait for it there.
            await asyncio.to_thread(trainer.client.shutdown_weight_transfer_engine)
            assert source.taken == len(weights)

            await asyncio.to_thread(trainer.init)
            source.taken, source.until, theirs.taken = 0, 2, 0
            reading = asyncio.create_task(asyncio.to_thread(list, beside))
            with pytest.raises(ValueError, match="the disk is gone"):
                await asyncio.to_thread(trainer.send_weights)
            assert len(await reading) == len(weights) == theirs.taken
            await asyncio.to_thread(trainer.client.start_weight_update)
            source.taken, source.until = 0, 2
            await asyncio.to_thread(trainer.client.shutdown_weight_transfer_engine)
            with pytest.raises(UpdateFailed, match="never finished"):  # it comes too late
                await asyncio.to_thread(list, beside)

            trainer = await bench.trainer({**weights, "model.no.weight": torch.ones(1)})
            reading = asyncio.create_task(asyncio.to_thread(list, beside))
            with pytest.raises(ManifestRefused):
                await asyncio.to_thread(trainer.send_weights)
            with pytest.raises(ManifestRefused):
                await reading

            reading = asyncio.create_task(asyncio.to_thread(list, beside))
            bench.agent.source({"w": torch.ones(1, dtype=torch.complex64)})
            with pytest.raises(UsageError, match="complex64"):
                await asyncio.to_thread(trainer.client.start_weight_update)
            with pytest.raises(UpdateFailed, match="complex64"):
                await reading
            assert theirs.taken == len(weights)
            with pytest.raises(UsageError, match="rank 1 sends nothing"):
                await asyncio.to_thread(other.client().start_weight_update)

    run(scenario())
