"""The schedule of figure 5 of the announcement: a deadlock with a pause in one phase, and,
with two, the steps of figure 6 in their order.

The schedule: rank 0 has a request and is in a step, which waits for rank 1. Then both are
asked to pause, then to take weights, and only then START_DP_WAVE comes to rank 1.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from bus.operations import Start
from sidecar._shared_pages.core_status import GLOBALLY_PAUSED, LOCALLY_PAUSED, STEPPING
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.dp_engine import GroupEngine, begin
from tests.support.dp_group import DpGroup, bounded, coordinated, steady
from tests.support.push import Push
from tests.support.steps import steps

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = (5, 9, 77, 31, 12)
TOKENS = 60
# Thousands of times what a step of these ranks takes.
LONG_S = 1.5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("moe"), seed=8, experts=4)


@pytest.mark.ci
def test_a_pause_in_one_phase_deadlocks(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """One rank is in a step for ever, its peer rank is idle, and the pages show it."""
    new = perturbed(checkpoint.weights, 5)

    async def run() -> None:
        folder = checkpoint.folder
        async with coordinated(tmp_path, folder, 2, one_phase_pause=True) as (group, coordinator):
            first, second = group.ranks
            begun = first.generate(PROMPT, TOKENS)
            await coordinator.asked.get()
            await first.shows(lambda v: v.phase == "step")
            # Both say at once that they are paused, and one of them is not.
            await group.all("pause", mode="keep", clear_cache=True)
            push = Push(GroupEngine(group), new)
            await push.open()
            await steps(push.engine).arm(push.manifest)
            started = [begin(rank, Start()) for rank in group.ranks]
            await started[1]
            coordinator.start(0)
            await second.logged("start_dp_wave", told=0)

            stuck = await steady(first, LONG_S)
            assert (stuck.phase, stuck.step, stuck.wave) == ("step", 1, 0)
            assert stuck.flags == STEPPING, "it has not even seen the pause"
            assert stuck.age_ms() > LONG_S * 1000
            absent = await second.shows(lambda v: v.phase == "idle")
            assert absent.flags & LOCALLY_PAUSED
            assert absent.step == 0
            assert not started[0].done()
            assert not begun.tokens
            push.close()
            await group.kill()

    bounded(run())


def test_a_pause_in_two_phases_goes_through_in_order(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    """Every rank joins the step, they pause together, and take the weights."""
    new = perturbed(checkpoint.weights, 5)

    async def run() -> None:
        async with coordinated(tmp_path, checkpoint.folder, 2) as (group, coordinator):
            first, second = group.ranks
            # 1. A request, FIRST_REQ, and rank 0 begins a step.
            begun = first.generate(PROMPT, TOKENS)
            await coordinator.asked.get()
            # 3. It waits in its forward pass for rank 1.
            waiting = await first.shows(lambda v: v.phase == "step")
            assert waiting.step == 1
            # 2. A pause of both, which doesn't return yet; rank 0 is in its step.
            # 4. and 5. Rank 1 takes the pause first, then START_DP_WAVE.
            await second.call("hold")
            pauses = [rank.begin("pause", mode="keep", clear_cache=True) for rank in group.ranks]
            await _queued(second, 1)
            coordinator.start(0)
            await _queued(second, 2)
            assert first.view() == waiting, "rank 0 is in its step still"
            assert not any(pause.done() for pause in pauses)
            await second.call("release")
            # 9. The pauses return.
            await asyncio.gather(*pauses)
            await first.call("queued")  # its answer comes behind all tokens
            counted = len(begun.tokens)
            for rank in group.ranks:
                view = await rank.shows(lambda v: v.phase == "idle")
                assert view.flags == LOCALLY_PAUSED | GLOBALLY_PAUSED
            # 10. to 12. The weights are taken by both, and the update ends.
            push = Push(GroupEngine(group), new)
            await push.whole(1)
            assert len(begun.tokens) == counted < TOKENS
            await group.all("resume")
            tokens = await begun.end()
            assert tokens[:counted] == checkpoint.greedy(checkpoint.weights, PROMPT, counted)
            so_far = (*PROMPT, *tokens[:counted])
            assert tokens[counted:] == checkpoint.greedy(new, so_far, TOKENS - counted)
            await _in_order(group)

    bounded(run())


async def _in_order(group: DpGroup) -> None:
    """Steps 3 to 8 of figure 6, in the order of the ranks' logs."""
    first, second = group.ranks
    steps: list[tuple[Any, str, dict[str, object]]] = [
        (first, "wave_entered", {"phase": "step"}),  # 3. forward pass, waiting
        (second, "locally_paused", {"mode": "keep"}),  # 4. local pause
        (second, "start_dp_wave", {"told": 0, "obeyed": True}),  # 5. START_DP_WAVE
        (second, "wave_entered", {"phase": "dummy"}),  # 6. joins the forward pass,
        (first, "wave_stepped", {}),  # which completes
        (first, "locally_paused", {"mode": "keep"}),  # 7. local pause of rank 0
        (first, "all_paused", {}),  # 8. they confer: the global pause
        (first, "globally_paused", {}),
    ]
    found = []
    for rank, event, fields in steps:
        line = rank.logs[await rank.logged(event, **fields)]
        found.append((line["timestamp"], f"rank {rank.rank} {event}"))
    assert found == sorted(found)
    assert (await second.logged("all_paused")) >= 0


async def _queued(rank: Any, count: int) -> None:
    """Wait until so much waits in the core's inbox."""
    while await rank.call("queued") < count:
        pass
