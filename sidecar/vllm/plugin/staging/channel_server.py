"""A worker's staging channel: where a sidecar reaches it while it makes steps.

vLLM's ``collective_rpc`` goes through the engine core, which asks its workers between two steps:
what is asked so, waits for a step, and the next step waits for it. What is staged disturbs no
step, so it comes another way: each worker listens at a Unix socket of its own, and carries out
what it is asked there in a thread, one thing at a time.

The core comes first. What it asks, begins a swap, ends an update, or starts another: so whoever is
staging is not needed any more, is interrupted, and kept out until the worker is done. (Who opens a
transport goes on, and so does the core.) And who has come last, comes before all others: what one
of them has asked and was not begun yet, never is.

The socket is in Linux's abstract namespace: there is no file that a process which is killed would
leave. Only processes of one user are let in, at both ends. A frame is its length, 4 bytes,
big-endian, and then an operation of :mod:`sidecar.vllm.plugin.staging.channel_messages`; back comes
its answer.
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
from typing import TYPE_CHECKING, BinaryIO, Final, TypeVar, cast

from sidecar.vllm.plugin import agreement
from sidecar.vllm.plugin.operations import MAX_PAYLOAD_CHARS, Open, WorkerFailure
from sidecar.vllm.plugin.staging import channel_messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

LENGTH: Final = struct.Struct(">I")
MAX_FRAME_BYTES: Final = MAX_PAYLOAD_CHARS
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_RETRY_S: Final = 0.05


class StagingChannelServer:
    """One worker's. Its thread starts when its address is first asked for.

    Args:
        carry_out: does what is asked; in a thread of the channel's.
        interrupt: has whoever is in there come out soon; called from any thread, any time.
        surroundings: of all that such a thread does; entered once in it.
    """

    def __init__(
        self,
        execute: Callable[[channel_messages.Operation], channel_messages.Done],
        interrupt: Callable[[], None],
        thread_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._execute = execute
        self._interrupt = interrupt
        self._thread_context = thread_context
        self._newest: socket.socket | None = None
        self._client_lock = threading.Lock()  # of those who ask by a staging channel
        self._worker_lock = threading.Lock()  # of these, and of the core
        self._listener: socket.socket | None = None
        self._name = ""

    @property
    def name(self) -> str:
        """Of the socket, in the abstract namespace."""
        if self._listener is None:
            self._name = f"wavebus-staging-{os.getpid()}-{secrets.token_hex(8)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"\0{self._name}")
            self._listener.listen()
            self._in_thread(self._listen, self._listener)
        return self._name

    @contextlib.contextmanager
    def preempted(self) -> Iterator[None]:
        """Nothing is carried out for the length of a block; what was, has been interrupted."""
        wait_s = 0.0
        while not self._worker_lock.acquire(timeout=wait_s):
            self._interrupt()  # again: the next one may just have begun
            wait_s = _RETRY_S
        try:
            yield
        finally:
            self._worker_lock.release()

    def close(self) -> None:
        """Let nobody in any more."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # who waits in accept, comes out
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
                time.sleep(_RETRY_S)  # the process has no descriptor left; it will have one
                continue
            try:
                self._accept(connection)
            except (OSError, RuntimeError):  # it has ended already, or there is no thread to be had
                connection.close()

    def _accept(self, connection: socket.socket) -> None:
        if not is_same_user(connection):
            connection.close()
            return
        # Each in its own thread: one that a sidecar before has left, keeps out nobody.
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
                asked = _attempt(functools.partial(channel_messages.decode, blob))
                with contextlib.ExitStack() as held:
                    for lock in self._locks_for(asked):
                        held.enter_context(lock)
                    if self._newest is not connection:
                        return
                    answer = channel_messages.encode(self._answer(asked))
                connection.sendall(LENGTH.pack(len(answer)) + answer)

    def _locks_for(self, asked: channel_messages.Operation | WorkerFailure) -> list[threading.Lock]:
        """What nothing else has meanwhile. Who opens a transport may wait for others: the core, and
        with it all steps, need not wait for that, nor who comes and greets."""
        match asked:
            case channel_messages.Greet():
                return []
            case Open():
                return [self._client_lock]
        return [self._client_lock, self._worker_lock]

    def _answer(self, asked: channel_messages.Operation | WorkerFailure) -> channel_messages.Answer:
        if isinstance(asked, WorkerFailure):
            return asked
        return _attempt(functools.partial(self._execute, asked))


def _attempt(work: Callable[[], T]) -> T | WorkerFailure:
    """What has come of it; or how it has failed."""
    done: list[T] = []
    failure = agreement.attempt(lambda: done.append(work()))
    return failure or done[0]


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this user, or root's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return uid in (os.getuid(), 0)


def _read_frame(stream: BinaryIO) -> bytes | None:
    """A frame; None where there is none any more, or one that is too long."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    if size > MAX_FRAME_BYTES:
        return None
    body = stream.read(size)
    return body if len(body) == size else None
