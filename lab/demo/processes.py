"""Starts the demo's broker and sidecars by the commands that users run."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final, Literal, Self

from bus.errors import WavebusError

if TYPE_CHECKING:
    from pathlib import Path

# The group that sidecars join by default.
GROUP: Final = "policy"
# How often peers send heartbeats, and when they are lost, where processes are killed.
HEARTBEAT_MS: Final = 500
PEER_TIMEOUT_MS: Final = 3000
BROKER_TIMES: Final = (
    *("--heartbeat-ms", str(HEARTBEAT_MS)),
    *("--peer-timeout-ms", str(PEER_TIMEOUT_MS)),
)
_STOP_S: Final = 15.0
# PR_SET_PDEATHSIG is 1. Without it, processes live on after a SIGKILL of the demo.
_END_WITH_PARENT: Final = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("the demo has ended")
runpy.run_module("bus._cli.main", run_name="__main__", alter_sys=True)
"""
# The environment and options of a tiny model's vLLM server on a CPU; others ignore the environment.
VLLM_ON_CPU: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
_VLLM_SERVER: Final = (
    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--skip-tokenizer-init"),
    *("--enforce-eager", "--dtype=float32", "--max-num-seqs=64", "--max-model-len=256"),
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
        self._commands: dict[str, tuple[str, ...]] = {}
        self._running: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def broker(self, *options: str) -> str:
        """Starts a broker on a free port, and returns its address.

        Args:
            options: more options of `wavebus broker`.

        Raises:
            WavebusError: the broker did not start.
        """
        stdout = self._start("broker", "broker", *options, "--listen", "tcp://127.0.0.1:*").stdout
        assert stdout is not None
        address = stdout.readline().strip()
        if not address:
            raise WavebusError(f"the broker did not start: {self.last_words('broker')}")
        self._commands["broker"] = ("broker", *options, "--listen", address)
        return address

    def sidecar(
        self,
        name: str,
        kind: Literal["embedded", "vllm"],
        broker: str,
        checkpoint: Path,
        *,
        dp_size: int = 1,
        dp_coordinator: Literal["vllm", "bus"] = "vllm",
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
        else:
            if dp_size > 1:
                options += ("--dp-coordinator", dp_coordinator)
            options += ("--", *_VLLM_SERVER)
        self._start(name, *options, "--model", str(checkpoint))

    def gateway(self, broker: str, *options: str) -> str:
        """Starts `wavebus gateway` on a free port, and returns its URL.

        Args:
            broker: the broker's address.
            options: more options of `wavebus gateway`.

        Raises:
            WavebusError: the gateway did not start.
        """
        options = ("gateway", "--broker", broker, "--listen", "127.0.0.1:0", *options)
        stdout = self._start("gateway", *options).stdout
        assert stdout is not None
        url = stdout.readline().strip()
        if not url:
            raise WavebusError(f"the gateway did not start: {self.last_words('gateway')}")
        return url

    def restart(self, name: str) -> None:
        """Kills a process by SIGKILL, and runs its command again; a broker keeps its address."""
        process = self._running.pop(name)
        process.kill()
        _wait(process)
        self._start(name, *self._commands[name])

    def check(self) -> None:
        """Checks that all processes are running.

        Raises:
            WavebusError: a process has ended; the text has the last lines of its log.
        """
        for name, process in self._running.items():
            code = process.poll()
            if code is not None:
                raise WavebusError(
                    f"{name} ended with code {code}; its log ends:\n{self.last_words(name)}"
                )

    def last_words(self, name: str) -> str:
        """Returns the last lines of a process's log."""
        try:
            text = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(text.splitlines()[-12:])

    def stop(self) -> None:
        """Sends SIGTERM to all processes, the last one first, then SIGKILL to any still running."""
        ending = list(reversed(self._running.values()))
        for process in ending:
            process.terminate()
        for process in ending:
            _wait(process)
        self._running.clear()

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        with (self.folder / f"{name}.log").open("a", encoding="utf-8") as log:
            process = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-c", _END_WITH_PARENT, str(os.getpid()), *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **VLLM_ON_CPU, "WAVEBUS_LOG_FORMAT": "json"},
                start_new_session=True,  # Ctrl-C stops the demo, and the demo stops these
            )
        self._commands[name] = arguments
        self._running[name] = process
        return process


def _wait(process: subprocess.Popen[str]) -> None:
    """Waits until a process has ended; kills it if that takes over 15 s."""
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
