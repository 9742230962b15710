"""A worker's lane: where a sidecar reaches it while it makes steps.

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
big-endian, and then an operation of :mod:`sidecar.vllm_plugin.lane_wire`; back comes its answer.
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

from sidecar.vllm_plugin import lane_wire, ranks
from sidecar.vllm_plugin.wire import MAX_PAYLOAD_CHARS, Failure, Open

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

LENGTH: Final = struct.Struct(">I")
MAX_FRAME_BYTES: Final = MAX_PAYLOAD_CHARS
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_AGAIN_S: Final = 0.05


class Lane:
    """One worker's. Its thread starts when its address is first asked for.

    Args:
        carry_out: does what is asked; in a thread of the lane's.
        interrupt: has whoever is in there come out soon; called from any thread, any time.
        surroundings: of all that such a thread does; entered once in it.
    """

    def __init__(
        self,
        carry_out: Callable[[lane_wire.Operation], lane_wire.Done],
        interrupt: Callable[[], None],
        surroundings: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._carry_out = carry_out
        self._interrupt = interrupt
        self._surroundings = surroundings
        self._newest: socket.socket | None = None
        self._turn = threading.Lock()  # of those who ask by a lane
        self._free = threading.Lock()  # of these, and of the core
        self._listener: socket.socket | None = None
        self._name = ""

    @property
    def name(self) -> str:
        """Of the socket, in the abstract namespace."""
        if self._listener is None:
            self._name = f"wavebus-lane-{os.getpid()}-{secrets.token_hex(8)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"\0{self._name}")
            self._listener.listen()
            self._in_thread(self._listen, self._listener)
        return self._name

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is carried out for the length of a block; what was, has been interrupted."""
        wait_s = 0.0
        while not self._free.acquire(timeout=wait_s):
            self._interrupt()  # again: the next one may just have begun
            wait_s = _AGAIN_S
        try:
            yield
        finally:
            self._free.release()

    def close(self) -> None:
        """Let nobody in any more."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # who waits in accept, comes out
            listener.close()

    def _in_thread(self, target: Callable[[socket.socket], None], served: socket.socket) -> None:
        threading.Thread(target=target, args=(served,), name="wavebus-lane", daemon=True).start()

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._listener is not listener:
                    return
                time.sleep(_AGAIN_S)  # the process has no descriptor left; it will have one
                continue
            try:
                self._let_in(connection)
            except (OSError, RuntimeError):  # it has ended already, or there is no thread to be had
                connection.close()

    def _let_in(self, connection: socket.socket) -> None:
        if not is_own(connection):
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
            self._surroundings(),
        ):
            stream = cast("BinaryIO", made)
            while (blob := _read(stream)) is not None:
                asked = _tried(functools.partial(lane_wire.decode, blob))
                with contextlib.ExitStack() as held:
                    for lock in self._locks(asked):
                        held.enter_context(lock)
                    if self._newest is not connection:
                        return
                    answer = lane_wire.encode(self._answer(asked))
                connection.sendall(LENGTH.pack(len(answer)) + answer)

    def _locks(self, asked: lane_wire.Operation | Failure) -> list[threading.Lock]:
        """What nothing else has meanwhile. Who opens a transport may wait for others: the core, and
        with it all steps, need not wait for that, nor who comes and greets."""
        match asked:
            case lane_wire.Greet():
                return []
            case Open():
                return [self._turn]
        return [self._turn, self._free]

    def _answer(self, asked: lane_wire.Operation | Failure) -> lane_wire.Answer:
        if isinstance(asked, Failure):
            return asked
        return _tried(functools.partial(self._carry_out, asked))


def _tried(work: Callable[[], T]) -> T | Failure:
    """What has come of it; or how it has failed."""
    done: list[T] = []
    failure = ranks.attempt(lambda: done.append(work()))
    return failure or done[0]


def is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this user, or root's."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(told)
    return uid in (os.getuid(), 0)


def _read(stream: BinaryIO) -> bytes | None:
    """A frame; None where there is none any more, or one that is too long."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    if size > MAX_FRAME_BYTES:
        return None
    body = stream.read(size)
    return body if len(body) == size else None
