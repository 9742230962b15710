"""What a sidecar asks of a vLLM's caches, by what that vLLM supports."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sidecar.vllm.cache_control import CacheControl


class Cores:
    """Remembers what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def ask(self, method: str, kwargs: dict[str, Any]) -> Any:
        self.asked.append((method, kwargs))


@pytest.mark.parametrize("why", ["", "preprocess_add_request takes more"])
def test_cores_that_salt_their_caches_are_asked_themselves(why: str) -> None:
    """The others don't know the question; there vLLM's own calls clear them, with each update."""
    cores = Cores()
    caches = CacheControl(cores.ask)
    caches.learn({"prefix_cache_versions": why})
    asyncio.run(caches.join_run("run"))
    assert asyncio.run(caches.clear()) is not bool(why)
    asked = [("wavebus_run", {"run": "run"}), ("wavebus_clear_caches", {})]
    assert cores.asked == ([] if why else asked)
