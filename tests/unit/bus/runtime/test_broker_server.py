"""The broker's process: what it does first when it did not run for a while."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from bus._protocol.core.config import BrokerConfig
from bus._runtime.broker_server import BrokerServer
from bus.messages import Heartbeat, Message, codec
from tests.unit.bus._builders import engine_join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bus._runtime.interfaces import OnRoutedFrame

CONFIG = BrokerConfig(heartbeat_ms=1000, peer_timeout_ms=5000)


@dataclass
class Timer:
    when_ms: float
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class Stage:
    """The network and the clock of a broker that may stop; timers run when it runs."""

    now: float = 0.0
    timers: list[Timer] = field(default_factory=list)
    seq: int = 0

    def __post_init__(self) -> None:
        self.server = BrokerServer(self, self, CONFIG, boot=1)
        self.server.start()
        for name in ("e0", "e1"):
            self.say(name, engine_join(dp_group=name))
            self.say(name, Heartbeat("running", 0, 0, ""))

    @property
    def peers(self) -> set[str]:
        return set(self.server.machine.peers.by_name)

    def say(self, name: str, message: Message) -> None:
        self.seq += 1
        frame = codec.encode_frame(message, name, 1, self.seq, group="policy")
        self.on_frame(name.encode(), frame, "")

    def run_timers(self) -> None:
        while due := [t for t in self.timers if t.when_ms <= self.now and not t.is_cancelled]:
            first = min(due, key=lambda timer: timer.when_ms)
            self.timers.remove(first)
            first.callback()

    # a scheduler

    def now_ms(self) -> float:
        return self.now

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when_ms, callback))
        return self.timers[-1]

    # a transport

    def listen(self, on_frame: OnRoutedFrame) -> None:
        self.on_frame = on_frame

    def send(self, _routes: Iterable[bytes], _frame: bytes) -> list[bytes]:
        return []

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("stopped_ms", "keeps"), [(5_500.0, True), (9_000.0, False)])
def test_a_broker_that_did_not_run_reads_before_it_misses_a_peer(
    stopped_ms: float, *, keeps: bool
) -> None:
    """Unless it was for so long that leases may be over. Who says nothing either, is missed."""
    stage = Stage()
    stage.run_timers()
    stage.now += stopped_ms
    stage.run_timers()
    assert stage.peers == ({"e0", "e1"} if keeps else set())
    stage.say("e0", engine_join(dp_group="e0"))
    stage.run_timers()
    assert stage.peers == ({"e0", "e1"} if keeps else {"e0"})
    stage.now += CONFIG.heartbeat_ms
    stage.run_timers()
    assert stage.peers == {"e0"}
