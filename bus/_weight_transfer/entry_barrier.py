"""Lets all ends of a communicator agree, on the host, before any of them enters a collective.

A collective ends only if every end takes part. An end on a GPU that waits for a dead one can stop
everything else there: CUDA loads some kernels when they are first used, and such a load waits for
the kernels that run. So no end enters before every end has announced that it will.

The sender is the root. It listens, and each receiver keeps one TCP connection to it. Collectives
are numbered from 1, and several may be announced ahead.

::

    end       state      event                      next      what happens
    receiver  IDLE       announce n                 READY     READY n to the root
    receiver  READY      GO n                       ENTERED   it enters the collective
    root      IDLE       announce n                 READY
    root      READY      READY n of all receivers   ENTERED   GO n to all, then it enters
    any       ENTERED    finish n                   IDLE
    any       ENTERED    for over BEAT_S            ENTERED   asks the other ends whether they live
    any       any        a connection ends; an end  LOST      closes its connections, so that all
                         asked has not answered for           other ends are LOST too, and says so
                         silence_s; a collective
                         takes longer than its
                         time

Invariants:

- An end enters collective n only if all ends have announced n. (The root can't enter before it
  sends GO: NCCL connects on first use, on the host, and that waits for all ends.)
- LOST is final. Nobody enters afterwards.
- The thread that watches the connections calls nothing that could wait for a GPU.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# How long a collective may take before the other ends are asked, and how often they are.
BEAT_S: Final = 0.1

_FRAME: Final = struct.Struct("<cQ")
_READY, _GO, _ASK, _ANSWER = b"R", b"G", b"?", b"!"
CLOSED: Final = "it was closed meanwhile"


@dataclass(slots=True)
class CollectiveEntry:
    """One collective of an end.

    Attributes:
        number: its number, from 1.
        patience_s: how long this end waits until all ends have announced it, in seconds.
        timeout_s: how long it may take once this end has entered and the one before has ended.
        entered_s: when this end entered, in seconds of ``time.monotonic()``; 0: not yet.
    """

    number: int
    patience_s: float
    timeout_s: float
    entered_s: float = 0.0


@dataclass(slots=True, eq=False)
class EndLink:
    """The connection to another end.

    Attributes:
        announced: the last collective that the other end announced (of a root: released).
        asked_s: since when the other end has not answered; 0: it has.
        questioned_s: when it was last asked.
    """

    connection: socket.socket
    name: str
    announced: int = 0
    asked_s: float = 0.0
    questioned_s: float = 0.0
    received: bytearray = field(default_factory=bytearray)

    def send(self, kind: bytes, number: int = 0) -> None:
        """Sends a frame; cuts the connection if the other end reads nothing any more."""
        with contextlib.suppress(OSError):  # the watching thread sees what is wrong
            try:
                whole = self.connection.send(_FRAME.pack(kind, number)) == _FRAME.size
            except BlockingIOError:
                whole = False
            if not whole:
                self.connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[tuple[bytes, int]] | None:
        """Returns the frames that have come, or None if the connection has ended."""
        try:
            some = self.connection.recv(4096)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not some:
            return None
        self.asked_s = 0.0
        self.received += some
        whole = len(self.received) // _FRAME.size * _FRAME.size
        frames = bytes(self.received[:whole])
        del self.received[:whole]
        return list(_FRAME.iter_unpack(frames))


_barriers: weakref.WeakSet[EntryBarrier] = weakref.WeakSet()


def _discard_all() -> None:
    for barrier in list(_barriers):
        barrier.discard()


os.register_at_fork(after_in_child=_discard_all)


class EntryBarrier:
    """One end's part in the agreement. Any thread may use it.

    Args:
        links: the connections by the rank of their other end: of the root to every receiver, of a
            receiver to the root.
        greetings: what the ends said when they met, by rank.
        silence_s: how long an end may leave a question unanswered while others wait inside a
            collective, in seconds.

    Attributes:
        greetings: as given.
    """

    def __init__(
        self, links: dict[int, EndLink], greetings: list[str], *, silence_s: float
    ) -> None:
        self.greetings = greetings
        self._links = links
        self._is_root = 0 not in links
        self._silence_s = silence_s
        self._on_lost: Callable[[str], None] = lambda _: None
        self._changed = threading.Condition()
        self._lost = ""
        self._announced = 0
        self._inside: deque[CollectiveEntry] = deque()
        self._last_done_s = 0.0
        self._wake, self._woken = socket.socketpair()
        for each in (self._wake, self._woken, *(link.connection for link in links.values())):
            each.setblocking(False)
        _barriers.add(self)
        threading.Thread(target=self._watch, name="wavebus-barrier", daemon=True).start()

    def call_when_lost(self, call: Callable[[str], None]) -> None:
        """Has ``call`` called with the reason when this end is lost, or now if it is.

        It runs in the thread that watches, after all connections were shut; or in this thread.
        """
        with self._changed:
            self._on_lost, lost = call, self._lost
        if lost:
            call(lost)

    def discard(self) -> None:
        """Closes the connections of a forked child, in which no thread uses them.

        Else the other ends would not notice the death of this process while the child lives.
        """
        for each in (self._wake, self._woken, *(link.connection for link in self._links.values())):
            each.close()

    def announce(self, timeout_s: float, patience_s: float) -> CollectiveEntry:
        """Announces that this end will enter the next collective.

        Args:
            timeout_s: how long the collective may take, in seconds.
            patience_s: how long to wait for the other ends' announcements, in seconds.

        Raises:
            RuntimeError: an end is gone, or this one was closed.
        """
        with self._changed:
            self.require()
            self._announced += 1
            entry = CollectiveEntry(self._announced, patience_s, timeout_s)
            if not self._is_root:
                self._links[0].send(_READY, entry.number)
        return entry

    @contextlib.contextmanager
    def entering(self, entry: CollectiveEntry) -> Iterator[None]:
        """Waits until all ends have announced a collective; the block must enter it.

        Entries are entered in the order of their announcements, by one thread.

        Args:
            entry: the collective.

        Raises:
            RuntimeError: an end is gone or has not announced it in time, or this one was closed.
                The block was not run.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lost or not self._missing(entry), entry.patience_s)
            self.require()
            if missing := self._missing(entry):
                raise RuntimeError(
                    f"{', '.join(missing)} did not get ready within {entry.patience_s:g} s"
                )
            entry.entered_s = time.monotonic()
            self._inside.append(entry)
            if self._is_root:
                for link in self._links.values():
                    link.send(_GO, entry.number)
        self._wake_up()
        yield

    def finish(self, entry: CollectiveEntry) -> None:
        """Records that this end has done its part in a collective, and in all before it."""
        with self._changed:
            while self._inside and self._inside[0].number <= entry.number:
                self._inside.popleft()
                self._last_done_s = time.monotonic()

    def require(self) -> None:
        """Raises an error if an end is gone or this one was closed.

        Raises:
            RuntimeError: the text says why.
        """
        if self._lost:
            raise RuntimeError(self._lost)

    @property
    def is_lost(self) -> bool:
        """Whether an end is gone, or this one was closed."""
        return bool(self._lost)

    def wait_lost(self, timeout_s: float) -> bool:
        """Waits until an end is gone or this one was closed, and returns whether one was.

        Args:
            timeout_s: how long to wait, in seconds.
        """
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._lost), timeout_s)

    def lose(self, reason: str) -> None:
        """Ends the agreement for all ends, if it has not ended yet; makes no call.

        Args:
            reason: why, for later errors of this end.
        """
        with self._changed:
            if self._lost:
                return
            self._lost = reason
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.connection.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
        self._wake_up()

    def close(self) -> None:
        """Leaves the communicator; all other ends are lost then."""
        self.lose(CLOSED)

    def _missing(self, entry: CollectiveEntry) -> list[str]:
        links = self._links.values()
        return [link.name for link in links if link.announced < entry.number]

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"w")

    # -- the watching thread ---------------------------------------------------------------

    def _watch(self) -> None:
        try:
            with self._wake, self._woken, selectors.DefaultSelector() as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                for link in self._links.values():
                    selector.register(link.connection, selectors.EVENT_READ, link)
                while not self._lost:
                    self._watch_once(selector)
        finally:
            for link in self._links.values():
                link.connection.close()

    def _watch_once(self, selector: selectors.BaseSelector) -> None:
        before_s = time.monotonic()
        busy = bool(self._inside) or any(link.asked_s for link in self._links.values())
        ready = selector.select(BEAT_S if busy else None)
        now = time.monotonic()
        stood_s = now - before_s if busy and now - before_s > BEAT_S + self._silence_s / 2 else 0.0
        for key, _ in ready:
            if key.data is None:
                self._woken.recv(4096)
            elif not self._read(key.data):
                own = f"; this process had not run for {stood_s:.1f} s" if stood_s else ""
                self._fail(f"{key.data.name} is closed or gone{own}")
        self._look(now, stood_still=bool(stood_s))

    def _read(self, link: EndLink) -> bool:
        """Takes what an end has sent; returns False if its connection has ended."""
        frames = link.receive()
        return frames is not None and all(self._take(link, *frame) for frame in frames)

    def _take(self, link: EndLink, kind: bytes, number: int) -> bool:
        """Handles a frame; returns False if no end of this kind sends it."""
        if kind == (_READY if self._is_root else _GO):
            with self._changed:
                link.announced = max(link.announced, number)
                self._changed.notify_all()
        elif kind == _ASK:
            link.send(_ANSWER)
            if self._is_root:  # whoever asks waits inside for an end that only the root can ask
                self._ask(time.monotonic())
        elif kind != _ANSWER:
            return False
        return True

    def _look(self, now: float, *, stood_still: bool) -> None:
        """Asks the other ends if a collective takes long; gives up if it can't end any more."""
        with self._changed:
            first = self._inside[0] if self._inside else None
            since_s = max(first.entered_s, self._last_done_s) if first else now
        if now - since_s >= BEAT_S:
            self._ask(now)
        for link in self._links.values():
            if link.asked_s and stood_still:
                link.asked_s = now  # it was this process that stood still
            if link.asked_s and now - link.asked_s >= self._silence_s:
                self._fail(f"{link.name} has been silent for {self._silence_s:g} s")
        if first and now - since_s >= first.timeout_s:
            self._fail(f"not all ends took part within {first.timeout_s:g} s")

    def _ask(self, now: float) -> None:
        for link in self._links.values():
            if not link.asked_s and now - link.questioned_s >= BEAT_S:
                link.asked_s = link.questioned_s = now
                link.send(_ASK)

    def _fail(self, reason: str) -> None:
        if not self._lost:
            self.lose(reason)
            self._on_lost(reason)
