"""vLLM's own classes of KV connectors: which clear themselves."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

import pytest

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._vllm.inprocess_engine import VllmEngine
from sidecar._vllm.plugin import kv_connectors as kv
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.push import plan
from tests.support.steps import steps
from tests.vllm._vllm import (
    MAX_POSITIONS,
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


@pytest.mark.parametrize(
    ("module", "how"),
    [(None, kv.BY_TOKENS), ("tests.vllm._clearing", kv.CLEARED), ("of_nobody", kv.BY_TOKENS)],
)
def test_vllms_base_class_clears_nothing_and_says_nothing(module: str | None, how: str) -> None:
    """That counts as done in vLLM: so a class must have its own ``reset_cache``. One that can't be
    imported is not known to have it."""
    from vllm.config import KVTransferConfig  # noqa: PLC0415 - after require_vllm

    inside = {
        "kv_connector": "ExampleConnector",
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
    }
    both = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "connectors": [{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, inside]
        },
    )
    expected = {"OffloadingConnector": kv.SALTED, "ExampleConnector": how}
    assert kv.treatments(both, {}) == expected


def test_each_connector_of_vllm_is_known_or_refused() -> None:
    """Those that clear themselves are the ones whose keys have salts; a new one is looked at."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    names = {*KVConnectorFactory._registry} - {"MultiConnector"}
    assert kv._KNOWN.keys() <= names
    found = {name: kv.treatments({"kv_connector": name}, {})[name] for name in names}
    refused = {name for name, how in found.items() if how == kv.UNKNOWN}
    assert refused == {
        "FlexKVConnectorV1",
        "HiSparseConnector",
        "LMCacheMPConnector",
        "MoRIIOConnector",
        "MooncakeConnector",
        "NixlPushConnector",
    }


def test_an_engine_with_a_connector_keyed_by_tokens_refuses_to_arm(tmp_path: Path) -> None:
    """By the connector's name, also of one inside a ``MultiConnector``. The engine serves on."""
    checkpoint = make_checkpoint(tmp_path / "model", seed=1, max_positions=MAX_POSITIONS)

    async def scenario() -> None:
        from vllm.config import KVTransferConfig  # noqa: PLC0415 - after require_vllm

        stored = {"shared_storage_path": str(tmp_path / "stored")}
        inside = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": stored,
        }
        connector = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": [inside]},
        )
        args = engine_args(
            checkpoint.folder, kv_transfer_config=connector, disable_hybrid_kv_cache_manager=True
        )
        async with async_llm(boot_environment(tmp_path / "plugin"), args) as llm:
            engine = VllmEngine(llm)
            info = await engine.start()
            assert info.kv_connectors == {"ExampleConnector": kv.BY_TOKENS}
            with pytest.raises(EngineError, match="ExampleConnector: keyed by tokens") as refused:
                await steps(engine).arm(plan(perturbed(checkpoint.weights, 1)))
            assert refused.value.code is NackCode.KV_CONNECTOR_REFUSED
            assert len((await generate(llm, "r1", 4)).token_ids) == 4
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 600))
    gc.collect()
