"""Rollouts on two served vLLM that are paused, updated and killed: each token is the greedy one of
the version that its span names, after all before it, and has that version's log-probability."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.processes import children, process_of_vllm
from tests.support.procs import PATIENT, Proc, wavebus
from tests.vllm._vllm import MAX_POSITIONS, boot_environment, require_vllm, server_argv
from trainer_agent import TrainerAgent
from trainer_agent._rollouts.client import RolloutClient
from trainer_agent._rollouts.request import plain_params

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from trainer_agent._rollouts.results import Completion, Span

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

BOOT_S = 600.0
LIMIT_S = 600.0
LOOK_S = 0.01
STEP_MS = 10.0
TOKENS = 80
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
PARAMS = [pytest.param(3, 0.0, id="3"), pytest.param(200, 0.5, id="200", marks=pytest.mark.slow)]


class Fleet:
    """A broker, and the engines ``e0`` and ``e1``, which are started anew when they die."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.checkpoint: Checkpoint = make_checkpoint(
            folder / "model", seed=1, max_positions=MAX_POSITIONS
        )
        self.weights: dict[int, Mapping[str, Tensor]] = {0: self.checkpoint.weights}
        timers = ("--heartbeat-ms", "500", *PATIENT)
        self.broker = stack.enter_context(
            wavebus("broker", "--listen", "tcp://127.0.0.1:*", *timers)
        )
        self.address = self.broker.first_line()
        argv = server_argv(self.checkpoint.folder, "--disable-uvicorn-access-log")
        environment = boot_environment(folder / "plugins", rest_ms=STEP_MS)
        self._sidecars: dict[str, Proc] = {}
        for name in ("e0", "e1"):
            options = ("--broker", self.address, "--name", name)
            started = wavebus("sidecar", *options, "--", *argv, env=environment)
            self._sidecars[name] = stack.enter_context(started)
        for _ in self._sidecars:
            self.broker.wait_event("peer_joined", timeout_s=BOOT_S, role="engine")

    def kill(self, name: str, which: str) -> None:
        """Its engine's ``core``, or its API ``server``."""
        [guard] = children(self._sidecars[name].pid)
        [sidecar] = children(guard)
        os.kill(process_of_vllm(sidecar, which), signal.SIGKILL)

    async def logged(self, event: str, name: str) -> None:
        """Waits until the broker has logged this of the engine."""
        await asyncio.to_thread(self.broker.wait_event, event, BOOT_S, peer=name)

    async def update(self, agent: TrainerAgent) -> None:
        """Send other weights."""
        new = perturbed(self.checkpoint.weights, seed=len(self.weights))
        version = await agent.update_weights(new)
        self.weights[version] = new

    def check(self, done: Completion) -> None:
        """Every token is that of its version, and none is without one."""
        [choice] = done.choices
        assert (len(choice.token_ids), choice.finish_reason) == (TOKENS, "length")
        assert choice.logprobs is not None
        assert sum(attempt.tokens for attempt in choice.attempts) == TOKENS
        ends = [0, *(span.end for span in choice.spans)]
        assert [span.start for span in choice.spans] == ends[:-1]
        assert ends[-1] == TOKENS
        at = 0
        for version, end in _runs(choice.spans):
            before = (*done.prompt_token_ids, *choice.token_ids[:at])
            tokens, logprobs = self._expected(version, before, end - at)
            assert choice.token_ids[at:end] == tokens, choice.spans
            assert choice.logprobs[at:end] == pytest.approx(logprobs, abs=1e-4)
            at = end

    @functools.cache  # noqa: B019 - a fleet lives as long as its tests
    def _expected(
        self, version: int, before: tuple[int, ...], count: int
    ) -> tuple[tuple[int, ...], list[float]]:
        """The greedy tokens of these weights, and their log-probabilities."""
        weights, tokens, logprobs = self.weights[version], [], []
        logits, past = self.checkpoint.forward(weights, before)
        for _ in range(count):
            tokens.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1)[tokens[-1]]))
            logits, past = self.checkpoint.forward(weights, tokens[-1:], past)
        return tuple(tokens), logprobs


def _runs(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Where each version ends, over engines and attempts."""
    ends: list[tuple[int, int]] = []
    for span in spans:
        assert span.version is not None, spans
        if ends and ends[-1][0] == span.version:
            ends.pop()
        ends.append((span.version, span.end))
    return ends


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack, tmp_path_factory.mktemp("fleet"))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, LIMIT_S))


async def until_tokens(client: RolloutClient, engine: str, requests: int) -> None:
    """So many requests have got a token of this engine from now on."""
    seen: dict[Any, float] = {}
    while requests > sum(  # noqa: ASYNC110 - it tells nobody
        attempt.last_s > seen.setdefault(attempt, attempt.last_s)
        for attempt in client._pool.attempts
        if attempt.engine == engine
    ):
        await asyncio.sleep(LOOK_S)


async def generate(client: RolloutClient, count: int) -> list[Completion]:
    prompts = [[5, 9, 77, number] for number in range(count)]
    return [done async for _, done in client.generate_many(prompts, GREEDY)]


async def generate_until(client: RolloutClient, enough: asyncio.Event) -> list[Completion]:
    """Ten at a time, so that requests are under way whatever an update takes."""
    answers: list[Completion] = []
    while not enough.is_set():
        answers += await generate(client, 10)
    return answers


@pytest.mark.parametrize(("pauses", "every_s"), PARAMS)
def test_pauses_that_abort_cost_no_request_a_token(
    fleet: Fleet, pauses: int, every_s: float
) -> None:
    async def main() -> None:
        async with (
            TrainerAgent(fleet.address) as agent,
            RolloutClient(fleet.address) as client,
        ):
            paused = asyncio.create_task(pause(agent, client))
            answers: list[Completion] = []
            while not paused.done():
                answers += await generate(client, 10)
            await paused
        for done in answers:
            fleet.check(done)
        assert max(len(done.choices[0].attempts) for done in answers) > 2

    async def pause(agent: TrainerAgent, client: RolloutClient) -> None:
        for _ in range(pauses):
            await until_tokens(client, "e0", 1)
            async with agent.paused(mode="abort"):
                pass
            await asyncio.sleep(every_s)

    run(main())


# Engines die here: this test stays the last one.
@pytest.mark.ci
def test_updates_and_killed_engines_cost_no_request_a_token(fleet: Fleet) -> None:
    async def main() -> None:
        async with (
            TrainerAgent(fleet.address) as agent,
            RolloutClient(fleet.address) as client,
        ):
            enough = asyncio.Event()
            under_way = asyncio.create_task(generate_until(client, enough))
            await until_tokens(client, "e0", 3)
            await fleet.update(agent)
            await until_tokens(client, "e0", 3)
            fleet.kill("e0", "core")
            await fleet.logged("peer_left", "e0")  # an update under way would fail with it
            await fleet.update(agent)
            enough.set()
            answers = await under_way
            assert "died" in ended_by(answers)
            await fleet.logged("peer_joined", "e0")
            enough.clear()
            under_way = asyncio.create_task(generate_until(client, enough))
            await until_tokens(client, "e1", 3)
            await fleet.update(agent)
            await until_tokens(client, "e1", 3)
            fleet.kill("e1", "server")
            enough.set()
            later = await under_way
            assert "died" in ended_by(later)
        for done in (*answers, *later):
            fleet.check(done)
        spans = [span for done in (*answers, *later) for span in done.choices[0].spans]
        assert {(span.engine, span.version) for span in spans} >= {("e0", 0), ("e1", 2), ("e0", 3)}

    run(main())


def ended_by(answers: list[Completion]) -> set[str]:
    return {attempt.ended_by for done in answers for attempt in done.choices[0].attempts}


def test_vllms_own_sampling_parameters_are_taken() -> None:
    """What differs from vLLM's defaults, and ``max_tokens``, which has another one there."""
    from vllm import sampling_params as vllm  # noqa: PLC0415 - slow to import

    constraint = vllm.StructuredOutputsParams(regex="a+")
    given = vllm.SamplingParams(seed=3, logit_bias={5: 1.0}, structured_outputs=constraint)
    assert plain_params(given) == {
        "seed": 3,
        "logit_bias": {"5": 1.0},
        "max_tokens": 16,
        "structured_outputs": {"regex": "a+"},
    }
