"""Pause and resume, again and again, of embedded ranks in lockstep, with requests coming to
any of them at any time, over links that delay and break.

Guarantees 1, 2, 3 and 9: no hang, and every request ends with exactly the tokens that an
undisturbed run makes.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest

from tests.support.checkpoints import Checkpoint, make_checkpoint
from tests.support.procs import wavebus
from tests.support.proxy import BadProxy
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from tests.integration.conftest import Bus

RANKS: Final = 4
ROUNDS: Final = int(os.environ.get("WAVEBUS_CHAOS_ROUNDS", "12"))
PROMPTS: Final = [[5, 9, 7], [11], [3, 3, 4, 8], [21, 6], [9, 14, 2, 30, 7]]
LONGEST: Final = 60


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("moe"), seed=8, experts=4)


class Requests:
    """Requests on random ranks at random times, each checked against the undisturbed run."""

    def __init__(self, urls: list[str], expected: list[list[int]], seed: int) -> None:
        self.ended = 0
        self._urls = urls
        self._expected = expected
        self._random = random.Random(seed)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """No new ones; those under way end."""
        self._stop.set()

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Sometimes many at once, sometimes none for a while."""
        async with asyncio.TaskGroup() as tasks:
            while not self._stop.is_set():
                for _ in range(self._random.choice([0, 1, 1, 2, 5])):
                    tasks.create_task(self._one(session))
                pause_s = self._random.choice([0.0, 0.01, 0.05, 0.3])
                await asyncio.wait([asyncio.create_task(self._stop.wait())], timeout=pause_s)

    async def _one(self, session: aiohttp.ClientSession) -> None:
        which = self._random.randrange(len(PROMPTS))
        count = self._random.randint(1, LONGEST)
        body: dict[str, Any] = {
            "token_ids": PROMPTS[which],
            "sampling_params": {"max_tokens": count, "temperature": 0.0, "ignore_eos": True},
        }
        url = self._random.choice(self._urls) + "/inference/v1/generate"
        async with session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            choice = (await response.json())["choices"][0]
        assert choice["token_ids"] == self._expected[which][:count]
        self.ended += 1


@pytest.mark.ci
def test_rounds_over_bad_links(bus: Bus, moe: Checkpoint) -> None:
    """See the module. Rounds of keep and of wait, with and without the cache."""
    expected = [moe.greedy(moe.weights, prompt, LONGEST) for prompt in PROMPTS]
    rng = random.Random(7)

    async def play() -> tuple[int, int, int, int]:
        target = bus.address.removeprefix("tcp://")
        async with BadProxy(target, seed=3) as proxy:
            bus.add(
                wavebus(
                    *("sidecar", "--broker", proxy.address, "--dp-group", "moe"),
                    *("--engine", "embedded", "--model", str(moe.folder)),
                    *("--dp-size", str(RANKS)),
                )
            )
            async with (
                TrainerAgent(proxy.address, timeout_s=90.0) as agent,
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session,
            ):
                views = await agent.wait_for_engines(RANKS, timeout_s=90.0)
                requests = Requests([view.endpoint for view in views], expected, seed=5)
                running = asyncio.create_task(requests.run(session))
                found = 0
                for number in range(ROUNDS):
                    async with agent.paused(
                        mode=rng.choice(["keep", "keep", "wait"]),
                        clear_cache=rng.random() < 0.5,
                        wait_s=0.05 + 0.2 * rng.random(),
                    ) as ack:
                        found += ack.in_flight > 0
                    assert not running.done(), f"after round {number}: {running.exception()}"
                requests.stop()
                await asyncio.wait_for(running, 120)
                return requests.ended, found, proxy.cuts, proxy.pieces

    ended, found, cuts, pieces = asyncio.run(play())
    assert ended > ROUNDS
    assert found > ROUNDS / 4, "too few rounds met a request"
    assert cuts > ROUNDS / 20, "too few links were cut"
    assert pieces > 10 * ROUNDS
