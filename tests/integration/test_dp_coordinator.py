"""The DP coordinator process on real sockets, with front ends and cores that are sockets only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from bus._protocol.dp.coordinator import StartCores
from tests.support.fake_group import DP_GROUP, FakeGroup, ready_group
from tests.support.procs import PATIENT, ROOT, Proc, run_wavebus, wavebus

if TYPE_CHECKING:
    from pathlib import Path

NOWHERE = "tcp://127.0.0.1:9"


def test_ready_comes_when_every_core_has_subscribed() -> None:
    """The second equal subscription counts, and a late one gets its READY as well."""
    with FakeGroup(3) as group:
        first, second, third = group.cores
        first.subscribe()
        second.subscribe()
        assert first.input.silent(200)
        third.subscribe()
        assert [core.heard() for core in group.cores] == [None, None, None]
        second.subscribe()
        assert second.heard() is None


def test_no_start_comes_before_ready() -> None:
    with FakeGroup(2) as group:
        group.fronts[0].subscribe()
        group.fronts[0].first_request(0)
        group.fronts[0].heard_standing(0, running=False)
        for core in group.cores:
            core.subscribe()
        for core in group.cores:
            assert core.heard() is None
            core.heard_start(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_waves_one_after_the_other(rank: int) -> None:
    with ready_group(2) as group:
        for wave in range(5):
            group.run_wave(wave, rank)
        group.process.stop()
        group.process.wait_event("dp_coordinator_ended")
        assert not [e for e in group.process.events if e["level"] not in ("info", "debug")]


def test_a_start_is_repeated_until_a_core_says_that_the_wave_runs() -> None:
    """Cores that are paused drop it and say nothing."""
    with ready_group(2) as group:
        group.fronts[1].first_request(0)
        for _ in range(4):
            for core in group.cores:
                assert core.heard() == StartCores(0)
        group.cores[0].report(started=0)
        group.cores[1].heard_start(0, excluded=0)
        group.cores[0].drain()
        if not group.cores[0].input.silent(600):  # one was on its way, and no more
            group.cores[0].drain()
            assert group.cores[0].input.silent(600)


def test_a_request_for_a_wave_that_is_over_starts_the_next() -> None:
    """Its core says so itself; the others are started, the front ends told."""
    with ready_group(2) as group:
        group.run_wave(0)
        for core in group.cores:
            core.drain()
        group.cores[1].report(started=1)
        assert group.cores[0].heard() == StartCores(1, 1)
        group.fronts[0].heard_standing(1, running=True)


def test_front_ends_hear_now_and_then() -> None:
    """Also one that came late, and one that believes that something runs."""
    with ready_group(2) as group:
        group.fronts[0].heard_standing(0, running=False)
        group.fronts[0].heard_standing(0, running=False)


def test_noise_is_dropped() -> None:
    with ready_group(2) as group:
        group.fronts[0].wire.send(b"\xc1noise")
        group.fronts[0].wire.socket.send_multipart([b"\x01", b"two"])
        group.cores[0].output.send(b"")
        group.cores[0].input.send(b"noise")
        for _ in range(4):
            group.process.wait_event("bad_frame")
        group.run_wave(0)


# -- with a broker, and without -----------------------------------------------------------


def test_a_broker_that_is_not_there_changes_nothing() -> None:
    with ready_group(2, "--broker", NOWHERE) as group:
        group.run_wave(0)


def test_a_broker_that_comes_goes_and_comes_back() -> None:
    """Serving goes on through all of it."""
    with wavebus("broker", "--listen", "tcp://127.0.0.1:*", *PATIENT) as broker:
        address = broker.first_line()
        with ready_group(2, "--broker", address) as group:
            group.process.wait_event("joined")
            group.run_wave(0)
            broker.kill()
            group.run_wave(1)
            group.run_wave(2, rank=1)
            with wavebus("broker", "--listen", address, *PATIENT):
                group.process.wait_event("joined")
                group.run_wave(3)
            group.run_wave(4)


def test_a_broker_that_hangs_is_not_waited_for() -> None:
    with (
        wavebus("broker", "--listen", "tcp://127.0.0.1:*", *PATIENT) as broker,
        ready_group(2, "--broker", broker.first_line()) as group,
    ):
        group.process.wait_event("joined")
        broker.signal(signal.SIGSTOP)
        for wave in range(3):
            group.run_wave(wave)
            told = group.process.wait_event("first_req_decided_locally", wave=wave)
            assert told["silent_ms"] >= 5


# -- waves that engines start by themselves, as in vLLM 0.33 ------------------------------


def test_a_core_whose_start_was_lost_with_its_connection_is_started() -> None:
    """The rank that began the wave waits for it, and reports only once."""
    with ready_group(3) as group:
        group.cores[2].lose_connection()
        group.cores[1].report(started=0)
        group.cores[0].heard_start(0, excluded=1)
        group.cores[2].connect_anew()
        assert group.cores[2].heard() is None
        assert group.cores[2].heard() == StartCores(0)


def test_the_broker_shows_and_records_every_wave(tmp_path: Path) -> None:
    """Also those of a time in which it was not there, and the one that runs when it is back. Nobody
    waits for it, and it starts nobody."""
    folder = tmp_path / "journal"
    options = ("--log-level", "debug", "--journal", str(folder), *PATIENT)
    with wavebus("broker", "--listen", "tcp://127.0.0.1:*", *options) as broker:
        address = broker.first_line()
        with ready_group(2, "--broker", address) as group:
            group.process.wait_event("joined")
            for wave, rank in enumerate((1, 0)):
                group.begin_by_engine(wave, rank)
                told = broker.wait_event("wave_started", wave=wave)
                assert (told["dp_group"], told["rank"], told["source"]) == (
                    DP_GROUP,
                    rank,
                    "coordinator",
                )
                group.end(wave)
                assert broker.wait_event("wave_complete", wave=wave)["start_seen"]
            group.begin_by_engine(2, 0)
            broker.wait_event("wave_started", wave=2)
            assert broker.stop() == 0
            group.end(2)
            group.begin_by_engine(3, 1)
            with wavebus("broker", "--listen", address, *options) as other:
                assert other.wait_event("wave_complete", wave=2)["source"] == "join"
                told = other.wait_event("wave_started", wave=3)
                assert (told["rank"], told["source"]) == (1, "join")
                group.process.wait_event("joined")
                shown = run_wavebus("status", "--broker", address)
                assert "running  3, begun by rank 1" in shown.stdout, shown.stdout
                group.end(3)
                assert other.wait_event("wave_complete", wave=3)["start_seen"]
                assert other.stop() == 0
    lines = _shown(folder, "show")
    assert [line.split("  ")[-1] for line in lines if "WAVE_STARTED" in line] == [
        "dp_group=moe wave=0 rank=1",
        "dp_group=moe wave=1 rank=0",
        "dp_group=moe wave=2 rank=0",
        "dp_group=moe wave=3 rank=1",  # after the JOIN, which has it, too
    ]
    assert any("JOIN from coordinator-moe" in each and "rank=1" in each for each in lines), lines
    assert not any("FIRST_REQ" in each or "START_DP_WAVE" in each for each in lines)
    replayed = run_wavebus("replay", str(folder), "--verbose")
    assert replayed.returncode == 0, replayed.stdout
    assert replayed.stdout.count("wave_started  ") == 4
    assert "wave=3 rank=1 local=False state=idle source=join" in replayed.stdout


def _shown(folder: Path, *command: str) -> list[str]:
    """What `wavebus journal` prints."""
    done = run_wavebus("journal", *command, str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# -- its end --------------------------------------------------------------------------------


def test_it_ends_when_its_stdin_ends() -> None:
    with ready_group(2) as group:
        assert group.process.process.stdin is not None
        group.process.process.stdin.close()
        assert group.process.wait() == 0


def test_it_ends_with_its_parent_however_that_ends() -> None:
    """Even where a process that the parent forked keeps the other end of its stdin open."""
    parent = textwrap.dedent(
        """
        import os, subprocess, sys, time
        coordinator = subprocess.Popen(
            [sys.executable, "-m", "sidecar._dp_coordinator", "--dp-group", "g", "--size", "2"],
            stdin=subprocess.PIPE,
        )
        if os.fork() == 0:
            os.close(1)
            os.close(2)
            time.sleep(60)
            os._exit(0)
        time.sleep(60)
        """
    )
    with Proc(sys.executable, "-c", parent) as process:
        process.wait_event("dp_coordinator_serves")
        children = subprocess.run(
            ["ps", "--ppid", str(process.pid), "-o", "pid="],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        process.signal(signal.SIGKILL)
        process.wait_event("dp_coordinator_ended", timeout_s=60)
        for child in children:
            with contextlib.suppress(ProcessLookupError):  # the DP coordinator has gone
                os.kill(int(child), signal.SIGKILL)


def test_ctrl_c_is_not_for_it() -> None:
    with ready_group(2) as group:
        group.process.signal(signal.SIGINT)
        group.run_wave(0)
        assert group.process.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--size", "0", "--dp-group", "g"], "--size"),
        (["--size", "2"], "--dp-group"),
        (["--size", "2", "--dp-group", "a b"], "--dp-group='a b'"),
        (["--size", "2", "--dp-group", "g", "--host", "192.0.2.1"], "192.0.2.1"),
        (["--size", "2", "--dp-group", "g", "--broker", "nonsense"], "nonsense"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], said: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "sidecar._dp_coordinator", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_it_imports_neither_torch_nor_vllm() -> None:
    """It starts in a moment, and is small."""
    program = (
        "import sys, sidecar._dp_coordinator.__main__; "
        "print([m for m in ('torch', 'vllm', 'numpy', 'aiohttp') if m in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert ended.stdout.strip() == "[]"
