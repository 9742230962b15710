"""Makes an engine join its group's run, so that caches of different runs stay apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.engine import Engine


class CacheRun:
    """Remembers which run an engine has joined, so that it joins each run once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._run = ""

    async def join(self, run: str, on_failure: Callable[[str, Exception], object]) -> bool:
        """Makes the engine salt its caches with a run's id, unless it does so already.

        If the engine's call fails, the next call of this method tries again. Until then the engine
        salts its caches with the earlier run's id, and uses no cache entries of ``run``.

        Args:
            run: the id of the group's run. Empty, as before the sidecar has joined a group: nothing
                happens.
            on_failure: receives the name and the exception of an engine call that failed.

        Returns:
            Whether this call has changed the run.
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
