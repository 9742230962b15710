"""Commands of wavebus as processes that start in no time: forked from one that has imported what
they need, each with its own pid, its own sockets, and a log that is read as it is written.

The fork server of :mod:`multiprocessing` serves here, since its processes run functions. What it
imports, and what that means, is as in :mod:`tests.support.fork_server`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
from collections import deque
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final, Self

from sidecar._supervision.reaper import die_with_parent
from tests.support.fork_server import IMPORTED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_KEPT_LINES: Final = 400
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "WAVEBUS_LOG_FORMAT": "json"}

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch looks when it is imported
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([*IMPORTED])


def run_command(arguments: list[str], environment: Mapping[str, str]) -> None:
    """In the child: `wavebus` with these arguments."""
    os.environ.update(environment)
    from bus._cli.main import run  # noqa: PLC0415 - after the fork

    sys.exit(run(arguments))


def _begin(log: Connection, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    die_with_parent(signal.SIGKILL)  # of the server that forks
    # And that ends with the test's process, once nobody else holds the end of this pipe.
    alive = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    os.close(alive)
    os.setsid()
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    log.close()
    os.environ.update(_ENVIRONMENT)
    target(*arguments)


class Fork:
    """One process, of the loop that it was made in.

    Args:
        name: for messages of tests.
        target: a function that can be imported; run in the child with ``arguments``.
        heard: is called with each line of its log.
    """

    def __init__(
        self,
        name: str,
        target: Callable[..., None],
        *arguments: Any,
        heard: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.name = name
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._heard = heard
        reading, writing = os.pipe()
        self.process = _forks.Process(
            target=_begin,
            args=(Connection(writing), target, arguments),
            name=name,
            daemon=True,
        )
        # The object that holds the pipe's end closes it when it is collected: so does this process.
        self.process.start()
        self._reading = asyncio.create_task(self._read(reading))
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.process.sentinel, self._on_end)

    @classmethod
    def wavebus(
        cls,
        name: str,
        *arguments: str,
        heard: Callable[[dict[str, Any]], None] = lambda _: None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """A command of wavebus."""
        return cls(name, run_command, list(arguments), dict(environment or {}), heard=heard)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return not self.ended.is_set()

    def signal(self, number: signal.Signals) -> None:
        if self.alive:
            os.kill(self.pid, number)

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.signal(signal.SIGKILL)
        await self.ended.wait()

    async def stop(self) -> None:
        """SIGTERM; returns when it is gone."""
        self.signal(signal.SIGTERM)
        await self.ended.wait()

    async def close(self) -> None:
        """Kill it if it still runs, and let go."""
        await self.kill()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    def last_words(self, lines: int = 25) -> str:
        return "\n".join(f"{self.name}| {line}" for line in list(self.lines)[-lines:])

    def _on_end(self) -> None:
        self._loop.remove_reader(self.process.sentinel)
        self.process.join()
        self.ended.set()

    async def _read(self, reading: int) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(reading, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while raw := await reader.readline():
                line = raw.decode(errors="replace").rstrip()
                self.lines.append(line)
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict):
                    self._heard(event)
        finally:
            transport.close()
