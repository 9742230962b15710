"""The adapter of vLLM: what it does beside its connection's calls."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from bus.errors import EngineError
from sidecar.vllm.engine import VllmAdapter


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
    """A count that fails is no failure of a swap, or of a pause that keeps requests."""

    async def play() -> int:
        adapter = VllmAdapter(cast("Any", Connection(counts=counts, fails=fails)))
        if call == "swap":
            return await adapter.swap(4, clear_cache=True)
        return await adapter.pause(cast("Any", call), clear_cache=False)

    if fails:
        with pytest.raises(EngineError, match="no call"):
            asyncio.run(play())
    elif call == "wait" and not counts:
        with pytest.raises(EngineError, match="no counts"):
            asyncio.run(play())
    else:
        assert asyncio.run(play()) == (3 if counts else 0)
