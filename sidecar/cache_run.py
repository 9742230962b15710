"""Keeps an engine's caches those of its group's run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.engine import Engine


class CacheRun:
    """The run that one engine has joined; none before its sidecar has joined a group."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._run = ""

    async def join(self, run: str, on_failure: Callable[[str, Exception], object]) -> bool:
        """Have the engine join the ``run`` of its group, unless it has; return whether it did.

        A failure is reported, and is no reason not to serve: another run's salt finds no keys and
        values of this one. The engine is asked again after its next call.
        """
        if run in ("", self._run):
            return False
        try:
            await self._engine.join_run(run)
        except Exception as error:  # noqa: BLE001 - an adapter may raise anything; it is logged
            on_failure("join_run", error)
            return False
        self._run = run
        return True
