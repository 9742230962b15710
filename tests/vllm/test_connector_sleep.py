"""Sleep of an engine with a KV connector: after the wake its peers know where its cache lies."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

import pytest

from bus._manifest import Manifest
from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._vllm.inprocess_engine import VllmEngine
from sidecar._vllm.plugin.kv_connectors import UNKNOWN
from tests.support.checkpoints import make_checkpoint
from tests.support.steps import steps
from tests.vllm._vllm import (
    MAX_POSITIONS,
    Oracle,
    async_llm,
    boot_environment,
    engine_args,
    generate,
    require_vllm,
)

if TYPE_CHECKING:
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

TOKENS = 12
LIMIT_S = 600.0


def test_peers_are_told_of_the_cache_that_a_wake_has_registered(tmp_path: Path) -> None:
    """Where the worker registers its cache anew (vLLM 0.33), the core tells them after the wake,
    and not before the cache is there. Else the registration stays as it was (0.32). Tokens are
    exact in both. Updates are refused: nobody knows what this connector keeps."""
    checkpoint = make_checkpoint(tmp_path / "model", seed=1, max_positions=MAX_POSITIONS)
    told = tmp_path / "told"

    def registrations() -> list[int]:
        return [*map(int, told.read_text(encoding="ascii").split())]

    async def scenario() -> None:
        from vllm.config import KVTransferConfig  # noqa: PLC0415 - after require_vllm
        from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: PLC0415
            KVConnectorBase_V1,
        )

        connector = KVTransferConfig(
            kv_connector="TellingConnector",
            kv_connector_module_path="_connector",
            kv_role="kv_both",
            kv_connector_extra_config={"told": str(told)},
        )
        registers_anew = hasattr(KVConnectorBase_V1, "restore_kv_caches")
        expected = Oracle(checkpoint.folder).greedy(checkpoint.weights, TOKENS)
        args = engine_args(
            checkpoint.folder, kv_transfer_config=connector, disable_hybrid_kv_cache_manager=True
        )
        async with async_llm(boot_environment(tmp_path / "plugin"), args) as llm:
            engine = VllmEngine(llm)
            info = await engine.start()
            assert info.kv_connectors == {"TellingConnector": UNKNOWN}
            with pytest.raises(EngineError, match="TellingConnector: unknown") as refused:
                await steps(engine).arm(Manifest(("a",), ("float32",), ((2,),), (1,)))
            assert refused.value.code is NackCode.KV_CONNECTOR_REFUSED
            assert registrations() == [1]
            await engine.pause("keep", clear_cache=True)
            await engine.sleep(1)
            await engine.wake_weights()
            assert registrations() == [1]
            await engine.wake()
            assert registrations() == ([1, 2] if registers_anew else [1])
            assert list((await generate(llm, "r1", TOKENS)).token_ids) == expected
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    gc.collect()
