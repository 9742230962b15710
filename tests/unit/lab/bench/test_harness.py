"""Rounds in turn, processes that are asked by method, and the table."""

from __future__ import annotations

import asyncio
import inspect
import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from lab.bench import programs
from lab.bench.harness import Bench, BenchFailed, in_turn, medians, table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def test_rounds_alternate_and_the_first_ones_are_not_counted() -> None:
    """Every other time in reverse, if that is asked for."""
    order: list[str] = []

    def way(name: str) -> Callable[[], Awaitable[int]]:
        async def one() -> int:
            order.append(name)
            return len(order)

        return one

    ways = {"a": way("a"), "b": way("b")}
    found = asyncio.run(in_turn(ways, 2, warm=1, swing=True))
    assert "".join(order) == "baabba"
    assert found == {"a": [3, 6], "b": [4, 5]}


def test_medians_are_of_each_figure() -> None:
    """To three digits."""
    assert medians([{"a": 1, "b": 0.12345}, {"a": 3, "b": 0.12345}]) == {"a": 2, "b": 0.123}


def test_a_table_has_a_column_for_each_way() -> None:
    """What is in a way's own fields is named with them; its lists are left out."""
    fields = {"gap_ms": 1.5, "calls": {"load": 2}, "rounds": [1, 2]}
    rows = table({"rounds": 2, "native": {"gap_ms": 3.0}, "bus": fields}).splitlines()
    assert [row.split() for row in rows] == [
        ["rounds", "2"],
        [],
        ["native", "bus"],
        ["gap_ms", "3.0", "1.5"],
        ["calls.load", "2"],
    ]
    assert {len(row) for row in rows[2:]} == {60}


def test_a_process_is_asked_by_method() -> None:
    """It says first what it is; one that breaks is told of with the end of its log."""

    async def scenario() -> None:
        async with Bench("asyncio") as bench:
            running, said = await bench.start("broker")
            assert said["address"].startswith("tcp://127.0.0.1:")
            with pytest.raises(BenchFailed, match="nonsense"):
                await running.ask("nonsense")

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_process_that_ends_ends_the_bench() -> None:
    """Others may wait for it for ever; one that the bench ends itself does not count."""

    async def scenario() -> None:
        async with Bench("asyncio") as bench:

            async def measure() -> None:
                ours, _ = await bench.start("broker", name="ours")
                await ours.kill()
                other, _ = await bench.start("broker", name="other")
                other.process.kill()
                await asyncio.Event().wait()

            with pytest.raises(BenchFailed, match=r"^other has ended:"):
                await bench.complete(measure())

            async def succeed() -> str:
                await bench.start("broker")
                return "done"

            assert await bench.complete(succeed()) == "done"

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.ci
def test_every_program_stands_in_the_module_of_its_name() -> None:
    """As processes of the benches look for it; other modules there are parts of programs."""
    parts = {"__main__", "call_times", "ipc", "measured_agent", "native"}
    for each in pkgutil.iter_modules(programs.__path__):
        needs_vllm = each.name == "vllm_trainer"
        if each.name not in parts and not (needs_vllm and find_spec("vllm") is None):
            module = import_module(f"{programs.__name__}.{each.name}")
            assert inspect.isfunction(getattr(module, each.name))
