"""Two real ranks whose sidecars died in a pause: they resume together, or neither does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm._dp import PATIENCE_S, Pair, boot_pair, shut_down
from tests.vllm._vllm import REST_MS, make_moe, require_vllm

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

LONG = 300
AN_HOUR_MS = 3_600_000.0


class Driver:
    """The pair, and the loop that it lives in."""

    def __init__(self, pair: Pair, runner: asyncio.Runner) -> None:
        self.pair = pair
        self._runner = runner

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(work)

    async def ends(self, serial: int) -> list[dict[str, Any]]:
        """What both cores have made of their holds, once they have."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = await self.pair.both("end", serial=serial)
                if all(each is not None and each["state"] != "waiting" for each in found):
                    return found
                await asyncio.sleep(0.02)

    async def waits(self, rank: int, serial: int, reason: str) -> None:
        """That core says that it waits, and for what."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                end = await self.pair.ranks[rank].do("end", serial=serial)
                if end is not None and reason in end["reason"]:
                    assert end["state"] == "waiting"
                    return
                await asyncio.sleep(0.02)

    async def paused(self) -> str:
        """Both, with a request in the middle."""
        request = await self.pair.begin(0, LONG)
        await self.pair.until(0, request, 5)
        await self.pair.both("pause", mode="keep")
        return request


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = tmp_path_factory.mktemp("deadline")
    model = make_moe(folder / "model", seed=1)
    with asyncio.Runner() as runner:
        env = {"WAVEBUS_TESTS_REST_MS": str(REST_MS)}
        pair = runner.run(boot_pair(folder, model, "vllm", env))
        try:
            runner.run(pair.undisturbed(LONG))
            yield Driver(pair, runner)
        finally:
            runner.run(shut_down(pair))


def test_ranks_that_are_whole_resume_together(driver: Driver) -> None:
    async def scenario() -> None:
        request = await driver.paused()
        await driver.pair.both("hold", serial=11)
        assert [end["state"] for end in await driver.ends(11)] == ["resumed"] * 2
        await driver.pair.ends_exactly(0, request, LONG)
        await driver.pair.both("let_go")

    driver.run(scenario())


def test_no_rank_resumes_while_the_other_is_held(driver: Driver) -> None:
    """Its sidecar lives, or nobody can tell: the rank waits, and says for whom."""

    async def scenario() -> None:
        zero, one = driver.pair.ranks
        request = await driver.paused()
        await one.do("hold", serial=21, left_ms=AN_HOUR_MS)
        await zero.do("hold", serial=21)
        await driver.waits(0, 21, "rank 1: its sidecar holds it paused")
        await one.do("hide_page", hidden=True)
        await driver.waits(0, 21, "rank 1: ")
        await driver.waits(0, 21, "No such file")
        await driver.pair.stays_paused(0.5)
        await one.do("hide_page", hidden=False)
        await one.do("hold", serial=21)
        assert [end["state"] for end in await driver.ends(21)] == ["resumed"] * 2
        await driver.pair.ends_exactly(0, request, LONG)
        await driver.pair.both("let_go")

    driver.run(scenario())


def test_a_rank_whose_mate_is_resumed_by_its_sidecar_resumes(driver: Driver) -> None:
    """The mate's resume waits for it."""

    async def scenario() -> None:
        zero, one = driver.pair.ranks
        request = await driver.paused()
        await zero.do("hold", serial=31)
        resumed = one.order("resume")
        await asyncio.wait_for(resumed, PATIENCE_S)
        await driver.pair.ends_exactly(0, request, LONG)
        await zero.do("let_go")

    driver.run(scenario())


def test_a_pause_that_reached_one_rank_is_completed_inside(driver: Driver) -> None:
    """The other's sidecar died before it asked; then both resume."""

    async def scenario() -> None:
        zero, one = driver.pair.ranks
        pausing = zero.order("pause", mode="keep")
        await zero.do("hold", serial=41, left_ms=AN_HOUR_MS)
        await one.do("hold", serial=41)
        await asyncio.wait_for(pausing, PATIENCE_S)
        await zero.do("hold", serial=41)
        assert [end["state"] for end in await driver.ends(41)] == ["resumed"] * 2
        for rank in range(2):
            await driver.pair.serves(rank)
        await driver.pair.both("let_go")

    driver.run(scenario())


@pytest.mark.parametrize("other", [{"broken": ["model"]}, {"version": 3}])
def test_both_stay_paused_when_one_lacks_a_part(driver: Driver, other: dict[str, Any]) -> None:
    """Or serves another version. The request of the whole one ends, too."""
    serial = 51 + len(other.get("broken", ()))

    async def scenario() -> None:
        zero, one = driver.pair.ranks
        request = await driver.paused()
        await one.do("hold", serial=serial, **other)
        await zero.do("hold", serial=serial)
        assert [end["state"] for end in await driver.ends(serial)] == ["quarantined"] * 2
        tokens = await zero.do("tokens", name=request)
        assert 5 <= len(tokens) < LONG
        await driver.pair.stays_paused(0.5)
        await driver.pair.both("let_go")
        await driver.pair.both("resume")
        await driver.pair.serves(0)

    driver.run(scenario())
