"""Two served MoE ranks, as a user starts them: one command, the bus as their coordinator."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest

from tests.support.procs import PATIENT, run_wavebus, wavebus
from tests.vllm._vllm import PROMPT, boot_environment, make_moe, require_vllm, server_argv
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]

BOOT_S = 600.0
LONG = 150


class Served:
    """A broker, two ranks with their sidecars, and requests to them over HTTP."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.broker = wavebus(
            "broker", "--listen", "tcp://127.0.0.1:*", "--log-level", "debug", *PATIENT
        )
        self.broker.__enter__()
        self.address = self.broker.first_line()
        self.ranks = wavebus(
            *("sidecar", "--broker", self.address, "--group", "policy", "--dp-group", "moe"),
            *("--dp-size", "2", "--dp-coordinator", "bus", "--", *server_argv(model)),
            env=boot_environment(folder),
        )

    def stop(self) -> None:
        self.ranks.stop()
        self.ranks.__exit__(None, None, None)
        self.broker.__exit__(None, None, None)

    def wait_for_ranks(self) -> None:
        for _ in range(2):  # the DP coordinator is there before them
            self.broker.wait_event("peer_joined", BOOT_S, role="engine")

    def status(self) -> dict[str, Any]:
        """The group's, as the broker tells it."""
        ended = run_wavebus("status", "--broker", self.address, "--json")
        status: dict[str, Any] = json.loads(ended.stdout)
        [group] = status["groups"]
        return dict(group)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    started = Served(folder, make_moe(folder / "model", seed=1))
    try:
        started.wait_for_ranks()
        yield started
    finally:
        started.stop()


class Asked(threading.Thread):
    """A request under way."""

    def __init__(self, endpoint: str, count: int) -> None:
        super().__init__(daemon=True)
        self.tokens: list[int] = []
        self._url = f"{endpoint}/inference/v1/generate"
        sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True}
        self._body = {"token_ids": PROMPT, "stream": False, "sampling_params": sampling}
        self.start()

    def run(self) -> None:
        body = json.dumps(self._body).encode()
        request = Request(self._url, body, {"content-type": "application/json"})
        with urlopen(request, timeout=300) as response:
            [choice] = json.load(response)["choices"]
        self.tokens = choice["token_ids"]

    def result(self) -> list[int]:
        self.join(120)
        assert self.tokens, "no answer"
        return self.tokens


def test_pauses_of_the_group_lose_nothing(served: Served) -> None:
    """Requests run on both ranks, come in the pause, and all end with the same tokens."""
    zero, one = (engine["endpoint"] for engine in served.status()["engines"])
    undisturbed = Asked(zero, LONG).result()

    async def scenario() -> None:
        async with TrainerAgent(broker=served.address, group="policy") as agent:
            await agent.wait_for_engines(2, timeout_s=180)
            for round_ in range(5):
                asked = [Asked(zero, LONG), Asked(one, LONG)]
                await asyncio.sleep(0.3 * round_)
                async with agent.paused(mode="keep"):
                    asked.append(Asked((zero, one)[round_ % 2], 20))
                    await asyncio.sleep(0.1)
                for request in asked:
                    tokens = await asyncio.to_thread(request.result)
                    assert tokens == undisturbed[: len(tokens)]
                    assert len(tokens) == (20 if request is asked[2] else LONG)

    asyncio.run(scenario())
    [view] = served.status()["dp_groups"]
    assert (view["name"], view["ranks"], view["size"]) == ("moe", 2, 2)
    assert view["coordinator"].startswith("coordinator-moe-")
    assert view["health"] == "ok"
    assert all(engine["core_phase"] for engine in served.status()["engines"])
    served.broker.wait_event("wave_started", dp_group="moe", source="coordinator")


@pytest.mark.slow
def test_a_sidecar_killed_when_its_rank_alone_is_paused(served: Served) -> None:
    """PAUSE_LOCAL reached one rank and nothing else did: its sidecar dies, its server with it,
    and all ranks are started anew."""
    victim, peer = served.status()["engines"]
    os.kill(peer["pid"], signal.SIGSTOP)

    async def half_a_pause() -> None:
        async with TrainerAgent(broker=served.address, group="policy") as agent:
            await agent.wait_for_engines(2, timeout_s=180)

            async def pause() -> None:
                async with agent.paused(mode="keep"):
                    pass

            asked = asyncio.create_task(pause())
            await asyncio.sleep(1.0)
            assert not asked.done()
            os.kill(victim["pid"], signal.SIGKILL)
            os.kill(peer["pid"], signal.SIGCONT)
            await asyncio.wait([asked], timeout=180)
            assert asked.done()
            await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(half_a_pause())
    served.broker.wait_event("dp_group_down", dp_group="moe")
    served.broker.wait_event("dp_group_up", BOOT_S, dp_group="moe")
    for engine in served.status()["engines"]:
        assert len(Asked(engine["endpoint"], 20).result()) == 20
