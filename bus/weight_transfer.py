"""Public names for writing your own transport backend: its sender, receiver and registration.

``examples/own_backend.py`` is such a backend. Importing this module loads torch.
"""

from __future__ import annotations

from bus._manifest import TensorMeta
from bus._weight_transfer.allocation import RankAssignment, World
from bus._weight_transfer.base import Receiver, Sender
from bus._weight_transfer.formats import decode, encode
from bus._weight_transfer.registry import register_receiver, register_sender

__all__ = [
    "RankAssignment",
    "Receiver",
    "Sender",
    "TensorMeta",
    "World",
    "decode",
    "encode",
    "register_receiver",
    "register_sender",
]
