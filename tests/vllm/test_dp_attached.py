"""Ranks in lockstep that nobody supervises, each with a sidecar that is attached to it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from sidecar._supervision.launch import free_port, with_reaper
from sidecar._supervision.ranks import rank_options
from sidecar._supervision.server import complete_command
from tests.support.procs import ROOT, Proc, wavebus
from tests.vllm._vllm import boot_environment, make_moe, require_vllm, server_argv
from tests.vllm.test_deadline import BOOT_S, Asked, Trainer, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

RANKS = 2
LONG = 300


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[str]]:
    """The URLs of two servers that boot; in this order, ranks 0 and 1."""
    model = make_moe(tmp_path / "model", seed=1)
    environment = {**os.environ, **boot_environment(tmp_path, rest_ms=10.0)}
    meeting = free_port()
    with contextlib.ExitStack() as stack:
        urls = []
        for rank in range(RANKS):
            options = rank_options(rank, RANKS, "127.0.0.1", meeting)
            prepared = complete_command(server_argv(model, *options), environment)
            argv = with_reaper(prepared.argv, 10.0)
            process = subprocess.Popen(argv, env=prepared.env, start_new_session=True)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            urls.append(prepared.base_url)
        yield urls


def test_a_sidecar_that_is_stopped_in_a_pause_leaves_the_resume_to_its_dp_group(
    ranks: list[str],
) -> None:
    """Alone its rank would stand in the collective of a resume that the peer rank does not make.
    The lease ends the pause of both: their requests end whole, and new ones are served."""
    with contextlib.ExitStack() as stack:

        def add(process: Proc) -> Proc:
            stack.enter_context(process)
            return process

        timing = ("--heartbeat-ms", "500", "--peer-timeout-ms", "7000")
        broker = add(wavebus("broker", "--listen", "tcp://127.0.0.1:*", *timing))
        address = broker.first_line()

        def attach(rank: int) -> Proc:
            name = ("--name", f"e{rank}", "--dp-group", "moe")
            sidecar = wavebus("sidecar", "--broker", address, *name, "--attach", ranks[rank])
            return add(sidecar)

        sidecars = [attach(rank) for rank in range(RANKS)]
        for _ in sidecars:
            broker.wait_event("peer_joined", BOOT_S)
        script = str(ROOT / "tests/support/held_pause.py")
        trainer = Trainer(sys.executable, script, address, "--when-told", stdin=subprocess.PIPE)
        add(trainer)
        assert trainer.first_line() == "ready"
        whole = Asked(ranks[0], LONG).result()
        assert (len(whole[0]), whole[1]) == (LONG, "length")
        requests = [Asked(url, LONG) for url in ranks]
        until(lambda: all(request.tokens for request in requests))
        assert trainer.begin() == "paused"
        assert all(len(request.tokens) < LONG for request in requests)
        assert sidecars[0].stop() == 0
        trainer.kill()
        for request in requests:
            assert request.result() == whole
        again = attach(0)
        broker.wait_event("dp_group_up", BOOT_S, dp_group="moe")
        for url in ranks:
            assert Asked(url, LONG).result() == whole
        assert again.stop() == 0
        assert sidecars[1].stop() == 0
