"""An engine that its sidecar is attached to: what becomes of a pause when the sidecar dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest
from safetensors.torch import load_file

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._shared_pages.core_status import CoreStatusReader
from sidecar._shared_pages.pause_lease import (
    Begun,
    LeaseOutcome,
    PauseLease,
    PauseLeasePage,
    deadline_ns,
)
from sidecar._supervision.launch import free_port, with_reaper
from sidecar._supervision.server import complete_command
from sidecar._vllm.connection_http import HttpConnection
from sidecar._vllm.engine import VllmAdapter
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.procs import ROOT, Proc, run_wavebus, wavebus
from tests.support.push import Push, plan
from tests.support.steps import steps
from tests.vllm._vllm import MAX_POSITIONS, PROMPT, boot_environment, require_vllm, server_argv
from trainer_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]

BOOT_S = 600.0
PATIENCE_S = 60.0
LONG = 500  # takes 6 s, since the core rests after each step
NOBODY = 2**22 + 1  # no process has this number


class Attached:
    """A server that nobody supervises, and requests to it."""

    def __init__(self, folder: Path, *extra: str) -> None:
        self.checkpoint: Checkpoint = make_checkpoint(
            folder / "model", seed=1, max_positions=MAX_POSITIONS
        )
        self.pages = folder / "pages"
        environment = {
            **os.environ,
            **boot_environment(folder, rest_ms=10.0),
            "WAVEBUS_CORE_PAGES": str(self.pages),
        }
        prepared = complete_command(
            [*server_argv(self.checkpoint.folder, *extra), "--port", str(free_port())], environment
        )
        self.url = prepared.base_url
        self.process = subprocess.Popen(
            with_reaper(prepared.argv, 10.0), env=prepared.env, start_new_session=True
        )

    def page(self) -> PauseLeasePage:
        [path] = self.pages.glob("*.hold")
        return PauseLeasePage.open(path)

    def ended(self, serial: int | None = None) -> LeaseOutcome:
        """What the core has made of the hold; waits for it."""

        def end() -> LeaseOutcome | None:
            with self.page() as page:
                found, hold = page.outcome(), page.lease()
            wanted = serial if serial is not None else hold.serial if hold else 0
            return found if found is not None and found.serial == wanted else None

        found: LeaseOutcome = until(end)
        return found

    def ask(self, count: int = LONG) -> Asked:
        """A request under way, with some tokens already."""
        asked = Asked(self.url, count)
        until(lambda: asked.tokens)
        return asked

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


class Asked(threading.Thread):
    """A streamed request."""

    def __init__(self, url: str, count: int) -> None:
        super().__init__(daemon=True)
        self.tokens: list[int] = []
        self.finish = ""
        self._url = f"{url}/inference/v1/generate"
        sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True}
        self._body = {"token_ids": PROMPT, "stream": True, "sampling_params": sampling}
        self.start()

    def run(self) -> None:
        body = json.dumps(self._body).encode()
        request = Request(self._url, body, {"content-type": "application/json"})
        with urlopen(request, timeout=300) as response:
            for line in response:
                event = line.decode().strip().removeprefix("data: ")
                if event and event != "[DONE]":
                    [choice] = json.loads(event)["choices"]
                    self.tokens = self.tokens + choice["token_ids"]
                    self.finish = choice["finish_reason"] or self.finish

    def result(self) -> tuple[list[int], str]:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "no end"
        return self.tokens, self.finish


def until(look: Callable[[], Any]) -> Any:
    """What it finds, as soon as it finds something."""
    end_s = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < end_s, "not in time"
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    started = Attached(tmp_path_factory.mktemp("attached"))
    try:
        yield started
    finally:
        started.stop()


class Trainer(Proc):
    """See :mod:`tests.support.held_pause`."""

    def begin(self) -> str:
        """Tell it to; what it says when it has."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.first_line()


class Bus:
    """A broker, and sidecars that attach."""

    def __init__(self, stack: contextlib.ExitStack, attached: Attached) -> None:
        self._stack = stack
        self._attached = attached
        timing = ("--heartbeat-ms", "500", "--peer-timeout-ms", "7000")
        self.broker = self.add(wavebus("broker", "--listen", "tcp://127.0.0.1:*", *timing))
        self.address = self.broker.first_line()

    def add(self, process: Proc) -> Proc:
        return self._stack.enter_context(process)

    def sidecar(self) -> Proc:
        process = self.add(
            wavebus(
                *("sidecar", "--broker", self.address, "--name", "e0"),
                *("--attach", self._attached.url),
            )
        )
        self.broker.wait_event("peer_joined", BOOT_S, peer="e0")
        return process

    def trainer(self, *update: str) -> Trainer:
        """One that is ready to hold a pause until it is killed, or to begin an update in it."""
        script = str(ROOT / "tests" / "support" / "held_pause.py")
        argv = (sys.executable, script, self.address, *update, "--when-told")
        trainer = Trainer(*argv, stdin=subprocess.PIPE)
        self.add(trainer)
        assert trainer.first_line() == "ready"
        return trainer

    def phase(self) -> str:
        """The engine's, as the broker tells it; empty where it has none."""
        shown = json.loads(run_wavebus("status", "--broker", self.address, "--json").stdout)
        engines = [each for group in shown["groups"] for each in group["engines"]]
        return str(engines[0]["phase"]) if engines else ""


@pytest.fixture
def bus(attached: Attached) -> Iterator[Bus]:
    with contextlib.ExitStack() as stack:
        yield Bus(stack, attached)


def test_a_core_that_is_stopped_gets_no_requests(attached: Attached, bus: Bus) -> None:
    """Also while it is idle, and no call of its sidecar waits for it."""
    sidecar = bus.sidecar()
    bus.broker.wait_event("routes", came=["e0"])
    [path] = attached.pages.glob("*.page")
    pid = CoreStatusReader(path).read().pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert sidecar.wait_event("core_frozen")["pid"] == pid
        bus.broker.wait_event("routes", gone=["e0"])
    finally:
        os.kill(pid, signal.SIGCONT)
    sidecar.wait_event("core_runs")
    bus.broker.wait_event("routes", came=["e0"])


def test_a_sidecar_killed_in_a_pause(bus: Bus, attached: Attached) -> None:
    """The engine resumes when the lease is over, and its request ends whole; the next sidecar
    finds it running."""
    sidecar = bus.sidecar()
    trainer = bus.trainer()
    request = attached.ask()
    assert trainer.begin() == "paused"
    before = len(request.tokens)
    sidecar.kill()
    assert attached.ended().state == "resumed"
    assert before < LONG
    assert request.result() == (attached.checkpoint.greedy(load(attached), PROMPT, LONG), "length")
    trainer.kill()
    again = bus.sidecar()
    assert bus.phase() == "running"
    assert again.stop() == 0


def test_a_sidecar_killed_with_a_chunk_loaded(bus: Bus, attached: Attached) -> None:
    """The engine stays paused, its request ends with the tokens it has, the next sidecar finds it
    quarantined, and a whole update frees it."""
    sidecar = bus.sidecar()
    trainer = bus.trainer(str(attached.checkpoint.folder))
    request = attached.ask()
    assert trainer.begin() == "chunk"
    sidecar.kill()
    end = attached.ended()
    assert end.state == "quarantined"
    assert "model" in end.reason
    tokens, finish = request.result()
    assert 0 < len(tokens) < LONG
    assert finish == "abort"
    trainer.kill()
    again = bus.sidecar()
    assert bus.phase() == "quarantined"
    new = perturbed(load(attached), 3)
    with SyncTrainerAgent(bus.address, name="next", lease_ms=14_000) as agent:
        agent.wait_for_engines(1, timeout_s=PATIENCE_S)
        agent.update_weights(list(new.items()), how="paused")
        assert attached.ask(20).result()[0] == attached.checkpoint.greedy(new, PROMPT, 20)
        agent.update_weights(list(load(attached).items()), how="paused")
    assert again.stop() == 0


def test_a_sidecar_that_comes_back_in_the_lease_takes_the_pause_over(
    bus: Bus, attached: Attached
) -> None:
    """It was killed; the next one finds the engine paused, and the broker has it resumed."""
    sidecar = bus.sidecar()
    trainer = bus.trainer()
    request = attached.ask()
    assert trainer.begin() == "paused"
    sidecar.kill()
    bus.broker.wait_event("peer_lost", peer="e0")
    trainer.kill()
    again = bus.sidecar()
    assert len(request.result()[0]) == LONG
    until(lambda: bus.phase() == "running")
    assert again.stop() == 0


def test_a_sidecar_stopped_for_longer_than_the_lease(bus: Bus, attached: Attached) -> None:
    """The engine resumes without it; woken, it finds so, and takes part in the next update."""
    sidecar = bus.sidecar()
    trainer = bus.trainer()
    request = attached.ask()
    assert trainer.begin() == "paused"
    sidecar.signal(signal.SIGSTOP)
    assert attached.ended().state == "resumed"
    assert len(request.result()[0]) == LONG
    trainer.kill()
    sidecar.signal(signal.SIGCONT)
    bus.broker.wait_event("peer_joined", peer="e0")
    until(lambda: bus.phase() == "running")
    with SyncTrainerAgent(bus.address, name="next", lease_ms=14_000) as agent:
        agent.wait_for_engines(1, timeout_s=PATIENCE_S)
        agent.update_weights(list(load(attached).items()), how="paused")
    assert sidecar.stop() == 0


def hold(serial: int, begun: Begun = "", broken: tuple[str, ...] = ()) -> PauseLease:
    """One that is over, of a sidecar that is dead."""
    return PauseLease(
        serial, "u1", deadline_ns(0), NOBODY, "e0", 0, begun, broken, asleep=False, resuming=False
    )


def test_an_update_that_was_only_started_is_undone(attached: Attached) -> None:
    """Its parameters are on meta then; the old weights come back before it resumes. And what a
    sidecar that was too slow still sends is refused."""

    async def scenario() -> None:
        engine = VllmAdapter(HttpConnection(attached.url))
        await engine.start()
        request = await asyncio.to_thread(attached.ask)
        weights = load(attached)
        push = Push(engine, weights, plan(weights))
        await engine.pause("keep", clear_cache=False)
        await push.begin()
        assert engine.write_pause_lease(hold(71, "model")) is None
        end = await asyncio.to_thread(attached.ended, 71)
        assert end.state == "resumed"
        with pytest.raises(EngineError, match="the pause's lease was over") as refused:
            await steps(engine).start_update(recover=False)
        assert refused.value.code is NackCode.WRONG_STATE
        found = engine.write_pause_lease(hold(71, "model"))
        assert found is not None
        assert found.state == "resumed"
        tokens, _ = await asyncio.to_thread(request.result)
        assert tokens == attached.checkpoint.greedy(weights, PROMPT, LONG)
        assert engine.write_pause_lease(None) is None
        await engine.close()

    asyncio.run(scenario())


def load(attached: Attached) -> dict[str, Any]:
    weights: dict[str, Any] = load_file(attached.checkpoint.folder / "model.safetensors")
    return weights
