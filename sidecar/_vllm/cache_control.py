"""Keeps the caches of one vLLM engine free of entries that older weights computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bus.errors import EngineError
from bus.messages import REFUSED, NackCode
from sidecar._vllm.plugin import worker_rpc
from sidecar._vllm.plugin.environment import trusted_kv_connectors
from sidecar._vllm.plugin.kv_connectors import CLEARED, explain, trust

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar._vllm.plugin.worker_rpc import WorkerFacts


class CacheControl:
    """Decides when the caches of one vLLM engine must be dropped, and drops them.

    With salts, cache entries of different runs and versions are kept apart
    (:mod:`sidecar._vllm.plugin.core.kv_versions`), and need not be dropped. A vLLM that the plugin
    can't extend has no salts.

    Args:
        ask: calls vLLM's ``collective_rpc`` with a method and its arguments.

    Attributes:
        connectors: by class name, how updates treat each KV connector
            (:mod:`sidecar._vllm.plugin.kv_connectors`).
    """

    def __init__(self, ask: Callable[[str, dict[str, Any]], Awaitable[Any]]) -> None:
        self._ask = ask
        self._is_salted = True
        self.connectors: dict[str, str] = {}

    def learn(self, facts: WorkerFacts) -> None:
        """Stores the plugin's report about salts and KV connectors.

        Args:
            facts: the plugin's report. Unknown connectors that the sidecar's own environment names
                as trusted are treated as trusted, too.
        """
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
        """Returns whether a pause or a swap must drop the caches.

        Args:
            asked: whether the caller wants the caches dropped. They are also dropped if this vLLM,
                or a KV connector, would find keys and values of older weights in them.
        """
        return asked or not self._is_salted or CLEARED in self.connectors.values()

    async def join_run(self, run: str) -> None:
        """Salts the caches with the id of a run; see :meth:`sidecar.engine.Engine.join_run`.

        Does nothing in a vLLM without salts, which drops its caches with each update instead.
        """
        if self._is_salted:
            await self._ask(worker_rpc.JOIN_RUN, {"run": run})

    async def clear(self) -> bool:
        """Drops keys, values and prefix cache, also those in KV connectors, if vLLM has salts.

        Returns:
            True if the cores have dropped them. False if nothing was done, and the caller must use
                vLLM's own calls.
        """
        if self._is_salted:
            await self._ask(worker_rpc.CLEAR_CACHES, {})
        return self._is_salted
