"""Two embedded ranks in lockstep keep the engine contract together.

Every control call goes to both, as the bus does it; requests go to the second, so that
rank 0 runs along with dummy batches.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import pytest

from tests.contract.engine_suite import EngineContract, Generated, Watch
from tests.contract.staged_suite import StagedContract
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.dp_engine import GroupEngine
from tests.support.dp_group import DpGroup

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence

    from torch import Tensor

    from sidecar.engine import Engine


class Lockstep:
    """Two ranks under test, in processes of their own."""

    workers = 2
    long_tokens = 300
    late_tokens = 2  # on their way through the rank's stdout
    quiet_s = 0.15
    wait_s = 120.0
    canary: Literal["abort", "keep"] = "keep"
    rejects = False

    def __init__(self, checkpoint: Checkpoint, group: DpGroup, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._rank = group.ranks[1]
        self.checkpoint = checkpoint
        self.weights: Mapping[str, Tensor] = checkpoint.weights
        self.version = 0
        self.engine: Engine = GroupEngine(group)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(work)

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, *, watch: Watch | None = None
    ) -> Generated:
        request = self._rank.generate(prompt, max_tokens)
        async for fresh in request.arrivals():
            if watch is not None:
                await watch.note(fresh)
        result = await request.result()
        spans = [(version, start, end) for version, start, end in result["spans"]]
        return Generated(result["tokens"], result["finish_reason"], spans)

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
def under_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lockstep]:
    folder = tmp_path_factory.mktemp("lockstep")
    with asyncio.Runner() as runner:
        checkpoint = make_checkpoint(folder / "model", seed=8, experts=4)
        group = DpGroup(folder, checkpoint.folder, 2)
        lockstep = Lockstep(checkpoint, group, runner)
        runner.run(lockstep.engine.start())
        yield lockstep
        runner.run(lockstep.engine.close())


@pytest.mark.ci
class TestLockstep(EngineContract):
    """Over gloo, with a DP coordinator that rank 0 has started."""


@pytest.mark.ci
class TestStaged(StagedContract):
    """Between two steps; no pause."""
