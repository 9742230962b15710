"""Writes the checkpoint of a small model."""

from __future__ import annotations

from pathlib import Path

from bus.runtime.json_lines import write_answer
from trainer_agent.demo.policy import Policy, PolicyConfig, save_checkpoint


def checkpoint(folder: str, experts: int) -> None:
    """Write it, as the demo has it; with experts it is a mixture."""
    save_checkpoint(Policy(PolicyConfig(experts=experts)), Path(folder))
    write_answer()
