"""Buffers rollouts for the trainer, and limits the age of their weights.

The age of a sample is the number of versions of the model that were committed after the oldest
version that sampled one of its tokens. Version numbers have gaps, because failed updates, drafts
and adapters use numbers too. So the buffer counts only the versions that
:meth:`RolloutBuffer.on_commit` has received.

==================  ====================  ==========================================================
event               possible if           effect
==================  ====================  ==========================================================
a rollout starts    ``capacity()`` > 0    it is under way, and last in the order of starting
a sample is added   it is under way       it is finished; dropped if the sample is too old
it ends without     it is under way       it leaves the order
``on_commit(v)``    v is the newest       the next step begins; samples that are too old are dropped
``take(n)``         n are finished        these leave the order, and count as taken in this step
==================  ====================  ==========================================================

With the policy ``raise``, a sample that is too old is dropped only when its turn comes in ``take``,
which raises an error.

Invariants:

- Unless a step takes more samples than ``samples_per_step``: taken in this step + under way +
  finished <= (``max_age_steps`` + 1) x ``samples_per_step``.
- No sample older than ``max_age_steps`` is taken.
- If each step takes ``samples_per_step`` in order and then commits once, no sample whose rollout
  waited for capacity becomes too old.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

import bus.log
from bus.errors import RolloutsTooOld, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from trainer_agent._rollouts.results import Completion

T = TypeVar("T")
AgePolicy: TypeAlias = Literal["drop", "raise"]


@dataclass(frozen=True, slots=True)
class RolloutBatch(Generic[T]):
    """A batch of samples for the trainer.

    Attributes:
        samples: the samples.
        ages: the age of each sample, in commits of the model.
        dropped: how many samples were dropped since the last batch, because they were too old.
    """

    samples: tuple[T, ...]
    ages: tuple[int, ...]
    dropped: int

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics for a trainer's log: ``age_mean``, ``age_max`` and ``dropped``."""
        mean = sum(self.ages) / len(self.ages)
        return {"age_mean": mean, "age_max": max(self.ages), "dropped": self.dropped}


class BufferedRollout(Generic[T]):
    """A rollout under way, from :meth:`RolloutBuffer.rollout`.

    Attributes:
        version: the oldest version that may have sampled one of its tokens.
        sample: a tuple of one, the sample; None until :meth:`add`.
    """

    def __init__(self, buffer: RolloutBuffer[T], version: int) -> None:
        self._buffer = buffer
        self.version = version
        self.sample: tuple[T] | None = None

    def add(self, sample: T, *completions: Completion) -> bool:
        """Adds the sample, which finishes the rollout.

        Args:
            sample: any object for the trainer, such as completions with their rewards.
            completions: all completions in the sample. Their oldest span determines the sample's
                age. A token of an unknown version counts as sampled by the version at the rollout's
                start.

        Returns:
            Whether the sample is kept; False: it is too old.

        Raises:
            UsageError: the rollout has added a sample already, or has ended.
        """
        spans = [s for done in completions for choice in done.choices for s in choice.spans]
        if spans:
            started = self.version
            self.version = min(started if s.version is None else s.version for s in spans)
        return self._buffer._finish(self, sample)  # noqa: SLF001 - its other half


class RolloutBuffer(Generic[T]):
    """Keeps finished rollouts until the trainer takes them, and limits their age.

    ::

        async with buffer.rollout() as rollout:  # waits for capacity
            done = await client.generate(prompt, params)
            rollout.add((done, rewards(done)), done)
        ...
        batch = await buffer.take()  # waits for samples
        await asyncio.to_thread(train, batch.samples)
        buffer.on_commit(await agent.update_weights(model))

    It is not thread-safe: use it on one event loop.

    Args:
        max_age_steps: the greatest age, in commits of the model, at which samples are taken. With
            0 the trainer takes only samples of the newest version.
        policy: how to handle older samples: ``drop`` them, or ``raise`` an error in :meth:`take`.
        samples_per_step: how many samples the trainer takes between two commits.
        step: the number of the trainer's present step; each commit begins the next step.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        max_age_steps: int,
        policy: AgePolicy = "drop",
        *,
        samples_per_step: int,
        step: int = 0,
    ) -> None:
        if max_age_steps < 0:
            raise UsageError(f"max_age_steps={max_age_steps}: must be 0 or more")
        if samples_per_step < 1:
            raise UsageError(f"samples_per_step={samples_per_step}: must be at least 1")
        if policy not in ("drop", "raise"):
            raise UsageError(f"policy={policy!r}: must be drop or raise")
        self.max_age_steps = max_age_steps
        self.policy = policy
        self.samples_per_step = samples_per_step
        self.step = step
        self._commits: list[int] = []  # versions, ascending
        self._order: dict[BufferedRollout[T], None] = {}  # in the order of starting
        self._taken = 0  # in this step
        self._dropped = 0  # since the last batch
        self._has_capacity = asyncio.Event()
        self._has_samples = asyncio.Event()

    def capacity(self) -> int:
        """Returns how many rollouts may start now without becoming too old for use.

        This assumes that each step uses ``samples_per_step``. Rollouts under way, finished samples
        and samples that this step has taken reduce the capacity.
        """
        ahead = self._taken + len(self._order)
        return max(0, (self.max_age_steps + 1) * self.samples_per_step - ahead)

    def valid_count(
        self, current_version: int | None = None, max_age_steps: int | None = None
    ) -> int:
        """Returns how many finished samples are young enough.

        Args:
            current_version: the version for which ages are computed. Commits up to and including
                this version count, even if this version is not committed yet. Samples whose tokens
                are all of later versions don't count. Default: the newest version.
            max_age_steps: the greatest age that counts. Default: the buffer's own.
        """
        limit = self.max_age_steps if max_age_steps is None else max_age_steps
        ages = [self._age(r, current_version) for r in self._order if r.sample]
        return sum(0 <= age <= limit for age in ages)

    def ready_for(self, step: int) -> int:
        """Returns how many finished samples wait for one training step.

        Each step gets the next ``samples_per_step`` rollouts, in the order in which rollouts
        started. Samples that are too old, or that the current step has already taken, don't count.

        Args:
            step: the number of the step.
        """
        first = (step - self.step) * self.samples_per_step - self._taken
        meant = islice(self._order, max(0, first), max(0, first + self.samples_per_step))
        return sum(r.sample is not None and self._age(r) <= self.max_age_steps for r in meant)

    def on_commit(self, version: int) -> None:
        """Records a new version of the model, as returned by ``update_weights``.

        Raises:
            UsageError: the version is not newer than the last one.
        """
        if self._commits and version <= self._commits[-1]:
            raise UsageError(f"version {version}: must be newer than {self._commits[-1]}")
        self._commits.append(version)
        self.step += 1
        self._taken = 0
        if self.policy == "drop":
            self._drop_old(self._order)
        self._has_capacity.set()

    @contextlib.asynccontextmanager
    async def rollout(self) -> AsyncGenerator[BufferedRollout[T]]:
        """Waits for capacity, then yields a rollout that takes up one place.

        The rollout is under way until it adds its sample. If the block ends without a sample, the
        place becomes free again.
        """
        await _until(self._has_capacity, lambda: self.capacity() > 0)
        rollout = BufferedRollout(self, self._commits[-1] if self._commits else 0)
        self._order[rollout] = None
        try:
            yield rollout
        finally:
            if rollout.sample is None:
                self._remove(rollout)

    async def take(self, count: int | None = None, *, in_order: bool = False) -> RolloutBatch[T]:
        """Waits for finished samples, and returns the samples whose rollouts started first.

        Args:
            count: how many samples to take. Default: ``samples_per_step``.
            in_order: whether to wait for the rollouts that started first, even if later rollouts
                have finished. Then no sample becomes too old, but a slow rollout delays the
                trainer.

        Raises:
            RolloutsTooOld: with the policy ``raise``, samples were too old; these are dropped.
            UsageError: ``count`` is less than 1, or more than the buffer can hold.
        """
        count = self.samples_per_step if count is None else count
        most = (self.max_age_steps + 1) * self.samples_per_step
        if not 1 <= count <= most:
            raise UsageError(f"count={count}: must be from 1 to {most}, the buffer's size")
        chosen: list[BufferedRollout[T]] = []

        def is_there() -> bool:
            turn = islice(self._order, count if in_order else None)
            chosen[:] = islice((r for r in turn if r.sample), count)
            return len(chosen) == count

        await _until(self._has_samples, is_there)
        if old := self._drop_old(dict.fromkeys(chosen)):
            raise RolloutsTooOld(
                f"{len(old)} of {count} samples are too old and were dropped: their ages are {old} "
                f"commits, and max_age_steps is {self.max_age_steps}"
            )
        self._taken += count
        for rollout in chosen:
            self._remove(rollout)
        ages = tuple(self._age(r) for r in chosen)
        batch = RolloutBatch(tuple(r.sample[0] for r in chosen if r.sample), ages, self._dropped)
        self._dropped = 0
        bus.log.logger().info("rollouts_taken", step=self.step, count=count, **batch.metrics)
        return batch

    def _finish(self, rollout: BufferedRollout[T], sample: T) -> bool:
        if rollout not in self._order or rollout.sample:
            raise UsageError("add: this rollout has added its sample already, or has ended")
        rollout.sample = (sample,)
        if self.policy == "drop" and self._drop_old({rollout: None}):
            return False
        self._has_samples.set()
        return True

    def _drop_old(self, among: dict[BufferedRollout[T], None]) -> list[int]:
        """Drops the finished samples that are too old; returns their ages."""
        ages = {r: age for r in among if r.sample and (age := self._age(r)) > self.max_age_steps}
        for rollout in ages:
            self._remove(rollout)
        self._dropped += len(ages)
        if ages and self._dropped >= self.samples_per_step:  # the trainer may wait for long
            bus.log.logger().warning(
                "rollouts_dropped", step=self.step, count=self._dropped, age_max=max(ages.values())
            )
        return list(ages.values())

    def _age(self, rollout: BufferedRollout[T], current: int | None = None) -> int:
        """Returns the age in commits; negative if all tokens are newer than ``current``."""
        commits, place = self._commits, bisect.bisect_right
        if current is None:
            return len(commits) - place(commits, rollout.version)
        if not commits or current > commits[-1]:
            commits = [*commits, current]
        return place(commits, current) - place(commits, rollout.version)

    def _remove(self, rollout: BufferedRollout[T]) -> None:
        self._order.pop(rollout, None)
        self._has_capacity.set()
        self._has_samples.set()  # with `in_order`, a waiter may have the rollout that is first now


async def _until(changed: asyncio.Event, is_true: Callable[[], bool]) -> None:
    while not is_true():
        changed.clear()
        await changed.wait()
