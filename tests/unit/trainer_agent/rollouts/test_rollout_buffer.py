"""The buffer of rollouts beside a simple model of it, and what it promises a trainer."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bus.errors import RolloutsTooOld, UsageError
from trainer_agent import RolloutBuffer
from trainer_agent._rollouts.results import Choice, Completion, Span

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from trainer_agent._rollouts.rollout_buffer import BufferedRollout


def completion(*versions: int | None) -> Completion:
    """A token of each version, all in one choice."""
    spans = tuple(Span(version, i, i + 1, "e") for i, version in enumerate(versions))
    tokens = tuple(range(len(versions)))
    return Completion("r", (1,), (Choice(0, tokens, None, None, "stop", None, spans, (), ()),))


class Loop:
    """The event loop of all these tests, which run a step of it at a time."""

    runner: asyncio.Runner


@pytest.fixture(autouse=True, scope="module")
def _loop() -> Iterator[None]:
    with asyncio.Runner() as Loop.runner:
        yield


def at_once(awaitable: Coroutine[Any, Any, Any]) -> Any:
    """The result of what has nothing to wait for."""
    try:
        awaitable.send(None)
    except StopIteration as ended:
        return ended.value
    pytest.fail("it waits")


def waits(awaitable: Coroutine[Any, Any, Any]) -> bool:
    """Whether it has to wait; it is cancelled then."""

    async def look() -> bool:
        task = asyncio.ensure_future(awaitable)
        await asyncio.sleep(0)
        is_waiting = not task.done()
        task.cancel()
        await asyncio.wait([task])
        return is_waiting

    return Loop.runner.run(look())


def start(buffer: RolloutBuffer[Any]) -> BufferedRollout[Any]:
    """One that stays under way: its block lives as long as it."""
    block = buffer.rollout()
    rollout: BufferedRollout[Any] = at_once(block.__aenter__())
    vars(rollout)["block"] = block
    return rollout


def finished(buffer: RolloutBuffer[Any], sample: object, *versions: int | None) -> bool:
    return start(buffer).add(sample, completion(*versions))


@dataclass
class Known:
    """The model's idea of a rollout: commits so far when its oldest token was sampled."""

    sample: int
    rollout: BufferedRollout[int]
    stack: AsyncExitStack
    commits: int
    is_finished: bool = False


class BesideAModel(RuleBasedStateMachine):
    """Numbers of versions have random gaps; the model counts commits and knows no numbers."""

    @initialize(
        max_age=st.integers(0, 3),
        per_step=st.integers(1, 3),
        policy=st.sampled_from(["drop", "raise"]),
    )
    def make(self, max_age: int, per_step: int, policy: Any) -> None:
        self.buffer: RolloutBuffer[int] = RolloutBuffer(max_age, policy, samples_per_step=per_step)
        self.versions = [0]  # those that were committed, with that of the beginning
        self.newest = 0  # numbers that are used up
        self.order: list[Known] = []
        self.taken = self.dropped = self.samples = 0

    # -- the model ----------------------------------------------------------------

    def age(self, each: Known) -> int:
        return len(self.versions) - 1 - each.commits

    def is_valid(self, each: Known) -> bool:
        return each.is_finished and self.age(each) <= self.buffer.max_age_steps

    def drop_old(self) -> None:
        for each in [e for e in self.order if e.is_finished and not self.is_valid(e)]:
            self.order.remove(each)
            self.dropped += 1

    def room(self) -> int:
        most = (self.buffer.max_age_steps + 1) * self.buffer.samples_per_step
        return max(0, most - self.taken - len(self.order))

    # -- what happens ---------------------------------------------------------------

    @rule()
    def start(self) -> None:
        if not self.room():
            assert waits(self.buffer.rollout().__aenter__())
            return
        stack = AsyncExitStack()
        rollout = at_once(stack.enter_async_context(self.buffer.rollout()))
        self.order.append(Known(self.samples, rollout, stack, len(self.versions) - 1))
        self.samples += 1

    def under_way(self) -> list[Known]:
        return [each for each in self.order if not each.is_finished]

    @precondition(lambda self: self.under_way())
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        """Its tokens are of some versions that were committed since it began, in order; an engine
        that died says none. A label may be the number of a draft, above that of the commit."""
        each = data.draw(st.sampled_from(self.under_way()))
        places = data.draw(
            st.lists(st.integers(each.commits, len(self.versions) - 1), min_size=1, max_size=3)
        )
        spans: list[int | None] = []
        for place in sorted(places):
            above = self.versions[place + 1] if place + 1 < len(self.versions) else self.newest + 1
            spans.append(data.draw(st.integers(self.versions[place], above - 1)))
        is_unknown = data.draw(st.booleans())
        if is_unknown:
            spans.insert(data.draw(st.integers(0, len(spans))), None)
        else:
            each.commits = min(places)
        each.is_finished = True
        is_kept = self.is_valid(each) or self.buffer.policy == "raise"
        assert each.rollout.add(each.sample, completion(*spans)) is is_kept
        at_once(each.stack.aclose())
        if self.buffer.policy == "drop":
            self.drop_old()

    @precondition(lambda self: self.under_way())
    @rule(data=st.data())
    def fail(self, data: Any) -> None:
        each = data.draw(st.sampled_from(self.under_way()))
        at_once(each.stack.aclose())
        self.order.remove(each)

    @rule()
    def use_up_a_number(self) -> None:
        """By an update that fails, a draft, an adapter."""
        self.newest += 1

    @rule()
    def commit(self) -> None:
        self.newest += 1
        self.versions.append(self.newest)
        self.buffer.on_commit(self.newest)
        self.taken = 0
        if self.buffer.policy == "drop":
            self.drop_old()

    @rule(count=st.integers(1, 3), in_order=st.booleans())
    def take(self, count: int, in_order: bool) -> None:
        count = min(count, (self.buffer.max_age_steps + 1) * self.buffer.samples_per_step)
        turn = self.order[:count] if in_order else self.order
        chosen = [each for each in turn if each.is_finished][:count]
        if len(chosen) < count:
            assert waits(self.buffer.take(count, in_order=in_order))
        elif not all(map(self.is_valid, chosen)):
            with pytest.raises(RolloutsTooOld):
                at_once(self.buffer.take(count, in_order=in_order))
            self.order = [e for e in self.order if e not in chosen or self.is_valid(e)]
            self.dropped += sum(not self.is_valid(each) for each in chosen)
        else:
            batch = at_once(self.buffer.take(count, in_order=in_order))
            assert batch.samples == tuple(each.sample for each in chosen)
            assert batch.ages == tuple(map(self.age, chosen))
            assert max(batch.ages) <= self.buffer.max_age_steps
            assert batch.dropped == self.dropped
            self.order = [each for each in self.order if each not in chosen]
            self.taken += count
            self.dropped = 0

    # -- what is seen ---------------------------------------------------------------

    @invariant()
    def both_count_the_same(self) -> None:
        buffer, per_step = self.buffer, self.buffer.samples_per_step
        assert buffer.step == len(self.versions) - 1
        assert buffer.capacity() == self.room()
        assert buffer.valid_count() == sum(map(self.is_valid, self.order))
        for place, version in enumerate(self.versions):
            ages = [place - each.commits for each in self.order if each.is_finished]
            assert buffer.valid_count(version, 1) == sum(0 <= age <= 1 for age in ages)
        for step in range(buffer.step + 4):
            meant = [
                each
                for i, each in enumerate(self.order, self.taken)
                if buffer.step + i // per_step == step
            ]
            assert buffer.ready_for(step) == sum(map(self.is_valid, meant))


TestBesideAModel = BesideAModel.TestCase
TestBesideAModel.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("max_age", [0, 1, 3])
def test_what_waits_for_capacity_is_young_enough_if_taken_in_order(max_age: int) -> None:
    """Rollouts finish in the opposite order; the trainer takes its share and commits, 20 times."""

    async def main() -> None:
        buffer: RolloutBuffer[int] = RolloutBuffer(max_age, samples_per_step=3)
        version, ages = 0, set()
        under_way: list[BufferedRollout[int]] = []
        for _ in range(20):
            while len(under_way) < 3 or buffer.capacity():
                under_way.append(start(buffer))
            for rollout in reversed(under_way[:3]):
                assert rollout.add(0, completion(rollout.version))
            del under_way[:3]
            batch = await buffer.take(in_order=True)
            ages |= set(batch.ages)
            while buffer.capacity():  # those that start while the trainer trains
                under_way.append(start(buffer))
            version += 7
            buffer.on_commit(version)
        assert batch.dropped == 0
        assert max(ages) == max_age
        assert batch.metrics == {"age_mean": max_age, "age_max": max_age, "dropped": 0}

    Loop.runner.run(main())


def test_an_age_counts_commits_and_is_that_of_the_oldest_span() -> None:
    buffer: RolloutBuffer[str] = RolloutBuffer(2, samples_per_step=9)
    for version in (3, 4, 9, 12):
        buffer.on_commit(version)
    assert finished(buffer, "crossed 4, 9 and 12", 12, 9, 4)
    assert finished(buffer, "of a draft's number after 9", 11)
    assert not finished(buffer, "too old", 12, 3)
    assert buffer.valid_count() == 2
    assert buffer.valid_count(12, 1) == 1
    assert buffer.valid_count(9, 0) == 1  # what the draft's number stands for
    assert buffer.valid_count(15) == 1  # as if 15 had been committed
    batch = at_once(buffer.take(2))
    assert batch.ages == (2, 1)
    assert batch.dropped == 1


def test_what_a_commit_makes_too_old_is_dropped_or_raised(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drops: RolloutBuffer[str] = RolloutBuffer(1, samples_per_step=1)
    raises: RolloutBuffer[str] = RolloutBuffer(1, "raise", samples_per_step=1)
    for buffer in (drops, raises):
        assert finished(buffer, "old", 0)
        for version in (1, 2):
            buffer.on_commit(version)
        assert buffer.valid_count() == buffer.ready_for(2) == 0
    assert (drops.capacity(), raises.capacity()) == (2, 1)
    with pytest.raises(RolloutsTooOld, match=r"1 of 1 .* \[2\] commits"):
        at_once(raises.take())
    for buffer in (drops, raises):
        assert finished(buffer, "new", 2)
        batch = at_once(buffer.take())
        assert (batch.samples, batch.dropped) == (("new",), 1)
    assert capsys.readouterr().err.count("rollouts_dropped") == 2  # a whole step's samples


def test_tokens_of_an_unknown_version_are_as_old_as_the_start() -> None:
    buffer: RolloutBuffer[str] = RolloutBuffer(1, samples_per_step=3)
    buffer.on_commit(5)
    begun = [start(buffer), start(buffer)]
    buffer.on_commit(6)
    begun[0].add("its engine died", completion(None, 6))
    begun[1].add("it had no tokens", completion())
    assert at_once(buffer.take(2)).ages == (1, 1)


def test_a_step_counts_no_samples_of_another() -> None:
    buffer: RolloutBuffer[int] = RolloutBuffer(2, samples_per_step=2, step=10)
    begun = [start(buffer) for _ in range(5)]
    for index in (1, 2, 3, 4):
        begun[index].add(index, completion(0))
    assert [buffer.ready_for(step) for step in (9, 10, 11, 12, 13)] == [0, 1, 2, 1, 0]
    assert waits(buffer.take(in_order=True))
    begun[0].add(0, completion(0))
    assert at_once(buffer.take(in_order=True)).samples == (0, 1)
    assert [buffer.ready_for(step) for step in (10, 11, 12)] == [0, 2, 1]


def test_waiting_rollouts_start_when_the_trainer_commits() -> None:
    async def main() -> None:
        buffer: RolloutBuffer[int] = RolloutBuffer(0, samples_per_step=2)
        ended: list[int] = []

        async def roll(index: int) -> None:
            async with buffer.rollout() as rollout:
                rollout.add(index, completion(rollout.version))
                ended.append(rollout.version)

        async with asyncio.TaskGroup() as tasks:
            for index in range(4):
                tasks.create_task(roll(index))
            assert (await buffer.take()).samples == (0, 1)
            assert buffer.capacity() == 0
            buffer.on_commit(8)
            assert (await buffer.take()).samples == (2, 3)
        assert ended == [0, 0, 8, 8]

    Loop.runner.run(main())


def test_a_rollout_that_fails_gives_its_place_back() -> None:
    async def main() -> None:
        buffer: RolloutBuffer[int] = RolloutBuffer(0, samples_per_step=1)
        with contextlib.suppress(ZeroDivisionError):
            async with buffer.rollout():
                assert buffer.capacity() == 0
                raise ZeroDivisionError
        async with buffer.rollout() as rollout:
            rollout.add(1, completion(0))
            with pytest.raises(UsageError, match="add"):
                rollout.add(2, completion(0))
        assert (await buffer.take()).samples == (1,)

    Loop.runner.run(main())


def test_bad_input_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="max_age_steps=-1"):
        RolloutBuffer(-1, samples_per_step=1)
    with pytest.raises(UsageError, match="samples_per_step=0"):
        RolloutBuffer(1, samples_per_step=0)
    with pytest.raises(UsageError, match="policy='keep'"):
        RolloutBuffer(1, "keep", samples_per_step=1)  # type: ignore[arg-type]
    buffer: RolloutBuffer[int] = RolloutBuffer(1, samples_per_step=1)
    for count in (0, 3):
        with pytest.raises(UsageError, match=f"count={count}"):
            at_once(buffer.take(count))
    buffer.on_commit(4)
    for version in (3, 4):
        with pytest.raises(UsageError, match="must be newer than 4"):
            buffer.on_commit(version)
