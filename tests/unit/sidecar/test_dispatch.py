"""The engine calls that a description becomes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from bus._protocol.engine.calls import CallStrengthenPause
from bus.errors import EngineError
from lab.bench.programs.stub_engines import StubEngine
from sidecar._dispatch import dispatch


class Uncounted(StubEngine):
    """Can't count its requests."""

    async def in_flight(self) -> int:
        raise EngineError("no counts")


def test_a_pause_is_strengthened_in_an_engine_that_can_not_count() -> None:
    """All was dropped; a count is only reported."""
    call = CallStrengthenPause(aborts=True, clears=True)
    asyncio.run(dispatch(cast("Any", Uncounted()), call))
