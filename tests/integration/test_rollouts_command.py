"""`wavebus rollouts`: generation over HTTP, before engines that are killed and updated."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from tests.integration.test_rollouts_front import (
    PROMPT,
    SAMPLED,
    STEP_MS,
    TOKENS,
    events,
    joined,
    post,
    run,
)
from tests.support.procs import run_wavebus, wavebus
from trainer_agent import RolloutClient, TrainerAgent

if TYPE_CHECKING:
    from tests.integration.conftest import Bus
    from tests.support.procs import Proc


def front(bus: Bus, *extra: str) -> str:
    """Its URL."""
    process = bus.add(
        wavebus("rollouts", "--broker", bus.address, "--listen", "127.0.0.1:0", *extra)
    )
    return process.first_line()


@pytest.mark.ci
def test_answers_equal_those_of_the_client_while_engines_die_and_are_updated(bus: Bus) -> None:
    engines: list[Proc] = [bus.sidecar(f"e{index}", *STEP_MS) for index in range(3)]
    weights = load_file(f"{bus.checkpoint.folder}/model.safetensors")
    url = front(bus)
    generate, complete = f"{url}/inference/v1/generate", f"{url}/v1/completions"

    async def main() -> None:
        params = [SAMPLED | {"seed": 100 * number, "n": 2} for number in range(6)]
        async with RolloutClient(bus.address) as client:
            twins = [(await client.generate(PROMPT, each)).choices for each in params]
        bodies = [{"token_ids": PROMPT, "sampling_params": each} for each in params]
        whole = [asyncio.create_task(post(generate, body)) for body in bodies]
        begun = [asyncio.Event() for _ in bodies]
        pieces = [
            asyncio.create_task(events(generate, *each)) for each in zip(bodies, begun, strict=True)
        ]
        texts = [
            asyncio.create_task(post(complete, {"prompt": [PROMPT] * 2, **each}))
            for each in params[:2]
        ]
        async with TrainerAgent(bus.address) as agent:
            await asyncio.gather(*(each.wait() for each in begun))
            await agent.update_weights(weights)
            await asyncio.to_thread(engines[0].kill)
        for twin, task, streamed in zip(twins, whole, pieces, strict=True):
            status, answer = await task
            assert status == 200, answer
            events_of = await streamed
            for choice in twin:
                for shown in (answer["choices"][choice.index], joined(events_of, choice.index)):
                    assert shown["token_ids"] == list(choice.token_ids)
                    content = shown["logprobs"]["content"]
                    given = [each["logprob"] for each in content]
                    assert given == pytest.approx(choice.logprobs, abs=1e-4)
                    assert (shown["finish_reason"], shown["inexact"]) == ("length", [])
                    spans = shown["weight_versions"]
                    assert [s["start"] for s in spans] == [0, *(s["end"] for s in spans[:-1])]
                    assert spans[-1]["end"] == TOKENS
                    assert {s["version"] for s in spans} <= {"0", "1"}
            assert answer["usage"] == {
                "prompt_tokens": 3,
                "completion_tokens": 2 * TOKENS,
                "total_tokens": 3 + 2 * TOKENS,
            }
        for twin, task in zip(twins, texts, strict=False):
            status, answer = await task
            given = [each["token_ids"] for each in answer["choices"]]
            assert given == [list(choice.token_ids) for choice in twin] * 2

    run(main())


def test_it_says_at_its_start_that_a_group_has_no_engine(bus: Bus) -> None:
    """As one of a mistyped name; it names those that have."""
    bus.sidecar("e0")
    options = ("--broker", bus.address, "--listen", "127.0.0.1:0")
    with wavebus("rollouts", *options, "--group", "polcy") as empty:
        line = empty.wait_event("no_engine_yet", group="polcy")
        assert line["groups"] == ["policy"]
        empty.first_line()
    with wavebus("rollouts", *options) as full:
        full.first_line()
        assert full.stop() == 0
        assert "no_engine_yet" not in full.all_text()


def test_beyond_loopback_it_needs_a_key_or_an_insecure_will() -> None:
    shown = run_wavebus("rollouts", "--listen", "0.0.0.0:0")
    assert (shown.returncode, "--api-key" in shown.stderr) == (2, True)
    for address in ("8000", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999"):
        assert run_wavebus("rollouts", "--listen", address).returncode == 2
