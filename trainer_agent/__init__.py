"""The library in the trainer's process: updates engines' weights, and generates rollouts.

The names in ``__all__`` are imported at first use, so that ``import trainer_agent`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainer_agent._agent import TrainerAgent
    from trainer_agent._canary import Canary
    from trainer_agent._report import UpdateReport
    from trainer_agent._rollouts.client import RolloutClient
    from trainer_agent._rollouts.results import (
        Attempt,
        ChatCompletion,
        Choice,
        Completion,
        Span,
        TokenDelta,
    )
    from trainer_agent._rollouts.rollout_buffer import RolloutBuffer
    from trainer_agent._rollouts.sync_client import SyncRolloutClient
    from trainer_agent._sync_agent import SyncTrainerAgent
    from trainer_agent._weights.cpu_cache import CpuCache
    from trainer_agent._weights.shared_memory import share_memory
    from trainer_agent._weights.source import WeightSource

__all__ = [
    "Attempt",
    "Canary",
    "ChatCompletion",
    "Choice",
    "Completion",
    "CpuCache",
    "RolloutBuffer",
    "RolloutClient",
    "Span",
    "SyncRolloutClient",
    "SyncTrainerAgent",
    "TokenDelta",
    "TrainerAgent",
    "UpdateReport",
    "WeightSource",
    "share_memory",
]

_HOMES: Final = {
    "Attempt": "trainer_agent._rollouts.results",
    "Canary": "trainer_agent._canary",
    "ChatCompletion": "trainer_agent._rollouts.results",
    "Choice": "trainer_agent._rollouts.results",
    "Completion": "trainer_agent._rollouts.results",
    "CpuCache": "trainer_agent._weights.cpu_cache",
    "RolloutBuffer": "trainer_agent._rollouts.rollout_buffer",
    "RolloutClient": "trainer_agent._rollouts.client",
    "Span": "trainer_agent._rollouts.results",
    "SyncRolloutClient": "trainer_agent._rollouts.sync_client",
    "SyncTrainerAgent": "trainer_agent._sync_agent",
    "TokenDelta": "trainer_agent._rollouts.results",
    "TrainerAgent": "trainer_agent._agent",
    "UpdateReport": "trainer_agent._report",
    "WeightSource": "trainer_agent._weights.source",
    "share_memory": "trainer_agent._weights.shared_memory",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
