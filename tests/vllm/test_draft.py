"""The weights of a draft model: a tiny Qwen3 that drafts for another, and an EAGLE head that takes
its embeddings and its output head from the model it drafts for.

The oracle: a draft that is equal to the model is right in every token that it proposes; and
whatever it proposes, greedy tokens are the model's.
"""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar import Sidecar
from sidecar._vllm.inprocess_engine import VllmEngine
from tests.support import pair_plugin
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint, make_eagle, perturbed
from tests.support.push import Push, plan
from tests.support.steps import steps
from tests.vllm._reader import READ_MODELS
from tests.vllm._vllm import (
    MAX_POSITIONS,
    Oracle,
    async_llm,
    boot_environment,
    engine_args,
    generate,
    paused_update,
    require_vllm,
)
from trainer_agent import SyncTrainerAgent, TrainerAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from tests.support.checkpoints import Checkpoint

require_vllm()
# vLLM's own imports warn of what they deprecate.
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]

TOKENS = 24
LONG = 400
AHEAD = 3
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


class Drafting:
    """An ``AsyncLLM`` that drafts. ``weights`` are its model's, ``draft`` its draft's."""

    def __init__(self, llm: Any, checkpoint: Checkpoint, draft: Mapping[str, Tensor]) -> None:
        self.llm = llm
        self.engine = VllmEngine(llm)
        self.weights: Mapping[str, Tensor] = checkpoint.weights
        self.draft = draft
        self.version = 0
        self._oracle = Oracle(checkpoint.folder)
        self._requests = 0

    async def accepted(self) -> tuple[int, int]:
        """How many tokens were drafted for a request, and how many of them were right; its own
        tokens are those of the model's weights, in the version that is served."""
        before = _drafted()
        self._requests += 1
        said = await generate(self.llm, f"r{self._requests}", TOKENS)
        assert list(said.token_ids) == self.greedy(TOKENS)
        if self.version:
            assert {span.version for span in said.weight_versions} == {str(self.version)}
        drafted, right = _drafted()
        return drafted - before[0], right - before[1]

    def greedy(self, count: int) -> list[int]:
        """What the model's weights say."""
        return self._oracle.greedy(self.weights, count)

    async def read(self) -> dict[str, dict[str, str]]:
        """What stands in both of its models."""
        (found,) = await self.llm.collective_rpc(READ_MODELS)
        return found  # type: ignore[no-any-return]


def _drafted() -> tuple[int, int]:
    from vllm.v1.metrics.reader import get_metrics_snapshot  # noqa: PLC0415 - after the boot

    found = {metric.name: getattr(metric, "value", 0) for metric in get_metrics_snapshot()}
    names = ("num_draft_tokens", "num_accepted_tokens")
    drafted, right = (found.get(f"vllm:spec_decode_{name}", 0) for name in names)
    return int(drafted), int(right)


@asynccontextmanager
async def drafting(
    folder: Path, method: str, draft: Path, backend: str = "wavebus"
) -> AsyncIterator[Any]:
    """An engine of the model in ``folder``, with the draft in its own."""
    spec = {"method": method, "model": str(draft), "num_speculative_tokens": AHEAD}
    args = engine_args(
        folder / "model",
        speculative_config=spec,
        weight_transfer_config={"backend": backend},
        disable_log_stats=False,
    )
    async with async_llm(boot_environment(folder), args) as llm:
        yield llm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The model's."""
    folder = tmp_path_factory.mktemp("draft")
    return make_checkpoint(folder / "model", seed=1, max_positions=MAX_POSITIONS)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def under_test(checkpoint: Checkpoint, runner: asyncio.Runner) -> Iterator[Drafting]:
    """A whole model drafts: one of other weights."""
    folder = checkpoint.folder.parent
    draft = make_checkpoint(folder / "drafts", seed=2, max_positions=MAX_POSITIONS)
    booted = drafting(folder, "draft_model", draft.folder)
    tested = Drafting(runner.run(booted.__aenter__()), checkpoint, draft.weights)
    try:
        info = runner.run(tested.engine.start())
        assert info.draft
        yield tested
    finally:
        runner.run(booted.__aexit__(None, None, None))
        del tested.llm, tested.engine
        gc.collect()


def test_a_draft_that_is_equal_to_the_model_is_always_right(
    under_test: Drafting, runner: asyncio.Runner
) -> None:
    """Over the bus, and in the middle of a request, whose tokens stay the model's."""

    async def scenario() -> None:
        drafted, right = await under_test.accepted()
        assert right < drafted / 2
        before = await under_test.read()
        async with (
            a_broker() as (_, address),
            Sidecar(under_test.engine, broker=address, name="engine"),
            TrainerAgent(address, name="trainer", chunk_bytes=1 << 14) as agent,
        ):
            (view,) = await agent.wait_for_engines(1)
            assert view.draft
            begun = asyncio.Event()

            async def note(_tokens: int) -> None:
                begun.set()

            request = asyncio.create_task(generate(under_test.llm, "kept", LONG, note=note))
            await begun.wait()
            under_test.version = await agent.update_weights(under_test.weights, target="draft")
            report = agent.last_update
            assert report is not None
            assert (report.target, report.version) == ("draft", under_test.version)
            under_test.draft = under_test.weights
            assert list((await request).token_ids) == under_test.greedy(LONG)
            drafted, right = await under_test.accepted()
            # But for what it would have drafted past the end.
            assert (drafted, right) == (drafted, TOKENS - drafted // AHEAD)
            assert drafted // AHEAD == TOKENS // (AHEAD + 1)
            after = await under_test.read()
            assert after["model"] == before["model"]
            assert after["draft"] == before["model"]  # which was loaded from that checkpoint

            # The other target is the model still, and its update leaves the draft alone.
            under_test.weights = perturbed(under_test.weights, 7)
            under_test.version = await agent.update_weights(under_test.weights)
            assert agent.last_update is not None
            assert agent.last_update.target == "model"
            drafted, right = await under_test.accepted()
            assert right < drafted / 2
            assert (await under_test.read())["draft"] == after["draft"]

    runner.run(scenario())


def test_a_draft_is_armed_against_the_drafts_own_tensors(
    under_test: Drafting, runner: asyncio.Runner
) -> None:
    """Half of a fused tensor is refused, by name, and nothing has changed."""

    async def scenario() -> None:
        before = await under_test.read()
        half = {n: t for n, t in under_test.draft.items() if n != K_PROJ}
        with pytest.raises(EngineError, match="missing") as refused:
            await steps(under_test.engine).arm(plan(half), "draft")
        assert refused.value.code is NackCode.MANIFEST_REFUSED
        assert refused.value.tensor == K_PROJ
        assert await under_test.read() == before
        await under_test.accepted()

    runner.run(scenario())


def test_what_was_armed_for_one_is_not_loaded_into_the_other(
    under_test: Drafting, runner: asyncio.Runner
) -> None:
    """They take the same tensors here, so nothing else would tell."""

    async def scenario() -> None:
        before = await under_test.read()
        push = Push(under_test.engine, perturbed(under_test.weights, 8))
        await push.open()
        await steps(under_test.engine).arm(push.manifest, "draft")
        await under_test.engine.pause("keep", clear_cache=True)
        await steps(under_test.engine).start_update(recover=False, target="model")
        with pytest.raises(EngineError, match="but the open session is of the model"):
            await push.chunk(0)
        await steps(under_test.engine).restore("model")
        await under_test.engine.resume()
        push.close()
        assert await under_test.read() == before

    runner.run(scenario())


def test_a_broken_draft_is_mended_by_a_whole_one(
    under_test: Drafting, runner: asyncio.Runner
) -> None:
    """A model that is updated in between is exact, and leaves the draft to be mended."""
    engine = under_test.engine
    lost, new = perturbed(under_test.draft, 9), perturbed(under_test.weights, 10)

    async def scenario() -> None:
        faulty = Push(engine, lost, plan(lost), received_by="faulty", target="draft")
        await engine.pause("keep", clear_cache=True)
        await faulty.begin()
        with pytest.raises(EngineError, match="poisoned on purpose"):
            await faulty.chunk(0)
        faulty.close()
        under_test.weights = new
        under_test.version += 1
        await Push(engine, new, plan(new)).whole(under_test.version, recover=True)
        under_test.version += 1
        await Push(engine, new, plan(new), target="draft").whole(under_test.version, recover=True)
        await engine.resume()
        drafted, right = await under_test.accepted()
        assert right == TOKENS - drafted // AHEAD
        found = await under_test.read()
        assert found["draft"] == found["model"]

    runner.run(scenario())


def test_a_head_upon_the_model_is_updated_without_what_it_shares(
    checkpoint: Checkpoint, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """EAGLE: what is the model's is refused by name, or it would be loaded into the model."""
    first = make_eagle(tmp_path / "head", seed=3)
    second = perturbed(first, 4)
    shared = {
        "embed_tokens.weight": checkpoint.weights["model.embed_tokens.weight"],
        "lm_head.weight": checkpoint.weights["lm_head.weight"],
    }

    async def scenario() -> None:
        async with drafting(checkpoint.folder.parent, "eagle", tmp_path / "head") as llm:
            under_test = Drafting(llm, checkpoint, first)
            engine = under_test.engine
            assert (await engine.start()).draft
            loaded = await under_test.read()
            for name, tensor in shared.items():
                with pytest.raises(EngineError, match="shares with the main model") as refused:
                    await steps(engine).arm(plan({**first, name: tensor}), "draft")
                assert refused.value.code is NackCode.MANIFEST_REFUSED
                assert refused.value.tensor == name
            await paused_update(engine, second, 1, "draft")
            under_test.version = 1
            await under_test.accepted()
            found = await under_test.read()
            assert found["model"] == loaded["model"]
            same = {
                layer for layer, sum_ in found["draft"].items() if sum_ == loaded["draft"][layer]
            }
            assert same == {"model.embed_tokens", "lm_head"}

            under_test.weights = perturbed(checkpoint.weights, 5)
            await paused_update(engine, under_test.weights, 2)
            under_test.version = 2
            await under_test.accepted()
            model, draft = (await under_test.read()).values()
            assert {layer: draft[layer] for layer in same} == {
                layer: model[layer] for layer in same
            }

            await paused_update(engine, checkpoint.weights, 3)
            await paused_update(engine, first, 4, "draft")
            assert await under_test.read() == loaded
            del under_test, engine, llm
        gc.collect()

    runner.run(scenario())


@pytest.mark.slow
def test_a_worker_engine_of_vllms_own_updates_a_draft(
    checkpoint: Checkpoint, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """By a client of the bus, whose updates are the draft's; so does a backend of wavebus's."""
    first = make_checkpoint(tmp_path / "drafts", seed=6, max_positions=MAX_POSITIONS)

    def send(agent: SyncTrainerAgent, weights: Mapping[str, Tensor]) -> int:
        from vllm.distributed.weight_transfer import (  # noqa: PLC0415 - after the boot
            WeightTransferTrainerFactory,
        )

        pair_plugin.register()
        trainer = WeightTransferTrainerFactory.trainer_init(
            agent.init_info("pair", buffer_bytes=1 << 14),
            client=agent.client(chunk_bytes=1 << 14, target="draft"),
            source=agent.source(weights),
        )
        trainer.send_weights()
        trainer.shutdown()
        assert agent.last_update is not None
        assert agent.last_update.target == "draft"
        return agent.last_update.version

    async def scenario() -> None:
        folder = checkpoint.folder.parent
        async with drafting(folder, "draft_model", first.folder, "pair") as llm:
            under_test = Drafting(llm, checkpoint, first.weights)
            async with (
                a_broker() as (_, address),
                Sidecar(under_test.engine, broker=address, name="engine") as sidecar,
            ):
                await sidecar.joined()
                agent = SyncTrainerAgent(address, timeout_s=60.0)
                await asyncio.to_thread(agent.connect)
                try:
                    await asyncio.to_thread(agent.wait_for_engines, 1)
                    under_test.version = await asyncio.to_thread(send, agent, checkpoint.weights)
                    drafted, right = await under_test.accepted()
                    assert right == TOKENS - drafted // AHEAD
                    found = await under_test.read()
                    assert found["draft"] == found["model"]
                    under_test.version = await asyncio.to_thread(
                        lambda: agent.update_weights(first.weights, target="draft")
                    )
                    drafted, right = await under_test.accepted()
                    assert right < drafted / 2
                    assert (await under_test.read())["model"] == found["model"]
                finally:
                    await asyncio.to_thread(agent.close)
            del under_test, llm
        gc.collect()

    runner.run(scenario())
