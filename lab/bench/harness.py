"""What all benches share: starts processes, alternates rounds, computes figures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

import click

from bus.errors import UsageError, WavebusError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

    from lab.bench.process import LoopChoice

T = TypeVar("T")

_LINE_BYTES: Final = 1 << 20
# Per engine: a connection's two ends, a listening socket and one of ZeroMQ's own.
_FILES_PER_ENGINE: Final = 4
_FILES_SPARE: Final = 256
_GATEWAY_S: Final = 120.0


class BenchFailed(WavebusError):
    """A process of the bench died or is stuck."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A process of a bench, and how to call the program that it runs.

    :mod:`lab.bench.programs.__main__` describes programs and their answers. ``log`` gets the
    process's stderr. After ``answer_s`` seconds without an answer, or ``grace_s`` seconds without
    an end, the process counts as stuck. ``may_end`` is set when the bench ends the process itself.
    """

    name: str
    process: asyncio.subprocess.Process
    log: IO[bytes]
    answer_s: float
    grace_s: float
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, method: str, **arguments: Any) -> Any:
        """Calls a method of the object that the program has returned; returns the result.

        Raises:
            BenchFailed: no answer came in time.
        """
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):  # the missing answer gives a better error
            self.process.stdin.write(json.dumps([method, arguments]).encode() + b"\n")
            await self.process.stdin.drain()
        return (await self.hello())["answer"]

    async def hello(self) -> dict[str, Any]:
        """Waits for the process's next answer; the first one describes what it has started.

        Raises:
            BenchFailed: no answer came in time. The text has the end of the process's log.
        """
        assert self.process.stdout is not None
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.answer_s):
                line = await self.process.stdout.readline()
        if not line:
            raise BenchFailed(f"{self.name} ended or is stuck:\n{self.tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tail(self) -> str:
        """Returns the end of the process's log."""
        self.log.seek(0)
        return self.log.read()[-2000:].decode(errors="replace").strip()

    async def kill(self) -> None:
        """Ends the process by SIGKILL, and waits for its end."""
        self.may_end.set()
        await kill(self.process)

    async def end(self) -> None:
        """Ends the process by closing its stdin, and kills it if that takes too long."""
        assert self.process.stdin is not None
        self.may_end.set()
        self.process.stdin.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.grace_s):
                    await self.process.wait()
        finally:
            await self.kill()


async def kill(process: asyncio.subprocess.Process) -> None:
    """Ends a process by SIGKILL, and waits for its end."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


class Bench(contextlib.AsyncExitStack):
    """Starts the processes of one run of a bench; ends them with the block.

    All of them have the same kind of event loop, and leave logs in the folder ``logs`` if there is
    one. The error of a broken process shows the end of its log.
    """

    def __init__(self, loop: LoopChoice, logs: Path | None = None) -> None:
        super().__init__()
        self.loop: LoopChoice = loop
        self.logs = logs
        self._ended: asyncio.Queue[Worker] = asyncio.Queue()
        self._watches: set[asyncio.Task[None]] = set()

    async def part(self) -> Bench:
        """Returns a bench for a part of this run; its processes may end earlier."""
        part = Bench(self.loop, self.logs)
        part._ended = self._ended
        return await self.enter_async_context(part)

    async def complete(self, measuring: Coroutine[Any, Any, T]) -> T:
        """Returns the result of ``measuring``, unless a process ends meanwhile.

        Raises:
            BenchFailed: a process has ended, which the bench did not end. Others may wait for it
                for ever.
        """
        result, ended = asyncio.ensure_future(measuring), asyncio.ensure_future(self._ended.get())
        try:
            await asyncio.wait((result, ended), return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                gone = ended.result()
                raise BenchFailed(f"{gone.name} has ended:\n{gone.tail()}")
        finally:
            for each in (result, ended):
                each.cancel()
            await asyncio.gather(result, ended, return_exceptions=True)
        return result.result()

    def folder(self) -> Path:
        """Makes a temporary folder, which is removed when the block ends."""
        name = self.enter_context(tempfile.TemporaryDirectory(prefix="wavebus-bench-"))
        return Path(name)

    async def launch(
        self,
        program: str,
        *,
        name: str = "",
        env: Mapping[str, str] | None = None,
        answer_s: float = 120.0,
        grace_s: float = 5.0,
        **settings: Any,
    ) -> Worker:
        """Starts a process without waiting for its first answer.

        Args:
            program: a module of :mod:`lab.bench.programs`, whose function of that name is run.
            name: the process's name in errors and in its log's file name; by default the program's.
            env: environment variables in addition to those of this process.
            answer_s: how long each answer may take, in seconds.
            grace_s: how long the end may take before the process is killed, in seconds.
            settings: the program's arguments.
        """
        name = name or program
        log = self.enter_context(
            (self.logs / f"{name}.log").open("w+b") if self.logs else tempfile.TemporaryFile()  # noqa: SIM115 - a block would end it
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lab.bench.programs"),
            *(program, json.dumps(settings), self.loop),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, **(env or {})},
            limit=_LINE_BYTES,
        )
        started = Worker(name, process, log, answer_s, grace_s)
        self.push_async_callback(started.end)
        watch = asyncio.create_task(self._watch(started))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return started

    async def _watch(self, started: Worker) -> None:
        await started.process.wait()
        if not started.may_end.is_set():
            self._ended.put_nowait(started)

    async def start(self, program: str, **how: Any) -> tuple[Worker, dict[str, Any]]:
        """Starts a process as :meth:`launch` does; returns it with its first answer."""
        started = await self.launch(program, **how)
        return started, await started.hello()

    async def broker(self, **how: Any) -> str:
        """Starts a broker, and returns its address."""
        return str((await self.start("broker", **how))[1]["address"])

    async def gateway(self, broker: str, group: str, *options: str) -> tuple[str, int]:
        """Starts ``wavebus gateway`` before a group; returns its URL and its process's id.

        Args:
            broker: the broker's address.
            group: the group.
            options: further options of the command.

        Raises:
            BenchFailed: it has not started.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bus._cli.main", "gateway", "--broker", broker),
            *("--group", group, "--listen", "127.0.0.1:0", "--log-level", "error", *options),
            stdout=asyncio.subprocess.PIPE,
        )
        self.push_async_callback(kill, process)
        assert process.stdout is not None
        url = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GATEWAY_S):
                url = (await process.stdout.readline()).decode().strip()
        if not url:
            raise BenchFailed("the gateway has not started")
        return url, process.pid


async def in_turn(
    ways: Mapping[str, Callable[[], Awaitable[T]]],
    rounds: int,
    *,
    warm: int = 1,
    swing: bool = False,
    on_round: Callable[[int, str, T], None] = lambda *_: None,
) -> dict[str, list[T]]:
    """Alternates rounds of all ways, so that other load of the host affects all alike.

    Args:
        ways: by name of a way, a function that runs one round of it.
        rounds: how many rounds of each way count.
        warm: how many rounds come before and don't count; they have negative numbers.
        swing: True reverses every other turn, so that no way always follows the same other way.
        on_round: called after each round with its number, way and result.
    """
    found: dict[str, list[T]] = {way: [] for way in ways}
    for number in range(-warm, rounds):
        for way in list(ways)[:: -1 if swing and number % 2 else 1]:
            done = await ways[way]()
            if number >= 0:
                found[way].append(done)
            on_round(number, way, done)
    return found


def title(number: int) -> str:
    """Returns how progress lines name a round of :func:`in_turn`."""
    return "warming up" if number < 0 else f"round {number + 1}"


def median(values: Iterable[float]) -> float:
    """Returns the median, rounded to three digits."""
    return round(statistics.median(values), 3)


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns, for each figure, its median over all rounds."""
    return {name: median(each[name] for each in rounds) for name in rounds[0]}


def gb_per_s(size_bytes: int, took_ms: float) -> float:
    """Returns the speed of a transfer in GB/s, rounded to three digits."""
    return round(size_bytes / took_ms / 1e6, 3)


def table(figures: Mapping[str, Any]) -> str:
    """Formats figures as a table for people.

    Single values come first, one per line. Each dict of figures becomes a column; lists in it are
    left out.
    """
    columns = {name: _flat(each) for name, each in figures.items() if isinstance(each, dict)}
    rows: list[tuple[object, ...]] = [
        (name, each) for name, each in figures.items() if name not in columns
    ]
    if columns:
        names = dict.fromkeys(name for column in columns.values() for name in column)
        rows += [("",), ("", *columns)]
        rows += [(name, *(each.get(name, "") for each in columns.values())) for name in names]
    lines = (f"{name!s:<32}" + "".join(f"{each!s:>14}" for each in cells) for name, *cells in rows)
    return "\n".join(line.rstrip() for line in lines)


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": each for inner, each in _flat(value).items()}
        elif not isinstance(value, list):
            found[name] = value
    return found


def say(text: str) -> None:
    """Prints progress on stderr; stdout is for figures."""
    click.echo(text, err=True)


def raise_file_limit(engines: int) -> None:
    """Raises the limit of open files, so that many engines can connect to one process.

    Raises:
        UsageError: the system allows fewer open files.
    """
    need = _FILES_PER_ENGINE * engines + _FILES_SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < need:
        raise UsageError(
            f"{engines} engines need {need} open files per process, and the hard limit is {hard}; "
            f"raise it (ulimit -Hn {need}, or LimitNOFILE of the service), or measure fewer engines"
        )
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
