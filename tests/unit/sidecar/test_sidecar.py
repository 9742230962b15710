"""A sidecar beside a real broker: what it sends, how it ends, and what it leaves to others."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest
import torch
from msgspec.structs import replace

from bus._protocol.core.config import BrokerConfig
from bus._protocol.core.link import LinkConfig
from bus._runtime.peer import PeerClient
from bus.errors import BusClosed, EngineError, Refused
from bus.messages import NackCode, PauseLocal, StartDpWave
from bus.messages.types import MAX_REQUEST_IDS
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from sidecar import _sidecar as module
from sidecar._shared_pages.pause_lease import LeaseOutcome
from sidecar.engine import EngineInfo
from tests.support.broker import a_broker
from tests.support.steps import ByStep
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from bus._protocol.core.effects import Note
    from bus.messages import PauseMode
    from sidecar._shared_pages.pause_lease import PauseLease

TIMEOUT_S = 60.0
REQUESTS = tuple(f"{n:0300}" for n in range(MAX_REQUEST_IDS + 1))


class Recorded(ByStep, StubEngine):
    """Tells what was called; drains in `wait` until it is paused otherwise."""

    def __init__(self, rank: int = 0, size: int = 1, endpoint: str = "") -> None:
        self.info = EngineInfo("stub", "test", "none", rank, size, 1, ("shm",), endpoint)
        self.info = replace(self.info, can_sleep=True)
        self.calls: list[str] = []
        self._drained = asyncio.Event()

    async def start(self) -> EngineInfo:
        return self.info

    async def request_ids(self) -> tuple[str, ...]:
        return REQUESTS

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:  # noqa: ARG002
        if mode == "wait":
            await self._drained.wait()
        self._drained.set()
        return 0

    async def resume(self) -> None:
        self.calls.append("resume")

    async def wake(self) -> None:
        self.calls.append("wake")

    async def admit(self, *, open: bool) -> None:  # noqa: A002 - as in the protocol
        self.calls.append("open" if open else "close")


class Joining(Recorded):
    """Boots closed, and refuses its run so often."""

    def __init__(self, refusals: int = 0) -> None:
        super().__init__()
        self.info = replace(self.info, booted_closed=True)
        self.runs: list[str] = []
        self.refusals = refusals

    async def join_run(self, run: str) -> None:
        self.calls.append("join run")
        self.runs.append(run)
        if self.refusals:
            self.refusals -= 1
            raise EngineError("no")


class Leased(Recorded):
    """Keeps its lease page, and may end its pause by itself before an update begins. A load ends
    when the page has been written during it."""

    def __init__(self, *, ends_pause: bool = False) -> None:
        super().__init__()
        self.page: PauseLease | None = None
        self.serials: list[int] = []  # of its pause calls
        self.partial: list[tuple[str, ...]] = []  # on the page: before, and in each load
        self._ends_pause = ends_pause
        self._written = asyncio.Event()

    def write_pause_lease(self, lease: PauseLease | None) -> LeaseOutcome | None:
        if self._ends_pause and lease is not None and lease.begun:
            return LeaseOutcome(lease.serial, "resumed", "no sidecar renewed the lease")
        self.page = lease
        self._written.set()
        return None

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:  # noqa: ARG002
        assert self.page is not None
        self.serials.append(self.page.serial)
        return 0

    async def on_start(self, *_: object) -> None:
        self.calls.append("start")

    async def on_load(self, *_: object) -> None:
        for _moment in ("before", "during"):
            assert self.page is not None
            self.partial.append(self.page.partial)
            self._written.clear()
            await self._written.wait()


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, TIMEOUT_S))


def test_a_wait_pause_with_more_requests_than_a_frame_may_name_completes() -> None:
    """The engine names as many as it may, each by as much of its id."""

    async def scenario() -> None:
        async with (
            a_broker() as (_, address),
            Sidecar(Recorded(), broker=address, name="engine"),
            TrainerAgent(address, name="trainer", timeout_s=20) as agent,
        ):
            await agent.wait_for_engines(1)
            async with agent.paused(mode="wait", wait_s=0.01) as done:
                assert done.escalated == ("engine",)
                assert done.waited_for == tuple(each[:256] for each in REQUESTS[:-1])

    run(scenario())


def test_what_the_broker_refuses_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its reason: the sidecar has sent what it may not."""
    found: asyncio.Queue[Note] = asyncio.Queue()
    monkeypatch.setattr(PeerClient, "note", lambda _self, note: found.put_nowait(note))

    async def scenario() -> None:
        async with (
            a_broker() as (_, address),
            Sidecar(Recorded(), broker=address, name="engine") as sidecar,
        ):
            await sidecar.joined()
            assert sidecar._peer is not None
            sidecar._peer.send(StartDpWave("moe", 1, None))
            while (note := await found.get()).event != "broker_nack":
                pass
            assert note.fields["code"] == NackCode.FORBIDDEN.value

    run(scenario())


def test_an_engine_joins_the_run_of_its_group_before_it_opens() -> None:
    """All engines the same one, and each is asked once."""

    async def scenario() -> None:
        engines = [Joining(), Joining()]
        async with contextlib.AsyncExitStack() as stack, a_broker() as (_, address):
            for number, engine in enumerate(engines):
                sidecar = Sidecar(engine, broker=address, name=f"e{number}")
                await stack.enter_async_context(sidecar)
                await sidecar.joined()
            async with TrainerAgent(address, name="trainer", timeout_s=20) as agent:
                await agent.wait_for_engines(2)
                [group] = (await agent.status()).groups
        assert [engine.calls[:2] for engine in engines] == [["join run", "open"]] * 2
        assert [engine.runs for engine in engines] == [[group.run]] * 2
        assert group.run

    run(scenario())


def test_an_engine_that_can_not_join_its_run_serves_and_is_asked_again() -> None:
    """When it has made its next call: nothing waits for it."""

    async def scenario() -> None:
        engine = Joining(refusals=1)
        async with (
            a_broker() as (_, address),
            Sidecar(engine, broker=address, name="engine"),
            TrainerAgent(address, name="trainer", timeout_s=20) as agent,
        ):
            await agent.wait_for_engines(1)
            async with agent.paused():
                pass
        assert engine.calls[:3] == ["join run", "open", "join run"]
        assert engine.runs[0] == engine.runs[1]

    run(scenario())


def test_the_page_says_what_is_loaded_for_as_long_as_that_takes() -> None:
    """Should the sidecar die in the middle, the engine must not take its weights for whole. Each
    pause has a lease of its own."""

    async def scenario() -> None:
        engine = Leased()
        async with (
            a_broker(config=BrokerConfig(heartbeat_ms=100)) as (_, address),
            Sidecar(engine, broker=address, name="engine"),
            TrainerAgent(address, name="trainer", timeout_s=20) as agent,
        ):
            await agent.wait_for_engines(1)
            for _ in range(2):
                await agent.update_weights({"w": torch.ones(4)})
        assert engine.partial == [("model",)] * 4
        assert len(set(engine.serials)) == 2

    run(scenario())


def test_no_update_is_begun_in_an_engine_that_has_ended_its_pause() -> None:
    """It runs steps again."""

    async def scenario() -> None:
        engine = Leased(ends_pause=True)
        async with (
            a_broker() as (_, address),
            Sidecar(engine, broker=address, name="engine"),
            TrainerAgent(address, name="trainer", timeout_s=20) as agent,
        ):
            await agent.wait_for_engines(1)
            with pytest.raises(Refused, match="the pause's lease was over") as found:
                await agent.update_weights({"w": torch.ones(4)})
        assert found.value.code is NackCode.WRONG_STATE
        assert "start" not in engine.calls

    run(scenario())


@pytest.mark.parametrize("task", ["caller", "watch"])
def test_a_sidecar_with_a_broken_task_ends_and_says_why(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go on without its engine calls, or without renewing its lease."""

    def breaks(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    async def scenario() -> None:
        engine = Recorded()
        if task == "watch":
            monkeypatch.setattr(engine, "core_view", breaks)
        async with (
            a_broker() as (_, address),
            Sidecar(engine, broker=address, name="engine") as sidecar,
        ):
            await sidecar.joined()
            if task == "caller":
                monkeypatch.setattr(sidecar.session, "on_call_done", breaks)
                pause = PauseLocal("u1", "keep", True, 10_000, 60_000, 0, "keep")
                sidecar._perform(sidecar.session.command(1, 1, pause, 0.0))
            with pytest.raises(EngineError, match="the sidecar broke: ZeroDivisionError: a bug"):
                await sidecar.run()

    run(scenario())


def test_a_rank_that_is_closed_in_a_pause_leaves_the_resume_to_its_dp_group() -> None:
    """Alone it would stand in the collective of a resume that its peer does not make."""

    async def scenario() -> None:
        ranks = [Recorded(rank, 2) for rank in range(2)]
        async with a_broker() as (_, address), contextlib.AsyncExitStack() as stack:
            cars = [
                Sidecar(each, broker=address, name=f"e{each.info.dp_rank}", dp_group="moe")
                for each in ranks
            ]
            for car in cars:
                await stack.enter_async_context(car)
            agent = await stack.enter_async_context(TrainerAgent(address, name="trainer"))
            await agent.wait_for_engines(2)
            with contextlib.suppress(Exception):
                async with agent.paused(mode="keep"):
                    await cars[0].close("stopped")
                    seen = list(ranks[0].calls)
            assert seen == []

    run(scenario())


def test_a_sleeping_engine_is_not_woken_by_the_end_of_its_sidecar() -> None:
    """The trainer on its GPU uses that memory; the lease says until when."""

    async def scenario() -> None:
        engine = Recorded()
        async with (
            a_broker() as (_, address),
            Sidecar(engine, broker=address, name="engine") as sidecar,
            TrainerAgent(address, name="trainer", timeout_s=20) as agent,
        ):
            await agent.wait_for_engines(1)
            with contextlib.suppress(Exception):
                async with agent.asleep(level=1):
                    await sidecar.close("stopped")
                    seen = list(engine.calls)
            assert seen == []

    run(scenario())


def test_an_engine_that_does_not_answer_at_the_start_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its core hangs in a collective, say."""
    monkeypatch.setattr(module, "START_ANSWER_S", 0.01)

    async def never() -> int:
        await asyncio.Event().wait()
        return 0

    async def scenario() -> None:
        engine = Recorded()
        monkeypatch.setattr(engine, "version", never)
        with pytest.raises(EngineError, match="the engine did not answer for") as found:
            await Sidecar(engine, broker="tcp://127.0.0.1:9", name="engine").start()
        assert found.value.code is NackCode.TIMEOUT

    run(scenario())


def test_a_second_sidecar_of_an_engine_is_refused_and_touches_nothing() -> None:
    """The first one may have closed its admission."""

    async def scenario() -> None:
        url = "http://127.0.0.1:8000"
        second = Recorded(endpoint=url)
        second.info = replace(second.info, closed=True)
        async with (
            a_broker(config=BrokerConfig(peer_timeout_ms=500, heartbeat_ms=100)) as (_, address),
            Sidecar(Recorded(endpoint=url), broker=address, name="first") as first,
        ):
            await first.joined()
            car = Sidecar(
                second,
                broker=address,
                name="second",
                link_config=LinkConfig(retry_ms=100, patience_ms=0),
            )
            async with car:
                with pytest.raises(
                    Refused, match=f"the engine at {url} already has the sidecar first"
                ):
                    await car.run()
            assert second.calls == []

    run(scenario())


class Closing(Recorded):
    """Records its end, to which it comes only if nobody cancels it; a resume or a start fails."""

    def __init__(self, *, starts: bool = True) -> None:
        super().__init__()
        self._starts = starts
        self.pausing, self.paused = asyncio.Event(), asyncio.Event()
        self.paused.set()

    async def start(self) -> EngineInfo:
        if not self._starts:
            raise EngineError("too old")
        return await super().start()

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:  # noqa: ARG002
        self.pausing.set()
        await self.paused.wait()
        return 0

    async def resume(self) -> None:
        raise EngineError("no resume")

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.calls.append("closed")


def test_an_engine_that_can_not_be_started_is_closed() -> None:
    """Its adapter may have started a server before it found out."""

    async def scenario() -> None:
        engine = Closing(starts=False)
        with pytest.raises(EngineError, match="too old"):
            await Sidecar(engine, broker="tcp://127.0.0.1:9", name="engine").start()
        assert engine.calls == ["closed"]

    run(scenario())


def test_a_start_that_is_cancelled_closes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, though the scope that was cancelled is still in force."""

    async def scenario() -> None:
        engine = Closing()
        with anyio.CancelScope() as scope:

            async def version() -> int:
                scope.cancel()
                await anyio.lowlevel.checkpoint()
                return 0

            monkeypatch.setattr(engine, "version", version)
            await Sidecar(engine, broker="tcp://127.0.0.1:9", name="engine").start()
        assert scope.cancelled_caught
        assert engine.calls == ["closed"]

    run(scenario())


def test_a_sidecar_whose_engine_does_not_resume_is_closed_nonetheless() -> None:
    """The caller gets the reason, and nothing of the sidecar is left."""

    async def scenario() -> None:
        engine = Closing()
        async with (
            a_broker() as (_, address),
            TrainerAgent(address, name="trainer", timeout_s=20) as agent,
        ):
            sidecar = Sidecar(engine, broker=address, name="engine")
            await sidecar.start()
            await agent.wait_for_engines(1)
            with contextlib.suppress(Exception):
                async with agent.paused():
                    with pytest.raises(EngineError, match="no resume"):
                        await sidecar.close()
        assert engine.calls[-1] == "closed"
        assert not sidecar._tasks._tasks
        await sidecar.run()

    run(scenario())


def test_a_close_that_is_cancelled_closes_the_engine() -> None:
    """While it waits for the broker, which does not answer."""

    async def scenario() -> None:
        engine = Closing()
        async with a_broker() as (server, address):
            sidecar = Sidecar(engine, broker=address, name="engine")
            await sidecar.start()
            await sidecar.joined()
            server.close()
            closing = asyncio.create_task(sidecar.close())
            while not sidecar._departure.begun:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
        assert engine.calls[-1] == "closed"

    run(scenario())


def test_nobody_waits_for_the_join_of_a_closed_sidecar() -> None:
    """No broker has answered before."""

    async def scenario() -> None:
        sidecar = Sidecar(Closing(), broker="tcp://127.0.0.1:9", name="engine")
        await sidecar.start()
        joining = asyncio.create_task(sidecar.joined())
        await asyncio.sleep(0)
        await sidecar.close()
        with pytest.raises(BusClosed):
            await joining

    run(scenario())


def test_a_sidecar_that_is_closed_during_an_engine_call_ends_without_an_error() -> None:
    """The call's answer has no broker to go to any more."""

    async def scenario() -> None:
        engine = Closing()
        engine.paused.clear()
        async with a_broker() as (_, address):
            sidecar = Sidecar(engine, broker=address, name="engine")
            await sidecar.start()
            await sidecar.joined()
            pause = PauseLocal("u1", "keep", True, 10_000, 60_000, 0, "keep")
            sidecar._perform(sidecar.session.command(1, 1, pause, 0.0))
            await engine.pausing.wait()
            closing = asyncio.create_task(sidecar.close())
            while not sidecar._closing:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0)
            engine.paused.set()
            with pytest.raises(EngineError, match="no resume"):
                await closing
            await sidecar.run()

    run(scenario())
