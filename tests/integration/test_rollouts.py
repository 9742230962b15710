"""The rollout client and engines that are updated, paused and killed, or that talk nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from aiohttp import web
from msgspec import structs
from safetensors.torch import load_file

from bus.errors import BusClosed, NoEngine, RequestPoisoned, RolloutFailed, UsageError
from bus.messages import RequestLimits, Route
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from sidecar.engine import EngineInfo
from tests.support.broker import a_broker
from tests.support.generating import PAUSED, generating, streamed
from tests.support.procs import Proc, run_wavebus
from trainer_agent import TrainerAgent
from trainer_agent._rollouts.client import RolloutClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from tests.integration.conftest import Bus
    from trainer_agent._rollouts.results import Choice, Completion, TokenDelta

TIMEOUT_S = 120.0
# An engine or a broker may get no processor for nearly as long.
WAIT_S = 7.0
PROMPT = [5, 9, 77]
TOKENS = 40
SAMPLED = {"temperature": 1.0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
STEP_MS = ("--step-ms", "15")
# For requests that run until the test ends them.
LONG_STEP_MS = ("--step-ms", "100")


LIMITS = RequestLimits(vocab_size=100, max_model_len=64, slots=8, exact_seeds=True)


class Serving(StubEngine):
    """Its requests go to a URL of the test's."""

    def __init__(self, endpoint: str, limits: RequestLimits) -> None:
        self._endpoint = endpoint
        self._limits = limits

    async def start(self) -> EngineInfo:
        return EngineInfo(
            *("stub", "test", "none", 0, 1, 1, ("shm",), self._endpoint), limits=self._limits
        )


def assert_whole(choice: Choice, tokens: int = TOKENS) -> None:
    """Spans cover each token once, and attempts give as many as there are."""
    assert len(choice.token_ids) == tokens
    assert [span.start for span in choice.spans] == [0, *(s.end for s in choice.spans[:-1])]
    assert choice.spans[-1].end == tokens
    assert None not in {span.version for span in choice.spans}
    assert sum(attempt.tokens for attempt in choice.attempts) == tokens


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


async def sessions(
    client: RolloutClient, count: int, last_turn: asyncio.Event | None = None
) -> list[list[Completion]]:
    """Conversations of three turns, each with the answer before as part of its prompt. The last one
    waits for ``last_turn``."""

    async def talk(number: int) -> list[Completion]:
        prompt, turns = [*PROMPT, number], []
        for turn in range(3):
            if last_turn is not None and turn == 2:
                await last_turn.wait()
            done = await client.generate(
                prompt, SAMPLED | {"n": 2, "seed": 1000 * number + turn}, session_id=f"s{number}"
            )
            turns.append(done)
            prompt = [*prompt, *done.choices[0].token_ids]
        client.finish_session(f"s{number}")
        return turns

    return await asyncio.gather(*(talk(number) for number in range(count)))


def tokens_of(talks: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for turn in talk for c in turn.choices] for talk in talks]


@pytest.mark.ci
def test_interrupted_sessions_equal_their_undisturbed_twins(bus: Bus) -> None:
    """The same weights are sent as new versions, and an engine is killed, while sessions run."""
    engines: list[Proc] = [bus.sidecar(f"e{index}", *STEP_MS) for index in range(3)]
    weights = load_file(f"{bus.checkpoint.folder}/model.safetensors")

    async def main() -> None:
        async with (
            TrainerAgent(bus.address) as agent,
            RolloutClient(bus.address) as client,
        ):
            undisturbed = await sessions(client, 16)
            updated = asyncio.Event()
            under_way = asyncio.create_task(sessions(client, 16, updated))
            await until_streaming(client, 16)
            await agent.update_weights(weights)
            updated.set()
            await until_streaming(client, 8)
            await asyncio.to_thread(engines[0].kill)
            await agent.update_weights(weights)
            disturbed = await under_way
        assert tokens_of(disturbed) == tokens_of(undisturbed)
        choices = [c for talk in disturbed for turn in talk for c in turn.choices]
        for choice in choices:
            assert_whole(choice)
            assert not choice.inexact
        assert any(len(choice.attempts) > 1 for choice in choices)
        assert {span.version for choice in choices for span in choice.spans} >= {0, 1}

    run(main())


def test_each_token_is_its_versions_greedy_token(bus: Bus) -> None:
    """Weights change twice, and an engine is killed, while requests run."""
    engines = [bus.sidecar(f"e{index}", "--step-ms", "25") for index in range(2)]
    weights = {0: bus.checkpoint.weights}
    greedy = {"temperature": 0.0, "max_tokens": 80, "ignore_eos": True, "logprobs": 0}
    answers: list[tuple[list[int], Choice]] = []
    came: asyncio.Queue[TokenDelta] = asyncio.Queue()
    killed = asyncio.Event()

    async def go_on_asking(client: RolloutClient, number: int) -> None:
        prompt = [*PROMPT, number]
        while not killed.is_set():
            done = await client.generate(prompt, greedy, on_delta=came.put_nowait)
            answers.append((prompt, done.choices[0]))

    async def until_came(*, version: int | None = None, engine: str | None = None) -> None:
        while not came.empty():  # those of before
            came.get_nowait()
        delta = await came.get()
        while version not in (None, delta.version) or engine not in (None, delta.engine):
            delta = await came.get()

    async def main() -> None:
        async with TrainerAgent(bus.address) as agent, RolloutClient(bus.address) as client:
            asking = [asyncio.create_task(go_on_asking(client, number)) for number in range(8)]
            await until_streaming(client, 8)
            for scale in (0.9, 1.2):
                changed = {name: each * scale for name, each in bus.checkpoint.weights.items()}
                version = await agent.update_weights(changed)
                weights[version] = changed
                await until_came(version=version)
            await until_came(engine="e0")
            await asyncio.to_thread(engines[0].kill)
            killed.set()
            await asyncio.gather(*asking)
        for prompt, choice in answers:
            assert_whole(choice, 80)
            assert choice.logprobs is not None
            for span in choice.spans:
                assert span.version is not None
                given = [*prompt, *choice.token_ids[: span.end - 1]]
                logits, _ = bus.checkpoint.logits(weights[span.version], given)
                rows = logits[len(prompt) - 1 + span.start :].log_softmax(-1)
                tokens = torch.tensor(choice.token_ids[span.start : span.end])
                found = rows.gather(-1, tokens[:, None]).squeeze(-1)
                told = torch.tensor(choice.logprobs[span.start : span.end])
                assert float((rows.amax(-1) - found).max()) < 1e-4  # none is likelier
                assert float((found - told).abs().max()) < 1e-4
        spans = [choice.spans for _, choice in answers]
        assert {span.version for each in spans for span in each} == weights.keys()
        assert any({span.engine for span in each} == {"e0", "e1"} for each in spans)

    run(main())


async def until_streaming(client: RolloutClient, attempts: int) -> None:
    """So many requests have engines."""
    while len(client._pool.attempts) < attempts:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)


def test_a_stream_is_the_completion_in_pieces_and_its_reader_may_leave(bus: Bus) -> None:
    bus.sidecar("e0", *STEP_MS)

    async def main() -> None:
        async with RolloutClient(bus.address) as client:
            whole = await client.generate(PROMPT, SAMPLED | {"seed": 3})
            deltas = [delta async for delta in client.stream(PROMPT, SAMPLED | {"seed": 3})]
            assert tuple(t for d in deltas for t in d.token_ids) == whole.choices[0].token_ids
            assert len(deltas) == TOKENS
            assert {(d.engine, d.version) for d in deltas} == {("e0", 0)}
            assert deltas[-1].finish_reason == "length"
            async with contextlib.aclosing(client.stream(PROMPT, SAMPLED)) as left:
                await anext(left)
            assert not client._pool.attempts
            many = [
                done async for done in client.generate_many([PROMPT] * 6, SAMPLED | {"seed": 3})
            ]
            assert [index for index, _ in many] == list(range(6))
            assert many[0][1].choices[0].token_ids == whole.choices[0].token_ids
            as_completed = [
                index
                async for index, _ in client.generate_many(
                    [PROMPT] * 6, SAMPLED, concurrency=4, as_completed=True
                )
            ]
            assert sorted(as_completed) == list(range(6))
            assert len({done.choices[0].token_ids for _, done in many}) == 6

    run(main())


@pytest.mark.ci
def test_a_paused_group_is_waited_for_and_a_group_without_engines_is_not(bus: Bus) -> None:
    bus.sidecar("e0", *STEP_MS)

    async def main() -> None:
        async with (
            TrainerAgent(bus.address) as agent,
            RolloutClient(bus.address, stall_s=WAIT_S, unavailable_s=WAIT_S) as client,
            RolloutClient(bus.address, group="nobody", unavailable_s=WAIT_S) as lonely,
        ):
            async with agent.paused(mode="keep"):
                waits = asyncio.create_task(client.generate(PROMPT, SAMPLED))
                with pytest.raises(NoEngine, match="nobody"):
                    await lonely.generate(PROMPT, SAMPLED)
                assert not waits.done()
            assert_whole((await waits).choices[0])

    run(main())


def test_a_request_may_have_more_choices_than_an_engine_has_slots(bus: Bus) -> None:
    """The others wait in the engine, for longer than ``stall_s``."""
    bus.sidecar("e0", "--max-num-seqs", "2", *LONG_STEP_MS)

    async def main() -> None:
        async with RolloutClient(bus.address, stall_s=WAIT_S) as client:
            done = await client.generate(PROMPT, SAMPLED | {"n": 9})
            assert len(done.choices) == 9
            for choice in done.choices:
                assert_whole(choice)
                assert len(choice.attempts) == 1

    run(main())


def test_many_clients_wait_for_the_slots_of_one_engine(bus: Bus) -> None:
    """None knows of the others, so that most requests wait in the engine, for longer than
    ``stall_s``: each for its turn."""
    bus.sidecar("e0", "--max-num-seqs", "4", *LONG_STEP_MS)

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(RolloutClient(bus.address, stall_s=WAIT_S))
                for _ in range(16)
            ]
            asked = [client.generate(PROMPT, SAMPLED) for client in clients]
            for done in await asyncio.gather(*asked):
                assert_whole(done.choices[0])
                assert len(done.choices[0].attempts) == 1

    run(main())


def test_requests_end_when_their_client_is_closed(bus: Bus) -> None:
    """Those that have an engine, and those that wait for one."""
    bus.sidecar("e0", "--step-ms", "50")

    async def main() -> None:
        async with RolloutClient(bus.address) as client:
            many = asyncio.create_task(anext(client.generate_many([PROMPT] * 99, SAMPLED)))
            while not client._pool._waiting:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
            one = asyncio.create_task(client.generate(PROMPT, SAMPLED))
            await asyncio.sleep(0)
        for task in (one, many):
            with pytest.raises(BusClosed, match="closed"):
                await task
        with pytest.raises(BusClosed, match="connect"):
            await client.generate(PROMPT, SAMPLED)

    run(main())


def test_bad_input_reaches_no_engine(bus: Bus) -> None:
    bus.sidecar("e0")

    async def main() -> None:
        async with RolloutClient(bus.address) as client:
            with pytest.raises(UsageError, match="vocabulary of"):
                await client.generate([10**6], SAMPLED)

    run(main())


def test_what_an_engine_refuses_in_its_stream_kills_no_other() -> None:
    async def main() -> None:
        refusal = {"error": {"type": "BadRequestError", "message": "min_p", "code": 400}}
        async with clients_of(then(refusal), honest) as client:
            with pytest.raises(UsageError, match="refuses the request: min_p"):
                await client.generate(PROMPT, {"max_tokens": 5})

    run(main())


@pytest.mark.ci
def test_an_engine_on_every_address_is_reached_by_the_one_that_it_advertises(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its key."""
    monkeypatch.setenv("VLLM_API_KEY", "a key")
    everywhere = ("--host", "0.0.0.0", "--model", str(bus.checkpoint.folder))
    refused = run_wavebus("sidecar", "--broker", bus.address, *everywhere)
    assert (refused.returncode, "--advertise" in refused.stderr) == (2, True)
    bus.sidecar("e0", "--host", "0.0.0.0", "--advertise", "127.0.0.1")

    async def main() -> None:
        async with (
            RolloutClient(bus.address, api_key="another") as stranger,
            RolloutClient(bus.address) as client,
        ):
            (choice,) = (await client.generate(PROMPT, SAMPLED)).choices
            assert_whole(choice)
            with pytest.raises(UsageError, match="Unauthorized"):
                await stranger.generate(PROMPT, SAMPLED)

    run(main())


# Engines that talk nonsense


def event(*tokens: int, finish: str | None = None, index: int = 0) -> dict[str, Any]:
    return {
        "choices": [
            {
                "index": index,
                "token_ids": list(tokens),
                "finish_reason": finish,
                "logprobs": {"content": [{"logprob": -1.0} for _ in tokens]},
            }
        ]
    }


@contextlib.asynccontextmanager
async def clients_of(
    *answers: Any,
    limits: RequestLimits = LIMITS,
    lengths: Sequence[int] = (),
    **options: Any,
) -> AsyncIterator[RolloutClient]:
    """A client, and an engine of each answer: ``e0``, ``e1``, …; ``lengths``: of their models."""
    async with contextlib.AsyncExitStack() as stack:
        _, address = await stack.enter_async_context(a_broker())
        for index, answer in enumerate(answers):
            url = await stack.enter_async_context(generating(answer))
            length = lengths[index] if lengths else limits.max_model_len
            engine = Serving(url, structs.replace(limits, max_model_len=length))
            sidecar = Sidecar(engine, broker=address, group="policy", name=f"e{index}")
            await stack.enter_async_context(sidecar)
            await sidecar.joined()
        yield await stack.enter_async_context(RolloutClient(address, **options))


async def honest(request: web.Request) -> web.StreamResponse:
    """Counts up from the last token, to the end of what is asked."""
    asked = json.loads(await request.read())
    last, budget = asked["token_ids"][-1], asked["sampling_params"]["max_tokens"]
    events = [event(last + step + 1) for step in range(budget)]
    return await streamed(request, *events[:-1], event(last + budget, finish="length"))


async def at_once(request: web.Request) -> web.StreamResponse:
    """As honest, in one write."""
    asked = json.loads(await request.read())
    budget = asked["sampling_params"]["max_tokens"]
    events = [event(7, finish="length" if left == 1 else None) for left in range(budget, 0, -1)]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    lines = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in events]
    await response.write(b"".join([*lines, b"data: [DONE]\n\n"]))
    return response


def test_an_answer_that_comes_at_once_is_decoded_in_parts() -> None:
    """So what a slow caller has not taken is kept as bytes, not as objects of thrice their size."""

    async def main() -> None:
        sizes: list[int] = []

        async def take(batch: list[TokenDelta]) -> None:
            sizes.append(sum(len(each.token_ids) for each in batch))

        limits = structs.replace(LIMITS, max_model_len=1000)
        async with clients_of(at_once, limits=limits) as client:
            params = {"max_tokens": 900, "logprobs": 0}
            done = await client.generate(PROMPT, params, on_deltas=take)
        assert (len(done.choices[0].token_ids), sum(sizes)) == (900, 900)
        assert max(sizes) < 90

    run(main())


def then(*events: dict[str, Any], cut: bool = False) -> Any:
    """Give these events; with ``cut``, break the connection instead of ending the answer."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if not cut:
            return await streamed(request, *events)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for each in events:
            await response.write(b"data: " + json.dumps(each).encode() + b"\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    return answer


async def raw(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"data: {nonsense\n\n")
    return response


async def silent(request: web.Request) -> web.StreamResponse:
    """One comment a tenth of a second, and no token."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b":\n")
        await asyncio.sleep(0.1)


async def drop_by_drop(request: web.Request) -> web.StreamResponse:
    """An event whose line does not end."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"data: ")
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.1)


async def mute(_: web.Request) -> web.StreamResponse:
    """Not even a status."""
    return await asyncio.Future()


def labelled(token: int, end: int) -> dict[str, Any]:
    """The event of an attempt's token ``end``, which names the weights of all tokens so far."""
    made = event(token)
    made["choices"][0]["weight_versions"] = [{"version": "0", "start": 0, "end": end}]
    return made


@pytest.mark.ci
@pytest.mark.parametrize(
    ("answer", "tokens", "ended_by"),
    [
        (raw, 0, "broken"),
        (then(event(78), cut=True), 1, "died"),
        (then({"error": {"type": "InternalServerError", "message": "x"}}), 0, "died"),
        (then(event(78), PAUSED), 1, "rejected"),
        (then(event(78), event(79)), 2, "broken"),
        (then(*(event(78 + step) for step in range(6))), 5, "broken"),
        (then(event(78, finish="stop"), event(79)), 1, "stop"),
        (then(event(100)), 0, "broken"),
        (then(event(78, index=3)), 0, "broken"),
        (then({"choices": [{"index": 0, "token_ids": [78]}]}), 0, "broken"),
        (then({"choices": "x"}), 0, "broken"),
        (then(labelled(78, 1), labelled(79, 2), labelled(79, 2)), 2, "broken"),
        (silent, 0, "stalled"),
        (drop_by_drop, 0, "stalled"),
        (mute, 0, "stalled"),
    ],
)
def test_a_request_goes_on_elsewhere_when_its_engine_talks_nonsense(
    answer: Any, tokens: int, ended_by: str
) -> None:
    """What the engine gave before stays; what it ended itself is ended."""

    async def main() -> None:
        stall_s = 0.4 if ended_by == "stalled" else TIMEOUT_S
        async with clients_of(answer, honest, stall_s=stall_s) as client:
            done = await client.generate(PROMPT, {"max_tokens": 5, "logprobs": 0})
            (choice,) = done.choices
            first = choice.attempts[0]
            assert (first.engine, first.tokens, first.ended_by) == ("e0", tokens, ended_by)
            expected = 1 if ended_by == "stop" else 5
            assert choice.token_ids == tuple(range(78, 78 + expected))
            assert choice.logprobs is not None
            assert len(choice.logprobs) == expected
            assert choice.spans[0].start == 0
            assert choice.spans[-1].end == expected

    run(main())


def test_what_an_engine_aborts_goes_on_there_up_to_the_budget() -> None:
    """It gives one token at a time; the last one is the end, though it says abort."""

    async def aborting(request: web.Request) -> web.StreamResponse:
        last = json.loads(await request.read())["token_ids"][-1]
        return await streamed(request, event(last + 1, finish="abort"))

    async def main() -> None:
        async with clients_of(aborting) as client:
            (choice,) = (await client.generate(PROMPT, {"max_tokens": 3})).choices
            assert (choice.token_ids, choice.finish_reason) == ((78, 79, 80), "length")
            assert [each.ended_by for each in choice.attempts] == ["abort"] * 3

    run(main())


def test_requests_end_where_they_are_if_their_caller_aborts_them() -> None:
    """With the tokens and spans that they have, or none; others go on."""
    begun = asyncio.Semaphore(0)
    may_end = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for each in (event(78), event(79, index=1)):
            await response.write(b"data: " + json.dumps(each).encode() + b"\n\n")
        begun.release()
        await may_end.wait()
        for each in (event(80, finish="stop"), event(81, finish="stop", index=1)):
            await response.write(b"data: " + json.dumps(each).encode() + b"\n\n")
        return response

    async def main() -> None:
        seen = asyncio.Semaphore(0)
        async with clients_of(answer) as client:
            assert client.abort_requests() == 0

            def ask(name: str) -> asyncio.Task[Any]:
                params = {"max_tokens": 5, "n": 2, "logprobs": 0}
                return asyncio.create_task(
                    client.generate(
                        PROMPT, params, request_id=name, on_delta=lambda _: seen.release()
                    )
                )

            first, second = ask("a"), ask("b")
            for _ in range(4):
                await seen.acquire()
            assert client.abort_requests(["a", "c"]) == 1
            done = (await first).choices
            assert [each.token_ids for each in done] == [(78,), (79,)]
            assert {each.finish_reason for each in done} == {"abort"}
            assert [each.spans[-1].end for each in done] == [1, 1]
            may_end.set()
            assert {each.finish_reason for each in (await second).choices} == {"stop"}
        async with clients_of() as client:
            waiting = asyncio.create_task(client.generate(PROMPT, {"max_tokens": 5}))
            while not client._pool.requests:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
            assert client.abort_requests() == 1
            (choice,) = (await waiting).choices
            assert (choice.token_ids, choice.finish_reason) == ((), "abort")

    run(main())


def test_an_engine_that_aborts_without_a_token_is_left_alone_for_a_while() -> None:
    """Also by a request that has tokens already."""
    asked: list[int] = []

    async def aborting(request: web.Request) -> web.StreamResponse:
        asked.append(len(json.loads(await request.read())["token_ids"]))
        if len(asked) == 3:
            return await streamed(request, event(79, finish="stop"))
        tokens = (78,) if len(asked) == 1 else ()
        return await streamed(request, event(*tokens, finish="abort"))

    async def main() -> None:
        async with clients_of(aborting) as client:
            (choice,) = (await client.generate(PROMPT, {"max_tokens": 3})).choices
            (load,) = client._pool.router.engines.values()
            assert choice.token_ids == (78, 79)
            assert asked == [3, 4, 4]
            assert load.held_until_s > 0

    run(main())


@pytest.mark.parametrize("reason", ["repetition", "of a later vLLM"])
def test_a_finish_reason_that_is_no_interruption_is_the_end(reason: str) -> None:
    """And it is passed on."""

    async def main() -> None:
        async with clients_of(then(event(78), event(79, finish=reason))) as client:
            (choice,) = (await client.generate(PROMPT, {"max_tokens": 5})).choices
            assert (choice.token_ids, choice.finish_reason) == ((78, 79), reason)
            assert [each.ended_by for each in choice.attempts] == [reason]
            deltas = [delta async for delta in client.stream(PROMPT, {"max_tokens": 5})]
            assert [delta.finish_reason for delta in deltas] == [None, reason]

    run(main())


def test_a_request_does_not_restart_for_ever() -> None:
    """Each attempt is interrupted, as by frequent updates; the error says what to do."""
    asked: list[float] = []

    async def aborting(request: web.Request) -> web.StreamResponse:
        asked.append(asyncio.get_running_loop().time())
        return await streamed(request, event(78, finish="abort"))

    async def main() -> None:
        async with clients_of(aborting) as client:
            with pytest.raises(RolloutFailed, match=r'11 times.*presence_penalty.*="continue"'):
                await client.generate(PROMPT, {"max_tokens": 5, "presence_penalty": 1.0})

    run(main())
    assert len(asked) == 11
    pauses = [after - before for before, after in itertools.pairwise(asked)]
    assert min(pauses[-3:]) > 0.9  # the longest pause is a second


def test_one_engine_that_a_request_kills_again_and_again_is_spared() -> None:
    """It is restarted at its port, and gives a token each time."""
    asked: list[int] = []

    async def dies(request: web.Request) -> web.StreamResponse:
        asked.append(1)
        response: web.StreamResponse = await then(event(78), cut=True)(request)
        return response

    async def main() -> None:
        async with clients_of(dies) as client:
            with pytest.raises(RequestPoisoned, match="e0, e0 failed"):
                await client.generate(PROMPT, {"max_tokens": 5})

    run(main())
    assert len(asked) == 2


def test_an_engine_that_is_still_dying_has_died_once() -> None:
    """Until the routes are without it, another attempt may come to its socket; here none other can
    take the request."""
    asked: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(1)
        if len(asked) == 1:
            response: web.StreamResponse = await then(event(78), cut=True)(request)
            return response
        if len(asked) == 2:
            assert request.transport is not None
            request.transport.abort()
        return await honest(request)

    async def main() -> None:
        async with clients_of(answer) as client:
            done = await client.generate(PROMPT, {"max_tokens": 5})
            ends = [each.ended_by for each in done.choices[0].attempts]
            assert ends == ["died", "died", "length"]

    run(main())


def test_one_death_that_all_choices_see_is_one() -> None:
    both, asked = asyncio.Barrier(2), list[int]()

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(1)
        if len(asked) == 1:
            ends = [event(78, finish="abort", index=index) for index in range(2)]
            return await streamed(request, *ends)
        if len(asked) > 3:
            return await honest(request)
        await both.wait()
        response: web.StreamResponse = await then(cut=True)(request)
        return response

    async def main() -> None:
        async with clients_of(answer) as client:
            done = await client.generate(PROMPT, {"max_tokens": 5, "n": 2})
            for choice in done.choices:
                ends = [each.ended_by for each in choice.attempts if each.ended_by != "unreachable"]
                assert ends == ["abort", "died", "length"]

    run(main())


@pytest.mark.parametrize(
    ("max_tokens", "tokens", "engines"),
    [(40, 40, {"e1"}), (29, 29, {"e0", "e1"}), (99, 61, {"e1"}), (None, 29, {"e0", "e1"})],
)
def test_engines_of_different_lengths(
    max_tokens: int | None, tokens: int, engines: set[str]
) -> None:
    """A request goes to those that take it, and its answer is as long on each of them."""

    async def counts(request: web.Request) -> web.StreamResponse:
        budget = json.loads(await request.read())["sampling_params"]["max_tokens"]
        events = [event(1) for _ in range(budget - 1)]
        return await streamed(request, *events, event(1, finish="length"))

    async def main() -> None:
        async with clients_of(counts, counts, lengths=(32, 64)) as client:
            while len(client.engines) < 2:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
            params = {} if max_tokens is None else {"max_tokens": max_tokens}
            asked = [client.generate(PROMPT, params) for _ in range(4)]
            choices = [done.choices[0] for done in await asyncio.gather(*asked)]
            assert {len(choice.token_ids) for choice in choices} == {tokens}
            assert {choice.attempts[0].engine for choice in choices} == engines
            assert {len(choice.attempts) for choice in choices} == {1}

    run(main())


def test_a_request_that_only_longer_engines_take_waits_for_one() -> None:
    """And says so in the end."""

    async def main() -> None:
        async with clients_of(then(event(78), cut=True), honest, unavailable_s=0.3) as client:
            await client._pool.until_routed()
            router = client._pool.router
            routes = [load.route for load in router.engines.values()]
            short = structs.replace(routes[0].limits, max_model_len=32)
            asked = client.stream(PROMPT, {"max_tokens": 40})
            assert (await anext(asked)).token_ids == (78,)
            router.update([structs.replace(routes[0], limits=short)])
            with pytest.raises(NoEngine, match="an engine that takes 43 tokens; e0 takes 32"):
                await anext(asked)

    run(main())


def test_what_kills_two_engines_is_sent_to_no_third() -> None:
    asked: list[str] = []

    async def last(request: web.Request) -> web.StreamResponse:
        asked.append("e2")
        return await honest(request)

    async def main() -> None:
        dies = then(cut=True)
        async with clients_of(dies, dies, last) as client:
            with pytest.raises(RequestPoisoned, match="e0, e1 failed"):
                await client.generate(PROMPT, {"max_tokens": 5})

    run(main())
    assert not asked


@contextlib.contextmanager
def full_engines(client: RolloutClient, *names: str) -> Iterator[None]:
    """Engines whose queues of connections are full: the kernel drops what comes."""
    with contextlib.ExitStack() as stack:
        for name in names:
            full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            stack.enter_context(socket.create_connection(full.getsockname()))
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            router = client._pool.router
            routes = [load.route for load in router.engines.values()]
            router.update([*routes, Route(name, "", url, RequestLimits(slots=8))])
        yield


def test_an_engine_that_takes_no_connection_has_run_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many do not: none is said to have died of the request, which tries each once."""
    monkeypatch.setattr("trainer_agent._rollouts.client._CONNECT_S", 1.0)

    async def main() -> None:
        async with clients_of(honest) as client:
            await client._pool.until_routed()
            with full_engines(client, "a0", "a1"):
                client._pool.router._sessions["s"] = "a1"
                (choice,) = (
                    await client.generate(PROMPT, {"max_tokens": 5}, session_id="s")
                ).choices
            assert choice.token_ids == tuple(range(78, 83))
            ends = [(each.engine, each.ended_by) for each in choice.attempts]
            assert ends[0] == ("a1", "unreachable")
            assert ends[1:-1] in ([], [("a0", "unreachable")])
            assert client._pool.router.place("s") == "e0"

    run(main())


@pytest.mark.ci
def test_engines_that_take_no_connection_are_not_asked_for_anything_else_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five that fail are the limit, but these have not been asked."""
    monkeypatch.setattr("trainer_agent._rollouts.client._CONNECT_S", 1.0)

    async def main() -> None:
        async with clients_of(honest) as client:
            await client._pool.until_routed()
            with full_engines(client, *(f"a{index}" for index in range(5))):
                assert await client.ask("/v1/models") is None  # e0 has no such route

    run(main())


@pytest.mark.parametrize("how", ["rejected", "unreachable"])
def test_engines_that_are_routed_and_take_nothing_are_no_engines(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, since what they advertise can't be reached from here. They are asked again
    before ``unavailable_s`` is over."""
    monkeypatch.setattr("trainer_agent._rollouts.router._LONGEST_HOLD_S", 0.05)

    async def closed(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "closed"}, status=503)

    async def main() -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            answers = {"/inference/v1/generate": closed, "/v1/chat/completions/render": closed}
            async with clients_of(answers, unavailable_s=0.3) as client, asyncio.timeout(30):
                await client._pool.until_routed()
                if how == "unreachable":
                    (load,) = client._pool.router.engines.values()
                    url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
                    client._pool.router.update([structs.replace(load.route, endpoint=url)])
                with pytest.raises(NoEngine, match=f"for 0.3 s.*the last: e0 at http://.*{how}"):
                    await client.generate(PROMPT, {"max_tokens": 5})
                with pytest.raises(NoEngine, match=f"for 0.3 s.*the last: e0 at http://.*{how}"):
                    await client.ask("/v1/chat/completions/render", {})

    run(main())


def test_five_attempts_in_a_row_without_a_token_are_the_limit() -> None:
    async def main() -> None:
        async with clients_of(raw) as client:
            with pytest.raises(RolloutFailed, match=r"5 attempts in a row.*e0 at http://"):
                await client.generate(PROMPT, {"max_tokens": 5})

    run(main())


@pytest.mark.parametrize("how", ["continue", "restart", "raise"])
def test_what_cannot_continue_exactly_does_as_it_was_asked(how: Any) -> None:
    async def main() -> None:
        cuts = then(event(78), event(79), cut=True)
        async with clients_of(cuts, honest) as client:
            asks = client.generate(
                PROMPT, {"max_tokens": 5, "presence_penalty": 1.0}, on_inexact=how
            )
            if how == "raise":
                with pytest.raises(RolloutFailed, match="presence_penalty"):
                    await asks
                return
            (choice,) = (await asks).choices
            assert choice.token_ids == (78, 79, 80, 81, 82)
            assert choice.inexact == (("presence_penalty",) if how == "continue" else ())
            given = [attempt.tokens for attempt in choice.attempts]
            assert given == ([2, 3] if how == "continue" else [2, 5])

    run(main())


class Letters:
    """A tokenizer: one character for each token."""

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(token) for token in token_ids)


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_is_found_across_the_seam(included: bool) -> None:
    async def main() -> None:
        cuts = then(event(78), event(79), cut=True)  # "N", "O"
        async with clients_of(cuts, honest, tokenizer=Letters()) as client:
            params = {"max_tokens": 9, "stop": ["OPQ"], "include_stop_str_in_output": included}
            (choice,) = (await client.generate(PROMPT, params)).choices
            assert choice.text == ("NOPQ" if included else "N")
            assert choice.token_ids == (78, 79, 80, 81)
            assert (choice.finish_reason, choice.stop_reason) == ("stop", "OPQ")
            assert choice.spans[-1].end == 4

    run(main())


class Chatting(Letters):
    """With a chat template, too."""

    def apply_chat_template(self, _: Any, **__: Any) -> list[int]:
        return PROMPT


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("parses", [False, True])
def test_a_text_is_cut_at_the_stop_string_that_ended_it(parses: bool, included: bool) -> None:
    """Not at one of the first tokens, which do not end it; a chat's message ends there as well."""

    async def render(_: web.Request) -> web.StreamResponse:
        return web.json_response({"token_ids": PROMPT, "sampling_params": {}})

    async def derender(request: web.Request) -> web.StreamResponse:
        (choice,) = json.loads(await request.read())["generate_response"]["choices"]
        message = {"role": "assistant", "content": Letters().decode(choice["token_ids"])}
        return web.json_response({"choices": [{"index": 0, "message": message}]})

    async def main() -> None:
        answer = then(event(78), event(79), event(78), event(79), event(78, finish="length"))
        routes = {"/inference/v1/generate": answer}
        if parses:
            chat = "/v1/chat/completions"
            routes |= {f"{chat}/render": render, f"{chat}/derender": derender}
        async with clients_of(routes, tokenizer=Chatting()) as client:
            params = {"max_tokens": 9, "min_tokens": 2, "stop": ["O", "OXXX"]}
            params["include_stop_str_in_output"] = included
            template = {"enable_thinking": False}
            done = await client.chat(
                [{"role": "user", "content": "?"}],
                sampling_params=params,
                chat_template_kwargs=template,
            )
            assert template == {"enable_thinking": False}
            (choice,) = done.choices
            assert choice.token_ids == (78, 79, 78, 79)
            assert choice.text == ("NONO" if included else "NON")
            assert done.messages[0]["content"] == choice.text

    run(main())


def test_a_client_that_is_killed_leaves_nothing_on_its_engine(bus: Bus) -> None:
    bus.sidecar("e0", *LONG_STEP_MS)
    script = (
        "import asyncio, sys; from trainer_agent import RolloutClient\n"
        "async def main():\n"
        "    async with RolloutClient(sys.argv[1]) as client:\n"
        "        prompts = [[5, 9, 77]] * 8\n"
        "        print('asks', flush=True)\n"
        "        asked = client.generate_many(prompts, {'max_tokens': 200, 'ignore_eos': True})\n"
        "        async for _ in asked: pass\n"
        "asyncio.run(main())"
    )

    async def main() -> None:
        async with TrainerAgent(bus.address) as agent:
            with Proc(sys.executable, "-c", script, bus.address) as asking:
                await asyncio.to_thread(asking.first_line)
                await until_in_flight(agent, 8)
                asking.kill()
                await until_in_flight(agent, 0)

    run(main())


async def until_in_flight(agent: TrainerAgent, count: int) -> None:
    """The one engine has so many requests, as the broker tells it."""
    async with asyncio.timeout(TIMEOUT_S):
        while (await agent.status()).groups[0].engines[0].in_flight != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_requests_without_a_session_go_where_other_clients_have_few(bus: Bus) -> None:
    for index in range(2):
        bus.sidecar(f"e{index}", *LONG_STEP_MS)

    async def main() -> None:
        async with RolloutClient(bus.address) as first, RolloutClient(bus.address) as second:
            async with asyncio.timeout(TIMEOUT_S):
                while min(len(first.engines), len(second.engines)) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            asked = SAMPLED | {"max_tokens": 450}
            busy = [
                asyncio.create_task(first.generate(PROMPT, asked, session_id="s")) for _ in range(4)
            ]
            own = asyncio.create_task(second.generate(PROMPT, asked, session_id="t"))
            engines = second._pool.router.engines
            async with asyncio.timeout(TIMEOUT_S):
                while not any(load.others == 4 for load in engines.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            (taken,) = (name for name, load in engines.items() if load.others == 4)
            deltas = second.stream(PROMPT, asked | {"max_tokens": 1})
            assert [delta.engine async for delta in deltas] == [*({*engines} - {taken})]
            for task in (*busy, own):
                task.cancel()
            await asyncio.wait((*busy, own))

    run(main())


def test_requests_outlive_their_broker(bus: Bus) -> None:
    """The last routes stay in use."""
    bus.sidecar("e0")

    async def main() -> None:
        async with RolloutClient(bus.address) as client:
            await client.generate(PROMPT, SAMPLED)
            bus.broker.kill()
            assert_whole((await client.generate(PROMPT, SAMPLED)).choices[0])

    run(main())
