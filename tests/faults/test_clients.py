"""Clients of a gateway that forget what they have begun, cell by cell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE
from typing import TYPE_CHECKING, Self

import pytest
from safetensors.torch import load_file, save_file

from tests.faults.clients import CLIENT_CELLS, CLIENT_SHARE, ClientCell
from tests.faults.test_faults import ALL
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.http_fleet import PROMPT, Fleet, fleet
from tests.support.oracle import Span, foreign_tokens
from trainer_agent import RolloutClient

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from trainer_agent._rollouts.results import Choice

SILENCE_S = 2.0
LIMIT_S = 120.0
TOKENS = 48
FIRST, NEXT = 11, 12  # the seeds of the weights of the client that is killed, and of the next one


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=1)


class Trainer:
    """A trainer's process."""

    def __init__(self, process: Process, folder: Path) -> None:
        self.process = process
        self._folder = folder

    def tell(self, call: str) -> None:
        assert self.process.stdin is not None
        line = f"folder {self._folder}" if call == "folder" else call
        self.process.stdin.write(f"{line}\n".encode())

    async def answer(self) -> tuple[int, str]:
        assert self.process.stdout is not None
        _, status, text = json.loads(await self.process.stdout.readline())
        return status, text

    async def call(self, name: str) -> None:
        self.tell(name)
        status, text = await self.answer()
        assert status == 200, text

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@contextlib.asynccontextmanager
async def trainer(
    served: Fleet, checkpoint: Checkpoint, folder: Path, seed: int
) -> AsyncIterator[Trainer]:
    arguments = (served.url, str(checkpoint.folder), str(seed))
    program = (sys.executable, "-m", "tests.support.http_trainer", *arguments)
    process = await asyncio.create_subprocess_exec(*program, stdin=PIPE, stdout=PIPE)
    started = Trainer(process, folder)
    try:
        yield started
    finally:
        await started.kill()


class Load:
    """Requests, one after the other, as long as the block; each of their tokens is checked."""

    def __init__(self, served: Fleet, checkpoint: Checkpoint) -> None:
        self._served = served
        self._checkpoint = checkpoint
        self._choices: list[Choice] = []

    async def __aenter__(self) -> Self:
        self._rollouts = await RolloutClient(self._served.broker).__aenter__()
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(3)]
        return self

    async def _ask(self) -> None:
        while True:
            params = {"max_tokens": TOKENS, "temperature": 0.0}
            answer = await self._rollouts.generate(PROMPT, params)
            self._choices.append(answer.choices[0])

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result
        await self._rollouts.__aexit__(None, None, None)

    def check(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """No token is of other weights than those of its version."""
        assert self._choices
        for choice in self._choices:
            spans = [Span(s.version, s.start, s.end) for s in choice.spans if s.version is not None]
            mixed = foreign_tokens(
                self._checkpoint,
                weights.__getitem__,
                PROMPT,
                choice.token_ids,
                spans,
                clear_cache=lambda _: True,
            )
            assert not mixed, choice


@pytest.mark.ci
@pytest.mark.parametrize("cell", CLIENT_CELLS if ALL else CLIENT_SHARE, ids=str)
def test_a_client_that_is_killed(cell: ClientCell, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """No engine is stuck or serves a mixture, no request is lost; the next client can update."""
    base = load_file(checkpoint.folder / "model.safetensors")  # in the order of the trainers'
    first, after = (perturbed(base, seed) for seed in (FIRST, NEXT))
    save_file(first, tmp_path / "model.safetensors")

    async def scenario() -> None:
        async with (
            fleet(checkpoint, silence_s=SILENCE_S) as served,
            Load(served, checkpoint) as load,
            trainer(served, checkpoint, tmp_path, NEXT) as second,
        ):
            async with trainer(served, checkpoint, tmp_path, FIRST) as killed:
                *before, last = cell.calls
                for call in before:
                    await killed.call(call)
                engine = served.engines[0]
                if cell.held:
                    engine.hold(cell.held)
                    killed.tell(last)
                    await engine.reached.wait()
                elif cell.within:
                    killed.tell(last)
                    await killed.answer()
                else:
                    await killed.call(last)
                await killed.kill()
                engine.may_go.set()
            if cell.is_held_up:
                await served.forgets()
            serves = {"old": checkpoint.weights, "new": first}.get(cell.outcome)
            if serves is not None:
                await served.assert_serve(serves)
            for call in ("pause", "init", "start", "update", "finish", "resume"):
                await second.call(call)
            await served.assert_serve(after)
            version = await served.engines[0].version()
        committed = dict.fromkeys(range(1, version), first)
        load.check({0: checkpoint.weights, **committed, version: after})

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
