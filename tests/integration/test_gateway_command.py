"""`wavebus gateway`: generation over HTTP, before engines that are killed and updated."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
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
from tests.support.procs import Proc, run_wavebus, wavebus
from trainer_agent import RolloutClient, TrainerAgent

if TYPE_CHECKING:
    from tests.integration.conftest import Bus


FILES = 128
LIVE = 256
# 1,024 streams are to take 300 MB at most: so much for the process, and for each stream.
IDLE_MB = 100
STREAM_MB = 0.19


def front_command(bus: Bus) -> list[str]:
    command = [sys.executable, "-m", "bus._cli.main", "gateway"]
    return [*command, "--broker", bus.address, "--listen", "127.0.0.1:0"]


def front(bus: Bus) -> str:
    """Its URL."""
    return bus.add(Proc(*front_command(bus))).first_line()


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
    with wavebus("gateway", *options, "--group", "polcy") as empty:
        line = empty.wait_event("no_engine_yet", group="polcy")
        assert line["groups"] == ["policy"]
        empty.first_line()
    with wavebus("gateway", *options) as full:
        full.first_line()
        assert full.stop() == 0
        assert "no_engine_yet" not in full.all_text()


def test_beyond_loopback_it_needs_a_key_or_an_insecure_will() -> None:
    shown = run_wavebus("gateway", "--listen", "0.0.0.0:0")
    assert (shown.returncode, "--api-key" in shown.stderr) == (2, True)
    for address in ("8000", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999"):
        assert run_wavebus("gateway", "--listen", address).returncode == 2
    options = ("--insecure", "--allow-pickled-handles")
    shown = run_wavebus("gateway", "--listen", "0.0.0.0:0", *options)
    assert (shown.returncode, "for loopback alone" in shown.stderr) == (2, True)


def test_half_sent_requests_do_not_shut_it(bus: Bus) -> None:
    """They are more than it may have files. It says so, and keeps files for engines."""
    bus.sidecar("e0")
    limited = f"ulimit -n {FILES}; exec {shlex.join(front_command(bus))}"
    process = bus.add(Proc("/bin/sh", "-c", limited))
    url = process.first_line()
    host, port = url.removeprefix("http://").split(":")

    async def main() -> None:
        halves = [await asyncio.open_connection(host, int(port)) for _ in range(2 * FILES)]
        for _, writer in halves:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-")
        await asyncio.to_thread(process.wait_event, "http_connections_dropped")
        asked: list[object] = []
        while len(asked) < 4:
            with contextlib.suppress(aiohttp.ClientError):
                status, answer = await post(f"{url}/v1/completions", {"prompt": PROMPT})
                asked += [answer] * (status == 200)
        async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as response:
            told = await response.json()
        assert 0 < told["connections"] <= told["limit"] <= FILES // 2
        assert told["evicted"] + told["refused"] > FILES
        for _, writer in halves:
            writer.close()

    run(main())


@pytest.mark.slow
def test_a_stream_takes_little_memory(bus: Bus) -> None:
    bus.sidecar("e0", "--max-num-seqs", str(LIVE), "--step-ms", "200")
    # A process of its own: one that is forked from the tests' has what they have imported.
    process = bus.add(Proc("/bin/sh", "-c", f"exec {shlex.join(front_command(bus))}"))
    url = process.first_line()

    def peak_mb() -> float:
        lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
        (peak,) = (int(each.split()[1]) for each in lines if each.startswith("VmHWM:"))
        return peak / 1000

    async def main() -> None:
        body = {"prompt": PROMPT, **SAMPLED}
        assert (await post(f"{url}/v1/completions", body))[0] == 200
        idle_mb = peak_mb()
        assert idle_mb < IDLE_MB
        begun = [asyncio.Event() for _ in range(LIVE)]
        streams = [
            asyncio.create_task(events(f"{url}/v1/completions", body, each)) for each in begun
        ]
        await asyncio.gather(*(each.wait() for each in begun))
        assert (peak_mb() - idle_mb) / LIVE < STREAM_MB
        for streamed in await asyncio.gather(*streams):
            assert len(joined(streamed)["token_ids"]) == TOKENS

    run(main())
