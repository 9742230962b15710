"""A forked program is a process of its own, run as ``python`` runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.fork_server import ForkedProcess, can_fork, run_forked

if TYPE_CHECKING:
    from tests.integration.conftest import Bus

PROGRAM = """
import atexit, json, os, random, sys, uuid
from bus._ids import new_boot
atexit.register(lambda: sys.stderr.write("bye"))
told = {"pid": os.getpid(), "argv": sys.argv, "env": dict(os.environ), "cwd": os.getcwd()}
told |= {"name": __name__, "path": sys.path[0], "group": os.getpgrp(), "session": os.getsid(0)}
told["drawn"] = [random.random(), new_boot(), uuid.uuid4().hex]
told["open"] = sorted(os.listdir("/proc/self/fd"))
print(json.dumps(told), flush=True)
exec(sys.stdin.readline())
"""


def ended(process: ForkedProcess, order: str) -> tuple[int, dict[str, Any], str]:
    """Its exit code, what it told, and its stderr, after it has run ``order``."""
    assert process.stdin
    assert process.stdout
    assert process.stderr
    with process.stdin, process.stdout, process.stderr:
        told = json.loads(process.stdout.readline())
        assert process.poll() is None
        process.stdin.write(order + "\n")
        process.stdin.flush()
        return process.wait(60), told, process.stderr.read()


@pytest.mark.parametrize(
    ("order", "code", "last"),
    [
        ("", 0, "bye"),
        ("sys.exit(7)", 7, "bye"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\nbye"),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_it_has_its_own_everything(tmp_path: Path, order: str, code: int, last: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    script = str(tmp_path / "program.py")
    argvs = [(sys.executable, script, "a", "b c"), (sys.executable, "-m", "program", "a")]
    found = []
    for argv in argvs:
        assert can_fork(argv, {"WAVEBUS_X": "1"})
        process = ForkedProcess(argv, env={"X": "1"}, cwd=tmp_path, stdin=subprocess.PIPE)
        ended_with, told, stderr = ended(process, order)
        assert (ended_with, told["pid"]) == (code, process.pid)
        assert stderr.endswith(last)
        assert told["argv"] == [script, *argv[2 if argv[1] == script else 3 :]]
        assert (told["env"], told["cwd"], told["name"]) == ({"X": "1"}, str(tmp_path), "__main__")
        assert told["path"] == str(tmp_path)
        assert (told["group"], told["session"]) == (os.getpgrp(), os.getsid(0))
        assert told["open"][:3] == ["0", "1", "2"]
        found.append(told)
    first, second = found
    assert not set(map(str, first["drawn"])) & set(map(str, second["drawn"]))
    assert first["open"] == second["open"]  # none is left of another process


def test_a_forked_sidecar_joins_by_its_own_pid(bus: Bus) -> None:
    sidecar = bus.sidecar("e0")
    joined = bus.broker.events[-1]
    assert (joined["event"], joined["pid"]) == ("peer_joined", sidecar.pid)


def test_a_variable_of_the_interpreter_wants_a_process_of_its_own() -> None:
    """It was read when the server began."""
    argv = (sys.executable, "-m", "bus._cli.main")
    assert can_fork(argv, {})
    assert not can_fork(argv, {"PYTHONHASHSEED": "1"})
    assert not can_fork((sys.executable, "-c", "pass"), {})


def test_an_order_that_is_too_long_leaves_nothing_open(tmp_path: Path) -> None:
    order = {"X": "x" * 1_000_000}
    argv = (sys.executable, "-m", "bus._cli.main")
    helped = run_forked((*argv, "--help"), env={}, cwd=tmp_path, timeout_s=60)  # the server stays
    assert helped.returncode == 0
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="Message too long"):
        ForkedProcess(argv, env=order, cwd=tmp_path, stdin=subprocess.PIPE)
    assert set(Path("/proc/self/fd").iterdir()) == before
