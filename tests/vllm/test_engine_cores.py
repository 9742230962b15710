"""Two engine cores behind one client: internal data parallelism, whose workers can't agree."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._vllm.inprocess_engine import VllmEngine
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.push import Push, plan
from tests.support.steps import steps
from tests.vllm._vllm import (
    MAX_POSITIONS,
    PROMPT,
    Oracle,
    async_llm,
    boot_environment,
    engine_args,
    paused_update,
    require_vllm,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

require_vllm()
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]


class Cores:
    """One ``AsyncLLM`` of two cores, its trainer's weights, and the oracle."""

    def __init__(self, llm: Any, model: Path, runner: asyncio.Runner) -> None:
        self.llm = llm
        self.engine = VllmEngine(llm)
        self.oracle = Oracle(model)
        self.weights = self.oracle.names()
        self._runner = runner

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(work)

    async def assert_serve(self, weights: Mapping[str, Tensor]) -> None:
        """Each of them."""
        from vllm import SamplingParams  # noqa: PLC0415 - after require_vllm

        params = SamplingParams(temperature=0.0, max_tokens=24, detokenize=False, ignore_eos=True)
        expected = self.oracle.greedy(weights, 24)
        asked = {"prompt_token_ids": list(PROMPT)}
        for rank in range(2):
            name = f"r{rank}-{id(weights)}"
            async for output in self.llm.generate(asked, params, name, data_parallel_rank=rank):
                last = output.outputs[0]
            assert list(last.token_ids) == expected


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cores]:
    folder = tmp_path_factory.mktemp("vllm")
    model = make_checkpoint(folder / "model", seed=1, max_positions=MAX_POSITIONS).folder
    with asyncio.Runner() as runner:
        booted = async_llm(boot_environment(folder), engine_args(model, data_parallel_size=2))
        llm = runner.run(booted.__aenter__())
        tested = Cores(llm, model, runner)
        try:
            info = runner.run(tested.engine.start())
            assert (info.workers, info.dp_size) == (2, 1)
            yield tested
        finally:
            runner.run(booted.__aexit__(None, None, None))
            # While warnings are no errors yet: vLLM leaves its sockets to the collector.
            del tested.llm, tested.engine, llm
            gc.collect()


def test_an_update_reaches_both(cores: Cores) -> None:
    """By vLLM's loader, and by the plan that this proves."""

    async def scenario() -> None:
        await cores.assert_serve(cores.weights)
        for version in (1, 2):
            new = perturbed(cores.weights, 60 + version)
            await paused_update(cores.engine, new, version)
            await cores.assert_serve(new)
        cores.weights = new

    cores.run(scenario())


def test_a_mismatch_in_one_core_keeps_both_from_loading(cores: Cores) -> None:
    """The other would load in the same call; so that both are asked before."""
    old, new = cores.weights, perturbed(cores.weights, 63)
    manifest = plan(new)

    async def scenario() -> None:
        push = Push(cores.engine, new, manifest, received_by="one-sided")
        await push.open()
        await steps(cores.engine).arm(manifest)
        await cores.engine.pause("keep", clear_cache=True)
        await steps(cores.engine).start_update(recover=False)
        with pytest.raises(EngineError) as refused:
            await push.chunk(0)
        assert refused.value.code is NackCode.CHECKSUM_MISMATCH
        await steps(cores.engine).restore()
        push.close()
        await cores.engine.resume()
        await cores.assert_serve(old)

    cores.run(scenario())
