"""The embedded engine keeps the engine contract."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import pytest

from bus.messages import RequestLimits
from sidecar._embedded.engine import EmbeddedEngine
from sidecar._embedded.sampling import SamplingParams
from tests.contract.bus_suite import BusContract
from tests.contract.data_routes_suite import API_KEY, DataRoutesContract, Routes, bodies
from tests.contract.engine_suite import EngineContract, Generated, Watch
from tests.contract.staged_suite import StagedContract
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence

    from torch import Tensor

    from sidecar.engine import Engine


class Embedded:
    """An embedded engine under test, asked in process."""

    workers = 1
    long_tokens = 400
    late_tokens = 0
    quiet_s = 0.15
    wait_s = 120.0
    canary: Literal["abort", "keep"] = "keep"
    rejects = False

    def __init__(self, checkpoint: Checkpoint, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.checkpoint = checkpoint
        self.weights: Mapping[str, Tensor] = checkpoint.weights
        self.version = 0
        # On a busy machine staging takes its time, and long requests must outlast it.
        self.engine: Engine = EmbeddedEngine(
            checkpoint.folder, host=None, max_num_seqs=8, step_ms=2
        )

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(work)

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, *, watch: Watch | None = None
    ) -> Generated:
        assert isinstance(self.engine, EmbeddedEngine)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        tokens: list[int] = []
        async for delta in self.engine.generate(prompt, params):
            tokens += delta.token_ids
            if watch is not None:
                await watch.note(len(delta.token_ids))
        spans = [(span.version, span.start, span.end) for span in delta.weight_versions]
        return Generated(tokens, str(delta.finish_reason), spans)

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


@pytest.fixture(scope="module")
def under_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    """One engine for all tests, as a slow one would be."""
    with asyncio.Runner() as runner:
        checkpoint = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=1)
        embedded = Embedded(checkpoint, runner)
        runner.run(embedded.engine.start())
        yield embedded
        runner.run(embedded.engine.close())


@pytest.fixture(scope="module")
def routes(under_test: Embedded) -> Iterator[Routes]:
    engine = EmbeddedEngine(
        under_test.checkpoint.folder, host="0.0.0.0", api_key=API_KEY, max_num_seqs=8
    )

    async def start() -> None:
        info = await engine.start()
        url = info.endpoint.replace("0.0.0.0", "127.0.0.1")
        made.append(Routes(engine, url, info.limits, 0, bodies(), "", under_test.run))

    made: list[Routes] = []
    under_test.run(start())
    assert made[0].limits == RequestLimits(128, engine.max_model_len, 8, exact_seeds=True)
    yield made[0]
    under_test.run(engine.close())


class TestDataRoutes(DataRoutesContract):
    """The embedded engine's own."""


class TestEmbeddedEngine(EngineContract):
    """In process, without HTTP."""


class TestEmbeddedOnTheBus(BusContract):
    """Broker, sidecar and trainer around it."""


class TestStaged(StagedContract):
    """Between two steps; no pause."""
