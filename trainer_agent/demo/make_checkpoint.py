"""A checkpoint of the demo's policy, untrained: ``python -m trainer_agent.demo.make_checkpoint
FOLDER EXPERTS``; with 0 experts it is dense."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer_agent.demo.policy import Policy, PolicyConfig, save_checkpoint

if __name__ == "__main__":
    folder, experts = sys.argv[1:]
    save_checkpoint(Policy(PolicyConfig(experts=int(experts))), Path(folder))
