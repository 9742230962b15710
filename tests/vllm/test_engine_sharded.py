"""Two tensor parallel workers, experts, a tied head: what the plugin adds on top of vLLM."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest

from bus.errors import EngineError
from bus.messages import NackCode, Staging
from sidecar import Sidecar
from sidecar._vllm.inprocess_engine import VllmEngine
from sidecar._vllm.plugin.operations import PERFORM
from sidecar._vllm.plugin.worker_rpc import ASK_DRAFT, SWAP
from sidecar.embedded import EmbeddedEngine, SamplingParams
from tests.support.broker import a_broker
from tests.support.checkpoints import perturbed
from tests.support.fsdp import train
from tests.support.push import Push, parts_of, plan
from tests.support.steps import steps
from tests.vllm._vllm import (
    PROMPT,
    Oracle,
    async_llm,
    boot_environment,
    engine_args,
    generate,
    in_another_order,
    make_moe,
    paused_update,
    require_vllm,
    staged_update,
    ways,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path

    from torch import Tensor

require_vllm()
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]

K_PROJ = "model.layers.1.self_attn.k_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


class Sharded:
    """One engine of two workers, its trainer's weights, and the oracle."""

    def __init__(self, llm: Any, model: Path, runner: asyncio.Runner) -> None:
        oracle = Oracle(model)
        self.llm = llm
        self.model = model
        self.engine = VllmEngine(llm)
        self.oracle = oracle
        self.weights = oracle.names()
        self._runner = runner

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(work)

    async def assert_serves(self, weights: dict[str, Tensor]) -> None:
        last = await generate(self.llm, f"r{id(weights)}", 24)
        assert list(last.token_ids) == self.oracle.greedy(weights, 24)
        self.weights = weights


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sharded]:
    folder = tmp_path_factory.mktemp("vllm")
    model = make_moe(folder / "model", seed=1)
    with asyncio.Runner() as runner:
        booted = async_llm(boot_environment(folder), engine_args(model, tensor_parallel_size=2))
        llm = runner.run(booted.__aenter__())
        tested = Sharded(llm, model, runner)
        try:
            assert runner.run(tested.engine.start()).workers == 2
            yield tested
        finally:
            runner.run(tested.engine.close())
            runner.run(booted.__aexit__(None, None, None))
            # While warnings are no errors yet: vLLM leaves its sockets to the collector.
            del tested.llm, tested.engine, llm
            gc.collect()


def _per_expert(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As checkpoints and most trainers name them: one tensor per expert and projection."""
    split: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for index, both in enumerate(tensor):
                gate, up = both.chunk(2)
                split[f"{prefix}{index}.gate_proj.weight"] = gate.contiguous()
                split[f"{prefix}{index}.up_proj.weight"] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            for index, down in enumerate(tensor):
                split[f"{name.removesuffix('down_proj')}{index}.down_proj.weight"] = down
        else:
            split[name] = tensor
    return split


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_workers_that_are_peers_stage_their_shards_and_swap_as_one(
    sharded: Sharded, backend: str
) -> None:
    """Of a manifest that they don't know they ask each other, by their core. They know the one that
    was armed last, and for an update in a pause as well."""

    async def scenario() -> None:
        engine = sharded.engine
        version = int(await engine.version()) + 1
        await paused_update(engine, _per_expert(perturbed(sharded.weights, 45)), version)
        for seed, asked in ((46, [PERFORM, SWAP]), (47, [SWAP]), (48, [SWAP])):
            new = perturbed(sharded.weights, seed)
            version += 1
            done = await staged_update(engine, new, version, workers=2, backend=backend)
            assert done == asked
            await sharded.assert_serves(new)
            version += 1
            await paused_update(engine, new, version)

    sharded.run(scenario())


def test_workers_that_are_peers_stage_an_open_update_part_by_part(sharded: Sharded) -> None:
    """Each its shards. What lacks an expert's half is refused, and the old weights serve on. A tied
    head and the embeddings come in different parts."""
    engine, up = sharded.engine, EXPERT.replace("down", "up")
    how = Staging(required=True, budget_bytes=0, keep=False, clear_cache=False)

    def pushed(weights: dict[str, Tensor], *first: str, lost: str = "") -> Push:
        sent = {name: tensor for name, tensor in weights.items() if name != lost}
        head, *rest = parts_of(sent, *first)
        return Push(engine, sent, head, workers=2, staging=how, rest=rest)

    async def scenario() -> None:
        version = int(await engine.version())
        for seed, lost in ((49, ""), (50, up), (51, "")):
            new = perturbed(sharded.weights, seed)
            head = {"lm_head.weight": new["model.embed_tokens.weight"]}
            whole = {**_per_expert(new), **head}
            push = pushed(whole, K_PROJ, EXPERT, "lm_head.weight", lost=lost)
            if not lost:
                version += 1
                await push.whole(version)
                assert await ways(sharded.llm) == {"staged"}
                await sharded.assert_serves(new)
                continue
            with pytest.raises(EngineError, match="missing") as refused:
                await push.whole(version + 1)
            assert refused.value.code is NackCode.MANIFEST_REFUSED
            await steps(engine).restore()
            push.close()
            await sharded.assert_serves(sharded.weights)

    sharded.run(scenario())


def test_update_of_experts_and_a_tied_head(sharded: Sharded) -> None:
    """vLLM on a CPU leaves the packed head and the experts stale; ours are exact, with the
    experts fused or one by one, and with the tied head in the manifest or not."""

    async def scenario() -> None:
        await sharded.assert_serves(sharded.weights)
        fused = perturbed(sharded.weights, 41)
        await paused_update(sharded.engine, fused, 1)
        await sharded.assert_serves(fused)

        single = perturbed(sharded.weights, 42)
        head = {"lm_head.weight": single["model.embed_tokens.weight"]}
        await paused_update(sharded.engine, {**_per_expert(single), **head}, 2)
        await sharded.assert_serves(single)
        assert await ways(sharded.llm) == {"loader"}
        for seed in (44, 45):  # what was loaded once, is copied from then on
            single = perturbed(sharded.weights, seed)
            head = {"lm_head.weight": single["model.embed_tokens.weight"]}
            await paused_update(sharded.engine, {**_per_expert(single), **head}, 2)
            assert await ways(sharded.llm) == {"plan"}
            await sharded.assert_serves(single)

    sharded.run(scenario())


def test_refusals_name_the_tensor_and_spoil_no_later_answer(sharded: Sharded) -> None:
    """Every worker refuses, and one answers: vLLM's executor would hand the other's refusal
    to the next call."""
    good = _per_expert(sharded.weights)
    bad: list[tuple[dict[str, Tensor], str]] = [
        ({n: t for n, t in good.items() if n != K_PROJ}, K_PROJ),
        ({**good, K_PROJ: good[K_PROJ].repeat(2, 1)}, K_PROJ),
        ({**good, K_PROJ: good[K_PROJ][:-2]}, K_PROJ),
        ({**good, EXPERT.replace(".3.", ".4."): good[EXPERT]}, EXPERT.replace(".3.", ".4.")),
        ({**good, EXPERT: good[EXPERT].repeat(2, 1)}, EXPERT),
        ({**good, "lm_head.weight": good[K_PROJ]}, "lm_head.weight"),
    ]

    async def scenario() -> None:
        for weights, tensor in bad:
            with pytest.raises(EngineError) as refused:
                await steps(sharded.engine).arm(plan(weights))
            assert (refused.value.code, refused.value.tensor) == (
                NackCode.MANIFEST_REFUSED,
                tensor,
            )
            assert await sharded.engine.version() >= 0
            await steps(sharded.engine).arm(plan(good))
        await sharded.assert_serves(sharded.weights)

    sharded.run(scenario())


@pytest.mark.parametrize("way", ["loader", "plan"])
def test_a_mismatch_in_one_worker_keeps_all_from_loading(sharded: Sharded, way: str) -> None:
    """So that what was there, serves on: nobody has to be mended by a whole update."""
    old, new = perturbed(sharded.weights, 47), perturbed(sharded.weights, 48)
    if way == "loader":
        old, new = in_another_order(old), in_another_order(new)
    manifest = plan(new)

    async def scenario() -> None:
        await paused_update(sharded.engine, old, 4)
        if way == "plan":
            await paused_update(sharded.engine, old, 5)
        push = Push(sharded.engine, new, manifest, received_by="one-sided")
        await push.open()
        await steps(sharded.engine).arm(manifest)
        await sharded.engine.pause("keep", clear_cache=True)
        await steps(sharded.engine).start_update(recover=False)
        with pytest.raises(EngineError) as refused:
            await push.chunk(0)
        assert refused.value.code is NackCode.CHECKSUM_MISMATCH
        assert refused.value.tensor == manifest.names[manifest.part(0)][-1]
        await steps(sharded.engine).restore()
        push.close()
        await sharded.engine.resume()
        await sharded.assert_serves(old)

    sharded.run(scenario())


def test_who_is_not_a_sidecar_is_refused_and_spoils_no_later_answer(sharded: Sharded) -> None:
    """By one worker for both; a session that vLLM has begun in the other is not in the way."""
    new = perturbed(sharded.weights, 49)

    async def scenario() -> None:
        for _ in range(2):
            with pytest.raises(Exception, match="are updated through wavebus"):
                await sharded.llm.start_weight_update()
            assert await sharded.llm.collective_rpc(ASK_DRAFT) == [False, False]
            await paused_update(sharded.engine, new, 6)
            await sharded.assert_serves(new)

    sharded.run(scenario())


@pytest.mark.parametrize("way", ["loader", "plan"])
def test_failed_load_is_recovered_on_every_worker(sharded: Sharded, way: str) -> None:
    """The failure is one for both, and so is the session. What recovers it is broadcast, to
    each worker in its own place."""
    new = perturbed(sharded.weights, 43)
    if way == "loader":
        new = in_another_order(new)
    manifest = plan(new)

    async def scenario() -> None:
        if way == "plan":
            await paused_update(sharded.engine, perturbed(sharded.weights, 46), 2)
        faulty = Push(sharded.engine, new, manifest, received_by="faulty")
        await faulty.open()
        await steps(sharded.engine).arm(manifest)
        await sharded.engine.pause("keep", clear_cache=True)
        await steps(sharded.engine).start_update(recover=False)
        with pytest.raises(EngineError, match="poisoned on purpose"):
            await faulty.chunk(manifest.chunks - 1)
        assert await ways(sharded.llm) == {way}
        faulty.close()
        again = Push(sharded.engine, new, plan(new), backend="gloo", workers=2)
        await again.whole(3, recover=True)
        await sharded.engine.resume()
        await sharded.assert_serves(new)

    sharded.run(scenario())


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_trainer_of_two_ranks_reaches_two_engines(
    sharded: Sharded, tmp_path: Path, backend: str
) -> None:
    """FSDP2 over gloo; vLLM with two workers, and an engine of another kind beside it."""
    fused = perturbed(sharded.weights, 51)
    new = _per_expert(fused)

    async def scenario() -> None:
        beside = EmbeddedEngine(sharded.model, host=None)
        async with (
            a_broker() as (_, broker),
            Sidecar(sharded.engine, broker=broker, group="policy", name="sharded") as first,
            Sidecar(beside, broker=broker, group="policy", name="beside") as second,
        ):
            await first.joined()
            await second.joined()
            said = await train(tmp_path, [new], broker=broker, engines=2, backend=backend)
            version = said[0][0]["version"]
            assert said == [[{"gathered": len(new), "version": version}]] * 2
            assert await sharded.engine.version() == await beside.version() == version
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            deltas = [delta async for delta in beside.generate(PROMPT, params)]
            await sharded.assert_serves(fused)
            tokens = [token for delta in deltas for token in delta.token_ids]
            assert tokens == sharded.oracle.greedy(fused, 24)

    sharded.run(scenario())
