"""A trainer that is killed in the middle of an adapter's update, which every engine has loaded.

Run as a script: ``dies_with_adapter.py BROKER ENGINES``.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

from trainer_agent import SyncTrainerAgent
from trainer_agent._update.update import Update


async def die(*_: Any) -> None:
    """In the place of the commit."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Update.commit = die  # type: ignore[method-assign, assignment]
    with SyncTrainerAgent(sys.argv[1], name="dies") as agent:
        agent.wait_for_engines(int(sys.argv[2]))
        layer = "base_model.model.q_proj"
        agent.update_adapter(
            "policy-lora",
            {
                f"{layer}.lora_A.weight": torch.zeros(2, 4),
                f"{layer}.lora_B.weight": torch.zeros(4, 2),
            },
            config={"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]},
        )
