"""An engine joins the run of its group once, and another one when the group's has changed."""

from __future__ import annotations

import asyncio

from bus.errors import EngineError
from lab.bench.programs.stub_engines import StubEngine
from sidecar._cache_run import CacheRun


class Joining(StubEngine):
    """Remembers its runs, and refuses one of them."""

    def __init__(self) -> None:
        self.runs: list[str] = []

    async def join_run(self, run: str) -> None:
        self.runs.append(run)
        if run == "refused":
            raise EngineError("no")


def test_an_engine_is_asked_once_for_each_run() -> None:
    """A failure is reported, and asked for again; no run at all is none to join."""
    engine = Joining()
    cache_run = CacheRun(engine)
    failures: list[str] = []

    def join(run: str) -> bool:
        failed = lambda name, error: failures.append(f"{name}: {error}")  # noqa: E731
        return asyncio.run(cache_run.join(run, failed))

    assert [join(run) for run in ("", "a", "a", "b", "")] == [False, True, False, True, False]
    assert engine.runs == ["a", "b"]
    assert [join("refused"), join("refused")] == [False, False]
    assert failures == ["join_run: no"] * 2
    assert join("b") is False
    assert engine.runs == ["a", "b", "refused", "refused"]
