"""The sending ends of weight transfer backends."""

from __future__ import annotations

from trainer_agent.transfer.base import Sender, current_gpu
from trainer_agent.transfer.registry import available_backends, make_sender, register_sender

__all__ = ["Sender", "available_backends", "current_gpu", "make_sender", "register_sender"]
