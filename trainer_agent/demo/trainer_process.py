"""The demo's trainer on the bus, as a process that can be killed: it sends what files hold.

Run as a program: ``python -m trainer_agent.demo.trainer_process BROKER OPTIONS``. It reads a JSON
object per line, ``{"path": ..., "label": ..., "how": ...}``, and answers with what became of it:
``{"version": ..., "engines": ..., ...}``, or ``{"error": ..., "text": ...}``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
from safetensors.torch import load_file

from bus.errors import WavebusError
from trainer_agent.sync_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from trainer_agent.options import How

_PATIENCE_S: Final = 60.0


class TrainerProcess:
    """The demo's end of one: told, killed and started again. A context manager.

    Args:
        broker: its address.
        options: of :class:`trainer_agent.SyncTrainerAgent`.
        log: the file that its stderr goes to.
    """

    def __init__(self, broker: str, options: dict[str, Any], log: Path) -> None:
        self._argv = [sys.executable, "-m", __name__, broker, json.dumps(options)]
        self._log = log
        self._process = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it does."""
        self._process.kill()

    def start(self) -> None:
        """Anew, after :meth:`kill`."""
        self._process.wait()
        self._process = self._start()

    def tell(self, order: dict[str, str]) -> None:
        """Have it send weights."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it was killed: so says answer()

    def answer(self) -> dict[str, Any] | None:
        """What became of it; None if it was killed instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        decoded: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
        return decoded

    def _start(self) -> subprocess.Popen[str]:
        with self._log.open("a", encoding="utf-8") as log:
            return subprocess.Popen(  # noqa: S603 - our own module
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )


def main(broker: str, options: str) -> None:
    """Until stdin ends."""
    torch.set_num_threads(1)
    with SyncTrainerAgent(broker, **json.loads(options)) as agent:
        agent.wait_for_engines(1, timeout_s=_PATIENCE_S)
        for line in sys.stdin:
            sys.stdout.write(json.dumps(_send(agent, json.loads(line))) + "\n")
            sys.stdout.flush()


def _send(agent: SyncTrainerAgent, order: dict[str, str]) -> dict[str, Any]:
    try:
        weights = load_file(order["path"])
        version = agent.update_weights(weights, label=order["label"], how=cast("How", order["how"]))
    except WavebusError as error:
        return {"error": type(error).__name__, "text": str(error)}
    report = agent.last_update
    assert report is not None
    return {
        "version": version,
        "how": report.how,
        "engines": report.engines,
        "excluded": report.excluded,
        "interrupted": report.interrupted,
        "paused_ms": report.paused_ms,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
