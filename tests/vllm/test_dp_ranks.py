"""Two real MoE ranks in lockstep, with vLLM's coordinator and with the bus as coordinator.

What is done to them here hangs one or the other vLLM 0.32 without the plugin: see
``core_guard``. Every request must end with exactly the tokens of an undisturbed run. And ranks
whose sidecars died in a pause resume together, or neither does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from sidecar._shared_pages.core_status import GLOBALLY_PAUSED, LOCALLY_PAUSED
from tests.support.procs import PATIENT, Proc, wavebus
from tests.vllm._dp import (
    OTHER_PROMPT,
    PATIENCE_S,
    Pair,
    boot_pair,
    front_ends_wake,
    shut_down,
)
from tests.vllm._vllm import PROMPT, make_moe, rejects_in_pauses, require_vllm
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

_log = logging.getLogger(__name__)
DP_GROUP = "moe"
LONG = 200
ROUNDS = 100
FEW_ROUNDS = 10
AN_HOUR_MS = 3_600_000.0
# vLLM's own coordinator knows no broker.
BUS_ONLY = pytest.mark.parametrize("tested", ["bus"], indirect=True)


class UnderTest:
    """A booted pair, and the broker that its DP coordinator asks (there for either coordinator)."""

    def __init__(self, runner: asyncio.Runner, pair: Pair, broker: Proc, address: str) -> None:
        self._runner = runner
        self.pair = pair
        self.broker = broker
        self.address = address

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        self._runner.run(scenario)

    def start_broker(self) -> None:
        """Another one, at the same address."""
        self.broker.__exit__(None, None, None)
        self.broker = _broker(self.address)


def _broker(listen: str) -> Proc:
    return wavebus("broker", "--listen", listen, "--log-level", "debug", *PATIENT).__enter__()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.own_coordinator]),
        "bus",
    ],
)
def tested(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[UnderTest]:
    folder = tmp_path_factory.mktemp("dp")
    model = make_moe(folder / "model", seed=1)
    broker = _broker("tcp://127.0.0.1:*")
    address = broker.first_line()
    env = {
        "WAVEBUS_DP_GROUP": DP_GROUP,
        "WAVEBUS_BROKER": address,
        "WAVEBUS_LOG_FORMAT": "json",
        "WAVEBUS_LOG_LEVEL": "debug",
    }
    with asyncio.Runner() as runner:
        pair = runner.run(boot_pair(folder, model, request.param, env))
        tested = UnderTest(runner, pair, broker, address)
        try:
            runner.run(pair.undisturbed(LONG))
            runner.run(pair.undisturbed(LONG, OTHER_PROMPT))
            yield tested
        finally:
            runner.run(shut_down(pair))
            tested.broker.__exit__(None, None, None)


@pytest.fixture
def pair(tested: UnderTest) -> Pair:
    return tested.pair


def test_they_are_what_was_asked_for(tested: UnderTest, pair: Pair) -> None:
    async def scenario() -> None:
        zero, one = await pair.both("info")
        assert [(i["dp_rank"], i["dp_size"]) for i in (zero, one)] == [(0, 2), (1, 2)]
        own = {"vllm": "DPCoordinator", "bus": "BusCoordinator"}
        assert (zero["coordinator"], one["coordinator"]) == (own[pair.coordinator], "NoneType")

    tested.run(scenario())


def test_requests_on_either_rank_and_on_both(tested: UnderTest, pair: Pair) -> None:
    """Of an idle group, and of one that runs; each ends with its tokens."""

    async def scenario() -> None:
        for rank in (0, 1, 1, 0):
            await pair.serves(rank)
        names = [await pair.begin(rank, 40) for rank in (0, 1)]
        for rank, name in enumerate(names):
            await pair.ends_exactly(rank, name, 40)

    tested.run(scenario())


async def next_wave(pair: Pair) -> int:
    """Wait until no wave runs, and no front end believes so; the number of the next one."""
    await pair.rests()
    await pair.front_ends_know()
    zero, one = await pair.both("view")
    assert zero["wave"] == one["wave"]
    number: int = zero["wave"]
    return number


@BUS_ONLY
@pytest.mark.parametrize("rank", [0, 1])
def test_the_broker_shows_a_wave_and_who_began_it(tested: UnderTest, pair: Pair, rank: int) -> None:
    """Where front ends wake their group, the broker is asked first. Where engines start waves,
    nobody asks it, and it is told the same."""
    numbers: list[int] = []

    async def scenario() -> None:
        numbers.append(await next_wave(pair))
        await pair.serves(rank)

    tested.run(scenario())
    [wave] = numbers
    if front_ends_wake():
        asked = tested.broker.wait_event("first_req", dp_group=DP_GROUP, wave=wave, rank=rank)
        assert asked["state"] == "idle"
    started = tested.broker.wait_event("wave_started", dp_group=DP_GROUP, wave=wave, rank=rank)
    assert started["source"] == "coordinator"
    over = tested.broker.wait_event("wave_complete", dp_group=DP_GROUP, wave=wave)
    assert over["start_seen"]
    if not front_ends_wake():
        assert not [each for each in tested.broker.events if each["event"] == "first_req"]


@BUS_ONLY
def test_the_broker_shows_a_wave_that_a_resume_begins(tested: UnderTest, pair: Pair) -> None:
    """Of a request that came in the pause. Where engines start waves, rank 0 reports it for all;
    elsewhere its front end has named the rank. The pause of an idle group is a wave as well."""
    numbers: list[int] = []

    async def scenario() -> None:
        numbers.append(await next_wave(pair))
        await pair.both("pause", mode="keep")
        await pair.front_ends_know()
        name = await pair.begin(1, 20)
        await pair.shows(1, waiting=1)
        await pair.both("resume")
        await pair.ends_exactly(1, name, 20)

    tested.run(scenario())
    [idle] = numbers
    paused = tested.broker.wait_event("wave_complete", dp_group=DP_GROUP, wave=idle)
    assert not paused["start_seen"]
    rank = 1 if front_ends_wake() else 0
    tested.broker.wait_event("wave_started", dp_group=DP_GROUP, wave=idle + 1, rank=rank)
    over = tested.broker.wait_event("wave_complete", dp_group=DP_GROUP, wave=idle + 1)
    assert over["start_seen"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("busy", "clear_cache"),
    [
        ((0,), True),
        ((1,), False),
        ((0, 1), True),
        pytest.param((0,), False, marks=pytest.mark.slow),
        pytest.param((1,), True, marks=pytest.mark.slow),
        pytest.param((0, 1), False, marks=pytest.mark.slow),
    ],
)
def test_a_pause_in_the_middle(
    tested: UnderTest, pair: Pair, busy: tuple[int, ...], clear_cache: bool
) -> None:
    """No token comes between its return and the resume, and none is lost."""

    async def scenario() -> None:
        names = {rank: await pair.begin(rank, LONG) for rank in busy}
        for rank, name in names.items():
            await pair.until(rank, name, 10)
        await pair.both("pause", mode="keep", clear_cache=clear_cache)
        had = [await pair.ranks[rank].do("count", name=name) for rank, name in names.items()]
        assert max(had) < LONG
        await pair.stays_paused(0.3)
        has = [await pair.ranks[rank].do("count", name=name) for rank, name in names.items()]
        assert had == has
        await pair.both("resume")
        for rank, name in names.items():
            await pair.ends_exactly(rank, name, LONG)

    tested.run(scenario())


@pytest.mark.ci
@pytest.mark.parametrize("alone", [None, pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_sleep_in_the_middle(tested: UnderTest, pair: Pair, alone: int | None) -> None:
    """Of both ranks, or of one: the other need not be asked. No token is lost by it."""

    async def scenario() -> None:
        names = [await pair.begin(rank, LONG) for rank in (0, 1)]
        for rank, name in enumerate(names):
            await pair.until(rank, name, 10)
        await pair.both("pause", mode="keep", clear_cache=True)
        if alone is None:
            await pair.both("sleep", level=1)
        else:
            await pair.ranks[alone].do("sleep", level=1)
        await pair.stays_paused(0.3)
        await pair.both("wake")
        for rank, name in enumerate(names):
            await pair.ends_exactly(rank, name, LONG)

    tested.run(scenario())


@pytest.mark.parametrize("first", [None, 0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_that_comes_in_a_pause(
    tested: UnderTest, pair: Pair, rank: int, first: int | None
) -> None:
    """Is kept, and served after the resume: of both at once, or of one a while before."""

    async def scenario() -> None:
        await pair.both("pause", mode="keep")
        name = await pair.begin(rank, 20)
        await pair.shows(rank, waiting=1)
        assert await pair.ranks[rank].do("count", name=name) == 0
        if first is None:
            await pair.both("resume")
        else:
            resumed = pair.ranks[first].order("resume")
            await pair.shows(first, phase="barrier")
            assert not resumed.done()  # it returns when both are
            await pair.ranks[1 - first].do("resume")
            await resumed
        await pair.ends_exactly(rank, name, 20)

    tested.run(scenario())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_that_comes_between_two_resumes(tested: UnderTest, pair: Pair, rank: int) -> None:
    """Where its front end wakes the group, the rank that is still paused drops the START, and
    obeys it all the same. Where engines start waves, no START is sent before both have resumed."""

    async def scenario() -> None:
        await pair.both("pause", mode="keep")
        await pair.front_ends_know()
        resumed = pair.ranks[rank].order("resume")
        await pair.shows(rank, phase="barrier")
        name = await pair.begin(rank, 20)
        await pair.stays_paused(0.3)
        await pair.ranks[1 - rank].do("resume")
        await resumed
        await pair.ends_exactly(rank, name, 20)

    tested.run(scenario())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_given_up_in_a_pause_mutes_nobody(
    tested: UnderTest, pair: Pair, rank: int
) -> None:
    """Its front end believes that something runs; the next request must wake the group."""

    async def scenario() -> None:
        await pair.both("pause", mode="keep")
        name = await pair.begin(rank, 20)
        await pair.shows(rank, waiting=1)
        await pair.ranks[rank].do("give_up", name=name)
        await pair.shows(rank, waiting=0)
        await pair.both("resume")
        await pair.serves(rank, 20)

    tested.run(scenario())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_turned_away_in_a_pause_leaves_no_rank_alone(
    tested: UnderTest, pair: Pair, rank: int
) -> None:
    """Its front end has told the coordinator; the other rank starts the wave when it resumes."""

    async def scenario() -> None:
        await pair.both("pause", mode="keep")
        await pair.front_ends_know()
        await pair.both("admit", let_in=False)
        name = await pair.begin(rank, 20)
        assert await pair.ranks[rank].do("tokens", name=name) == []
        await pair.stays_paused(0.3)
        await pair.both("admit", let_in=True)
        await pair.both("resume")
        await pair.rests()
        await pair.serves(1 - rank, 20)
        await pair.serves(rank, 20)

    tested.run(scenario())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_turned_away_by_a_group_that_runs(
    tested: UnderTest, pair: Pair, rank: int
) -> None:
    """Of an idle group: it makes a wave of dummy batches at most, which ends."""

    async def scenario() -> None:
        await pair.rests()
        await pair.front_ends_know()
        await pair.both("admit", let_in=False)
        name = await pair.begin(rank, 20)
        assert await pair.ranks[rank].do("tokens", name=name) == []
        await pair.both("admit", let_in=True)
        await pair.rests()
        await pair.serves(1 - rank, 20)

    tested.run(scenario())


@pytest.mark.ci
def test_ranks_run_their_probes_together(tested: UnderTest, pair: Pair) -> None:
    """Resumed and paused again as one, behind their admission. A request that was queued in the
    pause is turned away; one that it rejects is turned away, or served after the resume."""

    async def scenario() -> None:
        running = await pair.begin(0, LONG)
        await pair.until(0, running, 4)
        await pair.both("pause", mode="abort", clear_cache=True)
        waiting = await pair.begin(1, 20)
        if rejects_in_pauses():
            await pair.is_rejected(1, waiting)
        for _ in range(2):
            probes = await pair.both("probe", prompt=list(OTHER_PROMPT), count=6)
            assert probes == [await pair.undisturbed(6, OTHER_PROMPT)] * 2
            await pair.stays_paused(0.3)
        if not rejects_in_pauses():
            assert await pair.ranks[1].do("tokens", name=waiting) == []
        assert len(await pair.ranks[0].do("tokens", name=running)) < LONG
        await pair.both("resume")
        got = await pair.ranks[1].do("tokens", name=waiting)
        assert got in ([], await pair.undisturbed(20))
        await pair.rests()
        await pair.serves(0, 20)
        await pair.serves(1, 20)

    tested.run(scenario())


@pytest.mark.ci
@pytest.mark.parametrize("rank", [0, 1])
def test_a_second_resume(tested: UnderTest, pair: Pair, rank: int) -> None:
    """Or one without any pause: of an idle rank, then of one that runs."""

    async def scenario() -> None:
        await pair.both("pause", mode="keep")
        await pair.both("resume")
        await pair.ranks[rank].do("resume")
        await pair.serves(1 - rank)
        name = await pair.begin(rank, LONG)
        await pair.until(rank, name, 10)
        await pair.ranks[1 - rank].do("resume")
        await pair.ranks[rank].do("resume")
        await pair.ends_exactly(rank, name, LONG)
        await pair.serves(rank)

    tested.run(scenario())


@pytest.mark.parametrize("rank", [0, 1])
def test_resumes_doubled_while_they_are_under_way(tested: UnderTest, pair: Pair, rank: int) -> None:
    async def scenario() -> None:
        await pair.both("pause", mode="keep")
        resumed = [pair.ranks[rank].order("resume") for _ in range(3)]
        name = await pair.begin(rank, 20)
        await pair.shows(rank, phase="barrier")
        resumed += [pair.ranks[1 - rank].order("resume") for _ in range(3)]
        await asyncio.wait_for(asyncio.gather(*resumed), PATIENCE_S)
        await pair.ends_exactly(rank, name, 20)

    tested.run(scenario())


@pytest.mark.ci
@pytest.mark.parametrize("busy", [None, pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_pause_that_is_given_up_on_and_completes_later(
    tested: UnderTest, pair: Pair, busy: int | None
) -> None:
    """One rank asked alone pends; nothing is undone; asked on the other it completes."""

    async def scenario() -> None:
        name = "" if busy is None else await pair.begin(busy, LONG)
        if busy is not None:
            await pair.until(busy, name, 10)
        pause = pair.ranks[0].order("pause", mode="keep")
        done, _ = await asyncio.wait([pause], timeout=1.0)
        assert not done
        await pair.ranks[1].do("pause", mode="keep")
        await pause
        await pair.both("resume")
        if busy is not None:
            await pair.ends_exactly(busy, name, LONG)
        await pair.serves(1)

    tested.run(scenario())


@pytest.mark.ci
def test_a_pause_asked_while_a_resume_is_under_way(tested: UnderTest, pair: Pair) -> None:
    """On the same ranks in another order: behind each rank's own resume, or before one's."""

    async def scenario() -> None:
        name = await pair.begin(0, LONG)
        await pair.until(0, name, 10)
        await pair.both("pause", mode="keep")
        calls = []
        for rank in pair.ranks:
            calls += [rank.order("resume"), rank.order("pause", mode="keep")]
            if rank.rank == 0:
                await pair.shows(0, phase="barrier")
        await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)

        resumed = pair.ranks[0].order("resume")
        await pair.shows(0, phase="barrier")
        await pair.ranks[1].do("pause", mode="keep")  # it is paused
        await pair.ranks[1].do("resume")
        await resumed
        await pair.ends_exactly(0, name, LONG)

    tested.run(scenario())


@pytest.mark.ci
@pytest.mark.parametrize("escalate", ["keep", "abort"])
def test_a_wait_that_becomes_something_else(tested: UnderTest, pair: Pair, escalate: str) -> None:
    """A second pause while the first one drains; both return, and what ran is told. A request that
    comes meanwhile is queued, or rejected by the first pause and sent again; the second one, if it
    keeps requests, queues it."""

    async def scenario() -> None:
        name = await pair.begin(0, LONG)
        await pair.until(0, name, 10)
        waits = [rank.order("pause", mode="wait") for rank in pair.ranks]
        for rank in pair.ranks:
            await pair.shows(rank.rank, flags=LOCALLY_PAUSED)
        late = await pair.begin(1, 20, OTHER_PROMPT)
        if rejects_in_pauses():
            await pair.is_rejected(1, late)
        else:
            assert await pair.both("request_ids") == [[name], [late]]
        waits += [rank.order("pause", mode=escalate) for rank in pair.ranks]
        await asyncio.wait_for(asyncio.gather(*waits), PATIENCE_S)
        had = await pair.ranks[0].do("count", name=name)
        assert had < LONG
        await pair.both("resume")
        if escalate == "keep":
            await pair.ends_exactly(0, name, LONG)
            await pair.ends_exactly(1, late, 20, OTHER_PROMPT)
        else:
            got = await pair.ranks[0].do("tokens", name=name)
            assert got == (await pair.undisturbed(LONG))[: len(got)]
            assert len(got) < LONG
            if rejects_in_pauses():
                await pair.ends_exactly(1, late, 20, OTHER_PROMPT)
            else:
                assert await pair.ranks[1].do("tokens", name=late) == []

    tested.run(scenario())


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_second_pause_of_one_rank_when_all_are_paused(
    tested: UnderTest, pair: Pair, mode: str
) -> None:
    """As when its `wait` came to the deadline in the moment in which the others' ended."""

    async def scenario() -> None:
        await pair.both("pause", mode="wait")
        await pair.ranks[1].do("pause", mode=mode, clear_cache=True)
        await pair.both("resume")
        await pair.serves(0)
        await pair.serves(1)

    tested.run(scenario())


@pytest.mark.ci
def test_what_the_status_pages_show(tested: UnderTest, pair: Pair) -> None:
    """A rank that waits for another answers nobody; its page says in what."""

    async def scenario() -> None:
        await pair.rests()
        zero, one = await pair.both("view")
        assert (zero["rank"], zero["phase"], one["rank"], one["phase"]) == (0, "idle", 1, "idle")
        assert zero["step"] == one["step"]
        assert zero["wave"] == one["wave"]

        pause = pair.ranks[0].order("pause", mode="keep")
        await pair.shows(0, phase="dummy", age_ms=300)
        zero, one = await pair.both("view")
        assert (zero["phase"], one["phase"]) == ("dummy", "idle")
        assert zero["flags"] & LOCALLY_PAUSED
        assert not zero["flags"] & GLOBALLY_PAUSED
        assert zero["age_ms"] > 300
        await pair.ranks[1].do("pause", mode="keep")
        await pause

        resume = pair.ranks[1].order("resume")
        await pair.shows(1, phase="barrier")
        zero, one = await pair.both("view")
        assert (zero["phase"], one["phase"]) == ("idle", "barrier")
        assert zero["flags"] & GLOBALLY_PAUSED
        await pair.ranks[0].do("resume")
        await resume

        name = await pair.begin(0, LONG)
        await pair.until(0, name, 10)
        seen = set()
        while await pair.ranks[0].do("count", name=name) < LONG:
            zero, one = await pair.both("view")
            seen |= {("0", zero["phase"]), ("1", one["phase"]), ("running", zero["running"])}
        assert {("0", "step"), ("1", "dummy"), ("running", 1)} <= seen
        await pair.ends_exactly(0, name, LONG)

    tested.run(scenario())


async def ends(pair: Pair, serial: int) -> list[dict[str, Any]]:
    """What both cores have made of their holds, once they have."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await pair.both("end", serial=serial)
            if all(each is not None and each["state"] != "waiting" for each in found):
                return found
            await asyncio.sleep(0.02)


async def waits(pair: Pair, rank: int, serial: int, reason: str) -> None:
    """That core says that it waits, and for what."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            end = await pair.ranks[rank].do("end", serial=serial)
            if end is not None and reason in end["reason"]:
                assert end["state"] == "waiting"
                return
            await asyncio.sleep(0.02)


async def paused(pair: Pair) -> str:
    """Both, with a request in the middle."""
    request = await pair.begin(0, LONG)
    await pair.until(0, request, 5)
    await pair.both("pause", mode="keep")
    return request


@pytest.mark.ci
def test_ranks_whose_sidecars_died_resume_together(tested: UnderTest, pair: Pair) -> None:
    """In a pause: both are whole."""

    async def scenario() -> None:
        request = await paused(pair)
        await pair.both("hold", serial=11)
        assert [end["state"] for end in await ends(pair, 11)] == ["resumed"] * 2
        await pair.ends_exactly(0, request, LONG)
        await pair.both("let_go")

    tested.run(scenario())


@pytest.mark.ci
def test_no_rank_resumes_while_the_other_is_held(tested: UnderTest, pair: Pair) -> None:
    """Its sidecar lives: the rank waits, and says for whom."""

    async def scenario() -> None:
        zero, one = pair.ranks
        request = await paused(pair)
        await one.do("hold", serial=21, left_ms=AN_HOUR_MS)
        await zero.do("hold", serial=21)
        await waits(pair, 0, 21, "rank 1 has not voted")
        await pair.stays_paused(0.5)
        await one.do("hold", serial=21)
        assert [end["state"] for end in await ends(pair, 21)] == ["resumed"] * 2
        await pair.ends_exactly(0, request, LONG)
        await pair.both("let_go")

    tested.run(scenario())


@pytest.mark.ci
def test_a_rank_whose_peer_is_resumed_by_its_sidecar_resumes(tested: UnderTest, pair: Pair) -> None:
    """The peer rank's resume waits for it."""

    async def scenario() -> None:
        zero, one = pair.ranks
        request = await paused(pair)
        await zero.do("hold", serial=31)
        resumed = one.order("resume")
        await asyncio.wait_for(resumed, PATIENCE_S)
        await pair.ends_exactly(0, request, LONG)
        await zero.do("let_go")

    tested.run(scenario())


def test_a_pause_that_reached_one_rank_is_completed_inside(tested: UnderTest, pair: Pair) -> None:
    """The other's sidecar died before it asked; then both resume."""

    async def scenario() -> None:
        zero, one = pair.ranks
        pausing = zero.order("pause", mode="keep")
        await zero.do("hold", serial=41, left_ms=AN_HOUR_MS)
        await one.do("hold", serial=41)
        await asyncio.wait_for(pausing, PATIENCE_S)
        await zero.do("hold", serial=41)
        assert [end["state"] for end in await ends(pair, 41)] == ["resumed"] * 2
        for rank in range(2):
            await pair.serves(rank)
        await pair.both("let_go")

    tested.run(scenario())


@pytest.mark.parametrize("other", [{"broken": ["model"]}, {"version": 3}])
def test_both_stay_paused_when_one_lacks_a_part(
    tested: UnderTest, pair: Pair, other: dict[str, Any]
) -> None:
    """Or serves another version. The request of the whole one ends, too."""
    serial = 51 + len(other.get("broken", ()))

    async def scenario() -> None:
        zero, one = pair.ranks
        request = await paused(pair)
        await one.do("hold", serial=serial, **other)
        await zero.do("hold", serial=serial)
        assert [end["state"] for end in await ends(pair, serial)] == ["quarantined"] * 2
        tokens = await zero.do("tokens", name=request)
        assert 5 <= len(tokens) < LONG
        await pair.stays_paused(0.5)
        await pair.both("let_go")
        await pair.both("resume")
        await pair.serves(0)

    tested.run(scenario())


# The broker takes the DP group for down once its ranks have left, and is killed by the test after.
@pytest.mark.parametrize(
    ("tested", "times"),
    [
        pytest.param("vllm", ROUNDS, marks=pytest.mark.slow),
        ("bus", FEW_ROUNDS),
        pytest.param("bus", ROUNDS, marks=pytest.mark.slow),
    ],
    indirect=["tested"],
)
def test_many_rounds_over_the_bus(tested: UnderTest, pair: Pair, times: int) -> None:
    """Requests on random ranks at random times; pauses and resumes of both, by a trainer."""
    dice = random.Random(7)

    async def load(ended: asyncio.Event, counts: list[int]) -> None:
        while not ended.is_set():
            rank, count = dice.randrange(2), dice.randint(1, 60)
            prompt = dice.choice([PROMPT, OTHER_PROMPT])
            name = await pair.begin(rank, count, prompt)
            await pair.ends_exactly(rank, name, count, prompt)
            counts.append(count)
            await asyncio.sleep(dice.choice([0.0, 0.0, 0.1]))

    async def rounds(agent: TrainerAgent, loads: list[asyncio.Task[None]]) -> None:
        for _ in range(times):
            async with asyncio.timeout(PATIENCE_S):
                async with agent.paused(mode="keep", clear_cache=dice.choice([False, True])) as ack:
                    assert (ack.engines, ack.excluded) == (2, ())
                    await asyncio.sleep(dice.choice([0.0, 0.05]))
                await asyncio.sleep(dice.choice([0.0, 0.05]))
            assert not [task for task in loads if task.done()]

    async def scenario() -> None:
        ended, counts = asyncio.Event(), list[int]()
        joins = [
            each.do("join", broker=tested.address, dp_group=DP_GROUP, name=f"moe-{each.rank}")
            for each in pair.ranks
        ]
        await asyncio.gather(*joins)
        async with TrainerAgent(tested.address) as agent:
            await agent.wait_for_engines(2)
            loads = [asyncio.create_task(load(ended, counts)) for _ in range(3)]
            began_s = time.monotonic()
            await rounds(agent, loads)
            took_s = time.monotonic() - began_s
            ended.set()
            await asyncio.gather(*loads)
        await pair.both("leave")
        _log.info("%s: %d rounds took %.1f s", pair.coordinator, times, took_s)
        assert len(counts) > times / 10

    tested.run(scenario())


@BUS_ONLY
def test_a_broker_that_is_killed_and_comes_back(tested: UnderTest, pair: Pair) -> None:
    async def serve() -> None:
        for rank in (0, 1, 0):
            await pair.rests()
            await pair.serves(rank)

    tested.broker.signal(signal.SIGKILL)
    tested.run(serve())
    tested.start_broker()
    tested.broker.wait_event("peer_joined")
    # Waves that nobody heard of are over, says the coordinator as it joins.
    missed = tested.broker.wait_event("wave_complete", dp_group=DP_GROUP, source="join")
    tested.run(serve())
    for wave in range(missed["wave"] + 1, missed["wave"] + 4):
        for event in ("wave_started", "wave_complete"):
            tested.broker.wait_event(event, dp_group=DP_GROUP, wave=wave, source="coordinator")


@pytest.mark.ci
@BUS_ONLY
def test_a_gateway_that_dies_is_missed(tested: UnderTest, pair: Pair) -> None:
    """Last of all: waves that run go on, and both front end and sidecar say what is wrong."""

    async def scenario() -> None:
        [info, _] = await pair.both("info")
        name = await pair.begin(0, LONG)
        await pair.until(0, name, 10)
        os.kill(info["coordinator_pid"], signal.SIGKILL)
        await pair.ends_exactly(0, name, LONG)
        deadline_s = time.monotonic() + PATIENCE_S
        said = ""
        while time.monotonic() < deadline_s and "dp_coordinator_died" not in said:
            await asyncio.sleep(0.2)
            said = pair.ranks[0].log.read_text(errors="replace")
        assert "ended with exit code -9" in said
        assert "dp_coordinator_died" in said

    tested.run(scenario())
