"""Starts a DP coordinator as a child process, and watches it.

vLLM's plugin and the embedded engine use this module, so it imports neither vllm nor torch. The DP
coordinator ends when this process ends, in whatever way. It shares neither the terminal nor the
process group of this process.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import msgspec

from bus.errors import WavebusError

if TYPE_CHECKING:
    from collections.abc import Callable

START_S: Final = 60.0
STOP_S: Final = 5.0
_ROOT: Final = Path(__file__).resolve().parents[2]


class DpCoordinatorFailed(WavebusError):
    """The DP coordinator process did not start; the text says how it ended."""


@dataclass(frozen=True, slots=True)
class DpCoordinatorAddresses:
    """The addresses of a DP coordinator's three sockets (:mod:`bus._runtime.zmq_dp`).

    Attributes:
        front: where front ends get the status of waves, and send requests for a wave.
        core_in: where engine cores get START_DP_WAVE.
        core_out: where engine cores send their reports.
    """

    front: str
    core_in: str
    core_out: str


class DpCoordinatorProcess:
    """Runs one DP coordinator as a child process, from construction to :meth:`stop`.

    vLLM watches its coordinator as a ``multiprocessing.Process``. So this class also has what vLLM
    uses of a ``Process``: ``pid``, ``name``, ``sentinel``, ``exitcode`` and so on.

    Args:
        dp_group: the DP group's name on the bus.
        size: how many ranks the DP group has.
        host: the address on which the DP coordinator listens.
        broker: the broker's address; empty: the DP coordinator decides alone.
        group: the group on the bus that the DP group belongs to.
        on_death: called with the exit code, in a thread, if the process ends without :meth:`stop`,
            :meth:`terminate` or :meth:`kill`.

    Raises:
        DpCoordinatorFailed: the process ended, or printed no addresses within a minute.
    """

    def __init__(
        self,
        *,
        dp_group: str,
        size: int,
        host: str = "127.0.0.1",
        broker: str = "",
        group: str = "policy",
        on_death: Callable[[int], None] = lambda _code: None,
    ) -> None:
        self.name = f"wavebus_coordinator_{dp_group}"
        self._owner = os.getpid()
        self._stopping = False
        self._on_death = on_death
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [
                *(sys.executable, "-m", "sidecar._dp_coordinator", "--dp-group", dp_group),
                *("--size", str(size), "--host", host, "--broker", broker, "--group", group),
            ],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        try:
            self.addresses = self._read_addresses(self._process)
            self.sentinel = os.pidfd_open(self.pid)
        except BaseException:
            self._process.kill()
            self.stop()
            raise
        threading.Thread(
            target=self._watch, name="wavebus_dp_coordinator_watch", daemon=True
        ).start()

    @property
    def exitcode(self) -> int | None:
        """The exit code: None while the process runs, negative if a signal ended it."""
        return self._process.poll()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def terminate(self) -> None:
        self._stopping = True
        self._process.terminate()

    def kill(self) -> None:
        self._stopping = True
        self._process.kill()

    def join(self, timeout: float | None = None) -> None:
        """Waits until the process has ended.

        Args:
            timeout: the longest wait, in seconds, after which the method returns although the
                process still runs; None: no limit.
        """
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the process by closing its stdin, and kills it if that takes too long.

        A second call does nothing, nor does a call in a process forked from this one.

        Args:
            timeout_s: how long the process may take to end, in seconds; None: 5 s.
        """
        if self._owner != os.getpid() or self._process.stdin is None:
            return
        self._stopping = True
        if not self._process.stdin.closed:
            self._process.stdin.close()
        self.join(STOP_S if timeout_s is None else timeout_s)
        if self.is_alive():
            self.kill()
            self.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read_addresses(self, process: subprocess.Popen[bytes]) -> DpCoordinatorAddresses:
        output: IO[bytes] | None = process.stdout
        assert output is not None
        readable, _, _ = select.select([output], [], [], START_S)
        line = output.readline() if readable else b""
        if not line:
            code = process.poll() if readable else None
            how = f"ended with exit code {code}" if readable else f"wrote nothing for {START_S:g} s"
            raise DpCoordinatorFailed(
                f"the DP coordinator process {process.pid} {how}; its log says why"
            )
        return msgspec.json.decode(line, type=DpCoordinatorAddresses)

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._stopping:
            self._on_death(code)
