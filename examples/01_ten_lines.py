"""The whole of it: wait for engines, then send weights. Needs a broker and one sidecar.

wavebus broker &
wavebus sidecar --engine embedded --model CHECKPOINT &
python examples/01_ten_lines.py CHECKPOINT
"""

from __future__ import annotations

import sys

from safetensors.torch import load_file

from trainer_agent import SyncTrainerAgent

weights = load_file(f"{sys.argv[1]}/model.safetensors")
with SyncTrainerAgent("tcp://127.0.0.1:7710", group="policy") as agent:
    agent.wait_for_engines(1, timeout_s=60)
    for step in range(3):
        weights["model.norm.weight"] = weights["model.norm.weight"] * 1.01  # "training"
        version = agent.update_weights(weights, label=f"step {step}")
        print(f"step {step}: every engine serves version {version}")
