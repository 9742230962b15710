"""The sidecar's end of the workers' staging channels.

The workers' end is :mod:`sidecar._vllm.plugin.staging.channel_server`.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final

from bus.errors import EngineDead, EngineError
from sidecar._vllm.plugin import operations
from sidecar._vllm.plugin.operations import WorkerFailure
from sidecar._vllm.plugin.staging.channel_server import LENGTH, is_same_user

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus import operations as ops


# A worker answers at once, also while it serves another connection.
_GREET_TIMEOUT_S: Final = 60.0


class StagingChannels:
    """Sends operations to all workers of one engine over their staging channels.

    One operation runs at a time. A call that fails or is cancelled closes all connections, because
    a late answer would be taken for that of the next call. The next call connects again. The
    ``len()`` is the number of workers.

    Attributes:
        unusable_reason: why the channels can't be used; empty if they can.
    """

    def __init__(self) -> None:
        self.unusable_reason = "the engine's staging channels are not open"
        self._names: tuple[str, ...] = ()
        self._connections: list[_Connection] = []

    def __len__(self) -> int:
        return len(self._names)

    async def open(self, names: Sequence[str], *, cores: int = 1) -> None:
        """Connects to the workers' sockets, which then ignore all older connections.

        Args:
            names: each worker's socket, by its name in the abstract namespace; an empty name if a
                worker has none.
            cores: how many engine cores the workers belong to. Workers of different cores can't
                agree on anything.

        Raises:
            EngineError: a worker can't be reached from here. :attr:`unusable_reason` then has the
                error's text.
        """
        try:
            await self._open(tuple(names), cores)
        except EngineError as error:
            self.unusable_reason = error.detail
            raise
        self.unusable_reason = ""

    async def _open(self, names: tuple[str, ...], cores: int) -> None:
        self.close()
        self._names = ()
        if cores != 1:
            raise EngineError("the engine has several cores behind one client")
        if not names or not all(names):
            raise EngineError("the engine's workers have no staging channels")
        self._names = names
        try:
            async with asyncio.timeout(_GREET_TIMEOUT_S):
                await self.perform(operations.Greet())
        except TimeoutError as error:
            raise EngineError(f"a worker has not answered for {_GREET_TIMEOUT_S:.0f} s") from error

    async def perform(self, operation: operations.WorkerOperation) -> list[ops.Done]:
        """Carries out an operation in every worker; returns their answers, in their order.

        Args:
            operation: the operation.

        Raises:
            EngineDead: a worker is gone.
            EngineError: the operation failed in a worker; with the first such worker's error.
        """
        try:
            self._connect()
            blob = operations.pack(operation)
            async with asyncio.TaskGroup() as asked:
                answers = [asked.create_task(channel.ask(blob)) for channel in self._connections]
        except BaseExceptionGroup as group:
            self.close()
            raise group.exceptions[0] from None
        except BaseException:
            self.close()
            raise
        done: list[ops.Done] = []
        for each in answers:
            answer = each.result()
            if isinstance(answer, WorkerFailure):
                raise answer.to_error()
            done.append(answer)
        return done

    def close(self) -> None:
        """Closes the connections; the next operation opens new ones."""
        channels, self._connections = self._connections, []
        for channel in channels:
            channel.close()

    def _connect(self) -> None:
        while len(self._connections) < len(self._names):
            self._connections.append(_Connection.to(self._names[len(self._connections)]))


class _Connection:
    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def to(cls, name: str) -> _Connection:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.setblocking(False)
        try:
            end.connect(f"\0{name}")
            if not is_same_user(end):
                raise PermissionError("a process of another user listens there")
        except OSError as error:
            end.close()
            raise EngineError(
                f"a worker can't be reached at {name!r} ({error.strerror or error}): sidecar "
                "and workers must run on one host, as one user (containers: one network namespace)"
            ) from error
        return cls(end)

    async def ask(self, blob: bytes) -> operations.Answer:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._end, LENGTH.pack(len(blob)) + blob)
            size = LENGTH.unpack(await self._read(LENGTH.size))[0]
            answer = await self._read(size)
        except OSError as error:
            raise EngineDead("a worker closed its connection during staging") from error
        return operations.unpack_answer(answer)

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
