"""How much one peer may ask for: counted in tokens, at the door."""

from __future__ import annotations

import pytest

from bus.errors import DecodeError
from bus.messages import (
    WIRE_MAJOR,
    WIRE_MINOR,
    Envelope,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    Message,
    Nack,
    NackCode,
    Role,
    Status,
    StatusRequest,
    WaitEngines,
    codec,
)
from bus.protocol.broker.broker import Broker
from bus.protocol.broker.config import MAX_GROUPS, BrokerConfig
from bus.protocol.core.access import (
    FRAME_BYTES,
    KIB,
    OPEN_REQUESTS,
    REFUSED_COST,
    STRANGERS_FRAME_BYTES,
    Bucket,
    Limits,
    Rate,
)
from bus.protocol.core.effects import Effect, Note
from tests.unit.bus._builders import TRAINER_JOIN, engine_join, envelope, messages, nack_in

LIMITS = Limits(peer=Rate(100, 1000), stranger=Rate(10, 40), status=Rate(5, 8))
BEAT = Heartbeat("running", 0, 0, "")


class Door:
    """A broker with small limits; each frame is admitted, then received."""

    def __init__(self) -> None:
        self.broker = Broker(BrokerConfig(limits=LIMITS))
        self.now_ms = 0.0
        self.seq = 0

    def say(self, name: str, message: Message, size_bytes: int = 100) -> list[Effect]:
        route = f"{name}#1".encode()
        told = self.broker.admit(route, size_bytes, self.now_ms)
        if told is not None:
            return told
        self.seq += 1
        epoch = 0 if isinstance(message, Join) else 1
        frame = envelope(message, name, seq=self.seq, msg_id=self.seq, epoch=epoch)
        return self.broker.receive(route, frame, message, self.now_ms)

    def taken(self, name: str, message: Message, times: int, size_bytes: int = 100) -> int:
        """How many of so many frames are let in, all at one moment."""
        effects = [self.say(name, message, size_bytes) for _ in range(times)]
        return sum(not limited(each) and each != [] for each in effects)


def limited(effects: list[Effect]) -> bool:
    return any(
        isinstance(each, Nack) and each.code is NackCode.RATE_LIMITED for each in messages(effects)
    )


@pytest.fixture
def door() -> Door:
    return Door()


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    """And no more than its burst after any time."""
    bucket = Bucket(Rate(per_s=10, burst=5), 0.0)
    assert [bucket.take(1, 0.0) for _ in range(6)] == [True] * 5 + [False]
    assert [bucket.take(1, 200.0) for _ in range(3)] == [True, True, False]
    assert sum(bucket.take(1, 1e9) for _ in range(20)) == 5


def test_what_was_charged_is_owed() -> None:
    """Time pays it back."""
    bucket = Bucket(Rate(per_s=10, burst=5), 0.0)
    bucket.charge(25)
    assert not bucket.take(1, 2000.0)
    assert bucket.take(1, 2100.0)


def test_one_peer_over_its_limit_takes_nothing_from_another(door: Door) -> None:
    """The other's heartbeat is answered, however many the first one sends."""
    for name in ("loud", "quiet"):
        door.say(name, engine_join(dp_group=name))
    assert door.taken("loud", BEAT, 5000) < 200
    assert [type(each) for each in messages(door.say("quiet", BEAT))] == [HeartbeatAck]


def test_who_is_limited_is_told_once_a_second_and_served_when_it_is_slower(door: Door) -> None:
    """With the reason, and what becomes of its frames."""
    door.say("loud", engine_join())
    told = [door.say("loud", BEAT) for _ in range(3000)]
    refusals = [each for each in told if limited(each)]
    assert len(refusals) == 1
    nack = nack_in(refusals[0])
    assert "100 frames a second" in nack.detail
    assert nack.retry_after_ms == 1000
    assert [each.event for each in refusals[0] if isinstance(each, Note)] == ["rate_limited"]
    door.now_ms = 1000.0
    assert 90 <= door.taken("loud", BEAT, 1000) <= 110
    assert limited(door.say("loud", BEAT)) is False, "told already in this second"


def test_a_frame_costs_by_its_size(door: Door) -> None:
    """A hundred large ones are as much as thousands of small ones."""
    door.say("t", TRAINER_JOIN)
    door.now_ms = 60_000.0
    assert 9 <= door.taken("t", BEAT, 100, size_bytes=400 * KIB) <= 11


def test_what_is_refused_costs_more(door: Door) -> None:
    """It is answered, and logged."""
    door.say("o", Join("observer", "host", 1, None, None))
    door.now_ms = 60_000.0
    taken = door.taken("o", WaitEngines(1, 1), 1000)
    assert 1000 // (REFUSED_COST + 1) <= taken <= 1000 // (REFUSED_COST + 1) + 1


def test_a_stranger_has_little(door: Door) -> None:
    """Until it joins; and what is full again is forgotten."""
    assert door.taken("x", BEAT, 1000) <= 4
    assert door.broker._strangers
    door.now_ms = 60_000.0
    door.broker.tick(door.now_ms)
    assert not door.broker._strangers


def test_who_comes_and_goes_gets_no_new_tokens(door: Door) -> None:
    """A new bucket per join would be none at all."""
    answered = 0
    for _ in range(100):
        door.say("x", Join("observer", "host", 1, None, None))
        answered += door.taken("x", BEAT, 100)
        door.say("x", Leave(""))
    assert answered < 200


def test_strangers_share_their_questions_for_the_whole_view(door: Door) -> None:
    """Which is large; a peer that has joined asks on."""
    door.say("o", Join("observer", "host", 1, None, None))
    asked = [door.say(f"x{number}", StatusRequest()) for number in range(100)]
    assert sum(isinstance(each, Status) for effects in asked for each in messages(effects)) == 8
    assert [type(each) for each in messages(door.say("o", StatusRequest()))] == [Status]


@pytest.mark.parametrize("role", ["trainer", "follower", "observer", "scheduler"])
def test_a_frame_is_as_large_as_its_senders_role_needs(door: Door, role: Role) -> None:
    """Manifests are a trainer's; more is refused unread, with the bound."""
    strange = nack_in(door.say("p", BEAT, STRANGERS_FRAME_BYTES + 1))
    assert strange.code is NackCode.OVERSIZED
    door.say("p", Join(role, "host", 1, None, None))
    door.now_ms = 60_000.0
    bound = FRAME_BYTES[role]
    assert [type(each) for each in messages(door.say("p", BEAT, bound))] == [HeartbeatAck]
    door.now_ms = 120_000.0
    nack = nack_in(door.say("p", BEAT, bound + 1))
    assert nack.code is NackCode.OVERSIZED
    assert nack.detail == f"frame of {bound + 1} bytes; of role {role} at most {bound}"


def test_a_trainer_has_so_many_requests_open(door: Door) -> None:
    """The next one is refused; none of those that wait is lost."""
    door.say("t", TRAINER_JOIN)
    for _ in range(OPEN_REQUESTS):
        door.now_ms += 20.0
        assert messages(door.say("t", WaitEngines(9, 10**9))) == []
    door.now_ms += 20.0
    nack = nack_in(door.say("t", WaitEngines(9, 10**9)))
    assert nack.code is NackCode.RATE_LIMITED
    assert str(OPEN_REQUESTS) in nack.detail
    group = door.broker.groups["policy"]
    assert group.session.requests.open == OPEN_REQUESTS


def test_groups_that_nobody_is_in_are_forgotten_when_there_are_too_many() -> None:
    """Those that somebody is in stay; when all are, another one is refused."""
    broker = Broker()

    def join(name: str, group: str) -> list[Effect]:
        frame = envelope(TRAINER_JOIN, name, group=group)
        return broker.receive(f"{name}#1".encode(), frame, TRAINER_JOIN, 0.0)

    join("stays", "used")
    for number in range(MAX_GROUPS - 1):
        join(f"t{number}", f"g{number}")
    assert nack_in(join("more", "new")).code is NackCode.RATE_LIMITED
    bye = Leave("")
    for number in range(MAX_GROUPS - 1):
        frame = envelope(bye, f"t{number}", seq=2, group=f"g{number}")
        broker.receive(f"t{number}#1".encode(), frame, bye, 0.0)
    join("more", "new")
    assert set(broker.groups) == {"used", "new"}


def test_a_number_that_would_grow_past_the_wire_is_refused() -> None:
    """An epoch is counted up: what no frame could carry is never taken in."""
    body = codec.encode_body(TRAINER_JOIN)
    head = (WIRE_MAJOR, WIRE_MINOR, "JOIN", 1, 0, "t", 1, "policy")
    with pytest.raises(DecodeError, match="epoch"):
        codec.decode(codec.encode(Envelope(*head, 2**64 - 1, 1, body)))
