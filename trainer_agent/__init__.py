"""The library that a trainer imports."""

from __future__ import annotations

from trainer_agent.agent import TrainerAgent
from trainer_agent.report import UpdateReport
from trainer_agent.sources import WeightSource
from trainer_agent.sync import SyncTrainerAgent

__all__ = ["SyncTrainerAgent", "TrainerAgent", "UpdateReport", "WeightSource"]
