"""The canary over a whole bus: an engine that loads what it got wrongly is named, and left out.

Checksums pass everywhere: the rows of a tensor change their places after they were compared.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from bus.errors import CanaryFailed, Refused, UsageError
from bus.messages import NackCode
from sidecar.embedded import SamplingParams
from tests.integration.test_dp_restart import group
from tests.integration.test_killed import engines, generate
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.serving import PROMPT, assert_serve, greedy
from tests.support.twisted import TwistedEngine, twistable
from trainer_agent import Canary, TrainerAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Mapping

    from torch import Tensor

    from bus.messages import GroupStatus
    from tests.integration.conftest import Bus
    from tests.support.checkpoints import Checkpoint
    from trainer_agent._canary import Score, Tokens

LIMIT_S = 120.0
LONG = 500
PROBES = ((5, 9, 77, 31, 12), (40, 3, 18))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=3)


def run(scenario: Coroutine[object, object, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, LIMIT_S)

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def bus_of(
    checkpoint: Checkpoint, count: int
) -> AsyncIterator[tuple[TrainerAgent, list[TwistedEngine]]]:
    """A trainer, and so many engines, which do what is right so far: e0, e1, ..."""
    async with contextlib.AsyncExitStack() as stack:
        _, broker = await stack.enter_async_context(a_broker())
        agent = await stack.enter_async_context(TrainerAgent(broker, chunk_bytes=1 << 15))
        started = [
            await stack.enter_async_context(twistable(checkpoint, broker, f"e{index}"))
            for index in range(count)
        ]
        await agent.wait_for_engines(count)
        yield agent, started


def scored(checkpoint: Checkpoint, weights: Mapping[str, Tensor]) -> Score:
    """The trainer's own model."""

    def score(prompt: Tokens, tokens: Tokens) -> list[float]:
        return checkpoint.score(weights, prompt, tokens)

    return score


async def state(agent: TrainerAgent) -> GroupStatus:
    (group_status,) = (await agent.status()).groups
    return group_status


async def running(engine: TwistedEngine) -> tuple[asyncio.Task[list[int]], asyncio.Event]:
    """A long request; the event is set when it has tokens."""
    begun = asyncio.Event()

    async def read() -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
        tokens: list[int] = []
        async for delta in engine.generate(PROMPT, params):
            tokens += delta.token_ids
            if len(tokens) > 4:
                begun.set()
        return tokens

    return asyncio.create_task(read()), begun


def test_an_engine_with_swapped_rows_is_named_and_quarantined(checkpoint: Checkpoint) -> None:
    """With its probe, what the trainer expected and what was found. Its requests end with the
    tokens of the old weights, and what reaches it ends at once; the others serve the new version,
    and the next whole update frees it."""
    new, newer = perturbed(checkpoint.weights, 5), perturbed(checkpoint.weights, 6)

    async def scenario() -> None:
        async with bus_of(checkpoint, 3) as (agent, started):
            twisted = started[1]
            twisted.twists = True
            requests = [await running(engine) for engine in started]
            for _, begun in requests:
                await begun.wait()
            canary = Canary(PROBES, score=scored(checkpoint, new), tolerance=0.01)
            assert await agent.update_weights(new, canary=canary) == 1
            assert agent.last_update is not None
            assert agent.last_update.excluded == ("e1",)
            (differs,) = agent.last_update.differing
            assert (differs.engine, differs.probe) == ("e1", 0)
            assert differs.expected.startswith("log-probability -")
            (out,) = (await state(agent)).out
            assert (out.engine, out.state) == ("e1", "quarantined")
            assert "e1 differs on probe 0: expected log-prob" in out.reason
            whole, cut, as_whole = [await request for request, _ in requests]
            assert len(whole) == len(as_whole) == LONG
            assert 4 < len(cut) < LONG
            assert cut == checkpoint.greedy(checkpoint.weights, PROMPT, len(cut))
            await assert_serve(checkpoint, new, 1, started[0], started[2])
            params = SamplingParams(max_tokens=4)
            (ended,) = await twisted.generate(PROMPT, params).outputs()
            assert (ended.token_ids, ended.finish_reason) == ((), "abort")
            twisted.twists = False
            canary = Canary(PROBES, score=scored(checkpoint, newer), tolerance=0.01)
            assert await agent.update_weights(newer, canary=canary) == 2
            assert agent.last_update.differing == ()
            await assert_serve(checkpoint, newer, 2, *started)

    run(scenario())


def test_without_a_score_the_most_are_right(checkpoint: Checkpoint) -> None:
    """And who differs from them is named with the tokens of both."""
    new = perturbed(checkpoint.weights, 5)

    async def scenario() -> None:
        async with bus_of(checkpoint, 3) as (agent, started):
            started[2].twists = True
            assert await agent.update_weights(new, canary=Canary(PROBES)) == 1
            assert agent.last_update is not None
            assert agent.last_update.excluded == ("e2",)
            (differs,) = agent.last_update.differing
            right = ", ".join(map(str, checkpoint.greedy(new, PROBES[differs.probe], 8)))
            assert right in differs.expected
            assert right not in differs.found
            await assert_serve(checkpoint, new, 1, *started[:2])

    run(scenario())


@pytest.mark.parametrize("judge", ["each other", "the trainer"])
def test_an_update_that_proves_nobody_is_given_up(checkpoint: Checkpoint, judge: str) -> None:
    """One against one, without a score; or all against the trainer. All are named, none serves
    it, and the next whole update frees them."""
    new = perturbed(checkpoint.weights, 5)
    score = scored(checkpoint, checkpoint.weights) if judge == "the trainer" else None

    async def scenario() -> None:
        async with bus_of(checkpoint, 2) as (agent, started):
            started[0].twists = judge == "each other"
            with pytest.raises(CanaryFailed, match=r"e0.*e1|e1.*e0") as failed:
                await agent.update_weights(new, canary=Canary(PROBES, score=score))
            assert failed.value.code is NackCode.CANARY_FAILED
            assert {out.engine for out in (await state(agent)).out} == {"e0", "e1"}
            started[0].twists = False
            version = await agent.update_weights(new, canary=Canary(PROBES))
            await assert_serve(checkpoint, new, version, *started)

    run(scenario())


def test_where_delivery_cant_be_held_the_pause_must_end_requests(checkpoint: Checkpoint) -> None:
    """A canary with a pause that keeps them is refused by name, before anything is touched."""
    new = perturbed(checkpoint.weights, 5)

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            _, broker = await stack.enter_async_context(a_broker())
            TwistedEngine.says_abort = True
            engine = await stack.enter_async_context(twistable(checkpoint, broker, "e0"))
            agent = await stack.enter_async_context(TrainerAgent(broker))
            await agent.wait_for_engines(1)
            pauses = engine.pause
            asked = []

            async def pause(mode: str, *, clear_cache: bool) -> int:
                asked.append(mode)
                return await pauses(mode, clear_cache=clear_cache)  # type: ignore[arg-type]

            engine.pause = pause  # type: ignore[method-assign]
            canary = Canary(PROBES, score=scored(checkpoint, new))
            with pytest.raises(Refused, match=r'e0.*mode="abort"') as refused:
                await agent.update_weights(new, canary=canary)
            assert refused.value.nack.field == "canary"
            assert asked == []
            tokens, version = await greedy(engine)
            assert (len(tokens), version) == (16, 0)
            async with agent.paused(mode="keep"):
                with pytest.raises(Refused, match="canary"):
                    await agent.update_weights(new, mode="abort", canary=canary)
            assert await agent.update_weights(new, mode="abort", canary=canary) == 1
            await assert_serve(checkpoint, new, 1, engine)

    try:
        run(scenario())
    finally:
        TwistedEngine.says_abort = False


def test_a_draft_has_no_canary(checkpoint: Checkpoint) -> None:
    """It changes no token."""

    async def scenario() -> None:
        async with bus_of(checkpoint, 1) as (agent, _):
            with pytest.raises(UsageError, match="canary"):
                await agent.update_weights({}, target="draft", canary=Canary(PROBES))

    run(scenario())


@pytest.mark.ci
def test_ranks_in_lockstep_run_their_probes_together(
    bus: Bus, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As a DP group does everything; a dense engine beside them runs its own."""
    moe = make_checkpoint(tmp_path_factory.mktemp("moe"), seed=8, experts=4)
    dense = bus.sidecar("dense", "--model", str(moe.folder))
    ranks = group(bus, moe)
    new = perturbed(moe.weights, 5)

    async def update() -> None:
        async with TrainerAgent(bus.address) as trainer:
            await trainer.wait_for_engines(3)
            canary = Canary(PROBES, score=scored(moe, new), tolerance=0.01)
            await trainer.update_weights(list(new.items()), canary=canary)
            assert trainer.last_update is not None
            assert (trainer.last_update.engines, trainer.last_update.differing) == (3, ())

    asyncio.run(update())
    for name in ("moe-0", "moe-1", "dense"):
        assert generate(engines(bus)[name].endpoint, 12) == moe.greedy(new, [5, 9, 7], 12)
    assert ranks.stop() == 0
    assert dense.stop() == 0
