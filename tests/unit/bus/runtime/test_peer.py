"""A peer's shell: which of the broker's frames are of its membership."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus._protocol.core.link import LinkState
from bus._runtime.peer import PeerClient
from bus.messages import Heartbeat, Join, Message, NackCode, Role, WaitEngines, Welcome, codec
from tests.sim.clock import SimScheduler
from tests.sim.makers import make_nack
from tests.unit.bus._builders import envelope

if TYPE_CHECKING:
    import pytest

    from bus._protocol.core.effects import Note
    from bus._runtime.interfaces import OnFrame
    from bus.messages import Envelope

ROLE: Role = "trainer"


class Wire:
    """A transport whose other end is the test."""

    address = ""

    def __init__(self) -> None:
        self.sent: list[tuple[Envelope, Message]] = []
        self._seq = 0

    def listen(self, on_frame: OnFrame) -> None:
        self._on_frame = on_frame

    def send(self, frame: bytes) -> bool:
        self.sent.append(codec.decode(frame))
        return True

    def close(self) -> None:
        pass

    def say(self, message: Message, reply_to: int) -> None:
        self._seq += 1
        told = envelope(message, "broker", boot=9, seq=self._seq, epoch=1, reply_to=reply_to)
        self._on_frame(codec.encode(told))

    def last_join(self) -> int:
        return [head.id for head, message in self.sent if isinstance(message, Join)][-1]


class Joined:
    """A trainer that was let in, and hears nothing any more unless the test says it."""

    def __init__(self) -> None:
        self.wire, self.clock = Wire(), SimScheduler()
        self.heard: list[Message] = []
        self.peer = PeerClient(
            name="trainer",
            group="policy",
            transport=self.wire,
            scheduler=self.clock,
            join=lambda: Join(ROLE, "h", 1, None, None),
            beat=lambda: Heartbeat("running", 0, 0, ""),
            on_message=lambda _, message: self.heard.append(message),
        )
        self.peer.start()
        self.wire.say(Welcome(100, 500, 0), self.wire.last_join())
        assert self.peer.link.state is LinkState.JOINED


def test_a_refusal_of_something_else_is_no_refusal_of_the_join() -> None:
    """What was asked before the broker was missed may be refused when it is heard again: whoever
    asked hears it, and the peer joins."""
    joined = Joined()
    asked = joined.peer.send(WaitEngines(1, 1000))
    joined.clock.run_for(1000)
    assert joined.peer.link.state is LinkState.JOINING
    refused = make_nack(NackCode.PEER_LOST)
    joined.wire.say(refused, asked)
    assert joined.heard[-1] == refused
    assert joined.peer.link.state is LinkState.JOINING
    joined.wire.say(Welcome(100, 500, 0), joined.wire.last_join())
    assert joined.peer.link.state is LinkState.JOINED


def test_a_peer_that_no_broker_answers_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the address, and what keys have to do with it. A broker that is lost later is another
    matter."""
    noted: list[Note] = []
    monkeypatch.setattr(PeerClient, "note", lambda _, note: noted.append(note))
    clock = SimScheduler()
    peer = PeerClient(
        name="e0",
        group="policy",
        broker="tcp://127.0.0.1:1",
        transport=Wire(),
        scheduler=clock,
        on_message=lambda *_: None,
    )
    peer.start()
    clock.run_for(9_900)
    assert noted == []
    clock.run_for(60_000)
    assert [each.event for each in noted] == ["no_broker_answers"]
    assert noted[0].fields["detail"] == (
        "no broker answers at tcp://127.0.0.1:1. If the broker has keys, give --key and "
        "--broker-key"
    )
    noted.clear()
    Joined().clock.run_for(60_000)
    assert [each.event for each in noted] == ["joined", "broker_lost"]


def test_a_refusal_of_any_of_its_joins_is_one() -> None:
    """Several are under way when the broker is slow."""
    joined = Joined()
    joined.clock.run_for(1000)
    first = joined.wire.last_join()
    joined.clock.run_for(6000)
    assert joined.wire.last_join() > first
    joined.wire.say(make_nack(NackCode.FORBIDDEN), first)
    assert joined.peer.link.state is LinkState.REFUSED
