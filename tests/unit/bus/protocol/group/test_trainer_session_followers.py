"""The other ranks of a trainer hear of what rank 0 says, whenever either of them speaks."""

from __future__ import annotations

import pytest

from bus._protocol.core.effects import Effect, Send
from bus._protocol.group.trainer_session import UPDATES_KEPT
from bus.messages import (
    AwaitStep,
    Heartbeat,
    Join,
    Leave,
    Nack,
    NackCode,
    TrainerPoint,
    TrainerStep,
)
from tests.unit.bus._builders import messages, nack_in
from tests.unit.bus.protocol.broker.test_broker import Bench

FOLLOWER = Join("follower", "h", 1, None, None)
FAILED = Nack(NackCode.MANIFEST_REFUSED, "arm", "u1", 0, "no", "", "e0", "w", "", 0)


@pytest.fixture
def bench() -> Bench:
    """A trainer of three ranks."""
    made = Bench()
    made.trainer()
    for name in ("f1", "f2"):
        made.say(name, FOLLOWER)
    return made


def step(
    number: int,
    point: TrainerPoint,
    version: int = 0,
    failure: Nack | None = None,
    meeting: bytes = b"",
) -> TrainerStep:
    return TrainerStep(number, point, version, failure, meeting)


def told(effects: list[Effect]) -> dict[tuple[bytes, int], TrainerStep]:
    """Which request of whom was answered with what."""
    return {
        (each.routes[0], each.reply_to): each.message
        for each in effects
        if isinstance(each, Send) and isinstance(each.message, TrainerStep)
    }


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_is_gone_is_told_to_rank_zero(bench: Bench, *, leaves: bool) -> None:
    """At once, by a NACK of no request: it may wait for that rank in a collective."""
    if leaves:
        effects = bench.say("f1", Leave("a bug"))
    else:
        bench.now_ms = 4000.0
        for name in ("t", "f2"):
            bench.say(name, Heartbeat("running", 0, 0, ""))
        bench.now_ms = 6000.0
        effects = bench.broker.tick(bench.now_ms)
    (sent,) = [each for each in effects if isinstance(each, Send)]
    assert (sent.routes, sent.reply_to) == ((b"t#1",), 0)
    assert isinstance(sent.message, Nack)
    assert (sent.message.code, sent.message.peer) == (NackCode.PEER_LOST, "f1")


def test_a_rank_that_comes_first_waits(bench: Bench) -> None:
    """GO answers all who wait for it, and rank 0 hears that it was heard."""
    assert bench.say("f1", AwaitStep(1, "go"), msg_id=11) == []
    assert bench.say("f2", AwaitStep(1, "go"), msg_id=21) == []
    answered = told(bench.say("t", step(1, "go"), msg_id=31))
    assert answered == dict.fromkeys([(b"f1#1", 11), (b"f2#1", 21), (b"t#1", 31)], step(1, "go"))


def test_go_says_where_ranks_meet(bench: Bench) -> None:
    """As rank 0 said it: the broker does not read it."""
    bench.say("f1", AwaitStep(1, "go"), msg_id=11)
    answered = told(bench.say("t", step(1, "go", meeting=b"where"), msg_id=31))
    assert answered[b"f1#1", 11].meeting == b"where"


def test_a_rank_that_comes_late_hears_at_once(bench: Bench) -> None:
    bench.say("t", step(1, "go"))
    bench.say("t", step(1, "end", 7))
    assert told(bench.say("f1", AwaitStep(1, "go"), msg_id=1)) == {(b"f1#1", 1): step(1, "go")}
    assert told(bench.say("f1", AwaitStep(1, "end"), msg_id=2)) == {(b"f1#1", 2): step(1, "end", 7)}


def test_what_failed_before_go_answers_who_waits_for_it(bench: Bench) -> None:
    """No rank gathers for an update that was refused; what succeeded is no GO."""
    ended = step(1, "end", 0, FAILED)
    bench.say("f1", AwaitStep(1, "go"), msg_id=1)
    assert told(bench.say("t", ended))[b"f1#1", 1] == ended
    assert told(bench.say("f2", AwaitStep(1, "go"), msg_id=2)) == {(b"f2#1", 2): ended}
    bench.say("t", step(2, "end", 8))
    assert bench.say("f1", AwaitStep(2, "go")) == []


def test_asked_again_it_waits_once(bench: Bench) -> None:
    """The newest request is answered, under its own id."""
    for msg_id in (1, 1, 2):
        bench.say("f1", AwaitStep(1, "go"), msg_id=msg_id)
    answered = told(bench.say("t", step(1, "go"), msg_id=9))
    assert set(answered) == {(b"f1#1", 2), (b"t#1", 9)}
    assert set(told(bench.say("t", step(1, "go"), msg_id=9))) == {(b"t#1", 9)}


def test_another_update_answers_nobody(bench: Bench) -> None:
    bench.say("f1", AwaitStep(2, "go"))
    assert set(told(bench.say("t", step(1, "go"), msg_id=9))) == {(b"t#1", 9)}


def test_a_rank_0_that_goes_is_told(bench: Bench) -> None:
    """And what it said is forgotten: its successor counts anew."""
    bench.say("t", step(1, "go"))
    bench.say("f1", AwaitStep(1, "end"), msg_id=1)
    (failed,) = told(bench.say("t", Leave("closed"))).values()
    assert failed.failure is not None
    assert failed.failure.code is NackCode.CANCELLED
    assert "closed" in failed.failure.detail
    bench.trainer("next", boot=2)
    assert bench.say("f1", AwaitStep(1, "go")) == []


def test_a_rank_that_asks_again_after_rank_0_went_is_told_again(bench: Bench) -> None:
    """Its answer may have been lost, with its connection. What it asks anew is for a successor."""
    bench.say("f1", AwaitStep(1, "go"), msg_id=1)
    failed = told(bench.say("t", Leave("closed")))[b"f1#1", 1]
    assert bench.say("f2", AwaitStep(1, "go"), msg_id=1) == []
    assert told(bench.say("f1", AwaitStep(1, "go"), msg_id=1)) == {(b"f1#1", 1): failed}
    bench.say("f1", FOLLOWER, route="f1#1/1")
    assert told(bench.say("f1", AwaitStep(1, "go"), msg_id=1, route="f1#1/1")) == {
        (b"f1#1/1", 1): failed
    }
    assert bench.say("f1", AwaitStep(1, "go"), msg_id=2, route="f1#1/1") == []


def test_a_follower_that_goes_is_not_waited_for(bench: Bench) -> None:
    bench.say("f1", AwaitStep(1, "go"))
    bench.say("f1", Leave("closed"))
    assert set(told(bench.say("t", step(1, "go"), msg_id=9))) == {(b"t#1", 9)}


def test_old_updates_are_forgotten(bench: Bench) -> None:
    for number in range(1, UPDATES_KEPT + 2):
        bench.say("t", step(number, "go"))
    assert bench.say("f1", AwaitStep(1, "go")) == []
    assert messages(bench.say("f2", AwaitStep(2, "go")))


def test_only_rank_0_speaks_and_only_others_ask(bench: Bench) -> None:
    """A follower commands nothing, and rank 0 has nobody to follow."""
    assert nack_in(bench.say("f1", step(1, "go"))).code is NackCode.FORBIDDEN
    assert nack_in(bench.say("t", AwaitStep(1, "go"))).code is NackCode.FORBIDDEN
