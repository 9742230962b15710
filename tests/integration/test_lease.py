"""The ranks of a DP group whose pause nobody holds any more end it as one, without a broker."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch

from bus._keys import read_keyring
from bus._protocol.core.config import BrokerConfig
from bus.errors import EngineError, WavebusError
from bus.messages import NackCode
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from sidecar.engine import EngineInfo
from tests.integration.test_dp_restart import group, moe
from tests.integration.test_killed import engines, generate, held_pause
from tests.support.broker import a_broker
from tests.support.keys import KeyFolder
from tests.support.steps import ByStep
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine
    from pathlib import Path

    from bus.messages import LeasePosition, LeaseVote
    from bus.operations import LoadChunk, Restore
    from tests.integration.conftest import Bus
    from tests.support.checkpoints import Checkpoint

__all__ = ["moe"]

Secured: TypeAlias = KeyFolder | None

TIMEOUT_S = 120.0
FAST = BrokerConfig(heartbeat_ms=200, peer_timeout_ms=4000, retry_ms=100)
# On a loaded machine this process may get no processor for some seconds.
LEASE_MS = 8000


class Rank(ByStep, StubEngine):
    """One of two, which tells what it is asked to do. Its load of a chunk waits for ``may_load``;
    one that ``fails`` then finds that the chunk never came."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.fails = False
        self.loading = asyncio.Event()
        self.may_load = asyncio.Event()
        self.restoring = asyncio.Event()
        self.may_restore = asyncio.Event()
        self.may_restore.set()
        self.resumed = asyncio.Event()
        self.aborted = asyncio.Event()

    async def start(self) -> EngineInfo:
        return EngineInfo("stub", "test", "none", self.rank, 2, 1, ("shm",), "")

    async def resume(self) -> None:
        self.resumed.set()

    async def on_load(self, chunk: LoadChunk) -> None:
        self.loading.set()
        await self.may_load.wait()
        if self.fails:
            raise EngineError("it never came", code=NackCode.TRANSFER_FAILED)
        await self.proceed(chunk)

    async def on_restore(self, restore: Restore) -> None:
        self.restoring.set()
        await self.may_restore.wait()
        await self.proceed(restore)

    async def abort_requests(self) -> int:
        self.aborted.set()
        return 0


class Pair:
    """Two ranks with their sidecars, a trainer, and a broker that can be lost."""

    def __init__(self, secured: Secured) -> None:
        self.ranks = [Rank(0), Rank(1)]
        self.sidecars: list[Sidecar] = []
        self._secured = secured
        self._words: list[asyncio.Queue[LeasePosition]] = [asyncio.Queue(), asyncio.Queue()]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[TrainerAgent]:
        keys = self._secured
        engine_key = keys.make("engine", "engine") if keys else None
        trainer_key = keys.make("trainer", "trainer") if keys else None
        public = keys.public if keys else None
        keyring = read_keyring(keys.broker) if keys else None
        async with contextlib.AsyncExitStack() as stack:
            broker = a_broker(keyring=keyring, config=FAST)
            self.broker, address = await stack.enter_async_context(broker)
            for rank in self.ranks:
                sidecar = Sidecar(
                    rank,
                    broker=address,
                    name=f"e{rank.rank}",
                    dp_group="moe",
                    key=engine_key,
                    broker_key=public,
                )
                self.sidecars.append(await stack.enter_async_context(sidecar))
                self._overhear(sidecar)
            trainer = TrainerAgent(
                address,
                name="trainer",
                lease_ms=LEASE_MS,
                timeout_s=60,
                key=trainer_key,
                broker_key=public,
            )
            agent = await stack.enter_async_context(trainer)
            await agent.wait_for_engines(2)
            yield agent

    async def answer_of(self, rank: int) -> LeasePosition:
        """What its peer rank hears of it next."""
        return await self._words[rank].get()

    def _overhear(self, sidecar: Sidecar) -> None:
        link = sidecar._peer_links
        assert link is not None
        heard = link._on_vote

        def on_vote(word: LeaseVote) -> None:
            heard(word)
            self._words[word.dp_rank].put_nowait(word.position)

        link._on_vote = on_vote


@pytest.fixture(autouse=True)
def _short_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer tries for long to undo what it began, and here nobody will answer."""
    monkeypatch.setattr("trainer_agent._guaranteed_delivery.CLEANUP_S", 0.1)


@pytest.fixture(params=["open", "keys"])
def secured(request: pytest.FixtureRequest, tmp_path: Path) -> Secured:
    return KeyFolder(tmp_path) if request.param == "keys" else None


async def held(agent: TrainerAgent, paused: asyncio.Event) -> None:
    async with agent.paused(mode="keep"):
        paused.set()
        await asyncio.Event().wait()


async def update(agent: TrainerAgent) -> None:
    await agent.update_weights([("weight", torch.zeros(4))])


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """A trainer's work, which will not end well."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, WavebusError):
            await task


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, TIMEOUT_S))


@pytest.mark.ci
def test_ranks_without_a_broker_resume_together(secured: Secured) -> None:
    """Also where keys are needed: each peer rank's are known."""

    async def scenario() -> None:
        pair, paused = Pair(secured), asyncio.Event()
        async with pair.running() as agent, beside(held(agent, paused)):
            await paused.wait()
            pair.broker.close()
            for rank in pair.ranks:
                await rank.resumed.wait()

    run(scenario())


@pytest.mark.ci
def test_a_rank_waits_for_a_peer_that_has_something_to_undo() -> None:
    """Its own lease is over, and nothing of its own is left: it is the peer's word that lacks."""

    async def scenario() -> None:
        pair = Pair(None)
        first, second = pair.ranks
        first.fails = second.fails = True
        second.may_restore.clear()
        async with pair.running() as agent, beside(update(agent)):
            for rank in pair.ranks:
                await rank.loading.wait()
            pair.broker.close()
            for rank in pair.ranks:
                rank.may_load.set()
                await rank.restoring.wait()
            while await pair.answer_of(1) != "pausing":  # asked by a rank that is clean
                pass
            assert pair.sidecars[0].session.phase == "paused"
            assert not first.resumed.is_set()
            second.may_restore.set()
            for rank in pair.ranks:
                await rank.resumed.wait()
            assert not first.aborted.is_set()

    run(scenario())


@pytest.mark.ci
def test_a_rank_that_loaded_a_part_keeps_its_peer_paused() -> None:
    """The other one has loaded nothing; alone it would resume. Its requests are ended, too."""

    async def scenario() -> None:
        pair = Pair(None)
        second = pair.ranks[1]
        second.fails = True
        async with pair.running() as agent, beside(update(agent)):
            for rank in pair.ranks:
                await rank.loading.wait()
            pair.broker.close()
            for rank in pair.ranks:
                rank.may_load.set()
            await second.restoring.wait()
            for rank in pair.ranks:
                await rank.aborted.wait()
            assert await pair.answer_of(0) == "partial"
            phases = [each.session.phase for each in pair.sidecars]
            assert phases == ["quarantined", "paused"]
            assert not second.resumed.is_set()

    run(scenario())


@pytest.mark.slow
def test_supervised_ranks_whose_broker_and_trainer_are_killed_generate_again(
    bus: Bus, moe: Checkpoint
) -> None:
    """Real processes: nobody tells them, and both serve."""
    supervisor = group(bus, moe)
    endpoints = [engine.endpoint for engine in engines(bus).values()]
    trainer = held_pause(bus)
    assert trainer.first_line() == "paused"
    bus.broker.kill()
    trainer.kill()
    for endpoint in endpoints:
        assert len(generate(endpoint)) == 8
    assert supervisor.stop() == 0
