"""A journal in memory, of a broker in a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bus._journal.reader import Entry
from bus._journal.records import (
    MAGIC,
    BrokerClosed,
    FileBegan,
    FrameReceived,
    FrameRefused,
    FrameSent,
    KeysChanged,
    Record,
    TimerFired,
    pack,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bus._protocol.core.access import KeyRole
    from bus._protocol.core.config import BrokerConfig
    from bus._runtime.interfaces import Scheduler


class MemoryJournal:
    """Implements :class:`bus._runtime.interfaces.Journal`. ``flushed`` counts the records that
    would outlive the process."""

    def __init__(
        self,
        boot: int,
        config: BrokerConfig,
        scheduler: Scheduler,
        keys: Mapping[str, KeyRole] | None = None,
    ) -> None:
        self._scheduler = scheduler
        known = None if keys is None else dict(keys)
        now_ms = scheduler.now_ms()  # the clock on the wall began with the simulation
        self.began = FileBegan(boot, 0, 0, now_ms, now_ms / 1000, "simulated", config, known)
        self.records: list[Record] = []
        self.flushed = 0

    def on_received(self, now_ms: float, route: bytes, frame: bytes, user: str) -> None:
        self.records.append(FrameReceived(now_ms, route, frame, user))

    def on_refused(self, now_ms: float, route: bytes, size_bytes: int) -> None:
        self.records.append(FrameRefused(now_ms, route, size_bytes))

    def on_keys_changed(self, now_ms: float, keys: Mapping[str, KeyRole]) -> None:
        self.records.append(KeysChanged(now_ms, dict(keys)))

    def on_timer(self, now_ms: float) -> None:
        self.records.append(TimerFired(now_ms))

    def on_sent(self, now_ms: float, routes: tuple[bytes, ...], frame: bytes) -> None:
        self.records.append(FrameSent(now_ms, routes, frame))

    def flush(self) -> None:
        self.flushed = len(self.records)

    def close(self) -> None:
        self.records.append(BrokerClosed(self._scheduler.now_ms()))
        self.flush()

    def entries(self) -> list[Entry]:
        """As they would be read back."""
        path = Path(f"life-{self.began.boot}")
        head = Entry(path, 0, 0, self.began, self.began)
        rest = enumerate(self.records, 1)
        return [head, *(Entry(path, 0, number, each, self.began) for number, each in rest)]

    def data(self) -> bytes:
        """As it would lie in a file."""
        return MAGIC + b"".join(map(pack, [self.began, *self.records]))
