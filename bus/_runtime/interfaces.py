"""Interfaces of clocks, networks and journals. Real and simulated ones implement them.

All callbacks are synchronous, on one thread: between a frame's arrival and its effect there is no
queue and no task switch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from bus._protocol.core.access import KeyRole

OnFrame: TypeAlias = Callable[[bytes], None]
OnRoutedFrame: TypeAlias = Callable[[bytes, bytes, str], None]


class Handle(Protocol):
    """A pending timer."""

    def cancel(self) -> None:
        """Cancels the timer."""


class Scheduler(Protocol):
    """A monotonic clock, and timers on it."""

    def now_ms(self) -> float:
        """Returns the time since some fixed moment, in milliseconds."""

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Handle:
        """Calls back once, at ``when_ms`` or soon after."""


class ServerTransport(Protocol):
    """The broker's end of a network. A route is the address of one life of a peer.

    A frame arrives whole, or not at all. Frames of one peer arrive in order, except on
    networks that reorder them on purpose. No method blocks.
    """

    def listen(self, on_frame: OnRoutedFrame) -> None:
        """Starts to receive; calls ``on_frame(route, frame, user)`` for every frame.

        ``user`` is the public key of the frame's connection; empty if there are no keys.
        """

    def send(self, routes: Iterable[bytes], frame: bytes) -> list[bytes]:
        """Sends a frame to each route; returns the routes that can't be reached now."""

    def close(self) -> None:
        """Closes the transport; no callback comes after this."""


class Journal(Protocol):
    """Records the frames that a broker receives and sends. No method blocks for long."""

    def on_received(self, now_ms: float, route: bytes, frame: bytes, user: str) -> None:
        """Records a received frame, before the broker acts on it.

        ``user`` is the public key of the frame's connection; empty if there are no keys.
        """

    def on_refused(self, now_ms: float, route: bytes, size_bytes: int) -> None:
        """Records a frame that the broker refuses without reading it."""

    def on_keys_changed(self, now_ms: float, keys: Mapping[str, KeyRole]) -> None:
        """Records new authorised keys, before they are used."""

    def on_timer(self, now_ms: float) -> None:
        """Records that the broker's timer fired."""

    def on_sent(self, now_ms: float, routes: tuple[bytes, ...], frame: bytes) -> None:
        """Records a frame that is about to be sent."""

    def flush(self) -> None:
        """Passes all records to the operating system, so that they outlive this process."""

    def close(self) -> None:
        """Records the end of the broker."""


class ClientTransport(Protocol):
    """A peer's end of a network. It reconnects by itself.

    Attributes:
        address: where it connects to the broker now; empty: nowhere.
    """

    address: str

    def listen(self, on_frame: OnFrame) -> None:
        """Starts to receive; calls ``on_frame(frame)`` for every frame."""

    def send(self, frame: bytes) -> bool:
        """Sends a frame; returns False if the broker can't be reached now."""

    def close(self) -> None:
        """Closes the transport; frames already sent are still delivered if possible.

        No callback comes after this.
        """
