"""A data parallel group of embedded engines in real processes, asked by their stdin.

See :mod:`tests.support.dp_rank` for what runs there. Tests wait for answers, for lines of
the ranks' logs and for what their status pages say, and never for time to pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING, Any, Self

from bus._protocol.dp.coordinator import Publish, StartCores
from bus._runtime.zmq_dp import DpSockets
from bus.errors import EngineDead, EngineError
from bus.messages import NackCode
from sidecar._dp_coordinator import frames
from sidecar._shared_pages.core_status import CoreStatusReader
from sidecar._shared_pages.two_slot_page import NoPage
from sidecar._supervision.launch import free_port
from tests.support.fork_server import ForkedProcess
from tests.support.procs import ROOT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
    from pathlib import Path

    from sidecar._shared_pages.core_status import CoreStatusView

PATIENCE_S = 120.0
_LOOK_S = 0.001


class Request:
    """A request on some rank, and its tokens as they come."""

    def __init__(self, number: int, answer: asyncio.Future[Any]) -> None:
        self.number = number
        self.tokens: list[int] = []
        self._answer = answer
        self._news = asyncio.Event()
        answer.add_done_callback(lambda _: self._news.set())

    def push(self, token: int) -> None:
        self.tokens.append(token)
        self._news.set()

    async def reached(self, count: int) -> None:
        """Wait for so many tokens."""
        while len(self.tokens) < count:
            self._news.clear()
            await self._news.wait()

    async def arrivals(self) -> AsyncIterator[int]:
        """How many tokens more have come, again and again, to the end."""
        seen = 0
        while not (self.done and seen == len(self.tokens)):
            if seen == len(self.tokens):
                self._news.clear()
                await self._news.wait()
            fresh = len(self.tokens) - seen
            seen += fresh
            yield fresh

    async def end(self) -> list[int]:
        """All its tokens, at its end by length."""
        result = await self.result()
        assert result["finish_reason"] == "length"
        tokens: list[int] = result["tokens"]
        return tokens

    async def result(self) -> dict[str, Any]:
        result: dict[str, Any] = await self._answer
        return result

    @property
    def done(self) -> bool:
        return self._answer.done()


class RankProcess:
    """One rank. ``spec`` are the arguments of ``DataParallel``, and ``model``."""

    def __init__(self, folder: Path, spec: dict[str, Any]) -> None:
        self.rank: int = spec["rank"]
        self.page = CoreStatusReader(folder / f"page{self.rank}")
        self.logs: list[dict[str, Any]] = []
        self.text: list[str] = []
        self._spec = {**spec, "core_page": str(self.page.path)}
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._requests: dict[int, Request] = {}
        self._news = asyncio.Event()
        self._readers: list[asyncio.Task[None]] = []
        self.process: ForkedProcess

    async def start(self) -> None:
        self.process = ForkedProcess(
            (sys.executable, "-m", "tests.support.dp_rank", json.dumps(self._spec)),
            stdin=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        started = self._answers[0] = asyncio.get_running_loop().create_future()
        self._readers = [
            asyncio.create_task(self._read_answers()),
            asyncio.create_task(self._read_logs()),
        ]
        self.info: dict[str, Any] = await started

    async def stop(self) -> int:
        """End its stdin, and wait for its end."""
        self._close_stdin()
        return await self._ended()

    async def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self.process.kill()
        await self._ended()

    def begin(self, do: str, **arguments: object) -> asyncio.Future[Any]:
        """Make a call; the future has its answer, or an :class:`EngineError`."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        assert self.process.stdin is not None
        line = json.dumps({"id": number, "do": do, **arguments})
        with contextlib.suppress(BrokenPipeError):  # its answer is that it has ended
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        return answer

    async def call(self, do: str, **arguments: object) -> Any:
        return await self.begin(do, **arguments)

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Request:
        """Begin a greedy request."""
        answer = self.begin("generate", prompt=list(prompt), max_tokens=max_tokens)
        number = max(self._answers)
        request = self._requests[number] = Request(number, answer)
        return request

    def view(self) -> CoreStatusView:
        """The core's status page, read from this process."""
        return self.page.read()

    async def shows(self, condition: Callable[[CoreStatusView], bool]) -> CoreStatusView:
        """Wait until the page says so. It is memory, so somebody must look again and again."""
        while True:
            with contextlib.suppress(NoPage):
                if condition(view := self.view()):
                    return view
            await asyncio.sleep(_LOOK_S)

    async def logged(self, event: str, since: int = 0, **fields: object) -> int:
        """Wait for this line in the log, from line ``since`` on; where it stands."""
        while True:
            for at, line in enumerate(self.logs[since:], since):
                if line["event"] == event and all(line.get(k) == v for k, v in fields.items()):
                    return at
            since = len(self.logs)
            self._news.clear()
            await self._news.wait()

    async def _ended(self) -> int:
        code = await asyncio.to_thread(self.process.wait)
        self._close_stdin()
        await asyncio.gather(*self._readers)
        return code

    def _close_stdin(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    async def _read_answers(self) -> None:
        async for line in _lines(self.process.stdout):
            said = json.loads(line)
            number = said["id"]
            if "token" in said:
                self._requests[number].push(said["token"])
                continue
            answer = self._answers.pop(number)
            if answer.done():
                continue
            if "failed" in said:
                answer.set_exception(_error(said["failed"]))
            else:
                answer.set_result(said["result"])
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDead(f"rank {self.rank} has ended"))
                answer.exception()  # not everyone asks

    async def _read_logs(self) -> None:
        async for raw in _lines(self.process.stderr):
            try:
                line = json.loads(raw)
            except ValueError:
                self.text.append(raw.decode())
                continue
            self.logs.append(line)
            self._news.set()


async def _lines(pipe: IO[str] | None) -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader(limit=1 << 24)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    while line := await reader.readline():
        yield line
    transport.close()


def _error(failed: dict[str, str]) -> EngineError:
    code = NackCode(failed["code"])
    if code is NackCode.ENGINE_DEAD:
        return EngineDead(failed["error"])
    return EngineError(failed["error"], code=code, tensor=failed["tensor"])


class DpGroup:
    """All ranks of a group, each a process.

    Args:
        folder: where their status pages are.
        model: the checkpoint's folder.
        size: how many.
        options: more arguments of ``DataParallel``, such as ``coordinator``; or
            ``one_phase_pause``.
    """

    def __init__(self, folder: Path, model: Path, size: int, **options: Any) -> None:
        master = f"127.0.0.1:{free_port()}"
        spec = {"model": str(model), "size": size, "master": master, "group": "moe", **options}
        self.ranks = [RankProcess(folder, {**spec, "rank": rank}) for rank in range(size)]

    async def __aenter__(self) -> Self:
        starting = [asyncio.create_task(rank.start()) for rank in self.ranks]
        try:
            await asyncio.wait_for(asyncio.gather(*starting), PATIENCE_S)
        except BaseException:
            await self.kill()
            text = "".join(line for rank in self.ranks for line in rank.text)
            sys.stderr.write(text)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                asyncio.gather(*(rank.stop() for rank in self.ranks)), PATIENCE_S
            )
        await self.kill()

    async def kill(self) -> None:
        for rank in self.ranks:
            if hasattr(rank, "process"):
                await rank.kill()

    async def all(self, do: str, **arguments: object) -> list[Any]:
        """Make a call on all ranks at once."""
        return list(await asyncio.gather(*(rank.begin(do, **arguments) for rank in self.ranks)))

    async def idle(self) -> None:
        """Wait until no rank steps."""
        for rank in self.ranks:
            await rank.shows(lambda view: view.phase == "idle")


class Coordinator:
    """A coordinator that does only what a test says, apart from READY."""

    def __init__(self, size: int) -> None:
        self.sockets = DpSockets.of_coordinator("127.0.0.1")
        self.asked: asyncio.Queue[frames.FirstRequest] = asyncio.Queue()
        self.reports: asyncio.Queue[frames.CoreReport] = asyncio.Queue()
        self._size = size
        self._cores = 0
        self.sockets.core_in.listen(self._on_subscription)
        self.sockets.front.listen(self._on_front)
        self.sockets.core_out.listen(
            lambda parts: self.reports.put_nowait(frames.decode_core_frame(parts, size))
        )

    def start(self, wave: int) -> None:
        """START_DP_WAVE to all cores."""
        self.sockets.core_in.send(*frames.encode_start_wave(StartCores(wave)))

    def publish(self, wave: int, *, running: bool) -> None:
        """To all front ends."""
        self.sockets.front.send(frames.encode_wave_status(Publish(wave, running)))

    def _on_subscription(self, parts: list[bytes]) -> None:
        if frames.is_core_subscription(parts):
            self._cores += 1
            if self._cores == self._size:
                self.sockets.core_in.send(frames.READY)

    def _on_front(self, parts: list[bytes]) -> None:
        said = frames.decode_front_frame(parts, self._size)
        if isinstance(said, frames.FirstRequest):
            self.asked.put_nowait(said)


@contextlib.asynccontextmanager
async def coordinated(
    folder: Path, model: Path, size: int, **options: Any
) -> AsyncIterator[tuple[DpGroup, Coordinator]]:
    """A group whose coordinator is the test."""
    coordinator = Coordinator(size)
    try:
        async with DpGroup(
            folder, model, size, coordinator=coordinator.sockets.addresses, **options
        ) as group:
            yield group, coordinator
    finally:
        coordinator.sockets.close()


def bounded(work: Coroutine[Any, Any, None], timeout_s: float = PATIENCE_S) -> None:
    """Run a test's coroutine; one that waits for what never comes fails, and does not hang."""

    async def run() -> None:
        await asyncio.wait_for(work, timeout_s)

    asyncio.run(run())


async def steady(rank: RankProcess, for_s: float) -> CoreStatusView:
    """Look at a page that must not change for so long; the view at the end."""
    view = rank.view()
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s:
        assert rank.view() == view
        await asyncio.sleep(_LOOK_S)
    return view
