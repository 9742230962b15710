"""Processes that are driven by lines, measured, and killed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import IO, Any, Final

from tests.support.procs import ROOT

PATIENCE_S: Final = 120.0
SHM: Final = Path("/dev/shm")  # where the transport's segments are


class Gone(Exception):
    """The process has ended."""


class Actor:
    """One life of a process.

    Args:
        name: what it is called in what the soak tells.
        arguments: of Python.
        log: its stderr goes there.
    """

    def __init__(self, name: str, *arguments: str, log: Path) -> None:
        self.name = name
        self.first = True  # nothing of its kind lived before it
        self.samples: list[Sample] = []
        self._log = log
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                (sys.executable, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
        assert self.process.stdout is not None
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(
            target=_read, args=(self.process.stdout, self._lines), daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """The next line of its stdout.

        Raises:
            Gone: it has ended.
        """
        try:
            line = self._lines.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"{self.name} says nothing: {self.tail()}") from None
        if not line:
            raise Gone(f"{self.name}: {self.tail()}")
        return line.strip()

    def answer(self) -> dict[str, Any]:
        """The next line, of JSON."""
        found: dict[str, Any] = json.loads(self.line())
        return found

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def signal(self, number: Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        self.signal(SIGSTOP)

    def cont(self) -> None:
        self.signal(SIGCONT)

    def kill(self) -> None:
        """SIGKILL; nothing is left of it but its exit code."""
        self.signal(SIGKILL)
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def sample(self, update: int) -> None:
        """Measure it now."""
        self.samples.append(Sample(update, memory_bytes(self.pid), descriptors(self.pid)))

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


class Sample:
    """Of one process, after so many updates."""

    def __init__(self, update: int, memory: int, files: int) -> None:
        self.update = update
        self.memory = memory
        self.files = files


def memory_bytes(pid: int) -> int:
    """Anonymous and shared memory: what a process has made, without what it has mapped of files
    (libraries, which are the most of it, and others' too)."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return 1024 * sum(int(fields[key].split()[0]) for key in ("RssAnon", "RssShmem"))


def descriptors(pid: int) -> int:
    """How many files it has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def segments(pids: set[int]) -> list[str]:
    """What of these processes has a name in shared memory: names begin with their maker's pid."""
    ours = {str(pid) for pid in pids}
    return [path.name for path in SHM.glob("wavebus-*-*") if path.name.split("-")[1] in ours]


def _read(stream: IO[str], lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")
