"""What the shells need of the world: time and a network. Real, in memory, or simulated.

Everything here calls back synchronously, on one thread: between a frame's arrival
and its effect there is no queue and no task switch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from bus.protocol.core.access import KeyRole

OnFrame: TypeAlias = Callable[[bytes], None]
OnRoutedFrame: TypeAlias = Callable[[bytes, bytes, str], None]


class Handle(Protocol):
    """A timer that is set."""

    def cancel(self) -> None:
        """Make it not fire."""


class Scheduler(Protocol):
    """A clock that never goes back, and timers on it."""

    def now_ms(self) -> float:
        """Milliseconds since some fixed moment."""

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Handle:
        """Call once, at ``when_ms`` or soon after."""


class ServerTransport(Protocol):
    """The broker's end: many peers, each with a route.

    At most once: a frame arrives whole or not at all, in order per peer unless the
    network is one that disorders on purpose. Nothing here blocks.
    """

    def listen(self, on_frame: OnRoutedFrame) -> None:
        """Starts to receive; calls ``on_frame(route, frame, user)`` for every frame.

        ``user`` is the key that the frame's connection has proven; empty without keys.
        """

    def send(self, routes: Iterable[bytes], frame: bytes) -> list[bytes]:
        """Send to each route; return those that can't be reached now."""

    def close(self) -> None:
        """End; no callback comes after this."""


class Journal(Protocol):
    """Where a broker records what happens to it, and what it does. Nothing here blocks for long."""

    def on_received(self, now_ms: float, route: bytes, frame: bytes, user: str) -> None:
        """A frame came over a connection of this key; recorded before it is acted on."""

    def on_refused(self, now_ms: float, route: bytes, size_bytes: int) -> None:
        """A frame came and is not read, of which its sender is about to be told."""

    def on_keys_changed(self, now_ms: float, keys: Mapping[str, KeyRole]) -> None:
        """Other keys are about to count."""

    def on_timer(self, now_ms: float) -> None:
        """The broker's timer rang."""

    def on_sent(self, now_ms: float, routes: tuple[bytes, ...], frame: bytes) -> None:
        """A frame is about to be sent."""

    def flush(self) -> None:
        """All that was recorded outlives this process when this returns."""

    def close(self) -> None:
        """The broker ends in order."""


class ClientTransport(Protocol):
    """A peer's end. It reconnects by itself."""

    def listen(self, on_frame: OnFrame) -> None:
        """Begin; ``on_frame(frame)`` is called for every frame."""

    def send(self, frame: bytes) -> bool:
        """Send; False if the broker can't be reached now."""

    def close(self) -> None:
        """End; no callback comes after this. What was sent is still delivered if it can be."""
