"""The library in the trainer's process: updates engines' weights, and generates rollouts.

The names in ``__all__`` are imported at first use, so that ``import trainer_agent`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainer_agent.agent import TrainerAgent
    from trainer_agent.canary import Canary
    from trainer_agent.report import UpdateReport
    from trainer_agent.rollouts.client import RolloutClient
    from trainer_agent.rollouts.rollout_buffer import RolloutBuffer
    from trainer_agent.rollouts.sync_client import SyncRolloutClient
    from trainer_agent.sync_agent import SyncTrainerAgent
    from trainer_agent.weights.cpu_cache import CpuCache
    from trainer_agent.weights.shared_memory import share_memory
    from trainer_agent.weights.source import WeightSource

__all__ = [
    "Canary",
    "CpuCache",
    "RolloutBuffer",
    "RolloutClient",
    "SyncRolloutClient",
    "SyncTrainerAgent",
    "TrainerAgent",
    "UpdateReport",
    "WeightSource",
    "share_memory",
]

_HOMES: Final = {
    "Canary": "trainer_agent.canary",
    "CpuCache": "trainer_agent.weights.cpu_cache",
    "RolloutBuffer": "trainer_agent.rollouts.rollout_buffer",
    "RolloutClient": "trainer_agent.rollouts.client",
    "SyncRolloutClient": "trainer_agent.rollouts.sync_client",
    "SyncTrainerAgent": "trainer_agent.sync_agent",
    "TrainerAgent": "trainer_agent.agent",
    "UpdateReport": "trainer_agent.report",
    "WeightSource": "trainer_agent.weights.source",
    "share_memory": "trainer_agent.weights.shared_memory",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
