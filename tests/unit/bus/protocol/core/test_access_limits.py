"""How much one peer may ask for: counted in tokens, as its frames come in."""

from __future__ import annotations

import pytest

from bus._protocol.broker.broker import Broker
from bus._protocol.broker.group_table import MAX_GROUPS
from bus._protocol.core.access import (
    FRAME_BYTES,
    KIB,
    OPEN_REQUESTS,
    REFUSED_COST,
    STRANGERS_FRAME_BYTES,
    Bucket,
    Limits,
    Rate,
)
from bus._protocol.core.config import BrokerConfig
from bus._protocol.core.effects import Effect, Note
from bus.errors import DecodeError
from bus.messages import (
    WIRE_VERSION,
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
from tests.unit.bus._builders import TRAINER_JOIN, engine_join, envelope, messages, nack_in

LIMITS = Limits(peer=Rate(100, 1000), stranger=Rate(10, 40), status=Rate(5, 8))
BEAT = Heartbeat("running", 0, 0, "")


class Front:
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
def front() -> Front:
    return Front()


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


def test_one_peer_over_its_limit_takes_nothing_from_another(front: Front) -> None:
    """The other's heartbeat is answered, however many the first one sends."""
    for name in ("loud", "quiet"):
        front.say(name, engine_join(dp_group=name))
    assert front.taken("loud", BEAT, 5000) < 200
    assert [type(each) for each in messages(front.say("quiet", BEAT))] == [HeartbeatAck]


def test_who_is_limited_is_told_once_a_second_and_served_when_it_is_slower(front: Front) -> None:
    """With the reason, and what becomes of its frames."""
    front.say("loud", engine_join())
    told = [front.say("loud", BEAT) for _ in range(3000)]
    refusals = [each for each in told if limited(each)]
    assert len(refusals) == 1
    nack = nack_in(refusals[0])
    assert "100 frames a second" in nack.detail
    assert nack.retry_after_ms == 1000
    assert [each.event for each in refusals[0] if isinstance(each, Note)] == ["rate_limited"]
    front.now_ms = 1000.0
    assert 90 <= front.taken("loud", BEAT, 1000) <= 110
    assert limited(front.say("loud", BEAT)) is False, "told already in this second"


def test_a_frame_costs_by_its_size(front: Front) -> None:
    """A hundred large ones are as much as thousands of small ones."""
    front.say("t", TRAINER_JOIN)
    front.now_ms = 60_000.0
    assert 9 <= front.taken("t", BEAT, 100, size_bytes=400 * KIB) <= 11


def test_what_is_refused_costs_more(front: Front) -> None:
    """It is answered, and logged."""
    front.say("o", Join("observer", "host", 1, None, None))
    front.now_ms = 60_000.0
    taken = front.taken("o", WaitEngines(1, 1), 1000)
    assert 1000 // (REFUSED_COST + 1) <= taken <= 1000 // (REFUSED_COST + 1) + 1


def test_a_stranger_has_little(front: Front) -> None:
    """Until it joins; and what is full again is forgotten."""
    assert front.taken("x", BEAT, 1000) <= 4
    assert front.broker._strangers
    front.now_ms = 60_000.0
    front.broker.tick(front.now_ms)
    assert not front.broker._strangers


def test_who_comes_and_goes_gets_no_new_tokens(front: Front) -> None:
    """A new bucket per join would be none at all."""
    answered = 0
    for _ in range(100):
        front.say("x", Join("observer", "host", 1, None, None))
        answered += front.taken("x", BEAT, 100)
        front.say("x", Leave(""))
    assert answered < 200


def test_strangers_share_their_questions_for_the_whole_view(front: Front) -> None:
    """Which is large; a peer that has joined asks on."""
    front.say("o", Join("observer", "host", 1, None, None))
    asked = [front.say(f"x{number}", StatusRequest()) for number in range(100)]
    assert sum(isinstance(each, Status) for effects in asked for each in messages(effects)) == 8
    assert [type(each) for each in messages(front.say("o", StatusRequest()))] == [Status]


@pytest.mark.parametrize("role", ["trainer", "follower", "observer", "scheduler"])
def test_a_frame_is_as_large_as_its_senders_role_needs(front: Front, role: Role) -> None:
    """Manifests are a trainer's; more is refused unread, with the bound."""
    strange = nack_in(front.say("p", BEAT, STRANGERS_FRAME_BYTES + 1))
    assert strange.code is NackCode.NOT_JOINED  # so that it joins a broker that was restarted
    front.say("p", Join(role, "host", 1, None, None))
    front.now_ms = 60_000.0
    bound = FRAME_BYTES[role]
    assert [type(each) for each in messages(front.say("p", BEAT, bound))] == [HeartbeatAck]
    front.now_ms = 120_000.0
    nack = nack_in(front.say("p", BEAT, bound + 1))
    assert nack.code is NackCode.OVERSIZED
    assert nack.detail == (
        f"the frame has {bound + 1} bytes; a peer of role {role} may send at most {bound}"
    )


def test_a_trainer_has_so_many_requests_open(front: Front) -> None:
    """The next one is refused; none of those that wait is lost."""
    front.say("t", TRAINER_JOIN)
    for _ in range(OPEN_REQUESTS):
        front.now_ms += 20.0
        assert messages(front.say("t", WaitEngines(9, 10**9))) == []
    front.now_ms += 20.0
    nack = nack_in(front.say("t", WaitEngines(9, 10**9)))
    assert nack.code is NackCode.RATE_LIMITED
    assert str(OPEN_REQUESTS) in nack.detail
    group = front.broker.groups["policy"]
    assert group.session.open_requests == OPEN_REQUESTS


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
    head = (WIRE_VERSION, "JOIN", 1, 0, "t", 1, "policy")
    with pytest.raises(DecodeError, match="epoch"):
        codec.decode(codec.encode(Envelope(*head, 2**64 - 1, 1, body)))
