"""Two ranks of vLLM on two hosts, here network namespaces, end a pause whose lease is over as one.

Each rank has a sidecar that is attached to it, on its host.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from sidecar._supervision.launch import with_reaper
from sidecar._supervision.ranks import rank_options
from sidecar._supervision.server import complete_command
from tests.support.hosts import WITHOUT_KEYS, Host, two_hosts
from tests.support.procs import ROOT, Proc
from tests.vllm._vllm import PROMPT, boot_environment, make_moe, require_vllm, server_argv
from tests.vllm.test_deadline import BOOT_S, Trainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

LONG = 300
PORT = 8000  # of each server, on its own host
URL = f"http://127.0.0.1:{PORT}"
# Runs on a rank's host. It says when the first token has come, and at the end all of them.
ASK = """
import json, sys
from urllib.request import Request, urlopen

url, prompt, count = json.loads(sys.argv[1])
sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True}
body = {"token_ids": prompt, "stream": True, "sampling_params": sampling}
request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
tokens = []
with urlopen(request, timeout=300) as response:
    for line in response:
        event = line.decode().strip().removeprefix("data: ")
        if event and event != "[DONE]":
            if not tokens:
                print("began", flush=True)
            tokens += json.loads(event)["choices"][0]["token_ids"]
print(json.dumps(tokens), flush=True)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts on which the servers boot; in this order, ranks 0 and 1."""
    model = make_moe(tmp_path / "model", seed=1)
    environment = {**os.environ, **boot_environment(tmp_path, rest_ms=10.0)}
    with two_hosts() as made, contextlib.ExitStack() as stack:
        for rank, host in enumerate(made):
            options = rank_options(rank, len(made), made[0].address, 29_555)
            argv = server_argv(model, "--port", str(PORT), *options)
            prepared = complete_command(argv, environment)
            own = {"VLLM_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": host.link}
            process = subprocess.Popen(
                host.command(*with_reaper(prepared.argv, 10.0)),
                env={**prepared.env, **own},
                start_new_session=True,
            )
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
        yield made


def ask(stack: contextlib.ExitStack, host: Host) -> Proc:
    """A request to a host's rank, whose first token has come."""
    asked = json.dumps([f"{URL}/inference/v1/generate", PROMPT, LONG])
    process = stack.enter_context(host.start(sys.executable, "-c", ASK, asked))
    assert process.first_line() == "began"
    return process


def tokens_of(process: Proc) -> list[int]:
    assert process.process.stdout is not None
    tokens: list[int] = json.loads(process.process.stdout.readline())
    return tokens


@pytest.mark.parametrize("dead_sidecars", [0, 1])
def test_ranks_resume_once_and_together_when_trainer_and_broker_die(
    hosts: list[Host], dead_sidecars: int
) -> None:
    """So do they if one of the sidecars dies as well: the cores agree by the store of their own."""
    wavebus = (sys.executable, "-m", "bus._cli.main")
    first, second = hosts
    with contextlib.ExitStack() as stack:
        timing = ("--heartbeat-ms", "500", "--peer-timeout-ms", "7000")
        listen = ("--listen", f"tcp://{first.address}:*", *timing)
        broker = stack.enter_context(first.start(*wavebus, "broker", *listen))
        address = broker.first_line()
        sidecars = []
        for rank, host in enumerate(hosts):
            name = ("--name", f"e{rank}", "--dp-group", "moe", "--advertise", host.address)
            words = ("sidecar", "--broker", address, "--attach", URL, *name)
            sidecar = host.start(*wavebus, *words)
            sidecars.append(stack.enter_context(sidecar))
        for _ in sidecars:
            broker.wait_event("peer_joined", BOOT_S)
        script = str(ROOT / "tests/support/held_pause.py")
        argv = first.command(sys.executable, script, address, "--when-told")
        trainer = stack.enter_context(Trainer(*argv, stdin=subprocess.PIPE, env=WITHOUT_KEYS))
        assert trainer.first_line() == "ready"
        whole = tokens_of(ask(stack, first))
        assert len(whole) == LONG
        requests = [ask(stack, host) for host in hosts]
        assert trainer.begin() == "paused"
        for process in (trainer, broker, *sidecars[:dead_sidecars]):
            process.kill()
        for request in requests:
            assert tokens_of(request) == whole
        for host in (first, second):  # and they step on, both
            assert tokens_of(ask(stack, host)) == whole
