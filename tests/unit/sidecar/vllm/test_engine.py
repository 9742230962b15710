"""The adapter of vLLM: what it does beside its connection's calls."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any, cast

import pytest

from bus.errors import EngineError
from sidecar._vllm.engine import VllmAdapter
from tests.support.steps import steps


class Connection:
    """Counts three requests once something else was called, or can't count them."""

    is_served = True
    is_shared = False

    def __init__(self, *, counts: bool, fails: bool) -> None:
        self.called = asyncio.Event()
        self._counts = counts
        self._fails = fails

    async def in_flight(self, _seen: int | None) -> int:
        await self.called.wait()
        if not self._counts:
            raise EngineError("no counts")
        return 3

    async def pause(self, *_: object, **__: object) -> None:
        self._call()

    async def ask(self, *_: object) -> list[None]:
        self._call()
        return [None]

    def _call(self) -> None:
        self.called.set()
        if self._fails:
            raise EngineError("no call")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("call", ["keep", "wait", "swap"])
def test_pause_and_swap_count_the_requests(call: str, *, counts: bool, fails: bool) -> None:
    """A count that fails is no failure of the swap or the pause, which was made."""

    async def play() -> int:
        adapter = VllmAdapter(cast("Any", Connection(counts=counts, fails=fails)))
        if call == "swap":
            return await steps(adapter).swap(4, clear_cache=True)
        return await adapter.pause(cast("Any", call), clear_cache=False)

    if fails:
        with pytest.raises(EngineError, match="no call"):
            asyncio.run(play())
    else:
        assert asyncio.run(play()) == (3 if counts else 0)


class ProbedConnection:
    """Fails in one call, once. Admission passes probes alone, or all requests (empty)."""

    is_served = is_shared = True

    def __init__(self, fails: str) -> None:
        self.passes = ""
        self.calls: list[str] = []
        self._fails = fails

    async def ask(self, _method: str, how: dict[str, Any]) -> list[dict[str, Any]]:
        if how.get("ends"):
            self._call("abort_requests")
            return [{"ended": 0}]
        self.passes = how.get("passes", self.passes)
        return [{"admits": True, "passes": self.passes}]

    async def in_flight(self, _seen: int | None) -> int:
        return 0

    async def resume(self) -> None:
        self._call("resume")

    async def generate(self, *_: object) -> None:
        self._call("generate")

    async def pause(self, *_: object, **__: object) -> None:
        self._call("pause")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fails:
            self._fails = ""
            raise EngineError(f"no {name}")


@pytest.mark.parametrize("fails", ["", "abort_requests", "resume", "generate", "pause"])
def test_requests_are_admitted_after_probes_that_failed(fails: str) -> None:
    """Once the engine is paused: until then it may run with unproven weights."""

    async def play() -> None:
        connection = ProbedConnection(fails)
        adapter = VllmAdapter(cast("Any", connection))
        await adapter._admission.look()
        with pytest.raises(EngineError, match=f"no {fails}") if fails else nullcontext():
            await adapter.probe(((1, 2),), 4, "salt", mode="abort", clear_cache=True)
        assert connection.calls[-1] == "pause"
        assert bool(connection.passes) == (fails == "pause")
        await adapter.pause("abort", clear_cache=True)
        assert connection.passes == ""

    asyncio.run(play())
