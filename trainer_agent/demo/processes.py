"""Starts the demo's broker and sidecars by the commands that users run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final, Literal, Self, TypeAlias

from bus.errors import WavebusError

if TYPE_CHECKING:
    from pathlib import Path

EngineKind: TypeAlias = Literal["embedded", "vllm"]
DpCoordinator: TypeAlias = Literal["vllm", "bus"]

_STOP_S: Final = 15.0
# PR_SET_PDEATHSIG is 1. Without it, processes live on after a SIGKILL of the demo.
_END_WITH_PARENT: Final = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("the demo has ended")
runpy.run_module("bus.cli.main", run_name="__main__", alter_sys=True)
"""
# Options for serving a tiny model on a CPU; a GPU server needs none of them.
_VLLM_CPU_ENV: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
_VLLM_ARGS: Final = (
    "--skip-tokenizer-init",
    "--enforce-eager",
    "--dtype=float32",
    "--max-num-seqs=64",
    "--max-model-len=256",
)


class Processes:
    """Starts the demo's broker and engines as processes, and stops them in reverse order.

    On Linux the kernel sends these processes SIGTERM when the thread that started them ends, even
    by SIGKILL.

    Args:
        folder: where each process writes its log, ``NAME.log``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[tuple[str, subprocess.Popen[str]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def broker(self, *options: str, listen: str = "tcp://127.0.0.1:*") -> str:
        """Starts a broker, and returns its address.

        Args:
            options: more options of `wavebus broker`.
            listen: where it listens; port ``*`` takes any free one.

        Raises:
            WavebusError: the broker did not start.
        """
        process = self._start("broker", "broker", "--listen", listen, *options)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise WavebusError(f"the broker did not start: {self.last_words('broker')}")
        return address

    def sidecar(
        self,
        name: str,
        kind: EngineKind,
        broker: str,
        checkpoint: Path,
        *,
        dp_size: int = 1,
        dp_coordinator: DpCoordinator = "vllm",
        options: tuple[str, ...] = (),
    ) -> None:
        """Starts a sidecar and its engine, or those of all ranks of a DP group.

        The engines join the bus after they have loaded the model.

        Args:
            name: the name of the engine, or of the DP group.
            kind: the kind of engine, as `wavebus sidecar` names it.
            broker: the broker's address.
            checkpoint: the folder of the model.
            dp_size: the number of ranks in the DP group; 1 for an engine alone.
            dp_coordinator: which coordinator starts the waves of vLLM's ranks.
            options: more options of the sidecar.
        """
        options = ("sidecar", "--broker", broker, *options)
        if dp_size > 1:
            options += ("--dp-group", name, "--dp-size", str(dp_size))
        else:
            options += ("--name", name)
        if kind == "embedded":
            options += ("--engine", "embedded")
            self._start(name, *options, "--model", str(checkpoint))
            return
        if dp_size > 1:
            options += ("--dp-coordinator", dp_coordinator)
        server = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
        self._start(
            name,
            *options,
            "--",
            *server,
            "--model",
            str(checkpoint),
            *_VLLM_ARGS,
            environment=_VLLM_CPU_ENV,
        )

    def kill(self, name: str) -> None:
        """Sends SIGKILL to a process, which may be started again afterwards."""
        for each in [each for each in self._running if each[0] == name]:
            self._running.remove(each)
            process = each[1]
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def check(self) -> None:
        """Checks that all processes are running.

        Raises:
            WavebusError: a process has ended; the text has the last lines of its log.
        """
        for name, process in self._running:
            code = process.poll()
            if code is not None:
                raise WavebusError(
                    f"{name} ended with code {code}; its log ends:\n{self.last_words(name)}"
                )

    def last_words(self, name: str, lines: int = 12) -> str:
        """Returns the last lines of a process's log."""
        try:
            text = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """Sends SIGTERM to all processes, the last one first, then SIGKILL to any still running."""
        for _, process in reversed(self._running):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for _, process in reversed(self._running):
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._running = []

    def _start(
        self, name: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        with (self.folder / f"{name}.log").open("a", encoding="utf-8") as log:
            process = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-c", _END_WITH_PARENT, str(os.getpid()), *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "WAVEBUS_LOG_FORMAT": "json",
                    **(environment or {}),
                },
                start_new_session=True,  # Ctrl-C stops the demo, and the demo stops these
            )
        self._running.append((name, process))
        return process
