"""The receiving ends of weight transfer backends.

A receiver lives where the tensors are needed: in the embedded engine, or inside
a vLLM worker, called by the plugin. It fetches bytes and knows no model.
"""

from __future__ import annotations

from sidecar.transfer.base import Receiver
from sidecar.transfer.checks import check_delivered, check_room, check_sums
from sidecar.transfer.registry import available_backends, make_receiver, register_receiver
from sidecar.transfer.room import free_memory, spare_memory, staging_room

__all__ = [
    "Receiver",
    "available_backends",
    "check_delivered",
    "check_room",
    "check_sums",
    "free_memory",
    "make_receiver",
    "register_receiver",
    "spare_memory",
    "staging_room",
]
