"""Who is stuck for good is sent RESTART, if somebody starts it anew; else the status says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bus._protocol.broker.broker import Broker
from bus._protocol.core.config import BrokerConfig
from bus._protocol.core.effects import Effect, Note, Send
from bus._protocol.dp.restarts import AGAIN_MS
from bus.messages import CoreStatus, Heartbeat, Leave, PauseLocal, Restart, Status, StatusRequest
from tests.unit.bus._builders import TRAINER_JOIN, engine_join, envelope

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus.messages import CorePhase, Message

CONFIG = BrokerConfig(peer_timeout_ms=5_000, step_timeout_ms=20_000)
BEAT = Heartbeat("running", 0, 0, "")
PAUSE = PauseLocal("u1", "keep", True, 30_000, 600_000, 0, "keep")


class Bench:
    """A broker, and peers that say one frame at a time."""

    def __init__(self) -> None:
        self.broker = Broker(CONFIG)
        self.now_ms = 0.0
        self.epoch = 0
        self._said = 0
        self.effects: list[Effect] = []  # all of them

    def say(self, sender: str, message: Message, *, boot: int = 1) -> list[Effect]:
        self._said += 1
        told = envelope(
            message, sender, boot=boot, seq=self._said, msg_id=self._said, epoch=self.epoch
        )
        made = self.broker.receive(f"{sender}#{boot}".encode(), told, message, self.now_ms)
        self.effects += made
        return made

    def ranks(self, *supervised: bool) -> None:
        """A DP group of so many ranks, r0 and on."""
        for rank, each in enumerate(supervised):
            facts = {"dp_group": "moe", "dp_rank": rank, "dp_size": len(supervised)}
            self.say(f"r{rank}", engine_join(**facts, supervised=each))  # type: ignore[arg-type]

    def dense(self, *, supervised: bool) -> None:
        self.say("e0", engine_join(dp_group="e0", supervised=supervised))

    def live(self, to_ms: float, **pages: tuple[CorePhase, float]) -> list[Effect]:
        """Second by second until then: all that have a page tell since when they stand in it."""
        began = len(self.effects)
        while self.now_ms < to_ms:
            self.now_ms = min(self.now_ms + 1_000.0, to_ms)
            for name, (phase, since_ms) in pages.items():
                self.say(name, BEAT)
                stalled_ms = 0.0 if phase == "idle" else self.now_ms - since_ms
                self.say(name, CoreStatus(phase, stalled_ms, 7, 0, 1))
            if self.epoch:
                self.say("t", Heartbeat("running", 0, 0, ""))
            self.effects += self.broker.tick(self.now_ms)
        return self.effects[began:]

    def diagnosis(self) -> str:
        made = self.say("o", StatusRequest())
        (status,) = [e.message for e in made if isinstance(e, Send)]
        assert isinstance(status, Status)
        return status.groups[0].dp_groups[0].diagnosis


def asked(effects: Iterable[Effect]) -> list[tuple[str, ...]]:
    """Who is told to restart, time by time."""
    return [
        tuple(route.decode() for route in each.routes)
        for each in effects
        if isinstance(each, Send) and isinstance(each.message, Restart)
    ]


def events(effects: Iterable[Effect]) -> list[str]:
    return [each.event for each in effects if isinstance(each, Note)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_all_ranks_of_a_wedged_group_are_restarted(bench: Bench) -> None:
    """At the same time, with the diagnosis; and again for as long as they are there."""
    bench.ranks(True, True)
    before = bench.live(10_000, r0=("sync", 0.0), r1=("idle", 0.0))
    assert asked(before) == []
    after = bench.live(11_000, r0=("sync", 0.0), r1=("idle", 0.0))
    assert asked(after) == [("r0#1", "r1#1")]
    (sent,) = [e for e in after if isinstance(e, Send) and isinstance(e.message, Restart)]
    assert isinstance(sent.message, Restart)
    assert "rank 0 (r0) has been in the all-reduce" in sent.message.reason
    assert "rank 1 (r1) has been idle" in sent.message.reason
    assert events(after).count("restart_asked") == 1
    assert asked(bench.live(11_000 + AGAIN_MS - 1, r0=("sync", 0.0), r1=("idle", 0.0))) == []
    again = bench.live(11_000 + AGAIN_MS, r0=("sync", 0.0), r1=("idle", 0.0))
    assert asked(again) == [("r0#1", "r1#1")]
    assert "restart_asked" not in events(again)


@pytest.mark.parametrize("supervised", [(False, False), (True, False)])
def test_where_nobody_supervises_the_status_says_what_to_do(
    bench: Bench, supervised: tuple[bool, bool]
) -> None:
    """Also where only some ranks are: one alone can't come back."""
    bench.ranks(*supervised)
    made = bench.live(12_000, r0=("sync", 0.0), r1=("idle", 0.0))
    assert asked(made) == []
    assert events(made).count("restart_needed") == 1
    assert "no supervisor restarts it: restart all 2 ranks" in bench.diagnosis()


def test_who_is_left_of_a_group_is_restarted_when_it_waits_for_the_lost_one(bench: Bench) -> None:
    """Its peer was stopped, or has hung itself up; it will not end that collective any more."""
    bench.ranks(True, True)
    made = bench.live(16_000, r1=("dummy", 5_000.0))
    assert "dp_group_down" in events(made)
    assert asked(made) == [("r1#1",)]


def test_who_is_left_of_a_group_and_waits_for_nobody_is_left_alone(bench: Bench) -> None:
    """A link that broke heals by itself."""
    bench.ranks(True, True)
    assert asked(bench.live(40_000, r1=("idle", 0.0))) == []


def test_a_new_life_is_another_one(bench: Bench) -> None:
    """What was said of the old one is void; and the next wedge is told of anew."""
    bench.ranks(True, True)
    bench.live(11_000, r0=("sync", 0.0), r1=("idle", 0.0))
    for name in ("r0", "r1"):
        bench.say(name, Leave(""))
    for rank in range(2):
        facts = engine_join(dp_group="moe", dp_rank=rank, dp_size=2, supervised=True)
        bench.say(f"r{rank}", facts, boot=2)
    began = len(bench.effects)
    bench.say("r1", CoreStatus("idle", 0.0, 7, 0, 1), boot=2)
    bench.say("r0", CoreStatus("sync", 10_001.0, 7, 0, 1), boot=2)
    made = bench.effects[began:]
    assert asked(made) == [("r0#2", "r1#2")]
    assert events(made).count("restart_asked") == 1


@pytest.mark.parametrize("supervised", [True, False])
def test_an_engine_whose_step_is_overdue_and_whose_core_stands_still(
    bench: Bench, supervised: bool
) -> None:
    """It is restarted, or the trainer hears what to do."""
    bench.dense(supervised=supervised)
    bench.say("t", TRAINER_JOIN)
    bench.epoch = bench.broker.groups["policy"].epoch
    bench.say("t", PAUSE)
    made = bench.live(21_000, e0=("work", 0.0))
    assert asked(made) == ([("e0#1",)] if supervised else [])
    assert ("restart_asked" if supervised else "restart_needed") in events(made)
    failed = next(e for e in made if isinstance(e, Note) and e.event == "pause_failed")
    told = str(failed.fields["detail"])
    assert "its core has been in `work` for 21.0 s" in told
    assert ("no supervisor restarts it: restart the engine" in told) is not supervised


def test_an_engine_whose_step_is_overdue_and_whose_core_moves_is_slow(bench: Bench) -> None:
    bench.dense(supervised=True)
    bench.say("t", TRAINER_JOIN)
    bench.epoch = bench.broker.groups["policy"].epoch
    bench.say("t", PAUSE)
    made = bench.live(21_000, e0=("work", 5_000.0))
    assert asked(made) == []
    assert "pause_failed" in events(made)
