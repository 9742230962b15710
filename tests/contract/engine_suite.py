"""What every engine adapter must do, whatever engine is behind it.

A subclass of :class:`EngineContract` brings one engine, as an :class:`EngineUnderTest`,
which also says how coroutines run.
The suite leaves the engine running and whole after each test, but with other weights
and a higher version than before: so one engine may serve all tests of a class, where
booting it takes long. ``under_test.weights`` are always the ones it serves.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pytest

from bus._manifest import Manifest
from bus._weight_transfer.allocation import NO_RANK
from bus.errors import EngineError
from bus.messages import NackCode
from tests.support.push import Push, plan
from tests.support.steps import steps
from trainer_agent import CpuCache

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from torch import Tensor

    from bus.messages import PauseMode, SleepLevel
    from sidecar.engine import Engine

PROMPT = (5, 9, 77, 31, 12)
OTHER_PROMPT = (40, 3, 18)
LONG_PROMPT = tuple(3 + 7 * place % 110 for place in range(300))  # some blocks of a prefix cache
MANY_BYTES = 1 << 30


@dataclass(frozen=True)
class Generated:
    """What a request gave. ``weight_versions`` are (version, start, end) over ``tokens``."""

    tokens: list[int]
    finish_reason: str
    weight_versions: list[tuple[int, int, int]]


class Watch:
    """Counts a request's tokens as they arrive, so that tests can wait for the k-th."""

    def __init__(self) -> None:
        self.count = 0
        self.rejections = 0
        self._ended = False
        self._changed = asyncio.Condition()

    async def note(self, fresh: int) -> None:
        """The adapter under test says that ``fresh`` more tokens have arrived."""
        async with self._changed:
            self.count += fresh
            self._changed.notify_all()

    async def reject(self) -> None:
        """The adapter under test says that the engine has rejected the request, which is paused:
        it is sent again."""
        async with self._changed:
            self.rejections += 1
            self._changed.notify_all()

    async def rejected(self) -> None:
        """The request has been rejected."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.rejections)

    async def of(self, request: Awaitable[Generated]) -> Generated:
        """The request, of which nobody waits for a token any more when it has ended."""
        try:
            return await request
        finally:
            async with self._changed:
                self._ended = True
                self._changed.notify_all()

    async def reached(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.count >= count or self._ended)
        assert self.count >= count, "raise long_tokens: the request has ended"

    async def passed(self, count: int) -> None:
        """Another one has come; for ever, if none does."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.count > count)


class EngineUnderTest(Protocol):
    """One engine, with what the suite needs around it.

    Attributes:
        engine: the adapter, started.
        weights: all tensors that it serves at first, by their Hugging Face names. The
            suite replaces them as it updates the engine.
        version: what it serves as; the suite keeps it, too.
        workers: how many receivers it has.
        long_tokens: output length that gives time to act in the middle of a request.
        late_tokens: how many tokens of one request may still be on their way to the
            caller when a pause returns.
        quiet_s: seconds without a token that count as silence: many steps' worth.
        wait_s: seconds after which a test gives up waiting.
        canary: what a pause must leave of requests, so that probes can run.
        rejects: a pause that keeps no requests rejects new ones until the resume, with an error
            that says that they may be sent again. Else it queues them.
    """

    engine: Engine
    weights: Mapping[str, Tensor]
    version: int
    workers: int
    long_tokens: int
    late_tokens: int
    quiet_s: float
    wait_s: float
    canary: Literal["abort", "keep"]

    @property
    def rejects(self) -> bool: ...

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, in the event loop that the engine lives in."""

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, *, watch: Watch | None = None
    ) -> Generated:
        """Greedy, past any end of sequence; streams, and tells ``watch`` of tokens at once. What a
        paused engine rejects is sent again until it is served, and ``watch`` told of it."""

    def reference(
        self, weights: Mapping[str, Tensor], prompt: Sequence[int], count: int
    ) -> list[int]:
        """The greedy tokens that ``weights`` give, by other code than the engine's."""

    def score(
        self, weights: Mapping[str, Tensor], prompt: Sequence[int], tokens: Sequence[int]
    ) -> list[float]:
        """The log-probabilities that ``weights`` give these tokens, by other code, too."""

    def other_weights(self, seed: int) -> dict[str, Tensor]:
        """Another full set, in the same order, whose greedy tokens differ."""


def contract(
    test: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., None]:
    """Let a class run this coroutine its own way, bounded in time."""

    @functools.wraps(test)
    def run(self: EngineContract, under_test: EngineUnderTest, **params: object) -> None:
        under_test.run(asyncio.wait_for(test(self, under_test, **params), under_test.wait_s))

    return run


async def update(
    under_test: EngineUnderTest,
    weights: Mapping[str, Tensor],
    manifest: Manifest | None = None,
    *,
    recover: bool = False,
    backend: str = "shm",
    lent: bool = False,
    version: int | None = None,
) -> None:
    """Send them to the paused engine and commit them, as the next version."""
    push = Push(
        under_test.engine,
        dict(CpuCache(weights, shared=True)) if lent else weights,
        manifest or plan(weights, MANY_BYTES),
        backend=backend,
        packed=not lent,
        workers=under_test.workers,
    )
    version = under_test.version + 1 if version is None else version
    await push.whole(version, recover=recover)
    under_test.version = version
    under_test.weights = weights


class EngineContract:
    """The suite. A subclass, or its module, has a fixture ``under_test``."""

    # Generation

    @contract
    async def test_greedy_tokens_are_those_of_the_reference(
        self, under_test: EngineUnderTest
    ) -> None:
        """What is generated is the plain computation's, with the version it came from."""
        result = await under_test.generate(PROMPT, 24)
        assert result.tokens == under_test.reference(under_test.weights, PROMPT, 24)
        assert result.finish_reason == "length"
        assert result.weight_versions == [(under_test.version, 0, 24)]
        assert await under_test.engine.version() == under_test.version

    @contract
    async def test_requests_in_flight_are_counted(self, under_test: EngineUnderTest) -> None:
        """A frozen request counts; one that has ended doesn't."""
        assert await under_test.engine.in_flight() == 0
        request, _ = await _paused_in_the_middle(under_test, "keep", clear_cache=False)
        assert await under_test.engine.in_flight() == 1
        await under_test.engine.resume()
        await request
        assert await under_test.engine.in_flight() == 0

    # Pause and resume

    @contract
    async def test_keep_freezes_a_request_until_the_resume(
        self, under_test: EngineUnderTest
    ) -> None:
        """No token comes while paused, and the request ends with all it asked for."""
        request, watch = await _paused_in_the_middle(under_test, "keep", clear_cache=False)
        await _assert_quiet(under_test, watch)
        assert not request.done()
        await under_test.engine.resume()
        result = await request
        assert result.finish_reason == "length"
        assert len(result.tokens) == under_test.long_tokens
        assert result.tokens == under_test.reference(
            under_test.weights, PROMPT, under_test.long_tokens
        )

    @contract
    async def test_a_cleared_cache_changes_no_token_while_the_weights_stay(
        self, under_test: EngineUnderTest
    ) -> None:
        """Recomputing what a kept request has gives what it would have given."""
        request, _ = await _paused_in_the_middle(under_test, "keep", clear_cache=True)
        await under_test.engine.resume()
        result = await request
        assert result.tokens == under_test.reference(
            under_test.weights, PROMPT, under_test.long_tokens
        )

    @contract
    async def test_a_request_that_comes_while_paused_is_served_after_the_resume(
        self, under_test: EngineUnderTest
    ) -> None:
        """It waits, and loses nothing by it."""
        await under_test.engine.pause("keep", clear_cache=True)
        watch = Watch()
        request = asyncio.create_task(under_test.generate(OTHER_PROMPT, 8, watch=watch))
        await _held(under_test, 1)
        await _assert_quiet(under_test, watch)
        assert (watch.count, watch.rejections) == (0, 0)
        await under_test.engine.resume()
        result = await request
        assert result.tokens == under_test.reference(under_test.weights, OTHER_PROMPT, 8)

    @contract
    async def test_wait_lets_a_running_request_end_first(self, under_test: EngineUnderTest) -> None:
        """The pause returns when the request has all its tokens. A new one is queued, or rejected
        and sent again: it is served after the resume."""
        first, watch = await running(under_test)
        pause = asyncio.create_task(under_test.engine.pause("wait", clear_cache=True))
        await pause
        result = await first
        assert result.finish_reason == "length"
        assert len(result.tokens) == watch.count == under_test.long_tokens
        later_watch = Watch()
        later = asyncio.create_task(under_test.generate(OTHER_PROMPT, 8, watch=later_watch))
        await _taken(under_test, later_watch)
        await _assert_quiet(under_test, later_watch)
        assert later_watch.count == 0
        await under_test.engine.resume()
        assert len((await later).tokens) == 8

    @contract
    async def test_abort_ends_requests_with_the_tokens_they_have(
        self, under_test: EngineUnderTest
    ) -> None:
        """They are the first of those it would have given."""
        request, watch = await _paused_in_the_middle(under_test, "abort", clear_cache=True)
        result = await request
        assert result.finish_reason == "abort"
        assert 0 < len(result.tokens) < under_test.long_tokens
        assert len(result.tokens) == watch.count
        expected = under_test.reference(under_test.weights, PROMPT, len(result.tokens))
        assert result.tokens == expected
        await under_test.engine.resume()
        assert len((await under_test.generate(PROMPT, 4)).tokens) == 4

    @contract
    async def test_requests_can_be_aborted_while_paused(self, under_test: EngineUnderTest) -> None:
        """As a quarantined engine must: its requests end, it stays paused."""
        request, _ = await _paused_in_the_middle(under_test, "keep", clear_cache=False)
        assert await under_test.engine.abort_requests() == 1
        assert (await request).finish_reason == "abort"
        assert await under_test.engine.in_flight() == 0
        await under_test.engine.resume()

    @contract
    async def test_pauses_follow_each_other(self, under_test: EngineUnderTest) -> None:
        """One request lives through several of them, whatever becomes of its cache."""
        request, watch = await running(under_test)
        for clear_cache in (False, True, False):
            await under_test.engine.pause("keep", clear_cache=clear_cache)
            target = watch.count + 2
            await under_test.engine.resume()
            await watch.reached(target)
        result = await request
        assert result.tokens == under_test.reference(
            under_test.weights, PROMPT, under_test.long_tokens
        )

    # Admission

    @contract
    async def test_a_closed_door_ends_what_comes_at_once(self, under_test: EngineUnderTest) -> None:
        """With no tokens, while who was there before is served on; opened, it lets in again."""
        request, _ = await running(under_test)
        await under_test.engine.admit(open=False)
        for _ in range(2):
            turned_away = await under_test.generate(OTHER_PROMPT, 8)
            assert (turned_away.tokens, turned_away.finish_reason) == ([], "abort")
        await under_test.engine.admit(open=True)
        served = await under_test.generate(OTHER_PROMPT, 8)
        assert served.tokens == under_test.reference(under_test.weights, OTHER_PROMPT, 8)
        assert len((await request).tokens) == under_test.long_tokens
        assert await under_test.engine.in_flight() == 0

    @contract
    async def test_a_closed_door_queues_nothing_while_paused(
        self, under_test: EngineUnderTest
    ) -> None:
        """As of a quarantined engine: who waits is ended, who comes is turned away, and the abort
        and pause come to their end."""
        await under_test.engine.pause("keep", clear_cache=True)
        waiting = asyncio.create_task(under_test.generate(PROMPT, 8))
        await _held(under_test, 1)
        await under_test.engine.admit(open=False)
        await under_test.engine.abort_requests()
        ended = [await waiting, await under_test.generate(OTHER_PROMPT, 8)]
        assert [(each.tokens, each.finish_reason) for each in ended] == [([], "abort")] * 2
        assert await under_test.engine.in_flight() == 0
        await under_test.engine.admit(open=True)
        await under_test.engine.resume()
        served = await under_test.generate(OTHER_PROMPT, 8)
        assert served.tokens == under_test.reference(under_test.weights, OTHER_PROMPT, 8)

    # The canary

    @contract
    async def test_probes_tell_the_weights_that_are_not_committed(
        self, under_test: EngineUnderTest
    ) -> None:
        """Their greedy tokens and log-probabilities, whatever a prefix cache holds of the old
        ones; the engine is paused as before, and serves nobody meanwhile."""
        engine, new = under_test.engine, under_test.other_weights(31)
        before = await under_test.generate(LONG_PROMPT, 4)
        request, watch = await _paused_in_the_middle(
            under_test, under_test.canary, clear_cache=False
        )
        push = Push(engine, new, plan(new, MANY_BYTES), workers=under_test.workers)
        await push.begin()
        await push.chunk(0)
        await steps(engine).finish_update()
        count = watch.count
        for salt in ("u1", "u1", "u2"):
            long, short = await engine.probe(
                (LONG_PROMPT, OTHER_PROMPT), 6, salt, mode=under_test.canary, clear_cache=False
            )
            assert list(short.tokens) == under_test.reference(new, OTHER_PROMPT, 6)
            assert list(long.tokens) == under_test.reference(new, LONG_PROMPT, 6)
            assert list(long.tokens[:4]) != before.tokens
            for prompt, given in ((LONG_PROMPT, long), (OTHER_PROMPT, short)):
                scored = under_test.score(new, prompt, given.tokens)
                assert given.logprobs == pytest.approx(scored, abs=1e-3)
        await _assert_quiet(under_test, watch)
        assert watch.count <= count + under_test.late_tokens
        await engine.commit(under_test.version + 1)
        push.close()
        under_test.version, under_test.weights = under_test.version + 1, new
        await engine.resume()
        result = await request
        if under_test.canary == "keep":
            assert len(result.tokens) == under_test.long_tokens
            versions = [version for version, _, _ in result.weight_versions]
            assert versions == [under_test.version - 1, under_test.version]
        served = await under_test.generate(OTHER_PROMPT, 8)
        assert served.tokens == under_test.reference(new, OTHER_PROMPT, 8)

    @contract
    async def test_nobody_is_served_by_weights_that_are_being_probed(
        self, under_test: EngineUnderTest
    ) -> None:
        """A request that comes meanwhile waits for the commit, or is ended with no tokens. So is
        one that was queued in the pause, where the engine must be resumed for the probes."""
        engine, new = under_test.engine, under_test.other_weights(32)
        await engine.pause(under_test.canary, clear_cache=True)
        early_watch = Watch()
        early = asyncio.create_task(under_test.generate(PROMPT, 8, watch=early_watch))
        await _taken(under_test, early_watch)
        push = Push(engine, new, plan(new, MANY_BYTES), workers=under_test.workers)
        await push.begin()
        await push.chunk(0)
        await steps(engine).finish_update()
        probing = asyncio.create_task(
            engine.probe((PROMPT,) * 2, 16, "u1", mode=under_test.canary, clear_cache=True)
        )
        late: list[asyncio.Task[Generated]] = []
        while not probing.done() and len(late) < 8:
            late.append(asyncio.create_task(under_test.generate(OTHER_PROMPT, 8)))
            await asyncio.sleep(0.005)
        await probing
        await engine.commit(under_test.version + 1)
        push.close()
        under_test.version, under_test.weights = under_test.version + 1, new
        await engine.resume()
        for prompt, each in ((PROMPT, early), *((OTHER_PROMPT, each) for each in late)):
            result = await each
            if result.finish_reason == "abort":
                assert under_test.canary == "abort"
                assert result.tokens == []
            else:
                assert result.tokens == under_test.reference(new, prompt, 8)
                assert result.weight_versions == [(under_test.version, 0, 8)]

    @contract
    async def test_probes_of_what_is_not_finished_are_refused(
        self, under_test: EngineUnderTest
    ) -> None:
        """Or of an engine that runs; it goes on."""
        how: dict[str, Any] = {"mode": under_test.canary, "clear_cache": True}
        if under_test.canary == "abort":
            with pytest.raises(EngineError, match="keeps requests"):
                await under_test.engine.probe((PROMPT,), 4, "u1", mode="keep", clear_cache=True)
        else:
            with pytest.raises(EngineError):
                await under_test.engine.probe((PROMPT,), 4, "u1", **how)
        served = await under_test.generate(OTHER_PROMPT, 8)
        assert served.tokens == under_test.reference(under_test.weights, OTHER_PROMPT, 8)

    # Sleep

    @contract
    async def test_a_sleep_that_keeps_the_weights_loses_no_token(
        self, under_test: EngineUnderTest
    ) -> None:
        """The kept request computes its keys and values anew, and ends as it would have."""
        request, watch = await _paused_in_the_middle(under_test, "keep", clear_cache=True)
        await under_test.engine.sleep(1)
        waiting = asyncio.create_task(under_test.generate(OTHER_PROMPT, 8))
        await _assert_quiet(under_test, watch)
        await under_test.engine.wake()
        weights = under_test.weights
        assert (await waiting).tokens == under_test.reference(weights, OTHER_PROMPT, 8)
        result = await request
        assert result.tokens == under_test.reference(weights, PROMPT, under_test.long_tokens)

    @pytest.mark.parametrize("level", [1, 2])
    @contract
    async def test_an_update_while_the_cache_sleeps(
        self, under_test: EngineUnderTest, level: SleepLevel
    ) -> None:
        """Weights wake, are replaced and committed; the wake of the rest is the resume."""
        request, watch = await _paused_in_the_middle(under_test, "keep", clear_cache=True)
        old, new = under_test.weights, under_test.other_weights(20 + level)
        await under_test.engine.sleep(level)
        await under_test.engine.wake_weights()
        await update(under_test, new, recover=level == 2)
        await _assert_quiet(under_test, watch)
        await under_test.engine.wake()
        result = await request
        cut = result.weight_versions[0][2]
        assert result.tokens[:cut] == under_test.reference(old, PROMPT, cut)
        so_far = (*PROMPT, *result.tokens[:cut])
        rest = under_test.reference(new, so_far, under_test.long_tokens - cut)
        assert result.tokens[cut:] == rest

    @contract
    async def test_to_wake_an_engine_that_is_awake_is_to_resume_it(
        self, under_test: EngineUnderTest
    ) -> None:
        """As after a sleep that failed, of which nobody knows what sleeps."""
        await under_test.engine.pause("keep", clear_cache=True)
        await under_test.engine.wake_weights()
        await under_test.engine.wake()
        result = await under_test.generate(PROMPT, 8)
        assert result.tokens == under_test.reference(under_test.weights, PROMPT, 8)

    # Updates

    @contract
    async def test_a_catch_up_may_bring_an_earlier_version(
        self, under_test: EngineUnderTest
    ) -> None:
        """Then the keys and values that are kept are those of its weights."""
        engine, weights = under_test.engine, under_test.weights
        await engine.pause("keep", clear_cache=True)
        await update(under_test, weights)
        earlier = under_test.version
        await engine.resume()
        await under_test.generate(LONG_PROMPT, 4)
        for brought, version in ((under_test.other_weights(31), earlier + 1), (weights, earlier)):
            await engine.pause("keep", clear_cache=False)
            await update(under_test, brought, version=version)
            await engine.resume()
            result = await under_test.generate(LONG_PROMPT, 8)
            assert result.tokens == under_test.reference(brought, LONG_PROMPT, 8)
            assert result.weight_versions == [(version, 0, 8)]
            assert await engine.version() == version

    @contract
    async def test_an_update_in_the_middle_of_a_request(self, under_test: EngineUnderTest) -> None:
        """The request ends whole, its tokens know their versions; new ones see new weights."""
        before = under_test.version
        request, watch = await _paused_in_the_middle(under_test, "keep", clear_cache=True)
        old, new = under_test.weights, under_test.other_weights(11)
        await update(under_test, new)
        await _assert_quiet(under_test, watch)
        await under_test.engine.resume()
        fresh = await under_test.generate(OTHER_PROMPT, 24)
        result = await request
        assert fresh.tokens == under_test.reference(new, OTHER_PROMPT, 24)
        assert fresh.weight_versions == [(before + 1, 0, 24)]
        assert await under_test.engine.version() == before + 1

        total = under_test.long_tokens
        assert len(result.tokens) == total
        first, second = result.weight_versions
        assert first[0] == before
        assert second[0] == before + 1
        assert (first[1], second[1], second[2]) == (0, first[2], total)
        cut = first[2]
        assert result.tokens[:cut] == under_test.reference(old, PROMPT, cut)
        # With the cache cleared, the rest is what the new weights say after those tokens.
        so_far = (*PROMPT, *result.tokens[:cut])
        assert result.tokens[cut:] == under_test.reference(new, so_far, total - cut)

    @contract
    async def test_a_kept_cache_lets_a_request_end_whole_after_an_update(
        self, under_test: EngineUnderTest
    ) -> None:
        """Old keys and values under new weights: no reference, but every token is there."""
        before = under_test.version
        request, _ = await _paused_in_the_middle(under_test, "keep", clear_cache=False)
        new = under_test.other_weights(12)
        await update(under_test, new)
        await under_test.engine.resume()
        result = await request
        assert result.finish_reason == "length"
        assert len(result.tokens) == under_test.long_tokens
        assert [version for version, _, _ in result.weight_versions] == [before, before + 1]

    @contract
    async def test_a_pause_that_kept_the_cache_can_drop_it(
        self, under_test: EngineUnderTest
    ) -> None:
        """Then the rest of the request is that of the new weights, and so is a new one that begins
        like it."""
        request, _ = await _paused_in_the_middle(under_test, "keep", clear_cache=False)
        new = under_test.other_weights(13)
        await under_test.engine.clear_cache()
        await update(under_test, new)
        await under_test.engine.resume()
        again = await under_test.generate(PROMPT, 24)
        result = await request
        assert again.tokens == under_test.reference(new, PROMPT, 24)
        cut = result.weight_versions[0][2]
        so_far = (*PROMPT, *result.tokens[:cut])
        rest = under_test.reference(new, so_far, under_test.long_tokens - cut)
        assert result.tokens[cut:] == rest

    @pytest.mark.parametrize(("backend", "lent"), [("shm", False), ("shm", True), ("gloo", False)])
    @pytest.mark.parametrize("chunks", ["one", "seven", "each tensor"])
    def test_an_update_in_any_number_of_chunks(
        self, under_test: EngineUnderTest, chunks: str, backend: str, lent: bool
    ) -> None:
        """How the tensors are cut into chunks changes nothing."""
        new = under_test.other_weights(13)
        manifest = cut(plan(new, MANY_BYTES), chunks)

        async def scenario() -> None:
            await under_test.engine.pause("keep", clear_cache=True)
            await update(under_test, new, manifest, backend=backend, lent=lent)
            await under_test.engine.resume()
            result = await under_test.generate(PROMPT, 16)
            assert result.tokens == under_test.reference(new, PROMPT, 16)

        under_test.run(asyncio.wait_for(scenario(), under_test.wait_s))

    @pytest.mark.parametrize(
        "fault", ["unknown", "missing", "misshapen", "wrong dtype", "half fused"]
    )
    def test_a_manifest_that_does_not_fit_is_refused(
        self, under_test: EngineUnderTest, fault: str
    ) -> None:
        """At arm, by the tensor's name; the old weights serve on."""
        manifest, tensors = _spoilt(plan(under_test.weights, MANY_BYTES), fault)

        async def scenario() -> None:
            push = Push(under_test.engine, under_test.weights, manifest)
            await push.open()
            with pytest.raises(EngineError) as refused:
                await steps(under_test.engine).arm(manifest)
            push.close()
            assert refused.value.code is NackCode.MANIFEST_REFUSED
            assert refused.value.tensor in tensors
            assert any(tensor in refused.value.detail for tensor in tensors)
            result = await under_test.generate(PROMPT, 8)
            assert result.tokens == under_test.reference(under_test.weights, PROMPT, 8)
            assert result.weight_versions == [(under_test.version, 0, 8)]

        under_test.run(asyncio.wait_for(scenario(), under_test.wait_s))

    @pytest.mark.parametrize("backend", ["shm", "gloo"])
    def test_a_chunk_that_does_not_fit_is_refused_when_it_is_armed(
        self, under_test: EngineUnderTest, backend: str
    ) -> None:
        """Before anybody sends or receives it; the text has both sizes."""

        async def scenario() -> None:
            new = under_test.other_weights(19)
            small = Push(
                under_test.engine,
                new,
                cut(plan(new, MANY_BYTES), "each tensor"),
                backend=backend,
                workers=under_test.workers,
            )
            await small.open()
            whole = cut(plan(new, MANY_BYTES), "one")
            with pytest.raises(EngineError, match="has room for") as refused:
                await steps(under_test.engine).arm(whole)
            assert refused.value.code is NackCode.TRANSFER_FAILED
            assert refused.value.tensor in new
            small.close()

        under_test.run(asyncio.wait_for(scenario(), under_test.wait_s))

    @contract
    async def test_arming_disturbs_no_request(self, under_test: EngineUnderTest) -> None:
        """The engine generates on while it checks a manifest."""
        request, _ = await running(under_test)
        new = under_test.other_weights(14)
        push = Push(under_test.engine, new, plan(new, MANY_BYTES))
        await push.open()
        await steps(under_test.engine).arm(push.manifest)
        push.close()
        result = await request
        assert result.tokens == under_test.reference(
            under_test.weights, PROMPT, under_test.long_tokens
        )

    @contract
    async def test_a_started_update_that_loaded_nothing_is_restored(
        self, under_test: EngineUnderTest
    ) -> None:
        """The old weights are back, under the old version, and another update can follow."""
        new = under_test.other_weights(15)
        push = Push(under_test.engine, new, plan(new, MANY_BYTES))
        await under_test.engine.pause("keep", clear_cache=True)
        await push.begin()
        await steps(under_test.engine).restore()
        push.close()
        await under_test.engine.resume()
        result = await under_test.generate(PROMPT, 16)
        assert result.tokens == under_test.reference(under_test.weights, PROMPT, 16)
        assert result.weight_versions == [(under_test.version, 0, 16)]

        await under_test.engine.pause("keep", clear_cache=True)
        await update(under_test, new)
        await under_test.engine.resume()
        result = await under_test.generate(PROMPT, 16)
        assert result.tokens == under_test.reference(new, PROMPT, 16)

    @contract
    async def test_a_byte_that_flips_on_the_way_is_named(self, under_test: EngineUnderTest) -> None:
        """The chunk is refused before anything of it is loaded, and the old weights come back."""
        new = under_test.other_weights(18)
        push = Push(under_test.engine, new, cut(plan(new, MANY_BYTES), "seven"))
        await under_test.engine.pause("keep", clear_cache=True)
        await push.begin()
        names = push.manifest.names[push.manifest.part(0)]
        flipped = {**new, names[-1]: new[names[-1]].clone()}
        flipped[names[-1]].view(-1)[-1].neg_()
        push.weights = flipped
        await push.send(0)
        push.weights = new
        with pytest.raises(EngineError) as refused:
            await push.load(0)
        assert refused.value.code is NackCode.CHECKSUM_MISMATCH
        assert refused.value.tensor == names[-1]
        assert names[-1] in refused.value.detail
        await steps(under_test.engine).restore()
        push.close()
        await under_test.engine.resume()
        result = await under_test.generate(PROMPT, 8)
        assert result.tokens == under_test.reference(under_test.weights, PROMPT, 8)
        assert result.weight_versions == [(under_test.version, 0, 8)]

    @contract
    async def test_a_whole_update_recovers_a_partly_loaded_engine(
        self, under_test: EngineUnderTest
    ) -> None:
        """Nothing is left of the update that broke off."""
        broken_off = under_test.other_weights(16)
        new = under_test.other_weights(17)
        await under_test.engine.pause("keep", clear_cache=True)
        push = Push(under_test.engine, broken_off, cut(plan(broken_off, MANY_BYTES), "seven"))
        await push.begin()
        for seq in range(3):
            await push.chunk(seq)
        push.close()
        await update(under_test, new, cut(plan(new, MANY_BYTES), "seven"), recover=True)
        await under_test.engine.resume()
        result = await under_test.generate(PROMPT, 24)
        assert result.tokens == under_test.reference(new, PROMPT, 24)
        assert result.weight_versions == [(under_test.version, 0, 24)]

    @contract
    async def test_a_missing_backend_is_named(self, under_test: EngineUnderTest) -> None:
        """Whoever reads the refusal knows which one to install or to choose."""
        with pytest.raises(EngineError, match="pigeons") as refused:
            await steps(under_test.engine).open_transfer("pigeons", b"", NO_RANK)
        assert refused.value.code is NackCode.BACKEND_MISSING

    @contract
    async def test_a_draft_that_is_not_there_is_refused(self, under_test: EngineUnderTest) -> None:
        """By its code; what was armed, and what is served, is not touched."""
        with pytest.raises(EngineError, match="no draft model") as refused:
            await steps(under_test.engine).arm(plan(under_test.weights, MANY_BYTES), "draft")
        assert refused.value.code is NackCode.DRAFT_MISSING
        result = await under_test.generate(PROMPT, 8)
        assert result.tokens == under_test.reference(under_test.weights, PROMPT, 8)


async def running(under_test: EngineUnderTest) -> tuple[asyncio.Task[Generated], Watch]:
    """A long request that has its first tokens."""
    watch = Watch()
    asked = under_test.generate(PROMPT, under_test.long_tokens, watch=watch)
    request = asyncio.create_task(watch.of(asked))
    await watch.reached(4)
    return request, watch


async def _paused_in_the_middle(
    under_test: EngineUnderTest, mode: PauseMode, *, clear_cache: bool
) -> tuple[asyncio.Task[Generated], Watch]:
    request, watch = await running(under_test)
    await under_test.engine.pause(mode, clear_cache=clear_cache)
    assert watch.count < under_test.long_tokens, "raise long_tokens: the request has ended"
    return request, watch


async def _held(under_test: EngineUnderTest, count: int) -> None:
    """Wait until the engine holds so many requests."""
    while await under_test.engine.in_flight() != count:  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.01)


async def _taken(under_test: EngineUnderTest, watch: Watch) -> None:
    """Wait until the paused engine holds the request, or, if it is such an engine, rejects it."""
    if under_test.rejects:
        await watch.rejected()
    else:
        await _held(under_test, 1)
        assert watch.rejections == 0


async def _assert_quiet(under_test: EngineUnderTest, watch: Watch) -> None:
    """No token is made: at most those that were under way arrive."""
    expected = watch.count + under_test.late_tokens
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watch.passed(expected), under_test.quiet_s)


def cut(manifest: Manifest, chunks: str) -> Manifest:
    """The same tensors in ``one`` chunk, in ``seven``, or in one for ``each tensor``."""
    count = len(manifest.names)
    pieces = {"one": 1, "seven": 7, "each tensor": count}[chunks]
    ends = tuple(count * (piece + 1) // pieces for piece in range(pieces))
    return replace(manifest, chunk_ends=ends)


def _spoilt(manifest: Manifest, fault: str) -> tuple[Manifest, set[str]]:
    """A manifest with one fault, and the names by which it may be called."""
    metas = list(manifest.tensors())
    layer = "model.layers.1.self_attn"
    name = f"{layer}.k_proj.weight" if fault == "half fused" else f"{layer}.o_proj.weight"
    place = manifest.names.index(name)
    meta = metas[place]
    names = {name}
    if fault == "unknown":
        metas[place] = replace(meta, name=f"{layer}.x_proj.weight")
        names = {f"{layer}.x_proj.weight"}
    elif fault == "missing":
        del metas[place]
    elif fault == "misshapen":
        metas[place] = replace(meta, shape=(meta.shape[0] // 2, *meta.shape[1:]))
    elif fault == "wrong dtype":
        metas[place] = replace(meta, dtype="float16")
    else:
        # k_proj comes alone: whatever is named, it is of this one fused parameter.
        parts = {f"{layer}.{part}_proj.weight" for part in ("q", "v")}
        metas = [m for m in metas if m.name not in parts]
        names = {*parts, f"{layer}.qkv_proj.weight"}
    return Manifest.plan(metas, chunk_bytes=MANY_BYTES), names
