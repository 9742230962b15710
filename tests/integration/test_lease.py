"""The ranks of a DP group whose pause nobody holds any more end it as one, without a broker."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from bus._protocol.core.config import BrokerConfig
from bus.errors import EngineError, WavebusError
from bus.messages import NackCode
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from sidecar._lease_agreement import LeaseAgreement, RankLease
from sidecar._shared_pages.pause_lease import LeaseInMemory
from sidecar.engine import EngineInfo
from tests.integration.test_dp_restart import group, moe
from tests.integration.test_killed import engines, generate, held_pause
from tests.support.broker import a_broker
from tests.support.lease_store import LeaseStore
from tests.support.steps import ByStep
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from bus.messages import PauseMode
    from bus.operations import LoadChunk, Restore
    from sidecar._shared_pages.pause_lease import LeaseOutcome, PauseLease
    from tests.integration.conftest import Bus
    from tests.support.checkpoints import Checkpoint

__all__ = ["moe"]

PERIOD_S: Final = 0.05
TIMEOUT_S = 120.0
FAST = BrokerConfig(heartbeat_ms=200, peer_timeout_ms=4000, retry_ms=100)
# On a loaded machine this process may get no processor for some seconds.
LEASE_MS = 8000


class Rank(ByStep, StubEngine):
    """One of two, which tells what it is asked to do. Its load of a chunk waits for ``may_load``;
    one that ``fails`` then finds that the chunk never came."""

    def __init__(self, rank: int, store: LeaseStore) -> None:
        self.rank = rank
        self.fails = False
        self.page = LeaseInMemory()
        self.core = Core(self)
        votes = LeaseAgreement(rank, 2, store)
        self.lease = RankLease(self.core, self.page, votes, lambda *_: None)
        self.loading = asyncio.Event()
        self.may_load = asyncio.Event()
        self.restoring = asyncio.Event()
        self.may_restore = asyncio.Event()
        self.may_restore.set()
        self.resumed = asyncio.Event()
        self.aborted = asyncio.Event()

    async def start(self) -> EngineInfo:
        return EngineInfo("stub", "test", "none", self.rank, 2, 1, ("shm",), "")

    def write_pause_lease(self, lease: PauseLease | None) -> LeaseOutcome | None:
        return self.page.write_lease(lease)

    async def run_core(self) -> None:
        """As the core's own threads do, whatever the sidecar does."""
        while True:
            self.lease.exchange()
            if self.lease.is_due():
                self.lease.look()
            await asyncio.sleep(PERIOD_S)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:  # noqa: ARG002
        self.core.is_paused = True
        return 0

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

    async def waits(self, reason: str) -> None:
        """Until its core has written that it waits, and why."""
        await until(lambda: reason in getattr(self.page.outcome(), "reason", ""))
        end = self.page.outcome()
        assert end is not None
        assert end.state == "waiting"


class Core:
    """Implements :class:`sidecar._lease_agreement.RankCore`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.resumes = 0
        self.is_resuming = self.is_paused = False

    @property
    def is_complete(self) -> bool:
        return self.is_paused

    def pause(self) -> None:
        raise AssertionError("both ranks are paused by their sidecars")

    def prepare(self, lease: PauseLease) -> None:
        assert not lease.begun, "the sidecar undoes it first"

    def resume(self) -> None:
        self.is_paused = False
        self.resumes += 1
        self._rank.resumed.set()

    def quarantine(self) -> None:
        self._rank.aborted.set()


class Pair:
    """Two ranks with their sidecars, a trainer, and a broker that can be lost."""

    def __init__(self) -> None:
        store = LeaseStore()
        self.ranks = [Rank(0, store), Rank(1, store)]
        self.sidecars: list[Sidecar] = []

    async def reach(self, *phases: str) -> None:
        """Until the sidecars have found out, too."""
        await until(lambda: [each.session.phase for each in self.sidecars] == list(phases))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[TrainerAgent]:
        async with contextlib.AsyncExitStack() as stack:
            self.broker, address = await stack.enter_async_context(a_broker(config=FAST))
            for rank in self.ranks:
                core = asyncio.create_task(rank.run_core())
                stack.callback(core.cancel)
                sidecar = Sidecar(rank, broker=address, name=f"e{rank.rank}", dp_group="moe")
                self.sidecars.append(await stack.enter_async_context(sidecar))
            trainer = TrainerAgent(address, name="trainer", lease_ms=LEASE_MS, timeout_s=60)
            agent = await stack.enter_async_context(trainer)
            await agent.wait_for_engines(2)
            yield agent


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(PERIOD_S)


@pytest.fixture(autouse=True)
def _short_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer tries for long to undo what it began, and here nobody will answer."""
    monkeypatch.setattr("trainer_agent._guaranteed_delivery.CLEANUP_S", 0.1)


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
def test_ranks_without_a_broker_resume_together() -> None:
    """Their cores agree; each sidecar reads that on its page."""

    async def scenario() -> None:
        pair, paused = Pair(), asyncio.Event()
        async with pair.running() as agent, beside(held(agent, paused)):
            await paused.wait()
            pair.broker.close()
            for rank in pair.ranks:
                await rank.resumed.wait()
            await pair.reach("running", "running")
            assert [rank.core.resumes for rank in pair.ranks] == [1, 1]

    run(scenario())


@pytest.mark.ci
def test_a_rank_waits_for_a_peer_that_has_something_to_undo() -> None:
    """Its own lease is over, and nothing of its own is left: it is the peer's vote that lacks."""

    async def scenario() -> None:
        pair = Pair()
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
            await first.waits("rank 1 has not voted")
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
        pair = Pair()
        first, second = pair.ranks
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
            await pair.reach("quarantined", "paused")
            assert not first.resumed.is_set()
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
