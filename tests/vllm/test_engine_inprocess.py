"""An ``AsyncLLM`` under the bus: the engine contract, the oracle, refusals, recovery."""

from __future__ import annotations

import asyncio
import gc
import itertools
from typing import TYPE_CHECKING, Any, Literal

import pytest

from bus import operations as ops
from bus._manifest import Manifest, TensorMeta
from bus.errors import EngineError
from bus.messages import NackCode, RequestLimits
from bus.operations import ReceiveChunk
from sidecar._vllm.core_state import parse_version
from sidecar._vllm.inprocess_engine import VllmEngine
from sidecar._vllm.plugin import operations
from sidecar._vllm.plugin.operations import PERFORM
from sidecar._vllm.plugin.worker_rpc import SWAP
from tests.contract.bus_suite import BusContract
from tests.contract.data_routes_suite import API_KEY, DataRoutesContract, Routes, bodies
from tests.contract.engine_suite import EngineContract, Generated, Watch
from tests.contract.staged_suite import StagedContract
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.push import Push, plan
from tests.support.steps import steps
from tests.vllm._faulty import MISLEADING
from tests.vllm._vllm import (
    MAX_POSITIONS,
    REST_MS,
    Oracle,
    async_llm,
    boot_environment,
    engine_args,
    generate,
    in_another_order,
    paused_update,
    rejects_in_pauses,
    require_vllm,
    staged_update,
    ways,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence

    from torch import Tensor

    from sidecar.engine import Engine

require_vllm()
# vLLM's own imports warn of what they deprecate.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


VOCABULARY = 128


class InProcess:
    """An ``AsyncLLM`` under test."""

    workers = 1
    long_tokens = 400
    late_tokens = 8
    quiet_s = 0.3
    wait_s = 300.0
    canary: Literal["abort", "keep"] = "abort"

    def __init__(self, llm: Any, checkpoint: Checkpoint, runner: asyncio.Runner) -> None:
        self.llm = llm
        self.engine: Engine = VllmEngine(llm)
        self.checkpoint = checkpoint
        self.oracle = Oracle(checkpoint.folder)
        self.weights: Mapping[str, Tensor] = checkpoint.weights
        self.version = 0
        self._runner = runner
        self._names = itertools.count()

    @property
    def rejects(self) -> bool:
        return rejects_in_pauses()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(work)

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, *, watch: Watch | None = None
    ) -> Generated:
        note = watch.note if watch is not None else None
        rejected = watch.reject if watch is not None else None
        last = await generate(
            self.llm, f"r{next(self._names)}", max_tokens, prompt, note, rejected=rejected
        )
        spans = [(parse_version(s.version), s.start, s.end) for s in last.weight_versions]
        return Generated(list(last.token_ids), last.finish_reason, spans)

    def reference(
        self, weights: Mapping[str, Tensor], prompt: Sequence[int], count: int
    ) -> list[int]:
        return self.checkpoint.greedy(weights, prompt, count)

    def score(
        self, weights: Mapping[str, Tensor], prompt: Sequence[int], tokens: Sequence[int]
    ) -> list[float]:
        return self.checkpoint.score(weights, prompt, tokens)

    def other_weights(self, seed: int) -> dict[str, Tensor]:
        return perturbed(self.weights, seed)

    async def assert_serves(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Greedy tokens and their version are those of transformers with these weights."""
        result = await self.generate((5, 17, 99, 3, 42, 7), 24)
        assert result.tokens == self.oracle.greedy(weights, 24)
        assert result.weight_versions == [(version, 0, 24)]
        self.weights = {name: weights[name] for name in self.checkpoint.weights}
        self.version = version


@pytest.fixture(scope="module")
def under_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """One engine for the module: booting takes longer than all tests together."""
    folder = tmp_path_factory.mktemp("vllm")
    checkpoint = make_checkpoint(folder / "model", seed=1, max_positions=MAX_POSITIONS)
    with asyncio.Runner() as runner:
        booted = async_llm(
            boot_environment(folder, rest_ms=REST_MS), engine_args(checkpoint.folder)
        )
        llm = runner.run(booted.__aenter__())
        tested = InProcess(llm, checkpoint, runner)
        try:
            info = runner.run(tested.engine.start())
            assert (info.kind, info.dp_rank, info.dp_size, info.workers) == ("vllm", 0, 1, 1)
            yield tested
        finally:
            runner.run(tested.engine.close())
            runner.run(booted.__aexit__(None, None, None))
            # While warnings are no errors yet: vLLM leaves its sockets to the collector.
            del tested.llm, tested.engine, llm
            gc.collect()


@pytest.fixture(scope="class")
def routes(under_test: InProcess) -> Iterator[Routes]:
    """A second adapter serves the same engine; that of the other tests does not."""
    options = ("--host", "0.0.0.0", "--api-key", API_KEY)
    engine = VllmEngine(under_test.llm, serve=options)
    made: list[Routes] = []

    async def start() -> None:
        await under_test.engine.close()  # an engine has one adapter at a time
        info = await engine.start()
        assert info.limits == RequestLimits(VOCABULARY, MAX_POSITIONS, 8, exact_seeds=False)
        url = info.endpoint.replace("0.0.0.0", "127.0.0.1")
        model = str(under_test.checkpoint.folder)
        version = under_test.version
        made.append(
            Routes(engine, url, info.limits, version, bodies(model), "/pause", under_test.run)
        )

    async def end() -> None:
        await engine.close()
        await under_test.engine.start()  # its clients are in process again

    under_test.run(start())
    yield made[0]
    under_test.run(end())


class TestDataRoutes(DataRoutesContract):
    """vLLM's own, served from this process."""


class TestContract(EngineContract):
    """The contract that every engine adapter keeps."""


class TestStaged(StagedContract):
    """The weights change between two steps of the core."""


class TestOnTheBus(BusContract):
    """In process: broker, sidecar and trainer around a real AsyncLLM."""


def test_a_staged_update_asks_the_core_for_its_swap_and_for_nothing_else(
    under_test: InProcess,
) -> None:
    """Steps wait for whatever the core is asked for. Also the first one of its tensors, which opens
    the transport, and whose manifest nobody knows."""
    engine = under_test.engine
    assert isinstance(engine, VllmEngine)

    async def scenario() -> None:
        for seed in (61, 62):
            new = in_another_order(under_test.other_weights(seed))
            asked = await staged_update(engine, new, under_test.version + 1, backend="gloo")
            assert asked == [SWAP]
            await under_test.assert_serves(new, under_test.version + 1)

    under_test.run(scenario())


def test_a_sleep_gives_back_what_staging_has_kept(under_test: InProcess) -> None:
    """Else it lies beside what sleeps, on a GPU that somebody else is to have."""
    engine = under_test.engine
    assert isinstance(engine, VllmEngine)

    async def held_bytes() -> int:
        (account,) = await under_test.llm.collective_rpc("wavebus_loading")
        return int(account["staging_bytes"])

    async def scenario() -> None:
        new = under_test.other_weights(63)
        await staged_update(engine, new, under_test.version + 1, keep=True)
        assert await held_bytes() > 0
        await engine.pause("keep", clear_cache=True)
        await engine.sleep(1)
        assert await held_bytes() == 0
        await engine.wake()
        await under_test.assert_serves(new, under_test.version + 1)

    under_test.run(scenario())


def test_live_update_matches_transformers(under_test: InProcess) -> None:
    """Updated in the middle of a request, whose tokens are all there, split by version."""
    new = under_test.other_weights(31)
    version = under_test.version

    async def scenario() -> None:
        old = under_test.weights
        watch = Watch()
        request = asyncio.create_task(under_test.generate((1, 2, 3), 400, watch=watch))
        await watch.reached(20)
        await paused_update(under_test.engine, new, version + 1)
        result = await request
        assert len(result.tokens) == 400
        assert result.finish_reason == "length"
        (_, _, cut), _ = result.weight_versions
        assert result.tokens[:cut] == under_test.oracle.greedy(old, cut, (1, 2, 3))
        so_far = (1, 2, 3, *result.tokens[:cut])
        after = under_test.oracle.greedy(new, 400 - cut, so_far)
        assert result.tokens[cut:] == after, f"updated after {cut} tokens"
        await under_test.assert_serves(new, version + 1)

    under_test.run(scenario())


def test_updates_are_copied_by_a_plan_once_the_loader_has_proven_it(
    under_test: InProcess,
) -> None:
    """The first of a manifest goes by vLLM's loader, the others straight into the weights, however
    they are cut. Their tokens are exact."""

    async def scenario() -> None:
        for seed, way, chunk_bytes in (
            (51, "loader", 1 << 16),
            (52, "plan", 1 << 16),
            (53, "plan", 1 << 30),
        ):
            first, *others = under_test.other_weights(seed).items()
            new = dict([*others, first])  # of which no other test has made a plan
            version = under_test.version + 1
            await under_test.engine.pause("keep", clear_cache=True)
            await Push(under_test.engine, new, plan(new, chunk_bytes)).whole(version)
            await under_test.engine.resume()
            assert await ways(under_test.llm) == {way}
            await under_test.assert_serves(new, version)

    under_test.run(scenario())


def test_a_wrong_plan_is_found_out_by_the_first_update(under_test: InProcess) -> None:
    """It takes keys for values; and no weights are ever copied by it."""

    def misleading(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {MISLEADING: weights[MISLEADING], **_without(weights, MISLEADING)}

    async def scenario() -> None:
        for seed in (54, 55):
            new, version = misleading(under_test.other_weights(seed)), under_test.version + 1
            await paused_update(under_test.engine, new, version)
            await under_test.assert_serves(new, version)
            [account] = await under_test.llm.collective_rpc("wavebus_loading")
            assert (account["way"], account["proven"]) == ("loader", False)
            assert "qkv_proj.weight differs from the received" in account["reason"]

    under_test.run(scenario())


async def _prepare(under_test: InProcess, way: str) -> dict[str, Tensor]:
    """Weights of a manifest whose next update goes that way."""
    chosen = in_another_order if way == "loader" else dict
    for _ in range(2 if way == "plan" else 1):
        weights = under_test.other_weights(56)
        await paused_update(under_test.engine, weights, under_test.version + 1)
        await under_test.assert_serves(weights, under_test.version + 1)
    return chosen(under_test.other_weights(57))


def _without(weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {n: t for n, t in weights.items() if n != name}


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "tensor", "reason"),
    [
        (lambda w: _without(w, K_PROJ), K_PROJ, "missing"),
        (lambda w: _without(w, "model.norm.weight"), "model.norm.weight", "missing"),
        # What vLLM's loaders let pass: a bias that no layer has, rows too many.
        (
            lambda w: {**w, "model.layers.0.self_attn.k_proj.bias": w[K_PROJ][:, 0]},
            "model.layers.0.self_attn.k_proj.bias",
            "no place",
        ),
        (lambda w: {**w, K_PROJ: w[K_PROJ].repeat(2, 1)}, K_PROJ, "takes only"),
        (lambda w: {**w, "lm_head.weight": w["lm_head.weight"][1:]}, "lm_head.weight", "shape"),
        (
            lambda w: {**w, "model.norm.weight": w["model.norm.weight"].sum()},
            "model.norm.weight",
            "shape",
        ),
        (
            lambda w: {**w, "model.layers.9.mlp.down_proj.weight": w[K_PROJ]},
            "model.layers.9.mlp.down_proj.weight",
            "no such tensor",
        ),
        (lambda w: {**w, K_PROJ: w[K_PROJ].bfloat16()}, K_PROJ, "bfloat16"),
    ],
)
def test_manifests_that_vllm_would_take(
    under_test: InProcess, spoil: Any, tensor: str, reason: str
) -> None:
    """Each names its tensor; the old weights serve on."""

    async def scenario() -> None:
        with pytest.raises(EngineError, match=reason) as refused:
            await steps(under_test.engine).arm(plan(spoil(under_test.weights)))
        assert refused.value.code is NackCode.MANIFEST_REFUSED
        assert refused.value.tensor == tensor
        await under_test.assert_serves(under_test.weights, under_test.version)

    under_test.run(scenario())


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [(K_PROJ, "layout of .*qkv_proj.weight"), ("lm_head.weight", "packed for the CPU")],
)
def test_what_vllm_has_packed_takes_no_patch(
    under_test: InProcess, tensor: str, reason: str
) -> None:
    """It is written where weights serve, and here those don't lie as they were loaded."""
    engine, weight = under_test.engine, under_test.weights[tensor]
    patch = Manifest.of_patch([TensorMeta(tensor, "float32", tuple(weight.shape))], [1])

    async def scenario() -> None:
        with pytest.raises(EngineError, match=reason) as refused:
            await steps(engine).arm(patch)
        assert refused.value.code is NackCode.MANIFEST_REFUSED
        assert refused.value.tensor == tensor

    under_test.run(scenario())


def test_two_tensors_for_one_place_are_refused(under_test: InProcess) -> None:
    """Element counts alone would not tell them from a whole parameter."""
    engine = under_test.engine
    good = plan(under_test.weights)
    names = tuple(
        "model.layers.1.self_attn.qkv_proj.weight" if n == K_PROJ else n for n in good.names
    )
    manifest = Manifest(names, good.dtypes, good.shapes, good.chunk_ends)

    async def scenario() -> None:
        with pytest.raises(EngineError) as refused:
            await steps(engine).arm(manifest)
        assert refused.value.code is NackCode.MANIFEST_REFUSED

    under_test.run(scenario())


@pytest.mark.parametrize("way", ["loader", "plan"])
def test_failed_receive_is_restored(under_test: InProcess, way: str) -> None:
    """The transport lost the chunk; nothing is loaded, and the old weights come back."""
    engine = under_test.engine

    async def scenario() -> None:
        new = await _prepare(under_test, way)
        manifest, version = plan(new), under_test.version
        push = Push(engine, new, manifest)
        await push.open()
        await steps(engine).arm(manifest)
        await engine.pause("keep", clear_cache=True)
        await steps(engine).start_update(recover=False)
        assert await ways(under_test.llm) == {way}
        push.offer(0)
        with pytest.raises(EngineError) as failed:
            await steps(engine).receive(ReceiveChunk(0, "shm", b"\xc1"))
        assert failed.value.code is NackCode.TRANSFER_FAILED
        await push.send(0)
        await steps(engine).restore()
        await engine.resume()
        await under_test.assert_serves(under_test.weights, version)
        push.close()
        await paused_update(engine, new, version + 1)
        await under_test.assert_serves(new, version + 1)

    under_test.run(scenario())


@pytest.mark.parametrize("mended", ["the same tensors", "others"])
@pytest.mark.parametrize("way", ["loader", "plan"])
def test_failed_load_is_recovered_by_a_whole_update(
    under_test: InProcess, way: str, mended: str
) -> None:
    """vLLM's loader, or the copies, broke off in the middle of a chunk. What mends it goes by the
    plan, or by the loader."""
    engine = under_test.engine

    async def scenario() -> None:
        lost = await _prepare(under_test, way)
        manifest, version = plan(lost), under_test.version
        order = lost if mended == "the same tensors" else in_another_order(lost)
        new = {name: under_test.other_weights(34)[name] for name in order}
        faulty = Push(engine, lost, manifest, received_by="faulty")
        await faulty.open()
        await steps(engine).arm(manifest)
        await engine.pause("keep", clear_cache=True)
        await steps(engine).start_update(recover=False)
        with pytest.raises(EngineError, match="poisoned on purpose"):
            await faulty.chunk(0)
        assert await ways(under_test.llm) == {way}
        # Whatever is tried next says what is wrong, and breaks nothing further.
        with pytest.raises(EngineError, match="but nothing was received"):
            await steps(engine).load(1)
        with pytest.raises(EngineError, match="session is open"):
            await steps(engine).start_update(recover=False)
        faulty.close()
        await Push(engine, new, plan(new)).whole(version + 1, recover=True)
        await engine.resume()
        await under_test.assert_serves(new, version + 1)

    under_test.run(scenario())


def test_a_restarted_sidecar_recovers_what_the_last_one_left(under_test: InProcess) -> None:
    """A new adapter knows nothing of the open session, and asks the workers."""
    lost, new = under_test.other_weights(35), under_test.other_weights(36)
    manifest = plan(lost)
    version = under_test.version

    async def scenario() -> None:
        push = Push(under_test.engine, lost, manifest)
        await push.open()
        await steps(under_test.engine).arm(manifest)
        await under_test.engine.pause("keep", clear_cache=True)
        await steps(under_test.engine).start_update(recover=False)
        await push.chunk(0)
        push.close()
        await under_test.engine.close()

        under_test.engine = VllmEngine(under_test.llm)
        await under_test.engine.start()
        await Push(under_test.engine, new, plan(new)).whole(version + 1, recover=True)
        await under_test.engine.resume()
        await under_test.assert_serves(new, version + 1)

    under_test.run(scenario())


def test_a_failed_load_before_any_other_leaves_the_session_usable(under_test: InProcess) -> None:
    """A load without its receive changes nothing: the update goes on and is exact."""
    new = under_test.other_weights(37)
    manifest = plan(new)
    engine, version = under_test.engine, under_test.version

    async def scenario() -> None:
        push = Push(engine, new, manifest)
        await push.open()
        await steps(engine).arm(manifest)
        await engine.pause("keep", clear_cache=True)
        await steps(engine).start_update(recover=False)
        with pytest.raises(EngineError, match="but nothing was received"):
            await steps(engine).load(0)
        for seq in range(manifest.chunks):
            await push.chunk(seq)
        await steps(engine).finish_update()
        await engine.commit(version + 1)
        await engine.resume()
        await under_test.assert_serves(new, version + 1)

    under_test.run(scenario())


def test_an_unarmed_chunk_is_refused(under_test: InProcess) -> None:
    """What arrives must be what was checked."""
    good = plan(under_test.weights)

    async def scenario() -> None:
        push = Push(under_test.engine, under_test.weights, good)
        await push.open()
        await steps(under_test.engine).arm(good)
        chunk = push.offer(0)
        later = ReceiveChunk(good.chunks, "shm", chunk.handle)
        with pytest.raises(EngineError, match="is not in the armed manifest"):
            await steps(under_test.engine).receive(later)
        push.close()

    under_test.run(scenario())


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (
            operations.encode(operations.Hello(operations.PROTOCOL + 1)),
            "install one version of wavebus",
        ),
        ("AAAA", "ValidationError"),
        (operations.encode(ops.Finish()), "session is not open"),
    ],
)
def test_operations_that_cannot_be_are_refused(
    under_test: InProcess, operation: str, text: str
) -> None:
    """Another wavebus's, one that is none, one before its time: nothing changes."""

    async def scenario() -> None:
        kwargs = {"operation": operation}
        with pytest.raises(Exception, match=text) as refused:
            await under_test.llm.collective_rpc(PERFORM, kwargs=kwargs)
        assert operations.find_failure(str(refused.value)) is not None
        await under_test.assert_serves(under_test.weights, under_test.version)

    under_test.run(scenario())


async def _of_somebody_else(llm: Any, admission: str) -> None:
    """A call that vLLM's own trainer engines would make."""
    from vllm.distributed.weight_transfer.base import (  # noqa: PLC0415 - after the boot
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )

    match admission:
        case "init":
            info = {"master_address": "127.0.0.1", "master_port": 1}
            await llm.init_weight_transfer_engine(WeightTransferInitRequest(info))
        case "start":
            await llm.start_weight_update()
        case "update":
            await llm.update_weights(WeightTransferUpdateRequest({"names": ["lm_head.weight"]}))
        case "finish":
            await llm.finish_weight_update()


@pytest.mark.parametrize("admission", ["init", "start"])
def test_who_is_not_a_sidecar_is_refused(under_test: InProcess, admission: str) -> None:
    """An engine of this backend is updated by operations alone; and can be, afterwards."""
    new = under_test.other_weights(38)

    async def scenario() -> None:
        with pytest.raises(Exception, match="are updated through wavebus"):
            await _of_somebody_else(under_test.llm, admission)
        await paused_update(under_test.engine, new, under_test.version + 1)
        await under_test.assert_serves(new, under_test.version + 1)

    under_test.run(scenario())


@pytest.mark.parametrize("admission", ["update", "finish"])
def test_who_breaks_into_a_session_spoils_one_update(under_test: InProcess, admission: str) -> None:
    """vLLM has closed it then. What comes next of it fails, and a whole update mends it."""
    lost, new = under_test.other_weights(39), under_test.other_weights(40)
    engine, version = under_test.engine, under_test.version

    async def scenario() -> None:
        push = Push(engine, lost, plan(lost))
        await engine.pause("keep", clear_cache=True)
        await push.begin()
        await push.chunk(0)
        if admission == "update":
            with pytest.raises(Exception, match="are updated through wavebus"):
                await _of_somebody_else(under_test.llm, admission)
        else:
            await _of_somebody_else(under_test.llm, admission)
        with pytest.raises(EngineError, match="session is not open"):
            await push.chunk(1)
        push.close()
        await Push(engine, new, plan(new)).whole(version + 1, recover=True)
        await engine.resume()
        await under_test.assert_serves(new, version + 1)

    under_test.run(scenario())


def test_what_runs_is_told_from_inside(under_test: InProcess) -> None:
    """The core's status page, and the ids of requests as their clients gave them."""

    async def scenario() -> None:
        engine = under_test.engine
        watch = Watch()
        request = asyncio.create_task(generate(under_test.llm, "mine", 300, note=watch.note))
        await watch.reached(5)
        assert await engine.request_ids() == ("mine",)
        view = engine.core_view()
        assert view is not None
        assert (view.rank, view.running, view.waiting) == (0, 1, 0)
        await request
        assert await engine.request_ids() == ()
        coordinated = VllmEngine(under_test.llm, dp_coordinator="bus")
        with pytest.raises(EngineError, match="was booted with its own coordinator"):
            await coordinated.start()

    under_test.run(scenario())


def test_ranks_that_come_and_go_are_refused(
    under_test: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elastic expert parallelism, by the option's name; nothing is asked of the engine."""
    parallel = under_test.llm.vllm_config.parallel_config
    monkeypatch.setattr(parallel, "enable_elastic_ep", True)

    async def scenario() -> None:
        with pytest.raises(EngineError, match=r"has --enable-elastic-ep.*start it without"):
            await VllmEngine(under_test.llm).start()

    under_test.run(scenario())


# The engine dies here: this test stays the last one of the module.
def test_death_is_reported(under_test: InProcess) -> None:
    """An update that arrives nowhere: the engine core is killed."""

    async def scenario() -> None:
        engine = under_test.engine
        death = asyncio.create_task(engine.died())
        for process in under_test.llm.engine_core.resources.engine_manager.processes:
            process.kill()
        assert "dead" in await asyncio.wait_for(death, 60)
        with pytest.raises(EngineError) as failed:
            await engine.version()
        assert failed.value.code is NackCode.ENGINE_DEAD

    under_test.run(scenario())
