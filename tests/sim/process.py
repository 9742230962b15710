"""One process in simulated time: it can be stopped, continued, and killed in the middle of what
it does.

A process has its own view of the clock and of the network. While it is stopped, what comes to it
piles up, as in a process that got SIGSTOP; one that is killed does nothing more, and what it
was doing just then ends where it was, between two of its sends.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bus._runtime.interfaces import Handle, OnFrame, OnRoutedFrame, Scheduler
    from tests.sim.memory_network import MemoryClient, MemoryNetwork, MemoryServer


class Died(BaseException):
    """The process was killed while it ran; nothing in it may catch this."""


class Process:
    """Implements :class:`bus._runtime.interfaces.Scheduler`, and gives the ends of a network.

    Attributes:
        alive: it was not killed.
        stopped: it got a SIGSTOP, and no SIGCONT yet.
        heard_ms: when a frame came in last.
        went_on_ms: when it got the last SIGCONT, or began.
    """

    def __init__(self, scheduler: Scheduler, network: MemoryNetwork) -> None:
        self.alive = True
        self.stopped = False
        self.last_frame_ms = self.continued_ms = scheduler.now_ms()
        self._scheduler = scheduler
        self._network = network
        self._backlog: list[Callable[[], None]] = []
        self._sends_left: int | None = None
        self._dies: Callable[[], None] = self.kill

    # -- its view of the world ------------------------------------------------------

    def now_ms(self) -> float:
        return self._scheduler.now_ms()

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Handle:
        timer = _ProcessTimer(self, callback)
        timer.handle = self._scheduler.call_at(when_ms, timer.on_fire)
        return timer

    def client(self, route: bytes) -> Client:
        """A peer's end of the network."""
        return Client(self, self._network.client(route))

    def server(self) -> Server:
        """The broker's end of the network."""
        return Server(self, self._network, self._network.server())

    # -- what happens to it -----------------------------------------------------------

    def run(self, action: Callable[[], None]) -> None:
        """Something for the process to do: now, or when it is continued; nothing if it is dead."""
        if not self.alive:
            return
        if self.stopped:
            self._backlog.append(action)
            return
        with contextlib.suppress(Died):
            action()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def cont(self) -> None:
        """SIGCONT: what has piled up is done, in its order."""
        if not self.stopped:
            return
        self.stopped = False
        self.continued_ms = self.now_ms()
        backlog, self._backlog = self._backlog, []
        for each in backlog:
            self._scheduler.call_at(self.now_ms(), lambda each=each: self.run(each))  # type: ignore[misc]

    def kill(self) -> None:
        """SIGKILL."""
        self.alive = False
        self._backlog = []

    def die_after(self, sends: int, dies: Callable[[], None]) -> None:
        """After so many more frames, when it is about to send another, ``dies`` kills it."""
        self._sends_left = sends
        self._dies = dies

    def cancel_death(self) -> None:
        """What :meth:`die_after` said does not come."""
        self._sends_left = None

    def on_send(self) -> None:
        """A frame is about to be sent.

        Raises:
            Died: it will not be.
        """
        if self._sends_left is None:
            return
        if not self._sends_left:
            self._sends_left = None
            self._dies()
            raise Died
        self._sends_left -= 1


class _ProcessTimer:
    def __init__(self, process: Process, callback: Callable[[], None]) -> None:
        self.handle: Handle | None = None
        self._process = process
        self._callback: Callable[[], None] | None = callback

    def on_fire(self) -> None:
        self._process.run(self._ring)

    def cancel(self) -> None:
        self._callback = None
        if self.handle is not None:
            self.handle.cancel()

    def _ring(self) -> None:
        if self._callback is not None:
            self._callback()


class Client:
    """Implements :class:`bus._runtime.interfaces.ClientTransport`."""

    address = ""

    def __init__(self, process: Process, client: MemoryClient) -> None:
        self._process = process
        self._client = client

    def listen(self, on_frame: OnFrame) -> None:
        process = self._process

        def comes(frame: bytes) -> None:
            process.last_frame_ms = process.now_ms()
            on_frame(frame)

        self._client.listen(lambda frame: process.run(lambda: comes(frame)))

    def send(self, frame: bytes) -> bool:
        self._process.on_send()
        return self._client.send(frame)

    def close(self) -> None:
        self._client.close()


class Server:
    """Implements :class:`bus._runtime.interfaces.ServerTransport`."""

    def __init__(self, process: Process, network: MemoryNetwork, server: MemoryServer) -> None:
        self._process = process
        self._network = network
        self._server = server

    def listen(self, on_frame: OnRoutedFrame) -> None:
        run = self._process.run
        self._server.listen(lambda route, frame, user: run(lambda: on_frame(route, frame, user)))

    def send(self, routes: Iterable[bytes], frame: bytes) -> list[bytes]:
        return [route for route in routes if not self._to(route, frame)]

    def close(self) -> None:
        self._server.close()

    def _to(self, route: bytes, frame: bytes) -> bool:
        self._process.on_send()
        return self._network.send_to_client(route, frame)
