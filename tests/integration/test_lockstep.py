"""Ranks of embedded engines step, idle, pause and resume together. Real processes."""

from __future__ import annotations

import asyncio
import random
from signal import SIGCONT, SIGSTOP
from typing import TYPE_CHECKING, Any

import pytest

from bus.errors import EngineDead, EngineError
from bus.messages import NackCode
from sidecar._shared_pages.core_status import GLOBALLY_PAUSED, LOCALLY_PAUSED, STEPPING
from tests.support.checkpoints import Checkpoint, make_checkpoint
from tests.support.dp_group import PATIENCE_S, DpGroup, bounded, coordinated

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from tests.support.dp_group import RankProcess, Request

PROMPT = (5, 9, 77, 31, 12)
OTHER = (40, 3, 18)
LONG = 300


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Four experts, of which each token takes two."""
    return make_checkpoint(tmp_path_factory.mktemp("moe"), seed=8, experts=4)


class Running:
    """A group that serves many tests, and the loop it lives in."""

    def __init__(self, runner: asyncio.Runner, group: DpGroup, checkpoint: Checkpoint) -> None:
        self._runner = runner
        self.group = group
        self._checkpoint = checkpoint
        self._known: dict[tuple[int, ...], list[int]] = {}

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        async def to_the_end() -> None:
            await asyncio.wait_for(work, PATIENCE_S)
            await asyncio.wait_for(self.group.idle(), PATIENCE_S)

        self._runner.run(to_the_end())

    def greedy(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """What one rank alone gives, by other code."""
        if len(self._known.get(prompt, ())) < count:
            self._known[prompt] = self._checkpoint.greedy(self._checkpoint.weights, prompt, count)
        return self._known[prompt][:count]


def _group(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory, size: int
) -> Iterator[Running]:
    group = DpGroup(tmp_path_factory.mktemp("pages"), checkpoint.folder, size)
    with asyncio.Runner() as runner:
        runner.run(group.__aenter__())
        yield Running(runner, group, checkpoint)
        runner.run(group.__aexit__())
    assert [rank.process.returncode for rank in group.ranks] == [0] * size


@pytest.fixture(scope="module")
def two(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two ranks and a DP coordinator that rank 0 has started."""
    yield from _group(checkpoint, tmp_path_factory, 2)


@pytest.fixture(scope="module")
def four(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Four of them."""
    yield from _group(checkpoint, tmp_path_factory, 4)


# Steps and waves


@pytest.mark.parametrize("size", ["two", "four"])
def test_tokens_are_those_of_one_rank_alone(size: str, request: pytest.FixtureRequest) -> None:
    """Requests of any length on random ranks, some of them in each other's company."""
    running: Running = request.getfixturevalue(size)
    chance = random.Random(size)

    async def scenario() -> None:
        begun = []
        for number in range(10):
            rank = chance.choice(running.group.ranks)
            prompt = tuple(chance.randrange(128) for _ in range(chance.randrange(1, 12)))
            length = chance.randrange(1, 40)
            begun.append((rank.generate(prompt, length), prompt, length))
            if number % 3 == 0:
                await begun[-1][0].reached(1)
        for made, prompt, length in begun:
            assert await made.end() == running.greedy(prompt, length)

    running.run(scenario())


def test_a_request_on_any_rank_wakes_all_and_then_they_rest(four: Running) -> None:
    """All make the same steps, and none more when nobody has work."""

    async def scenario() -> None:
        ranks = four.group.ranks
        for rank in ranks:
            await four.group.idle()
            before = [other.view() for other in ranks]
            assert not any(view.flags & STEPPING for view in before)
            assert len({view.wave for view in before}) == 1
            assert await rank.generate(PROMPT, 20).end() == four.greedy(PROMPT, 20)
            await four.group.idle()
            made = {
                other.view().step - view.step for other, view in zip(ranks, before, strict=True)
            }
            assert made == {32}, "to the second agreement after the twentieth token"
            for other, view in zip(ranks, before, strict=True):
                assert other.view().wave == view.wave + 1

    four.run(scenario())


def test_a_request_that_is_given_up_at_once_leaves_nobody_waiting(two: Running) -> None:
    """The others may have joined for nothing; then they all rest again."""

    async def scenario() -> None:
        for rank in two.group.ranks * 3:
            begun = rank.generate(PROMPT, LONG)
            await rank.call("abort", number=begun.number)
            await begun.result()
        await two.group.idle()
        assert await two.group.ranks[1].generate(PROMPT, 5).end() == two.greedy(PROMPT, 5)

    two.run(scenario())


def test_every_rank_says_who_it_is(two: Running) -> None:
    """In what it says of itself, and on its page."""
    for number, rank in enumerate(two.group.ranks):
        assert (rank.info["dp_rank"], rank.info["dp_size"]) == (number, 2)
        assert rank.view().rank == number
        assert rank.view().pid == rank.process.pid


# Pause and resume


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mode", "clear_cache"),
    [
        ("keep", False),
        ("keep", True),
        pytest.param("wait", False, marks=pytest.mark.slow),
        ("wait", True),
        ("abort", False),
        pytest.param("abort", True, marks=pytest.mark.slow),
    ],
)
def test_a_pause_keeps_its_mode_s_word(two: Running, mode: str, clear_cache: bool) -> None:
    """With requests on both ranks, on one, and on none."""

    async def scenario() -> None:
        for busy in ([0, 1], [1], [0], []):
            ranks = [two.group.ranks[number] for number in busy]
            requests = [rank.generate(PROMPT, 120) for rank in ranks]
            for begun in requests:
                await begun.reached(3)
            await two.group.all("pause", mode=mode, clear_cache=clear_cache)
            views = [await rank.shows(lambda v: v.phase == "idle") for rank in two.group.ranks]
            assert {view.flags for view in views} == {LOCALLY_PAUSED | GLOBALLY_PAUSED}
            assert len({view.wave for view in views}) == 1
            if mode == "keep":
                assert not any(begun.done for begun in requests)
            else:
                for begun in requests:  # its answer may come behind that of the pause
                    await begun.result()
            counts = [len(begun.tokens) for begun in requests]
            await two.group.all("resume")
            for begun, count in zip(requests, counts, strict=True):
                result = await begun.result()
                length = count if mode == "abort" else 120
                assert result["finish_reason"] == ("abort" if mode == "abort" else "length")
                assert result["tokens"] == two.greedy(PROMPT, length)

    two.run(scenario())


def test_the_pause_of_an_idle_group_takes_a_wave(two: Running) -> None:
    """By which an idle rank learns that all are paused."""

    async def scenario() -> None:
        await two.group.idle()
        before = [rank.view() for rank in two.group.ranks]
        await two.group.all("pause", mode="keep", clear_cache=True)
        for rank, view in zip(two.group.ranks, before, strict=True):
            now = await rank.shows(lambda v: v.phase == "idle")
            assert (now.wave, now.step) == (view.wave + 1, view.step + 1)
        await two.group.all("resume")

    two.run(scenario())


@pytest.mark.ci
def test_a_pause_returns_only_when_every_rank_was_asked(two: Running) -> None:
    """Till then the rank that was asked steps on, and requests elsewhere go on."""

    async def scenario() -> None:
        first, second = two.group.ranks
        begun = second.generate(PROMPT, LONG)
        await begun.reached(2)
        pause = first.begin("pause", mode="keep", clear_cache=False)
        await first.shows(lambda v: bool(v.flags & LOCALLY_PAUSED))
        await begun.reached(len(begun.tokens) + 40)
        assert not pause.done()
        assert not first.view().flags & GLOBALLY_PAUSED
        await second.call("pause", mode="keep", clear_cache=False)
        await pause
        await two.group.all("resume")
        assert await begun.end() == two.greedy(PROMPT, LONG)

    two.run(scenario())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_a_request_that_comes_during_a_pause_is_served_after_it(
    two: Running, order: tuple[int, int]
) -> None:
    """On any rank, before or between the resumes, in any order of those."""

    async def scenario() -> None:
        early, late = (two.group.ranks[number] for number in order)
        for place in ("before", "between on early", "between on late"):
            await two.group.all("pause", mode="keep", clear_cache=True)
            begun = early.generate(PROMPT, 20) if place == "before" else None
            resume = early.begin("resume")
            await early.shows(lambda v: v.phase == "barrier")
            if begun is None:
                begun = (early if place == "between on early" else late).generate(PROMPT, 20)
            assert not begun.tokens
            await late.call("resume")
            await resume
            assert await begun.end() == two.greedy(PROMPT, 20)

    two.run(scenario())


def test_a_resume_too_many_does_nothing(two: Running) -> None:
    """On one rank or the other, while it rests and while it runs: it is no barrier."""

    async def scenario() -> None:
        await two.group.all("pause", mode="keep", clear_cache=True)
        await two.group.all("resume")
        for rank in two.group.ranks:
            await rank.call("resume")
            for other in two.group.ranks:
                assert await other.generate(OTHER, 6).end() == two.greedy(OTHER, 6)
        begun = two.group.ranks[1].generate(PROMPT, 60)
        await begun.reached(3)
        for rank in two.group.ranks:
            await rank.call("resume")
        assert await begun.end() == two.greedy(PROMPT, 60)

    two.run(scenario())


def test_a_resume_without_a_completed_pause_is_refused(two: Running) -> None:
    """As with vLLM; the pause goes on."""

    async def scenario() -> None:
        first, second = two.group.ranks
        begun = second.generate(PROMPT, LONG)
        await begun.reached(2)
        pause = first.begin("pause", mode="keep", clear_cache=False)
        with pytest.raises(EngineError) as refused:
            await first.call("resume")
        assert refused.value.code is NackCode.WRONG_STATE
        await second.call("pause", mode="keep", clear_cache=False)
        await pause
        await two.group.all("resume")
        assert await begun.end() == two.greedy(PROMPT, LONG)

    two.run(scenario())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("asked", "mode"),
    [
        ((0, 1), "keep"),
        ((0, 1), "abort"),
        pytest.param((0,), "keep", marks=pytest.mark.slow),
        ((0,), "abort"),
        ((1,), "keep"),
        ((1,), "abort"),
    ],
    ids=str,
)
def test_a_wait_that_takes_too_long_is_escalated(
    two: Running, mode: str, asked: tuple[int, ...]
) -> None:
    """By a second pause of the rank that drains, or of all; then both calls return."""

    async def scenario() -> None:
        busy = two.group.ranks[asked[-1]]
        begun = busy.generate(PROMPT, LONG)
        await begun.reached(2)
        waits = [rank.begin("pause", mode="wait", clear_cache=True) for rank in two.group.ranks]
        await begun.reached(len(begun.tokens) + 20)
        for number in asked:
            rank = two.group.ranks[number]
            waits.append(rank.begin("pause", mode=mode, clear_cache=True))
        await asyncio.gather(*waits)
        assert len(begun.tokens) < LONG
        # Once more, on one rank alone: it is paused, and says so at once.
        await two.group.ranks[0].call("pause", mode="keep", clear_cache=True)
        await two.group.all("resume")
        result = await begun.result()
        assert result["finish_reason"] == ("length" if mode == "keep" else "abort")
        assert result["tokens"] == two.greedy(PROMPT, len(result["tokens"]))

    two.run(scenario())


@pytest.mark.ci
def test_many_rounds_under_load_lose_nothing(four: Running) -> None:
    """Pauses of all modes that keep requests, asked and resumed in random order."""
    chance = random.Random(7)

    async def scenario() -> None:
        requests: list[tuple[Request, tuple[int, ...], int]] = []
        for number in range(15):
            for _ in range(chance.randrange(3)):
                asked, length = (chance.randrange(128), 7), chance.randrange(1, 40)
                rank = chance.choice(four.group.ranks)
                requests.append((rank.generate(asked, length), asked, length))
            order = chance.sample(four.group.ranks, 4)
            mode, clear = chance.choice(["keep", "wait"]), chance.random() < 0.5
            pauses = [rank.begin("pause", mode=mode, clear_cache=clear) for rank in order]
            await asyncio.gather(*pauses)
            if number % 2:
                rank = chance.choice(four.group.ranks)
                requests.append((rank.generate(OTHER, 5), OTHER, 5))
            resumes = [rank.begin("resume") for rank in chance.sample(order, 4)]
            await asyncio.gather(*resumes)
        for begun, prompt, length in requests:
            assert await begun.end() == four.greedy(prompt, length)

    four.run(scenario())


# START_DP_WAVE, by a coordinator that the test holds in its hand


def _by_hand(
    tmp_path: Path,
    checkpoint: Checkpoint,
    scenario: Callable[..., Coroutine[Any, Any, None]],
) -> None:
    async def run() -> None:
        async with coordinated(tmp_path, checkpoint.folder, 2) as (group, coordinator):
            await scenario(group, coordinator)

    bounded(run())


def _begins_alone(view: Any) -> bool:
    return bool(view.phase == "step")


@pytest.mark.ci
def test_start_is_obeyed_before_all_are_paused_and_not_after(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    """A stale one after the global pause changes nothing, then or after the resume."""

    async def scenario(group: DpGroup, coordinator: Any) -> None:
        first, second = group.ranks
        begun = first.generate(PROMPT, 40)
        asked = await coordinator.asked.get()
        assert (asked.rank, asked.wave) == (0, 0)
        await first.shows(_begins_alone)
        # The second rank hears of the pause first, then of the wave, and then may go on.
        await second.call("hold")
        pauses = [second.begin("pause", mode="keep", clear_cache=False)]
        await _queued(second, 1)
        coordinator.start(0)
        await _queued(second, 2)
        await second.call("release")
        at = await second.logged("locally_paused")
        at = await second.logged("start_dp_wave", at, told=0, obeyed=True)
        await second.logged("wave_stepped", at)
        pauses.append(first.begin("pause", mode="keep", clear_cache=False))
        await asyncio.gather(*pauses)
        views = [await rank.shows(lambda v: v.phase == "idle") for rank in group.ranks]
        assert {view.wave for view in views} == {1}
        coordinator.start(0)
        for rank in group.ranks:
            await rank.logged("start_dp_wave", told=0, obeyed=False)
        assert [(v.step, v.flags) for v in views] == [
            (v.step, v.flags)
            for v in [await rank.shows(lambda v: v.phase == "idle") for rank in group.ranks]
        ]
        await group.all("resume")
        assert await begun.end() == checkpoint.greedy(checkpoint.weights, PROMPT, 40)
        await group.idle()
        assert {rank.view().wave for rank in group.ranks} == {2}

    _by_hand(tmp_path, checkpoint, scenario)


@pytest.mark.ci
@pytest.mark.parametrize("early", [0, 1])
def test_start_in_the_window_between_two_resumes_is_not_lost(
    tmp_path: Path, checkpoint: Checkpoint, early: int
) -> None:
    """Said once, to a rank that is in its resume and to one that is still paused."""

    async def scenario(group: DpGroup, coordinator: Any) -> None:
        resumed, paused = group.ranks[early], group.ranks[1 - early]
        await group.all("pause", mode="keep", clear_cache=True)
        coordinator.publish(1, running=False)
        resume = resumed.begin("resume")
        await resumed.shows(lambda v: v.phase == "barrier")
        begun = resumed.generate(PROMPT, 20)
        await coordinator.asked.get()
        await _queued(resumed, 1)  # or it comes after that wave, and the rank asks for another
        coordinator.start(1)
        await paused.logged("start_dp_wave", obeyed=False)
        await paused.call("resume")
        await resume
        assert await begun.end() == checkpoint.greedy(checkpoint.weights, PROMPT, 20)

    _by_hand(tmp_path, checkpoint, scenario)


@pytest.mark.ci
def test_a_request_stamped_with_a_wave_that_is_over_wakes_the_others(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    """Its front end believes that the wave still runs, and says no FIRST_REQ."""

    async def scenario(group: DpGroup, coordinator: Any) -> None:
        first, second = group.ranks
        begun = second.generate(PROMPT, 5)
        await coordinator.asked.get()
        coordinator.start(0)
        await begun.end()
        await group.idle()
        assert (await coordinator.reports.get()).started == 0
        assert (await coordinator.reports.get()).complete == 0
        # Its own FIRST_REQ is the last that the second front end knows of.
        late = second.generate(OTHER, 5)
        told = await coordinator.reports.get()
        assert (told.rank, told.started) == (1, 1)
        coordinator.start(1)
        assert await late.end() == checkpoint.greedy(checkpoint.weights, OTHER, 5)
        assert coordinator.asked.empty()
        assert first.view().wave == 1 or await first.shows(lambda v: v.phase == "idle")

    _by_hand(tmp_path, checkpoint, scenario)


async def _queued(rank: RankProcess, count: int) -> None:
    """Wait until so much waits in the core's inbox."""
    while await rank.call("queued") < count:
        pass


# The end


@pytest.mark.ci
@pytest.mark.parametrize("busy", [True, False], ids=["running", "idle"])
def test_a_killed_rank_takes_its_peers_down(
    tmp_path: Path, checkpoint: Checkpoint, busy: bool
) -> None:
    """They say which rank it was, whether or not they were in a step with it."""

    async def run() -> None:
        async with DpGroup(tmp_path, checkpoint.folder, 3) as group:
            victim = group.ranks[1]
            requests = [rank.generate(PROMPT, LONG) for rank in group.ranks[::2] if busy]
            for begun in requests:
                await begun.reached(2)
            ends = [rank.begin("died") for rank in group.ranks[::2]]
            await victim.kill()
            for rank, end in zip(group.ranks[::2], ends, strict=True):
                assert "rank 1 of DP group moe has died" in await end
                with pytest.raises(EngineDead, match="has died"):
                    await rank.generate(OTHER, 1).result()
            for begun in requests:
                with pytest.raises(EngineDead, match="has died"):
                    await begun.result()

    bounded(run())


@pytest.mark.ci
def test_a_death_that_rank_0_tells_late_is_the_dead_ranks(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    """A rank whose step broke hears from rank 0 which one is gone: it does not take the fault for
    its own meanwhile."""

    async def run() -> None:
        async with DpGroup(tmp_path, checkpoint.folder, 3) as group:
            first, victim, last = group.ranks
            begun = last.generate(PROMPT, LONG)
            await begun.reached(2)
            end = last.begin("died")
            first.process.send_signal(SIGSTOP)
            await victim.kill()
            done, _ = await asyncio.wait([end], timeout=2.0)
            first.process.send_signal(SIGCONT)
            assert not done
            assert "rank 1 of DP group moe has died" in await end
            with pytest.raises(EngineDead, match="has died"):
                await begun.result()

    bounded(run())


def test_ranks_that_are_not_alike_do_not_start(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """They would do different arithmetic, or confer at different steps."""

    async def run() -> None:
        group = DpGroup(tmp_path, checkpoint.folder, 2)
        group.ranks[1]._spec["sync_interval"] = 8
        starting = [asyncio.create_task(rank.start()) for rank in group.ranks]
        with pytest.raises(EngineDead):
            await starting[1]
        await group.ranks[1].kill()
        text = "".join(group.ranks[1].text)
        assert "sync_interval is 8 on rank 1 of DP group moe, but 16 on rank 0" in text
        await group.ranks[0].kill()
        await asyncio.gather(*starting, return_exceptions=True)

    bounded(run())
