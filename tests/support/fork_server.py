"""A process that has imported what wavebus needs, and forks one for each program that tests start.

Importing torch costs a second of processor time, and tests start some 200 processes that do. A
forked one is a real process all the same: it has its own pid, environment, folder, streams and exit
code, and runs its module or script from the first line to the exit handlers, as ``python`` does.
Differences: its parent is the server, ``/proc/PID/cmdline`` is the server's, sets of strings have
the server's order, and imports come from memory. So tests of imports, and of what looks at its
parent, start a process of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# All but what runs as ``__main__``.
IMPORTED: Final = (
    *("aiohttp.web", "anyio.abc", "anyio.to_thread", "structlog", "safetensors.torch"),
    *(
        "bus._cli.broker",
        "bus._cli.doctor",
        "bus._cli.journal",
        "bus._cli.replay",
        "bus._cli.trace",
    ),
    *(
        "bus._cli.routes",
        "bus._cli.status",
        "bus._cli.why",
        "bus._journal.explain",
        "bus._runtime.broker_server",
    ),
    *("sidecar._booting", "sidecar._cli", "sidecar._embedded.engine", "sidecar._embedded.server"),
    *("bus._runtime.broker_server", "sidecar._embedded.parallel.core", "sidecar._sidecar"),
    "trainer_agent",
)
ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Template:
    """What a server has imported, which those that it forks share.

    Attributes:
        imported: modules.
        path: where they lie, if not among the installed ones.
    """

    imported: tuple[str, ...]
    path: tuple[str, ...] = ()


WAVEBUS: Final = Template(
    IMPORTED, (str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
)
_MOST_BYTES: Final = 1 << 20
_NUMBER: Final = struct.Struct("=i")


def can_fork(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether it is a module or a script of Python, and no variable is for the interpreter."""
    is_program = argv[1] == "-m" or argv[1].endswith(".py")
    return argv[0] == sys.executable and is_program and all(n.startswith("WAVEBUS_") for n in env)


class ForkedProcess:
    """A program that the fork server of this process runs. Looks like a ``subprocess.Popen``.

    Args:
        argv: the interpreter, then ``-m`` and a module or the path of a script, then arguments.
        env: the whole environment.
        stdin: ``subprocess.PIPE``, or None for that of this process.
        template: what it finds imported.

    Raises:
        OSError: arguments and environment have more than some 200,000 characters.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdin: int | None = None,
        template: Template = WAVEBUS,
    ) -> None:
        self.args = argv
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        (out, its_out), (err, its_err), (self._status, its_status) = (os.pipe() for _ in range(3))
        self.stdout: IO[str] | None = os.fdopen(out, encoding="utf-8")
        self.stderr: IO[str] | None = os.fdopen(err, encoding="utf-8")
        its_in = 0
        if stdin == subprocess.PIPE:
            its_in, mine = os.pipe()
            self.stdin = os.fdopen(mine, "w", encoding="utf-8")
        order: dict[str, Any] = {"argv": argv[1:], "env": dict(env), "cwd": str(cwd)}
        order["hang_up"] = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        ends = [its_in, its_out, its_err, its_status]
        self._lock = threading.Lock()
        with contextlib.ExitStack() as undo:
            for stream in filter(None, (self.stdin, self.stdout, self.stderr)):
                undo.push(stream)
            undo.callback(os.close, self._status)
            with contextlib.ExitStack() as given:
                for end in filter(None, ends):
                    given.callback(os.close, end)
                with _STARTING:
                    server = _server(os.getpid(), template)
                socket.send_fds(server, [json.dumps(order).encode()], ends)
            self.pid = self._read_number()
            undo.pop_all()

    def poll(self) -> int | None:
        """Its exit code, or None while it runs; negative: the signal that ended it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it runs still after so many seconds.
        """
        if self.returncode is None:
            ready = select.poll()
            ready.register(self._status, select.POLLIN)
            if not ready.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._read_number()
                    os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs still."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read_number(self) -> int:
        read = os.read(self._status, _NUMBER.size)
        assert read, "the fork server has died: its stderr says why"
        number: int = _NUMBER.unpack(read)[0]
        return number


def run_forked(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    timeout_s: float,
    template: Template = WAVEBUS,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as :func:`subprocess.run` does.

    Raises:
        subprocess.TimeoutExpired: it ran so long that it was killed.
    """
    process = ForkedProcess(argv, env=env, cwd=cwd, template=template)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr, ThreadPoolExecutor(2) as readers:
        said = [readers.submit(stream.read) for stream in (process.stdout, process.stderr)]
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(argv, code, *(each.result() for each in said))


_STARTING: Final = threading.Lock()


@cache
def _server(_pid: int, template: Template) -> socket.socket:
    """The server of this process, which ends with it; not that of the process that forked this."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join(template.path)
    server = subprocess.Popen(
        [sys.executable, __file__, str(its.fileno()), *template.imported],
        pass_fds=[its.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # neither a terminal, as those of its children are not
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    its.close()
    atexit.register(server.wait)
    atexit.register(mine.close)
    return mine


def _main(control: socket.socket, imported: Sequence[str]) -> None:
    """The server; and, once it has returned from :func:`_serve`, each of its children."""
    sys.path.pop(0)  # of this script
    for name in imported:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"  # noqa: PTH208
    gc.collect()
    gc.freeze()
    order = _serve(control)
    if order is None:
        return
    signal.signal(signal.SIGHUP, signal.SIG_DFL if order["hang_up"] else signal.SIG_IGN)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    program, *arguments = order["argv"]
    if program == "-m":
        sys.argv = arguments
        sys.path.insert(0, order["cwd"])
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *arguments]
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each order, and tell of each child's pid and exit code. Return in a child its order,
    and None in the server once nobody is left who could give one."""
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}  # pidfd: pid, where its exit code goes
    while True:
        for ready, _ in waiting.poll():
            if ready != control.fileno():
                waiting.unregister(ready)
                pid, status = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, _NUMBER.pack(code))
                os.close(status)
                os.close(ready)
                continue
            order, ends, _, _ = socket.recv_fds(control, _MOST_BYTES, 4)
            if not order:
                return None
            pid = os.fork()
            if not pid:
                control.close()
                for number, end in enumerate(ends[:3]):
                    os.dup2(end, number)
                for end in (*ends, *running, *(status for _, status in running.values())):
                    os.close(end)
                decoded: dict[str, Any] = json.loads(order)
                return decoded
            for end in ends[:3]:
                os.close(end)
            os.write(ends[3], _NUMBER.pack(pid))
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, ends[3]
            waiting.register(pidfd, select.POLLIN)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
