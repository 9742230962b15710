"""A network in memory for tests, with optional reproducible faults.

The network has the same interfaces as the ZeroMQ transport. With :class:`Faults` it drops, delays,
duplicates and reorders frames, always in the same way for the same seed and order of sends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bus._runtime.interfaces import OnFrame, OnRoutedFrame, Scheduler


@dataclass(frozen=True, slots=True)
class Faults:
    """The probabilities of faults per frame, and the delays in milliseconds.

    Attributes:
        drop: the probability that a frame is lost.
        duplicate: the probability that a frame arrives twice.
        delay_ms: how long every frame takes.
        jitter_ms: how much longer a frame may take; chosen at random for each frame.
        reorder: True: frames may overtake each other. False: frames of one direction of one link
            arrive in the order in which they were sent.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    reorder: bool = False


BROKER: Final = b""  # the broker's end of each link


class MemoryNetwork:
    """Connects one broker and its peers in memory, without sockets.

    Args:
        scheduler: the clock and timers.
        seed: decides which frames suffer the faults.
        faults: the faults; the attribute may be replaced at any time. Default: none.

    Attributes:
        counts: how many frames were sent, dropped, duplicated and delivered.
    """

    def __init__(
        self, scheduler: Scheduler, *, seed: int = 0, faults: Faults | None = None
    ) -> None:
        self.faults = faults or Faults()
        self.counts = {"sent": 0, "dropped": 0, "duplicated": 0, "delivered": 0}
        self._scheduler = scheduler
        self._random = random.Random(seed)
        self._server: MemoryServer | None = None
        self._clients: dict[bytes, MemoryClient] = {}
        self._cut: set[tuple[bytes, bytes]] = set()  # from whom to whom nothing passes
        self._partitioned: set[bytes] = set()  # peers whose frames are all dropped
        self._due: dict[tuple[bytes, bytes], float] = {}
        self._routes: dict[bytes, bytes] = {}  # of peers that have had more than one connection
        self._healed = 0

    def server(self) -> MemoryServer:
        """Returns a new broker's end, which replaces the previous one."""
        self._server = MemoryServer(self)
        return self._server

    def client(self, route: bytes) -> MemoryClient:
        """Returns the end of the peer with this route, which replaces an earlier one."""
        client = self._clients[route] = MemoryClient(self, route)
        return client

    def cut(self, route: bytes, *, up: bool = True, down: bool = True) -> None:
        """Drops all frames from this peer (``up``) and to this peer (``down``) from now on."""
        if up:
            self._cut.add((route, BROKER))
        if down:
            self._cut.add((BROKER, route))

    def partition(self, route: bytes) -> None:
        """Drops all frames between this peer and any other process, not just the broker."""
        self._partitioned.add(route)

    def heal(self, route: bytes) -> None:
        """Carries this peer's frames again; frames dropped before stay lost.

        A peer that was cut off has a new connection, with another route for the broker.
        """
        self._partitioned.discard(route)
        links = {(route, BROKER), (BROKER, route)}
        if links & self._cut:
            self._healed += 1
            self._routes[route] = b"%s/%d" % (route, self._healed)
        self._cut -= links

    def send_to_server(self, route: bytes, frame: bytes) -> None:
        """Carries a frame from a peer to the broker."""
        self._carry(route, BROKER, frame)

    def send_to_client(self, route: bytes, frame: bytes) -> bool:
        """Carries a frame from the broker to a peer; returns False without such a peer."""
        client = route.partition(b"/")[0]
        if client not in self._clients or self._routes.get(client, client) != route:
            return False
        self._carry(BROKER, client, frame)
        return True

    def discard_client(self, route: bytes) -> None:
        """Removes a peer's end."""
        self._clients.pop(route, None)

    def discard_server(self, server: MemoryServer) -> None:
        """Removes the broker's end, unless another one has replaced it."""
        if self._server is server:
            self._server = None

    def _carry(self, source: bytes, target: bytes, frame: bytes) -> None:
        self.carry_between(source, target, lambda: self._deliver(source, target, frame))

    def carry_between(self, source: bytes, target: bytes, deliver: Callable[[], None]) -> None:
        """Carries one frame between any two processes, with the network's faults.

        Args:
            source: the route of the sending process.
            target: the route of the receiving process.
            deliver: called when the frame arrives; twice for a duplicated frame.
        """
        faults = self.faults

        def arrive() -> None:
            if (source, target) in self._cut or not self._partitioned.isdisjoint((source, target)):
                self.counts["dropped"] += 1
                return
            self.counts["delivered"] += 1
            deliver()

        copies = 1
        self.counts["sent"] += 1
        if self._random.random() < faults.drop:
            self.counts["dropped"] += 1
            copies = 0
        elif self._random.random() < faults.duplicate:
            self.counts["duplicated"] += 1
            copies = 2
        for _ in range(copies):
            delay_ms = faults.delay_ms + self._random.random() * faults.jitter_ms
            due_ms = self._scheduler.now_ms() + delay_ms
            if not faults.reorder:
                due_ms = max(due_ms, self._due.get((source, target), 0.0))
                self._due[(source, target)] = due_ms
            self._scheduler.call_at(due_ms, arrive)

    def _deliver(self, source: bytes, target: bytes, frame: bytes) -> None:
        if target == BROKER:
            if self._server is not None and self._server.on_frame is not None:
                self._server.on_frame(self._routes.get(source, source), frame, "")
            return
        client = self._clients.get(target)
        if client is not None and client.on_frame is not None:
            client.on_frame(frame)


class MemoryServer:
    """The broker's end of a :class:`MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self.on_frame: OnRoutedFrame | None = None

    def listen(self, on_frame: OnRoutedFrame) -> None:
        """Starts to receive; calls ``on_frame(route, frame, "")`` for every frame."""
        self.on_frame = on_frame

    def send(self, routes: Iterable[bytes], frame: bytes) -> list[bytes]:
        """Sends a frame to each route; returns the routes without a peer."""
        return [route for route in routes if not self._network.send_to_client(route, frame)]

    def close(self) -> None:
        """Closes this end."""
        self.on_frame = None
        self._network.discard_server(self)


class MemoryClient:
    """A peer's end of a :class:`MemoryNetwork`."""

    address = ""

    def __init__(self, network: MemoryNetwork, route: bytes) -> None:
        self._network = network
        self.route = route
        self.on_frame: OnFrame | None = None

    def listen(self, on_frame: OnFrame) -> None:
        """Starts to receive; calls ``on_frame(frame)`` for every frame."""
        self.on_frame = on_frame

    def send(self, frame: bytes) -> bool:
        """Sends a frame to the broker. Returns True, even if the frame will be dropped."""
        self._network.send_to_server(self.route, frame)
        return True

    def close(self) -> None:
        """Closes this end."""
        self.on_frame = None
        self._network.discard_client(self.route)
