"""A KV connector that is keyed by tokens alone, and clears itself."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector


class ExampleConnector(example_connector.ExampleConnector):  # type: ignore[misc]
    """It says that it has, and has nothing."""

    def reset_cache(self) -> bool:
        return True
