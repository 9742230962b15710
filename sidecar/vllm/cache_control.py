"""Controls the caches of one vLLM: their run, and when to drop them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bus.errors import EngineError
from bus.messages import REFUSED, NackCode
from sidecar.vllm.plugin import worker_rpc
from sidecar.vllm.plugin.environment import trusted_kv_connectors
from sidecar.vllm.plugin.kv_connectors import CLEARED, explain, trust

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from sidecar.vllm.plugin.worker_rpc import WorkerFacts


class CacheControl:
    """Controls the caches of one engine. ``ask`` calls vLLM's ``collective_rpc``."""

    def __init__(self, ask: Callable[[str, dict[str, Any]], Awaitable[Any]]) -> None:
        self._ask = ask
        self._is_salted = True
        self.connectors: Mapping[str, str] = {}  # how updates treat them

    def learn(self, facts: WorkerFacts) -> None:
        """Stores the plugin's facts; the sidecar's environment may trust more KV connectors."""
        self._is_salted = not facts.features.get("prefix_cache_versions")
        self.connectors = trust(facts.kv_connectors, trusted_kv_connectors())

    def require_updatable(self) -> None:
        """Refuses an update if a KV connector could return keys and values of older weights.

        Raises:
            EngineError: code ``kv_connector_refused``; the text names the connector and says what
                to do.
        """
        refused = [n for n, how in sorted(self.connectors.items()) if how.startswith(REFUSED)]
        if refused:
            detail = "; ".join(explain(name, self.connectors[name]) for name in refused)
            raise EngineError(detail, code=NackCode.KV_CONNECTOR_REFUSED)

    def clears(self, asked: bool) -> bool:
        """Returns whether a pause or a swap must drop caches.

        ``asked``: the caller wants it. Caches are dropped anyway if this vLLM, or a KV connector,
        would find keys and values of older weights in them.
        """
        return asked or not self._is_salted or CLEARED in self.connectors.values()

    async def join_run(self, run: str) -> None:
        """Salts the caches with the id of a run; see :meth:`sidecar.engine.Engine.join_run`.

        A vLLM without salts drops its caches with each update instead.
        """
        if self._is_salted:
            await self._ask(worker_rpc.JOIN_RUN, {"run": run})

    async def clear(self) -> bool:
        """Drops keys, values and prefix cache, also in connectors.

        Returns:
            False if the cores can't do it by themselves, so that vLLM's own calls are needed.
        """
        if self._is_salted:
            await self._ask(worker_rpc.CLEAR_CACHES, {})
        return self._is_salted
