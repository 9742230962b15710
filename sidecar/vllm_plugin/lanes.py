"""The lanes of an engine's workers, sidecar's end: see :mod:`sidecar.vllm_plugin.lane`."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from bus.errors import EngineError
from sidecar.vllm_plugin import wire
from sidecar.vllm_plugin.lane import LENGTH, is_own

if TYPE_CHECKING:
    from collections.abc import Sequence


class Lanes:
    """One of each worker. Asked one thing at a time.

    A call that is cancelled, or breaks, drops all connections: an answer that comes yet would be
    taken for the next one's. The next call makes them anew.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._lanes: list[_Connection] = []

    def open(self, names: Sequence[str]) -> None:
        """Reach the workers that listen there.

        Raises:
            EngineError: one can't be reached from here.
        """
        self.close()
        self._names = tuple(names)
        self._connect()

    async def perform(self, operation: wire.Operation) -> None:
        """Have every worker carry it out; return when all have.

        Raises:
            EngineError: in the first worker that failed; or one is gone.
        """
        try:
            self._connect()
            text = wire.encode(operation).encode()
            async with asyncio.TaskGroup() as asked:
                answers = [asked.create_task(lane.ask(text)) for lane in self._lanes]
        except BaseExceptionGroup as group:
            self.close()
            raise group.exceptions[0] from None
        except BaseException:
            self.close()
            raise
        for answer in answers:
            failure = answer.result()
            if failure is not None:
                raise EngineError(failure.detail, code=failure.code, tensor=failure.tensor)

    def close(self) -> None:
        """Let the connections go."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()

    def _connect(self) -> None:
        while len(self._lanes) < len(self._names):
            self._lanes.append(_Connection.to(self._names[len(self._lanes)]))


class _Connection:
    """To one worker."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def to(cls, name: str) -> _Connection:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.setblocking(False)
        try:
            end.connect(f"\0{name}")
            if not is_own(end):
                raise PermissionError("somebody else listens there")
        except OSError as error:
            end.close()
            raise EngineError(
                f"its worker is not to be reached at {name!r} ({error.strerror or error}): sidecar "
                "and workers must run on one host, as one user (containers: one network namespace)"
            ) from error
        return cls(end)

    async def ask(self, text: bytes) -> wire.Failure | None:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._end, LENGTH.pack(len(text)) + text)
            size = LENGTH.unpack(await self._read(LENGTH.size))[0]
            blob = await self._read(size)
        except OSError as error:
            raise EngineError("a worker has left in the middle of staging") from error
        return wire.Failure.from_bytes(blob) if blob else None

    async def _read(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        read = b""
        while len(read) < size:
            some = await loop.sock_recv(self._end, size - len(read))
            if not some:
                raise ConnectionError("closed")
            read += some
        return read

    def close(self) -> None:
        self._end.close()
