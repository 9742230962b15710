"""Real processes of wavebus, as a user starts them, followed by their JSON logs.

Tests wait for what a log says has happened, and never for time to pass.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from signal import SIGTERM, Signals
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from tests.support.fork_server import ForkedProcess, can_fork, run_forked

if TYPE_CHECKING:
    from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
KNOWN: WeakSet[Proc] = WeakSet()  # those that somebody still refers to, such as a traceback
PATIENCE_S = 120.0
# For a broker that must not miss peers: on a loaded machine a process may get no processor for some
# seconds. The default lease of a trainer is twice as long.
PATIENT = ("--peer-timeout-ms", "15000")
# This checkout, then what finds its entry points where it is not installed.
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
_OWN = {
    "PYTHONPATH": PYTHONPATH,
    "OMP_NUM_THREADS": "1",
    "WAVEBUS_CONFIG": str(ROOT / "tests/support/patient.toml"),
}


class Proc:
    """One process. ``stderr`` is read as JSON log lines; other lines are kept as text.

    ``stdin=subprocess.PIPE`` for one that ends with its stdin.
    """

    def __init__(
        self,
        *argv: str,
        env: dict[str, str] | None = None,
        cwd: Path = ROOT,
        stdin: int | None = None,
    ) -> None:
        self.argv = argv
        whole = {**os.environ, **_OWN, "WAVEBUS_LOG_FORMAT": "json", **(env or {})}
        self.process: subprocess.Popen[str] | ForkedProcess
        if can_fork(argv, env or {}):
            self.process = ForkedProcess(argv, env=whole, cwd=cwd, stdin=stdin)
        else:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                argv, stdin=stdin, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=whole
            )
        self.events: list[dict[str, Any]] = []
        self.text: list[str] = []
        self._fresh: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._seen = 0
        self._text_came: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        KNOWN.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def first_line(self) -> str:
        """The first line of stdout."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"no output from {self.argv}: {self.all_text()}"
        return line

    def wait_event(
        self, event: str, timeout_s: float = PATIENCE_S, **fields: object
    ) -> dict[str, Any]:
        """The next log line of this event whose fields agree; lines are looked at once."""
        deadline = time.monotonic() + timeout_s
        while True:
            while self._seen < len(self.events):
                line = self.events[self._seen]
                self._seen += 1
                if line.get("event") == event and all(
                    line.get(key) == value for key, value in fields.items()
                ):
                    return line
            left_s = deadline - time.monotonic()
            fresh: dict[str, Any] | None = None
            if left_s > 0:
                try:
                    fresh = self._fresh.get(timeout=left_s)
                except queue.Empty:
                    pass
                else:
                    if fresh is not None:
                        self.events.append(fresh)
                        continue
            raise AssertionError(f"no {event} {fields} from {self.argv[-6:]}:\n{self.all_text()}")

    def wait_text(self, part: str, timeout_s: float = PATIENCE_S) -> None:
        """Return when a line that is no log line has this in it."""
        deadline = time.monotonic() + timeout_s
        while not any(part in line for line in self.text):
            assert time.monotonic() < deadline, f"no {part!r}:\n{self.all_text()}"
            with contextlib.suppress(queue.Empty):
                self._text_came.get(timeout=1.0)

    def signal(self, number: Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def stop(self, number: Signals = SIGTERM) -> int:
        """Ask it to stop; return its exit code."""
        self.signal(number)
        return self.process.wait(PATIENCE_S)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def all_text(self) -> str:
        """What it has logged so far, for a failing test's message."""
        with contextlib.suppress(queue.Empty):
            while (line := self._fresh.get_nowait()) is not None:
                self.events.append(line)
            self._fresh.put(None)
        return "\n".join([*(json.dumps(e) for e in self.events[-30:]), *self.text[-30:]])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                parsed = json.loads(line)
            except ValueError:
                self.text.append(line.rstrip())
                self._text_came.put(None)
                continue
            if isinstance(parsed, dict):
                self._fresh.put(parsed)
        self._fresh.put(None)


def wavebus(*arguments: str, env: dict[str, str] | None = None) -> Proc:
    """A command of wavebus."""
    return Proc(sys.executable, "-m", "bus._cli.main", *arguments, env=env)


def run_wavebus(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path = ROOT, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """A command of wavebus, to its end."""
    argv = [sys.executable, "-m", "bus._cli.main", *arguments]
    whole = {**os.environ, **_OWN, **(env or {})}
    if not can_fork(argv, env or {}):
        return subprocess.run(
            argv, capture_output=True, text=True, cwd=cwd, timeout=timeout_s, check=False, env=whole
        )
    return run_forked(argv, env=whole, cwd=cwd, timeout_s=timeout_s)
