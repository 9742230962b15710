"""Who takes part in a collective transfer, in which place; and nobody else."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from bus._protocol.broker.broker import Broker
from bus._protocol.group.engine_registry import communicator
from bus.messages import (
    Arm,
    GroupAck,
    Join,
    Leave,
    Message,
    Nack,
    NackCode,
    PlanTransfer,
    Step,
    TransferInit,
    TransferPlan,
)
from tests.sim.makers import make_arm, make_manifest
from tests.unit.bus._builders import (
    TRAINER_JOIN,
    ack,
    engine_join,
    envelope,
    facts,
    messages,
    nack_in,
    only,
    peer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus._protocol.core.effects import Effect

MANIFEST = make_manifest(("a", "b"))
# Name, DP group, rank, ranks of the group, workers, boot.
Engine = tuple[str, str, int, int, int, int]
FOUR: tuple[Engine, ...] = (
    ("e0", "dp", 0, 2, 2, 10),
    ("e1", "dp", 1, 2, 2, 11),
    ("e2", "alone", 0, 1, 1, 12),
    ("e3", "other", 0, 1, 4, 13),
)


def made_of(engines: tuple[Engine, ...]) -> TransferPlan:
    return communicator(
        peer(
            name,
            facts(dp_group=dp_group, dp_rank=rank, dp_size=size, workers=workers),
            boot=boot,
        )
        for name, dp_group, rank, size, workers, boot in engines
    )


def test_rank_0_is_the_trainers_and_workers_follow_each_other() -> None:
    """Engine by engine; the ranks of a DP group one after the other."""
    made = made_of(FOUR)
    assert made.world_size == 1 + 2 + 2 + 1 + 4
    assert made.first_ranks == {"e2": 1, "e0": 2, "e1": 4, "e3": 6}
    assert made.communicator > 0


def test_ranks_are_contiguous_whatever_the_names() -> None:
    """Of a DP group in the order of its ranks, which need not be that of the names."""
    engines = tuple((f"n{9 - rank}", "dp", rank, 5, 3, rank) for rank in range(5))
    assert made_of(engines).first_ranks == {f"n{9 - rank}": 1 + 3 * rank for rank in range(5)}


def test_the_same_members_are_the_same_communicator() -> None:
    """In whatever order they came."""
    expected = made_of(FOUR)
    rng = random.Random(1)
    for _ in range(10):
        engines = list(FOUR)
        rng.shuffle(engines)
        assert made_of(tuple(engines)) == expected


@pytest.mark.parametrize(
    "changed",
    [
        FOUR[:3],
        (*FOUR, ("e4", "new", 0, 1, 1, 14)),
        (*FOUR[:3], ("e3", "other", 0, 1, 4, 99)),
        (*FOUR[:3], ("e3", "other", 0, 1, 2, 13)),
        (*FOUR[:3], ("e9", "other", 0, 1, 4, 13)),
        (("e0", "dp", 1, 2, 2, 10), ("e1", "dp", 0, 2, 2, 11), *FOUR[2:]),
        (("e0", "zz", 0, 2, 2, 10), ("e1", "zz", 1, 2, 2, 11), *FOUR[2:]),
    ],
    ids=["left", "joined", "restarted", "workers", "renamed", "ranks", "order"],
)
def test_other_members_are_another_communicator(changed: tuple[Engine, ...]) -> None:
    """Also where the same names take part, in another life or another place."""
    assert made_of(changed).communicator != made_of(FOUR).communicator


class Bench:
    """A broker with a trainer and engines, one frame at a time."""

    def __init__(self, engines: tuple[Engine, ...] = FOUR) -> None:
        self.broker = Broker()
        self.ids = 0
        self.say("t", 1, TRAINER_JOIN)
        for engine in engines:
            self.join(engine)

    def say(self, sender: str, boot: int, message: Message) -> list[Effect]:
        self.ids += 1
        epoch = self.broker.groups["policy"].epoch if sender in self.broker.peers.by_name else 0
        told = envelope(message, sender, boot=boot, seq=self.ids, msg_id=self.ids, epoch=epoch)
        return self.broker.receive(f"{sender}#{boot}".encode(), told, message, 0.0)

    def ask(self, message: Message) -> list[Effect]:
        return self.say("t", 1, message)

    def join(self, engine: Engine) -> None:
        name, dp_group, rank, size, workers, boot = engine
        join = engine_join(dp_group=dp_group, dp_rank=rank, dp_size=size, workers=workers)
        self.say(name, boot, join)

    def leave(self, engine: Engine) -> None:
        self.say(engine[0], engine[5], Leave(""))

    def plan(self) -> TransferPlan:
        return only(self.ask(PlanTransfer()), TransferPlan)

    def all_ack(self, step: Step, update_id: str) -> list[Effect]:
        effects: list[Effect] = []
        for each in list(self.broker.groups["policy"].registry.engines.values()):
            effects += self.say(each.name, each.boot, ack(step, update_id))
        return effects

    def opened(self) -> int:
        """The communicator in which every engine has opened its end."""
        number = self.plan().communicator
        self.ask(TransferInit("t1", "gloo", b"", number, 0, {}))
        assert only(self.all_ack(Step.TRANSFER_INIT, "t1"), GroupAck)
        return number


def test_a_plan_is_what_the_engines_would_be_told() -> None:
    """The broker adds to TRANSFER_INIT how many take part, and where each stands."""
    bench = Bench()
    plan = bench.plan()
    expected = made_of(FOUR)
    assert (plan.communicator, plan.world_size) == (expected.communicator, expected.world_size)
    init = TransferInit("t1", "gloo", b"p", plan.communicator, 0, {})
    told = only(bench.ask(init), TransferInit)
    expected_init = replace(init, world_size=expected.world_size, first_ranks=expected.first_ranks)
    assert told == expected_init


def test_an_observer_reads_the_plan() -> None:
    """Without engines it gets the refusal that a trainer would, also of an unknown group."""
    bench = Bench()
    bench.say("o", 1, Join("observer", "h", 1, None, None))
    assert only(bench.say("o", 1, PlanTransfer()), TransferPlan) == bench.plan()
    for engine in FOUR:
        bench.leave(engine)
    assert only(bench.say("o", 1, PlanTransfer()), Nack).code is NackCode.EMPTY_GROUP
    bench.broker.groups.clear()
    bench.ids += 1
    told = envelope(PlanTransfer(), "o", boot=1, seq=bench.ids, msg_id=bench.ids)
    effects = bench.broker.receive(b"o#1", told, PlanTransfer(), 0.0)
    assert only(effects, Nack).code is NackCode.UNKNOWN_GROUP


@pytest.mark.parametrize("communicates", [True, False])
def test_an_engine_that_is_silent_holds_up_no_new_communicator(*, communicates: bool) -> None:
    """It has half of the time after which a peer is lost, and the trainer hears that it needs
    another communicator. Without collectives the others wait for nobody, and it has all of it."""
    bench = Bench()
    number = bench.plan().communicator if communicates else 0
    bench.ask(TransferInit("t1", "gloo", b"p", number, 0, {}))
    half_ms = bench.broker.config.peer_timeout_ms / 2
    engines = bench.broker.groups["policy"].registry.engines
    for name, *_, boot in FOUR[:-1]:
        bench.say(name, boot, ack(Step.TRANSFER_INIT, "t1"))
        engines[name].last_heard_ms = half_ms
    engine = engines[FOUR[-1][0]]
    engine.last_heard_ms = -1.0
    bench.broker.tick(half_ms)
    assert not engine.overdue
    effects = bench.broker.tick(half_ms + 1)
    assert engine.overdue == (Step.TRANSFER_INIT.value if communicates else "")
    if communicates:
        assert nack_in(effects).code is NackCode.TRANSFER_CLOSED
        assert bench.plan().communicator != number


def test_a_backend_without_collectives_needs_no_plan() -> None:
    told = only(Bench().ask(TransferInit("t1", "shm", b"p", 0, 0, {})), TransferInit)
    assert told == TransferInit("t1", "shm", b"p", 0, 0, {})


def test_a_plan_of_a_group_without_engines_is_refused() -> None:
    assert nack_in(Bench(()).ask(PlanTransfer())).code is NackCode.UNKNOWN_GROUP


def test_a_dp_group_that_is_not_whole_is_not_in_the_plan() -> None:
    """It does not take part until it is."""
    assert Bench((FOUR[0], *FOUR[2:])).plan().communicator == made_of(FOUR[2:]).communicator
    bench = Bench()
    bench.leave(FOUR[1])
    assert bench.plan().communicator == made_of(FOUR[2:]).communicator


def test_a_fresh_broker_plans_the_same() -> None:
    """Engines that live on join it in any order."""
    assert Bench().plan() == Bench(FOUR[::-1]).plan()


LATER: Engine = ("e4", "new", 0, 1, 1, 14)
REBORN: Engine = (*FOUR[3][:5], 99)


def restart(bench: Bench) -> None:
    bench.leave(FOUR[3])
    bench.join(REBORN)


CHANGES: dict[str, Callable[[Bench], None]] = {
    "left": lambda b: b.leave(FOUR[3]),
    "joined": lambda b: b.join(LATER),
    "restarted": restart,
    "lost a rank": lambda b: b.leave(FOUR[0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_old_communicator_is_neither_opened_nor_armed(change: str) -> None:
    """By its field, and no engine hears of it; a new plan is taken."""
    bench = Bench()
    number = bench.opened()
    CHANGES[change](bench)
    for asked in (
        TransferInit("t1", "gloo", b"", number, 0, {}),
        make_arm("u1", MANIFEST, communicator=number),
    ):
        effects = bench.ask(asked)
        assert [type(each) for each in messages(effects)] == [Nack]
        assert nack_in(effects).code is NackCode.TRANSFER_CLOSED
        assert nack_in(effects).field == "communicator"
        assert bench.broker.groups["policy"].update.state == "idle"
    assert bench.opened() != number
    arm = make_arm("u2", MANIFEST, communicator=bench.plan().communicator)
    assert only(bench.ask(arm), Arm).communicator == arm.communicator


def test_who_was_away_and_is_back_is_in_its_communicator_still() -> None:
    """The same life: its end of the transport is as it was."""
    bench = Bench()
    number = bench.opened()
    bench.join(FOUR[3])
    assert bench.plan().communicator == number
    assert only(bench.ask(make_arm("u1", MANIFEST, communicator=number)), Arm)


def test_a_backend_without_collectives_is_armed_whoever_came() -> None:
    """Who came since refuses by itself, if it has no transport."""
    bench = Bench()
    bench.ask(TransferInit("t1", "shm", b"", 0, 0, {}))
    bench.all_ack(Step.TRANSFER_INIT, "t1")
    bench.leave(FOUR[3])
    assert only(bench.ask(make_arm("u1", MANIFEST)), Arm).communicator == 0
