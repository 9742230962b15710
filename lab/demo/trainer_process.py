"""Runs the demo's trainer agent in a process that can be killed.

The process reads the weights from files.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
from safetensors.torch import load_file

from bus.errors import WavebusError
from trainer_agent._sync_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from trainer_agent._options import How

_BOOT_S: Final = 60.0
_NEW: Final = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork


class TrainerProcess:
    """Starts, commands and kills a process with a trainer agent.

    Args:
        broker: the broker's address.
        options: arguments of :class:`trainer_agent.SyncTrainerAgent`.
        log: the file for the process's stderr.
    """

    def __init__(self, broker: str, options: dict[str, Any], log: Path) -> None:
        self._arguments = (broker, options, log)
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Sends SIGKILL to the process."""
        self._process.kill()
        self._process.join()

    def start(self) -> None:
        """Starts the process, for the first time or after :meth:`kill`."""
        self._connection, theirs = _NEW.Pipe()
        arguments = (theirs, *self._arguments)
        self._process = _NEW.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, order: dict[str, str]) -> None:
        """Orders the process to send a file's weights; keys: ``path``, ``label`` and ``how``."""
        with contextlib.suppress(OSError):  # it was killed, as answer() shows
            self._connection.send(order)

    def answer(self) -> dict[str, Any] | None:
        """Waits for the update's result: its report, or ``error`` and ``text``; None if killed."""
        try:
            return cast("dict[str, Any]", self._connection.recv())
        except (EOFError, OSError):
            return None


def _serve(connection: Connection, broker: str, options: dict[str, Any], log: Path) -> None:
    """Carries out orders until the demo closes the connection."""
    os.setsid()  # Ctrl-C stops the demo, and the demo stops this
    with log.open("a") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    with SyncTrainerAgent(broker, **options) as agent, contextlib.suppress(EOFError):
        agent.wait_for_engines(1, timeout_s=_BOOT_S)
        while True:
            connection.send(_send(agent, connection.recv()))


def _send(agent: SyncTrainerAgent, order: dict[str, str]) -> dict[str, Any]:
    try:
        agent.update_weights(
            load_file(order["path"]), label=order["label"], how=cast("How", order["how"])
        )
    except WavebusError as error:
        return {"error": type(error).__name__, "text": str(error)}
    report = agent.last_update
    assert report is not None
    return {"how": report.how, "engines": report.engines, "excluded": report.excluded}
