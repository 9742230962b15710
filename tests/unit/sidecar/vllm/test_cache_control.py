"""What a sidecar asks of a vLLM's caches, by what that vLLM supports."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bus.errors import EngineError
from bus.messages import NO_LIMITS, NackCode
from sidecar._vllm.cache_control import CacheControl
from sidecar._vllm.plugin import kv_connectors
from sidecar._vllm.plugin.environment import TRUST_KV_CONNECTORS
from sidecar._vllm.plugin.worker_rpc import WorkerFacts


class Cores:
    """Remembers what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def ask(self, method: str, kwargs: dict[str, Any]) -> Any:
        self.asked.append((method, kwargs))


def caches_of(
    cores: Cores, *, unsalted: str = "", connectors: dict[str, str] | None = None
) -> CacheControl:
    caches = CacheControl(cores.ask)
    features = {"prefix_cache_versions": unsalted}
    found = connectors or {}
    caches.learn(WorkerFacts("vllm", "", 0, 0, "", (), features, NO_LIMITS, found))
    return caches


@pytest.mark.parametrize("why", ["", "preprocess_add_request takes more"])
def test_cores_that_salt_their_caches_are_asked_themselves(why: str) -> None:
    """The others don't know the question; there vLLM's own calls clear them, with each update."""
    cores = Cores()
    caches = caches_of(cores, unsalted=why)
    asyncio.run(caches.join_run("run"))
    assert asyncio.run(caches.clear()) is not bool(why)
    asked = [("wavebus_run", {"run": "run"}), ("wavebus_clear_caches", {})]
    assert cores.asked == ([] if why else asked)
    assert caches.clears(False) is bool(why)


def test_what_is_keyed_by_tokens_alone_is_cleared_whoever_asks() -> None:
    """Else it would give keys and values of older weights."""
    found = {"A": kv_connectors.SALTED, "B": kv_connectors.CLEARED}
    assert caches_of(Cores(), connectors=found).clears(False)
    assert not caches_of(Cores(), connectors={"A": kv_connectors.SALTED}).clears(False)


def test_a_connector_that_is_trusted_here_may_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, if it is unknown; one that is known to give old keys and values may not."""
    found = {"Own": kv_connectors.UNKNOWN, "Example": kv_connectors.BY_TOKENS}
    caches = caches_of(Cores(), connectors=found)
    with pytest.raises(EngineError, match="Own: unknown to wavebus") as refused:
        caches.require_updatable()
    assert refused.value.code is NackCode.KV_CONNECTOR_REFUSED
    assert TRUST_KV_CONNECTORS in refused.value.detail
    assert "Example: keyed by tokens alone" in refused.value.detail
    monkeypatch.setenv(TRUST_KV_CONNECTORS, "Other, Own,Example")
    caches = caches_of(Cores(), connectors=found)
    with pytest.raises(EngineError) as refused:
        caches.require_updatable()
    assert "Own" not in refused.value.detail
    del found["Example"]
    caches_of(Cores(), connectors=found).require_updatable()
