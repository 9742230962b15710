"""The library that a trainer imports."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainer_agent.agent import TrainerAgent
    from trainer_agent.cache import CpuCache
    from trainer_agent.canary import Canary
    from trainer_agent.report import UpdateReport
    from trainer_agent.shared import share_memory
    from trainer_agent.sources import WeightSource
    from trainer_agent.sync import SyncTrainerAgent

__all__ = [
    "Canary",
    "CpuCache",
    "SyncTrainerAgent",
    "TrainerAgent",
    "UpdateReport",
    "WeightSource",
    "share_memory",
]

_HOMES: Final = {
    "Canary": "trainer_agent.canary",
    "CpuCache": "trainer_agent.cache",
    "SyncTrainerAgent": "trainer_agent.sync",
    "TrainerAgent": "trainer_agent.agent",
    "UpdateReport": "trainer_agent.report",
    "WeightSource": "trainer_agent.sources",
    "share_memory": "trainer_agent.shared",
}


def __getattr__(name: str) -> Any:
    """Late: a command's help text needs no torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
