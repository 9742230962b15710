"""A worker's staging channel, by which a sidecar calls the worker while it runs steps.

vLLM's ``collective_rpc`` goes through the engine core, which calls its workers between two steps:
the call waits for a step, and the next step waits for the call. Staging must not delay steps, so
each worker also listens at its own Unix socket, and carries out operations in a thread, one at a
time.

Requests from the engine core take precedence. Such a request begins a swap, ends an update, or
starts another one, so a running operation of the channel is obsolete. The running operation is
interrupted, and no other one begins until the worker has handled the core's request. (Opening a
transport is not interrupted, and does not block the core.) The newest connection supersedes all
others: requests on older ones that have not begun are dropped.

The socket is in Linux's abstract namespace, so a killed process leaves no file behind. Both ends
accept only processes of the same user, or of root. A frame is its length (4 bytes, big-endian) and
an operation of :mod:`sidecar._vllm.plugin.operations`. The answer has the same form.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, BinaryIO, Final, cast

from bus import operations as ops
from sidecar._vllm.plugin import agreement, operations
from sidecar._vllm.plugin.operations import MAX_PAYLOAD_CHARS, WorkerFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LENGTH: Final = struct.Struct(">I")
MAX_FRAME_BYTES: Final = MAX_PAYLOAD_CHARS
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_RETRY_S: Final = 0.05


class StagingChannelServer:
    """The worker's end of its staging channel; it listens once :attr:`name` was read.

    Args:
        execute: carries out an operation, in a thread of the channel.
        interrupt: makes the running operation return soon; called from any thread, at any time.
        thread_context: entered once in each thread that executes operations, around all its work.
    """

    def __init__(
        self,
        execute: Callable[[operations.WorkerOperation], ops.Done],
        interrupt: Callable[[], None],
        thread_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._execute = execute
        self._interrupt = interrupt
        self._thread_context = thread_context
        self._newest: socket.socket | None = None
        self._client_lock = threading.Lock()  # held by operations of the staging channel
        self._worker_lock = threading.Lock()  # held by these, except Open, and by the core
        self._listener: socket.socket | None = None
        self._name = ""

    @property
    def name(self) -> str:
        """The socket's name in the abstract namespace; the first read starts listening."""
        if self._listener is None:
            self._name = f"wavebus-staging-{os.getpid()}-{secrets.token_hex(8)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"\0{self._name}")
            self._listener.listen()
            self._in_thread(self._listen, self._listener)
        return self._name

    @contextlib.contextmanager
    def preempted(self) -> Iterator[None]:
        """Keeps the channel from working during a block, which a request of the core needs.

        The running operation is interrupted, and no other one begins until the block ends.
        """
        wait_s = 0.0
        while not self._worker_lock.acquire(timeout=wait_s):
            self._interrupt()  # again: another operation may just have begun
            wait_s = _RETRY_S
        try:
            yield
        finally:
            self._worker_lock.release()

    def close(self) -> None:
        """Stops listening; connections that are open stay open."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # a thread that waits in accept returns
            listener.close()

    def _in_thread(self, target: Callable[[socket.socket], None], served: socket.socket) -> None:
        threading.Thread(target=target, args=(served,), name="wavebus-staging", daemon=True).start()

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._listener is not listener:
                    return
                time.sleep(_RETRY_S)  # the process has no descriptor left now
                continue
            try:
                self._accept(connection)
            except (OSError, RuntimeError):  # the connection has ended, or no thread can be started
                connection.close()

    def _accept(self, connection: socket.socket) -> None:
        if not is_same_user(connection):
            connection.close()
            return
        # One thread each, so that a connection of an earlier sidecar blocks no other.
        self._newest = connection
        self._in_thread(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with (
            connection,
            contextlib.suppress(OSError),
            connection.makefile("rb") as made,
            self._thread_context(),
        ):
            stream = cast("BinaryIO", made)
            while (blob := _read_frame(stream)) is not None:
                asked = agreement.attempt(functools.partial(operations.unpack, blob))
                with contextlib.ExitStack() as held:
                    for lock in self._locks_for(asked):
                        held.enter_context(lock)
                    if self._newest is not connection:
                        return
                    answer = operations.pack(self._answer(asked))
                connection.sendall(LENGTH.pack(len(answer)) + answer)

    def _locks_for(self, asked: operations.WorkerOperation | WorkerFailure) -> list[threading.Lock]:
        """Returns the locks that an operation holds while it is carried out.

        ``Open`` may wait for other processes, so it does not hold the lock for which requests of
        the core wait. Steps go on meanwhile.
        """
        match asked:
            case operations.Greet():
                return []
            case ops.Open():
                return [self._client_lock]
        return [self._client_lock, self._worker_lock]

    def _answer(self, asked: operations.WorkerOperation | WorkerFailure) -> operations.Answer:
        if isinstance(asked, WorkerFailure):
            return asked
        return agreement.attempt(functools.partial(self._execute, asked))


def is_same_user(connection: socket.socket) -> bool:
    """Returns whether the process at the other end runs as this user, or as root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return uid in (os.getuid(), 0)


def _read_frame(stream: BinaryIO) -> bytes | None:
    """Returns the body of the next frame; None at the end, or if too long."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    if size > MAX_FRAME_BYTES:
        return None
    body = stream.read(size)
    return body if len(body) == size else None
