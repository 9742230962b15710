"""The bench's processes: started, spoken to by lines, and gone at the end, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import tempfile
from typing import IO, TYPE_CHECKING, Any, Final

from bus.errors import UsageError, WavebusError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

# What servers of a small model need on a CPU.
VLLM_ON_CPU: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

_ANSWER_S: Final = 120.0
_GRACE_S: Final = 5.0
# Per engine: a connection's two ends, a listening socket and what ZeroMQ needs beside.
_FILES_PER_ENGINE: Final = 4
_FILES_SPARE: Final = 256


class BenchFailed(WavebusError):
    """A process of the bench died or is stuck."""


class Worker:
    """A process driven by lines (see :mod:`bus.runtime.json_lines`)."""

    def __init__(
        self,
        module: str,
        process: asyncio.subprocess.Process,
        log: IO[bytes],
        *,
        answer_s: float = _ANSWER_S,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._module = module
        self._process = process
        self._log = log
        self._answer_s = answer_s
        self._grace_s = grace_s

    async def ask(self, command: str) -> dict[str, Any]:
        """Send a line, and return its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # the answer's absence tells more
            self._process.stdin.write(command.encode() + b"\n")
            await self._process.stdin.drain()
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        """The next line.

        Raises:
            BenchFailed: there is none; with the end of what the process has logged.
        """
        assert self._process.stdout is not None
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._answer_s):
                line = await self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            tail = self._log.read()[-2000:].decode(errors="replace").strip()
            raise BenchFailed(f"{self._module} ended or is stuck:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        await self._process.wait()

    async def end(self) -> None:
        """Its stdin ends, and so does it; if it doesn't, it is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(self._grace_s):
                await self._process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            raise


async def run_module(module: str, *args: object) -> None:
    """Run ``python -m module args`` to its end.

    Raises:
        BenchFailed: it ended with another code than 0.
    """
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *map(str, args))
    if await process.wait():
        raise BenchFailed(f"{module} ended with code {process.returncode}")


@contextlib.asynccontextmanager
async def worker(
    module: str,
    *args: object,
    answer_s: float = _ANSWER_S,
    grace_s: float = _GRACE_S,
    env: Mapping[str, str] | None = None,
    log_path: Path | None = None,
) -> AsyncIterator[Worker]:
    """Run ``python -m module args`` for the length of a block.

    Args:
        answer_s: how long each of its answers may take.
        grace_s: how long it may take to end; then it is killed.
        env: variables beside those of this process.
        log_path: where its stderr is kept. Default: its end is told if it breaks, and that is all.
    """
    with tempfile.TemporaryFile() if log_path is None else log_path.open("w+b") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *map(str, args),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, **(env or {})},
            limit=1 << 20,
        )
        started = Worker(module, process, log, answer_s=answer_s, grace_s=grace_s)
        try:
            yield started
        finally:
            with contextlib.suppress(TimeoutError):
                await started.end()


def raise_file_limit(engines: int) -> None:
    """Take all open files that the system allows, for this process and those it starts.

    Raises:
        UsageError: they are too few for so many engines.
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
