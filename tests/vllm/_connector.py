"""A KV connector that moves nothing. It tells peers how often its cache has been registered.

vLLM finds it by its name and this module's, in the engine core (its scheduler's side) and in the
worker (the other side).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)


@dataclass
class Registrations(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What peers are told of one worker."""

    count: int


class TellingConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Appends to the file ``told`` of its configuration what peers are told."""

    _count = 1

    # The worker's side

    def restore_kv_caches(self) -> None:
        self._count += 1

    def get_handshake_metadata(self) -> Registrations:
        return Registrations(self._count)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    # The scheduler's side

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        told = Path(self._kv_transfer_config.kv_connector_extra_config["told"])
        with told.open("a", encoding="ascii") as file:
            file.writelines(f"{each.count}\n" for each in metadata.values())

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, *_: Any) -> None:
        pass

    def build_connector_meta(self, _: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()
