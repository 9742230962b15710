"""The core schedules, pauses and ends requests without losing a token."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from bus.errors import EngineDead, EngineError
from bus.messages import NackCode
from sidecar._embedded.sampling import SamplingParams
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.push import Push
from tests.unit.sidecar.embedded.harness import PROMPT, greedy, run, serving, take

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from bus.messages import PauseMode
    from sidecar._embedded.engine import EmbeddedEngine
    from sidecar._embedded.requests import VersionSpan

SAMPLED = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=11)
LONG = 400


async def _tokens(engine: EmbeddedEngine, params: SamplingParams) -> list[tuple[int, ...]]:
    outputs = await engine.generate(PROMPT, params, stream=False).outputs()
    return [output.token_ids for output in outputs]


def test_streamed_and_whole_answers_are_the_same(checkpoint: Checkpoint) -> None:
    """One delta per token, or one at the end, of the same tokens, logprobs and spans."""

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            params = greedy(12, logprobs=0)
            deltas = [delta async for delta in engine.generate(PROMPT, params)]
            assert [len(delta.token_ids) for delta in deltas] == [1] * 12
            assert [bool(delta.finish_reason) for delta in deltas] == [False] * 11 + [True]
            (streamed,) = await engine.generate(PROMPT, params).outputs()
            whole = [delta async for delta in engine.generate(PROMPT, params, stream=False)]
            assert len(whole) == 1
            assert whole[0].token_ids == streamed.token_ids
            assert whole[0].logprobs == streamed.logprobs
            assert whole[0].weight_versions == streamed.weight_versions

    run(scenario())


def test_more_requests_than_slots_are_served_in_turn(checkpoint: Checkpoint) -> None:
    """Each with what it would have got alone, though slots are freed and filled again."""
    lengths = [3, 17, 9, 30, 5, 24, 11]
    prompts = [(20 + i, *PROMPT[: 1 + i % 4]) for i in range(len(lengths))]

    async def scenario() -> None:
        async with serving(checkpoint, max_num_seqs=3) as engine:
            requests = [
                engine.generate(prompt, greedy(length), stream=False)
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            for prompt, length, request in zip(prompts, lengths, requests, strict=True):
                (output,) = await request.outputs()
                expected = checkpoint.greedy(checkpoint.weights, prompt, length)
                assert list(output.token_ids) == expected

    run(scenario())


def test_a_seed_gives_the_same_tokens_whatever_runs_beside(checkpoint: Checkpoint) -> None:
    """Alone, in company, and with a pause in the middle that drops the cache."""

    async def scenario() -> None:
        async with serving(checkpoint, max_num_seqs=8) as engine:
            (alone,) = await _tokens(engine, SAMPLED)
            others = [
                engine.generate((7 + i, 8), SamplingParams(temperature=1.5, max_tokens=LONG))
                for i in range(6)
            ]
            for other in others:
                await take(other, 1)
            (company,) = await _tokens(engine, SAMPLED)
            assert company == alone
            request = engine.generate(PROMPT, SAMPLED)
            begun = await take(request, 10)
            await engine.pause("keep", clear_cache=True)
            await engine.resume()
            (rest,) = await request.outputs()
            assert tuple(t for d in begun for t in d.token_ids) + rest.token_ids == alone
            for other in others:
                other.abort()
            (reseeded,) = await _tokens(
                engine, SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=12)
            )
            assert reseeded != alone

    run(scenario())


def test_without_a_seed_samples_differ(checkpoint: Checkpoint) -> None:
    """Each request draws its own."""

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
            assert await _tokens(engine, params) != await _tokens(engine, params)

    run(scenario())


def test_n_choices_share_a_prompt_and_differ(checkpoint: Checkpoint) -> None:
    """Also when there are fewer slots than choices, and some begin later."""

    async def scenario() -> None:
        params = SamplingParams(n=5, max_tokens=20, ignore_eos=True, seed=4)
        async with serving(checkpoint, max_num_seqs=8) as engine:
            together = await _tokens(engine, params)
            assert len(set(together)) == 5
            assert await engine.in_flight() == 0
            same = await _tokens(engine, greedy(20, n=3))
            assert set(same) == {tuple(checkpoint.greedy(checkpoint.weights, PROMPT, 20))}
        async with serving(checkpoint, max_num_seqs=2) as engine:
            assert await _tokens(engine, params) == together

    run(scenario())


def test_logprobs_are_of_the_model_whatever_the_temperature(checkpoint: Checkpoint) -> None:
    """Raw ones, as vLLM gives by default."""

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            params = SamplingParams(
                temperature=0.3, top_k=5, max_tokens=6, ignore_eos=True, seed=1, logprobs=0
            )
            (output,) = await engine.generate(PROMPT, params).outputs()
            assert output.logprobs is not None
            sequence = list(PROMPT)
            for token, logprob in zip(output.token_ids, output.logprobs, strict=True):
                logits, _ = checkpoint.forward(checkpoint.weights, sequence)
                expected = float(torch.log_softmax(logits, -1)[token])
                assert logprob == pytest.approx(expected, abs=1e-3)
                sequence.append(token)
            (plain,) = await engine.generate(PROMPT, greedy(2)).outputs()
            assert plain.logprobs is None

    run(scenario())


def test_a_sequence_ends_at_its_own_end_or_at_a_stop_token(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The last token is part of the output; a stop token is also the reason."""
    expected = checkpoint.greedy(checkpoint.weights, PROMPT, 30)
    ends = [place for place, token in enumerate(expected) if token not in expected[:place]]
    first, second = ends[3], ends[4]
    same = make_checkpoint(tmp_path, seed=3, eos_token_id=expected[second])
    stop = expected[first]

    async def scenario() -> None:
        async with serving(same) as engine:
            plain = SamplingParams(temperature=0.0, max_tokens=30)
            (output,) = await engine.generate(PROMPT, plain).outputs()
            assert list(output.token_ids) == expected[: second + 1]
            assert (output.finish_reason, output.stop_reason) == ("stop", None)

            (output,) = await engine.generate(PROMPT, greedy(30, stop_token_ids=(stop,))).outputs()
            assert list(output.token_ids) == expected[: first + 1]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)

            (output,) = await engine.generate(PROMPT, greedy(30)).outputs()
            assert list(output.token_ids) == expected
            assert (output.finish_reason, output.stop_reason) == ("length", None)

            least = SamplingParams(
                temperature=0.0, max_tokens=30, min_tokens=second + 5, stop_token_ids=(stop,)
            )
            (output,) = await engine.generate(PROMPT, least).outputs()
            early = output.token_ids[: second + 5]
            assert len(early) == second + 5
            assert not {stop, expected[second]} & set(early)

    run(scenario())


def test_output_ends_where_the_model_s_length_ends(checkpoint: Checkpoint) -> None:
    """Asked for more, or for no particular number."""

    async def scenario() -> None:
        async with serving(checkpoint, max_model_len=32) as engine:
            for max_tokens in (None, 1000):
                params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
                (output,) = await engine.generate(PROMPT, params).outputs()
                assert len(PROMPT) + len(output.token_ids) == 32
                assert output.finish_reason == "length"

    run(scenario())


def test_a_prompt_larger_than_the_prefill_budget_runs(checkpoint: Checkpoint) -> None:
    """Together with others, which come in later steps; each gets what it gets alone."""
    prompts = [tuple((7 * i + j) % 128 for i in range(400)) for j in range(14)]

    async def scenario() -> None:
        async with serving(checkpoint, max_num_seqs=14) as engine:
            requests = [engine.generate(prompt, greedy(3), stream=False) for prompt in prompts]
            for prompt, request in zip(prompts, requests, strict=True):
                (output,) = await request.outputs()
                assert list(output.token_ids) == checkpoint.greedy(checkpoint.weights, prompt, 3)

    run(scenario())


# Pauses


def test_a_storm_of_pauses_changes_no_token(checkpoint: Checkpoint) -> None:
    """Seeded requests, more than slots, end as if they had been left alone."""
    many = [
        SamplingParams(max_tokens=30 + 7 * i, ignore_eos=True, seed=i, n=1 + i % 2)
        for i in range(6)
    ]

    async def scenario() -> None:
        async with serving(checkpoint, max_num_seqs=4) as engine:
            calm = [await _tokens(engine, params) for params in many]
            storm = [asyncio.create_task(_tokens(engine, params)) for params in many]
            pauses = 0
            while not all(task.done() for task in storm):
                await engine.pause("keep", clear_cache=pauses % 3 == 0)
                pauses += 1
                await engine.resume()
                probe = engine.generate((3, 4), greedy(2))
                await take(probe, 1)
            assert [task.result() for task in storm] == calm
            assert pauses > 5

    run(scenario())


def test_wait_keeps_those_waiting_that_have_not_begun(checkpoint: Checkpoint) -> None:
    """Only what runs is run to its end."""

    async def scenario() -> None:
        async with serving(checkpoint, max_num_seqs=1) as engine:
            running = engine.generate(PROMPT, greedy(60))
            waiting = engine.generate(PROMPT, greedy(5))
            await take(running, 2)
            await engine.pause("wait", clear_cache=True)
            assert running.done.is_set()
            assert not waiting.done.is_set()
            assert await engine.in_flight() == 1
            await engine.resume()
            (output,) = await waiting.outputs()
            assert len(output.token_ids) == 5

    run(scenario())


def test_a_pause_that_waits_is_no_pause_yet(checkpoint: Checkpoint) -> None:
    """Until it returns, neither a resume nor an update is taken; a keep ends the wait."""

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            request = engine.generate(PROMPT, greedy(LONG))
            await take(request, 2)
            assert engine._core is not None
            wait = asyncio.wrap_future(engine._core.pause("wait", clear_cache=False))
            with pytest.raises(EngineError) as refused:
                await engine.resume()
            assert refused.value.code is NackCode.WRONG_STATE
            assert not request.done.is_set()
            await engine.pause("keep", clear_cache=False)
            await wait
            assert not request.done.is_set()
            await engine.resume()
            (rest,) = await request.outputs()
            assert len(rest.token_ids) == LONG - 2

    run(scenario())


@pytest.mark.parametrize("clear_cache", [False, True])
def test_kept_requests_go_first_after_the_resume(checkpoint: Checkpoint, clear_cache: bool) -> None:
    """Also when they have to be computed anew: who has waited longer still waits."""

    async def scenario() -> None:
        async with serving(checkpoint, max_num_seqs=1) as engine:
            kept = engine.generate(PROMPT, greedy(LONG))
            waiting = engine.generate(PROMPT, greedy(2))
            await take(kept, 3)
            await engine.pause("keep", clear_cache=clear_cache)
            await engine.resume()
            await take(waiting, 1)
            assert kept.done.is_set()

    run(scenario())


@pytest.mark.parametrize("clear_cache", [False, True])
def test_abort_also_ends_what_has_not_begun(checkpoint: Checkpoint, clear_cache: bool) -> None:
    """With no tokens, and so with no versions."""

    async def scenario() -> None:
        async with serving(checkpoint, max_num_seqs=1) as engine:
            running = engine.generate(PROMPT, greedy(LONG), stream=False)
            begun = engine.generate(PROMPT, greedy(LONG))
            await engine.pause("abort", clear_cache=clear_cache)
            (first,), (second,) = await running.outputs(), await begun.outputs()
            assert first.finish_reason == second.finish_reason == "abort"
            assert second.token_ids == ()
            assert second.weight_versions == ()
            later = engine.generate(PROMPT, greedy(3))
            await engine.resume()
            (output,) = await later.outputs()
            assert len(output.token_ids) == 3

    run(scenario())


def test_a_kept_request_can_be_aborted_by_its_caller(checkpoint: Checkpoint) -> None:
    """It ends at once, and its neighbour in the next slot goes on as it would have."""

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            first = engine.generate(PROMPT, greedy(LONG))
            second = engine.generate((40, 3), greedy(60))
            await take(first, 5)
            await take(second, 5)
            await engine.pause("keep", clear_cache=False)
            first.abort()
            (output,) = await first.outputs()
            assert output.finish_reason == "abort"
            await engine.resume()
            (rest,) = await second.outputs()
            assert list(rest.token_ids) == checkpoint.greedy(checkpoint.weights, (40, 3), 60)[5:]

    run(scenario())


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_an_idle_engine_pauses_and_resumes(checkpoint: Checkpoint, mode: PauseMode) -> None:
    """At once, and once: a resume needs a pause."""

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            await engine.pause(mode, clear_cache=True)
            await engine.resume()
            with pytest.raises(EngineError, match="resume needs a paused engine"):
                await engine.resume()

    run(scenario())


# Weights that change under a request


async def _updated_in_the_middle(
    checkpoint: Checkpoint, new: Mapping[str, Tensor], *, clear_cache: bool
) -> tuple[list[int], tuple[VersionSpan, ...]]:
    """60 greedy tokens, with a pause after some, in which ``new`` weights are loaded."""
    async with serving(checkpoint) as engine:
        request = engine.generate(PROMPT, greedy(60))
        begun = await take(request, 15)
        await engine.pause("keep", clear_cache=clear_cache)
        await Push(engine, new, chunks=3).whole(1)
        await engine.resume()
        (rest,) = await request.outputs()
        tokens = [token for delta in begun for token in delta.token_ids] + [*rest.token_ids]
        return tokens, rest.weight_versions


def _cut(spans: tuple[VersionSpan, ...]) -> int:
    """Where the second version begins."""
    assert [span.version for span in spans] == [0, 1]
    assert (spans[0].start, spans[-1].end) == (0, 60)
    assert all(a.end == b.start for a, b in pairwise(spans))
    return spans[1].start


def test_a_kept_cache_is_exactly_the_old_keys_under_new_weights(checkpoint: Checkpoint) -> None:
    """Equal, token for token, to a plain computation that keeps them; not to a recompute."""
    new = perturbed(checkpoint.weights, 21)
    tokens, spans = run(_updated_in_the_middle(checkpoint, new, clear_cache=False))
    cut = _cut(spans)
    assert tokens[:cut] == checkpoint.greedy(checkpoint.weights, PROMPT, cut)
    # Cached by the old weights: all but the newest token, which the new ones see first.
    _, past = checkpoint.forward(checkpoint.weights, [*PROMPT, *tokens[: cut - 1]])
    expected = tokens[:cut]
    while len(expected) < 60:
        logits, past = checkpoint.forward(new, expected[-1:], past)
        expected.append(int(logits.argmax()))
    assert tokens == expected
    assert tokens[cut:] != checkpoint.greedy(new, [*PROMPT, *tokens[:cut]], 60 - cut)


def test_a_cleared_cache_is_a_full_recompute_under_new_weights(checkpoint: Checkpoint) -> None:
    """Equal to what the new weights say about prompt and output so far."""
    new = perturbed(checkpoint.weights, 21)
    tokens, spans = run(_updated_in_the_middle(checkpoint, new, clear_cache=True))
    cut = _cut(spans)
    assert tokens[:cut] == checkpoint.greedy(checkpoint.weights, PROMPT, cut)
    assert tokens[cut:] == checkpoint.greedy(new, [*PROMPT, *tokens[:cut]], 60 - cut)


# The end


def test_a_crash_of_the_core_fails_everyone_with_the_reason(checkpoint: Checkpoint) -> None:
    """Requests, calls under way, later calls: nobody waits for a dead thread."""

    def defect() -> None:
        raise ZeroDivisionError("a defect in a step")

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            died = asyncio.create_task(engine.died())
            request = engine.generate(PROMPT, greedy(LONG))
            await take(request, 1)
            assert engine._core is not None
            draining = asyncio.wrap_future(engine._core.pause("wait", clear_cache=True))
            with pytest.raises(EngineDead, match="ZeroDivisionError"):
                await asyncio.wrap_future(engine._core.call(defect))
            with pytest.raises(EngineDead, match="a defect in a step"):
                await request.outputs()
            with pytest.raises(EngineDead):
                await draining
            assert "ZeroDivisionError" in await died
            assert not engine.is_alive
            for call in (engine.resume(), engine.version(), engine.abort_requests()):
                with pytest.raises(EngineDead, match="a defect in a step"):
                    await call
            with pytest.raises(EngineDead):
                engine.generate(PROMPT, greedy(1))
            assert await engine.in_flight() == 0

    run(scenario())


def test_closing_ends_requests_with_what_they_have(checkpoint: Checkpoint) -> None:
    """Frozen ones, too; afterwards the engine answers nothing, and closing again is nothing."""

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            request = engine.generate(PROMPT, greedy(LONG))
            await take(request, 3)
            await engine.pause("keep", clear_cache=False)
            await engine.close()
            (rest,) = await request.outputs()
            assert rest.finish_reason == "abort"
            with pytest.raises(EngineDead, match="closed"):
                await engine.resume()

    run(scenario())
