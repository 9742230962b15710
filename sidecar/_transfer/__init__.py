"""The engine's side of weight transfer, between the transport and the weights.

It receives chunks, verifies them, and decides whether memory allows staging. The receivers of the
transfer backends are in :mod:`bus.weight_transfer`.
"""

from __future__ import annotations

from sidecar._transfer.memory_budget import free_memory, spare_memory, staging_capacity
from sidecar._transfer.verification import check_delivered, check_room, check_sums

__all__ = [
    "check_delivered",
    "check_room",
    "check_sums",
    "free_memory",
    "spare_memory",
    "staging_capacity",
]
