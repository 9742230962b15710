"""A peer's membership: it joins, beats, misses the broker and joins again."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from bus._protocol.core.effects import Effect, Note
from bus._protocol.core.link import LATE_MS, Link, LinkConfig, LinkState
from bus.messages import (
    Ack,
    Envelope,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    Message,
    NackCode,
    Resume,
    Role,
    Step,
    Welcome,
)
from tests.sim.makers import make_nack
from tests.unit.bus._builders import envelope, facts, messages

CONFIG = LinkConfig(retry_ms=500, patience_ms=8_000)
_S = LinkState


class Driver:
    """A link, and a broker that answers when the test says so."""

    def __init__(self, role: Role = "engine") -> None:
        engine = facts() if role == "engine" else None
        self.link = Link(
            group="policy",
            join=lambda: Join(role, "h", 1, engine, None),
            beat=lambda: Heartbeat("running", 0, 0, ""),
            config=CONFIG,
        )
        self.seq = 0

    def say(
        self, message: Message, now_ms: float, *, epoch: int = 1, boot: int = 9
    ) -> list[Effect]:
        self.seq += 1
        told = self.envelope(message, epoch=epoch, boot=boot)
        if not self.link.fresh(told, now_ms):
            return []
        return self.link.receive(told, message, now_ms)

    def envelope(self, message: Message, *, epoch: int = 1, boot: int = 9) -> Envelope:
        return envelope(message, "broker", boot=boot, seq=self.seq, epoch=epoch)

    def to(self, state: LinkState) -> Driver:
        self.link.start(0.0)
        if state in (_S.JOINED, _S.CLOSED):
            self.say(Welcome(1000, 5000, 3), 0.0)
        if state is _S.CLOSED:
            self.link.leave("bye")
        if state is _S.REFUSED:
            self.say(make_nack(NackCode.MALFORMED), 0.0)
        assert self.link.state is state
        return self


def sent(effects: list[Effect]) -> list[type[Message]]:
    return [type(each) for each in messages(effects)]


EVENTS: dict[str, Message] = {
    "welcome": Welcome(700, 3000, 4),
    "heartbeat_ack": HeartbeatAck(8, "u1"),
    "not_joined": make_nack(NackCode.NOT_JOINED),
    "name_taken": make_nack(NackCode.NAME_TAKEN),
    "group_held": make_nack(NackCode.GROUP_HELD),
    "final": make_nack(NackCode.MALFORMED),
    "stale": make_nack(NackCode.STALE),
    "other": Ack(Step.ARM, "u1", 0, 0, 0.0, "", ()),
}
NEXT = {
    (_S.JOINING, "welcome"): _S.JOINED,
    (_S.JOINING, "final"): _S.REFUSED,
    (_S.JOINED, "not_joined"): _S.JOINING,
}


@pytest.mark.parametrize(("state", "event"), list(product(LinkState, EVENTS)))
def test_every_frame_of_the_broker_in_every_state(state: LinkState, event: str) -> None:
    """The table says what follows; everything else leaves the state and sends nothing."""
    driver = Driver().to(state)
    effects = driver.say(EVENTS[event], 10.0)
    assert driver.link.state is NEXT.get((state, event), state)
    assert sent(effects) == ([Join] if (state, event) == (_S.JOINED, "not_joined") else [])


def test_it_asks_until_it_is_let_in() -> None:
    """A broker that has the JOIN gets answer_ms for it; one that is not there is tried often."""
    link = Driver().link
    assert sent(link.start(0.0)) == [Join]
    assert link.tick(4_999.0) == []
    assert sent(link.tick(5_000.0)) == [Join]
    link.on_join_unsent(5_000.0)
    assert link.tick(5_499.0) == []
    assert sent(link.tick(5_500.0)) == [Join]
    assert link.next_deadline_ms() == 10_500.0


def test_an_answer_that_waits_unread_is_read_before_it_asks_again() -> None:
    """This process did not run for a while; its next look at the time finds it joined."""
    driver = Driver()
    driver.link.start(0.0)
    assert driver.link.tick(30_000.0) == []
    assert driver.link.next_deadline_ms() == 30_000.0 + LATE_MS
    driver.say(Welcome(1000, 5000, 3), 30_001.0)
    assert driver.link.next_deadline_ms() == 31_001.0
    # The same for a broker that seems silent; and one that is, is asked though each tick is late.
    assert driver.link.tick(60_000.0) == []
    driver.say(HeartbeatAck(0, ""), 60_001.0)
    assert sent(driver.link.tick(60_000.0 + LATE_MS)) == [Heartbeat]
    assert driver.link.tick(90_000.0) == []
    assert sent(driver.link.tick(99_000.0)) == [Join]


def test_a_join_that_was_dropped_with_many_frames_comes_again() -> None:
    """As soon as the broker reads this peer again."""
    driver = Driver()
    driver.link.start(0.0)
    nack = replace(make_nack(NackCode.RATE_LIMITED), retry_after_ms=1_000)
    assert driver.say(nack, 10.0) == []
    assert driver.link.tick(1_009.0) == []
    assert sent(driver.link.tick(1_010.0)) == [Join]


def test_a_welcome_brings_the_beat_and_the_epoch() -> None:
    """The broker says how often."""
    driver = Driver()
    driver.link.start(0.0)
    driver.say(Welcome(700, 3000, 4), 10.0, epoch=6)
    link = driver.link
    assert (link.epoch, link.version, link.heartbeat_ms) == (6, 4, 700.0)
    assert link.next_deadline_ms() == 710.0
    assert sent(link.tick(710.0)) == [Heartbeat]
    assert link.next_deadline_ms() == 1410.0


def test_the_run_of_the_last_welcome_is_kept() -> None:
    """While it looks for its broker, too: it tells the next one. A late WELCOME changes nothing."""
    driver = Driver()
    driver.link.start(0.0)
    assert driver.link.run == ""
    driver.say(Welcome(700, 3000, 4, "one"), 10.0)
    driver.say(Welcome(700, 3000, 4, "late"), 11.0)
    assert driver.link.run == "one"
    driver.say(make_nack(NackCode.NOT_JOINED), 20.0)
    assert driver.link.run == "one"
    driver.say(Welcome(700, 3000, 4, "other"), 30.0)
    assert driver.link.run == "other"


def test_a_silent_broker_is_missed_and_asked_again() -> None:
    """After its own patience; heard again, it is not."""
    driver = Driver().to(_S.JOINED)
    driver.say(HeartbeatAck(0, ""), 4000.0)
    assert sent(driver.link.tick(9000.0)) == [Heartbeat]
    effects = driver.link.tick(10_000.0)
    assert sent(effects) == [Join]
    assert [each.event for each in effects if isinstance(each, Note)] == ["broker_lost"]
    assert driver.link.state is _S.JOINING


@pytest.mark.parametrize("code", [NackCode.NAME_TAKEN, NackCode.GROUP_HELD])
def test_a_name_that_is_held_is_waited_for_so_long(code: NackCode) -> None:
    """Its owner may be dead and not yet missed; after the patience it is final. Noted once."""
    driver = Driver().to(_S.JOINING)
    noted = driver.say(make_nack(code), 100.0)
    assert [each.event for each in noted if isinstance(each, Note)] == ["join_waits"]
    assert driver.link.state is _S.JOINING
    assert sent(driver.link.tick(600.0)) == [Join]
    assert driver.say(make_nack(code), 8_099.0) == []
    assert driver.link.state is _S.JOINING
    driver.say(make_nack(code), 8_100.0)
    assert driver.link.state is _S.REFUSED
    assert driver.link.refusal is not None
    assert driver.link.refusal.code is code
    assert driver.link.next_deadline_ms() is None
    assert driver.link.tick(99_999.0) == []


@pytest.mark.parametrize("state", [_S.JOINING, _S.JOINED])
def test_leaving_is_said_by_who_asked_to_be_in(state: LinkState) -> None:
    """Also before the answer: the broker may have let it in, and would miss it for seconds.

    It is said once; afterwards nothing more is sent.
    """
    driver = Driver().to(state)
    assert sent(driver.link.leave("bye")) == [Leave]
    assert driver.link.leave("bye") == []
    assert driver.link.tick(99_999.0) == []


def test_who_is_not_in_leaves_without_a_word() -> None:
    """Who never asked, or was refused."""
    assert Driver().link.leave("bye") == []
    assert Driver().to(_S.REFUSED).link.leave("bye") == []


def test_who_leaves_while_it_looks_for_its_broker_says_so() -> None:
    """A broker that was silent for long may have it still."""
    driver = Driver().to(_S.JOINED)
    driver.link.tick(6_000.0)
    driver.link.tick(6_000.0 + LATE_MS)
    assert driver.link.state is _S.JOINING
    assert sent(driver.link.leave("bye")) == [Leave]


def test_old_and_doubled_frames_of_one_broker_are_dropped() -> None:
    """Numbers only grow; a new broker begins anew."""
    driver = Driver()
    first = envelope(HeartbeatAck(0, ""), "broker", boot=9, seq=5)
    older = envelope(HeartbeatAck(0, ""), "broker", boot=9, seq=4)
    other = envelope(HeartbeatAck(0, ""), "broker", boot=10, seq=1)
    assert driver.link.fresh(first, 1.0)
    assert not driver.link.fresh(first, 2.0)
    assert not driver.link.fresh(older, 3.0)
    assert driver.link.last_heard_ms == 1.0
    assert driver.link.fresh(other, 4.0)
    assert driver.link.last_heard_ms == 4.0


def test_an_engine_hears_of_later_epochs_and_a_trainer_keeps_its_own() -> None:
    """An engine tells the next broker how far the fencing had come; a trainer must notice
    that it was replaced."""
    engine = Driver("engine").to(_S.JOINED)
    engine.say(HeartbeatAck(0, ""), 5.0, epoch=4)
    assert engine.link.epoch == 4
    engine.say(HeartbeatAck(0, ""), 5.0, epoch=2)
    assert engine.link.epoch == 4
    engine.say(Resume("u1"), 5.0, epoch=6)
    assert engine.link.epoch == 6
    trainer = Driver("trainer").to(_S.JOINED)
    trainer.say(HeartbeatAck(0, ""), 5.0, epoch=4)
    assert trainer.link.epoch == 1


def test_a_broker_that_is_gone_lets_nobody_keep_its_epoch() -> None:
    """Its welcome was long on its way; the one of the broker that is there has a later epoch."""
    trainer = Driver("trainer")
    trainer.link.start(0.0)
    trainer.say(Welcome(1000, 5000, 3), 10.0, epoch=1, boot=8)
    assert trainer.link.epoch == 1
    for epoch in (2, 1):
        assert trainer.say(Welcome(1000, 5000, 3), 20.0, epoch=epoch, boot=9) == []
        assert (trainer.link.state, trainer.link.epoch) == (_S.JOINED, 2)
