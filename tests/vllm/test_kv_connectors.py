"""vLLM's own classes of KV connectors: which clear themselves."""

from __future__ import annotations

import pytest

from sidecar.vllm.plugin import kv_connectors as kv
from tests.vllm._vllm import require_vllm

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
