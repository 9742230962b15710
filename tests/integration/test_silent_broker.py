"""A broker that says nothing any more in the middle of an update: the trainer hears it by name."""

from __future__ import annotations

import asyncio
import contextlib
from signal import SIGCONT, SIGSTOP
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

from bus.errors import BusTimeout, UpdateFailed
from bus.messages import ChunkSent, Commit, GroupAck, PauseLocal, Step
from tests.integration.test_killed import engines, generate
from tests.support.links import Links
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from bus.messages import Message
    from tests.integration.conftest import Bus
    from tests.support.links import Passing, Way
    from trainer_agent._options import How

LEASE_MS = 20_000
# A peer connects anew to a broker that is silent for 6 s. The error is to be there before that, and
# takes 2 s more.
STEP_S = 3.0
# By then the trainer has missed the broker.
LONG_STEP_S = 10.0
PATIENCE_S = 90.0
LOOK_S = 0.1
# The message at which it falls silent, and the steps that its error may name.
MOMENTS: dict[str, tuple[Callable[[Message], bool], set[str]]] = {
    "chunk": (lambda asked: isinstance(asked, ChunkSent) and asked.chunk == 1, {"chunk"}),
    "pause": (lambda asked: isinstance(asked, PauseLocal), {"pause_global"}),
    # It is asked ahead, while the answers to the last chunk and to the finish may be on their way.
    "commit": (lambda asked: isinstance(asked, Commit), {"chunk", "finish", "commit"}),
}


@pytest.fixture(autouse=True)
def _long_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the answers of a silent broker: it would be for longer than the test."""
    monkeypatch.setattr("trainer_agent._guaranteed_delivery.CLEANUP_S", 10 * PATIENCE_S)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))


@contextlib.asynccontextmanager
async def trainer(bus: Bus, step_s: float) -> AsyncIterator[tuple[TrainerAgent, Links]]:
    """A trainer, alone behind a proxy."""
    port = int(bus.address.rpartition(":")[2])
    async with (
        Links(port, lambda _: None) as links,
        TrainerAgent(
            links.address,
            name="trainer",
            lease_ms=LEASE_MS,
            timeout_s=step_s,
            buffers=1,
            chunk_bytes=20_000,
        ) as agent,
    ):
        await agent.wait_for_engines(1)
        yield agent, links


async def falls_silent(
    agent: TrainerAgent, links: Links, bus: Bus, moment: str, silence: Callable[[], None]
) -> BusTimeout:
    """What an update raises in whose middle it does; nobody has ended the silence by then."""
    matches, _ = MOMENTS[moment]
    trap = links.trap(lambda passing: passing.way == "to" and matches(passing.message))
    weights = load_file(bus.checkpoint.folder / "model.safetensors")
    update = asyncio.create_task(agent.update_weights(weights, how="paused"))
    await trap.caught.wait()
    silence()
    trap.release()
    with pytest.raises(BusTimeout) as caught:
        await update
    return caught.value


async def at_rest(agent: TrainerAgent) -> bool:
    """The engine is there (a broker that was stopped may have missed it), and has given up the
    update, or what a part of it has left."""
    try:
        (group,) = (await agent.status()).groups
    except BusTimeout:
        return False
    phases = {engine.phase for engine in group.engines}
    return bool(phases) and phases <= {"running", "quarantined"}


async def heals(agent: TrainerAgent, bus: Bus) -> None:
    """The next update is committed, and the engine generates."""
    while not await at_rest(agent):  # noqa: ASYNC110 - the broker calls nobody
        await asyncio.sleep(LOOK_S)
    weights = load_file(bus.checkpoint.folder / "model.safetensors")
    version = await agent.update_weights(weights, how="paused")
    found = await asyncio.to_thread(engines, bus)
    assert (found["e0"].version, found["e0"].phase) == (version, "running")
    assert len(await asyncio.to_thread(generate, found["e0"].endpoint)) == 8


@pytest.mark.ci
@pytest.mark.parametrize("moment", ["chunk", "commit"])
def test_a_broker_that_is_stopped(bus: Bus, moment: str) -> None:
    """The update fails while it is stopped still. Woken, it undoes what was begun, since the next
    update is to be had."""
    bus.sidecar("e0")

    async def main() -> None:
        async with trainer(bus, STEP_S) as (agent, links):
            error = await falls_silent(
                agent, links, bus, moment, lambda: bus.broker.signal(SIGSTOP)
            )
            bus.broker.signal(SIGCONT)
            assert error.peer == "broker"
            assert error.step in MOMENTS[moment][1]
            assert (error.chunk is not None) is (error.step == "chunk")
            assert error.heard_s is not None
            assert error.heard_s >= STEP_S
            assert "last heard" in str(error)
            await heals(agent, bus)

    run(main())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("way", "moment", "event"),
    [
        ("to", "chunk", "quarantined"),
        ("from", "chunk", "quarantined"),
        ("from", "pause", "resumed"),
    ],
)
def test_a_link_that_is_cut_one_way(bus: Bus, way: Way, moment: str, event: str) -> None:
    """Where the broker still hears the trainer, it hears that the update is given up, and that its
    engine is to go on; where it doesn't, it misses the trainer."""
    bus.sidecar("e0")

    async def main() -> None:
        async with trainer(bus, LONG_STEP_S) as (agent, links):
            error = await falls_silent(
                agent, links, bus, moment, lambda: links.swallow(way, "trainer")
            )
            assert error.peer == "broker"
            assert error.step in MOMENTS[moment][1]
            await asyncio.to_thread(bus.broker.wait_event, event)
            links.heal()
            await heals(agent, bus)

    run(main())


@pytest.mark.parametrize("how", ["staged", "paused"])
def test_a_broker_that_is_killed_with_the_answer_to_commit(bus: Bus, how: How) -> None:
    """Engines have committed, and the trainer has not heard of it: the next broker tells it."""

    def is_committed(passing: Passing) -> bool:
        answer = passing.message
        return passing.way == "from" and isinstance(answer, GroupAck) and answer.step is Step.COMMIT

    async def scenario() -> None:
        async with trainer(bus, PATIENCE_S) as (agent, links):
            trap = links.trap(is_committed)
            weights = load_file(bus.checkpoint.folder / "model.safetensors")
            update = asyncio.create_task(agent.update_weights(weights, how=how))
            await trap.caught.wait()
            bus.broker.kill()
            trap.lose()
            bus.broker = bus.start_broker(bus.address)
            assert await update == 1
            await heals(agent, bus)

    bus.sidecar("e0")
    run(scenario())


def test_a_broker_that_is_killed_with_commit(bus: Bus) -> None:
    """No engine was asked: the next broker finds none that serves the version, and says so."""

    async def scenario() -> None:
        async with trainer(bus, PATIENCE_S) as (agent, links):
            trap = links.trap(lambda it: it.way == "to" and isinstance(it.message, Commit))
            weights = load_file(bus.checkpoint.folder / "model.safetensors")
            update = asyncio.create_task(agent.update_weights(weights, how="staged"))
            await trap.caught.wait()
            bus.broker.kill()
            trap.lose()
            bus.broker = bus.start_broker(bus.address)
            with pytest.raises(UpdateFailed) as caught:
                await update
            assert (caught.value.version, caught.value.outcome) == (1, "not_committed")
            await heals(agent, bus)

    bus.sidecar("e0")
    run(scenario())
