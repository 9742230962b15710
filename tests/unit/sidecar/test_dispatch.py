"""What an engine call gives back to the session."""

from __future__ import annotations

import asyncio

import pytest

from bus.errors import EngineError
from bus.protocol.engine.calls import CallPause, CallSwap
from sidecar.bench.programs.stub_engines import StubEngine
from sidecar.dispatch import dispatch


class Engine(StubEngine):
    """Has three requests, or can't count them."""

    def __init__(self, *, counts: bool) -> None:
        self.swaps = 0
        self._counts = counts

    async def in_flight(self) -> int:
        if not self._counts:
            raise EngineError("no counts")
        return 3

    async def pause(self, mode: object, *, clear_cache: bool) -> None:  # noqa: ARG002
        self.swaps += 1
        await asyncio.sleep(0)

    async def swap(self, version: int, *, clear_cache: bool) -> None:  # noqa: ARG002
        self.swaps += 1
        await asyncio.sleep(0)


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize(
    "call", [CallSwap(4, clear_cache=True), CallPause("keep", clear_cache=False)]
)
def test_a_swap_says_how_many_requests_were_in_flight(
    call: CallSwap | CallPause, *, counts: bool
) -> None:
    """As a pause does. A count that fails is no failure of what was done."""
    engine = Engine(counts=counts)
    assert asyncio.run(dispatch(engine, call)) == (3 if counts else 0)
    assert engine.swaps == 1
