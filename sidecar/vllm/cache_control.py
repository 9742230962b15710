"""The caches of one vLLM as its sidecar commands them: whose they are, when they are dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidecar.vllm.plugin import worker_rpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping


class CacheControl:
    """One engine's. ``ask`` makes vLLM's ``collective_rpc``."""

    def __init__(self, ask: Callable[[str, dict[str, Any]], Awaitable[Any]]) -> None:
        self._ask = ask
        self._is_salted = True

    def learn(self, features: Mapping[str, str]) -> None:
        """Take what this vLLM supports (:class:`bus.messages.EngineFacts`)."""
        self._is_salted = not features.get("prefix_cache_versions")

    def clears(self, asked: bool) -> bool:
        """Whether a pause, or a swap, is to drop caches: also where nobody asked for it, in a
        vLLM that would find keys and values of older weights in them."""
        return asked or not self._is_salted

    async def join_run(self, run: str) -> None:
        """See :meth:`sidecar.engine.Engine.join_run`. A vLLM without salts drops its caches with
        each update instead."""
        if self._is_salted:
            await self._ask(worker_rpc.JOIN_RUN, {"run": run})

    async def clear(self) -> bool:
        """Drop keys, values and prefix cache, a connector's too; False if the cores can't do it by
        themselves, and vLLM's own calls are to be made."""
        if self._is_salted:
            await self._ask(worker_rpc.CLEAR_CACHES, {})
        return self._is_salted
