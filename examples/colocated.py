"""Trainer and engine share a GPU: the engine gives its memory back while the trainer trains.

It needs no GPU: the embedded engine gives back what it has of the host's memory. Run it:

python examples/colocated.py

With vLLM, start engines with --enable-sleep-mode, and send with backend="ipc", by which weights
go from the trainer's tensors into the engine's without leaving the GPU.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

from lab.demo.policy import make_policy, save_checkpoint
from lab.network import PolicyConfig
from sidecar import Sidecar
from sidecar.embedded import EmbeddedEngine, SamplingParams
from trainer_agent import TrainerAgent


async def main() -> None:
    """A broker of its own, one engine, one request that lives through three sleeps."""
    broker = subprocess.Popen(  # noqa: ASYNC220 - our own command, quickly started
        [sys.executable, "-m", "bus._cli.main", "broker", "--listen", "tcp://127.0.0.1:*"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert broker.stdout is not None
    address = broker.stdout.readline().strip()
    try:
        with tempfile.TemporaryDirectory() as folder:
            await colocated(address, Path(folder))
    finally:
        broker.terminate()
        broker.wait()
        broker.stdout.close()


async def colocated(address: str, folder: Path) -> None:
    """Generate, sleep, train, update, go on."""
    save_checkpoint(make_policy(PolicyConfig()), folder)
    engine = EmbeddedEngine(folder, host=None)
    weights = load_file(folder / "model.safetensors")
    async with (
        Sidecar(engine, broker=address, group="policy", name="engine"),
        TrainerAgent(address, group="policy") as agent,
    ):
        await agent.wait_for_engines(1)
        prompt, length = [1, 2, 3], 200
        sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        request = engine.generate(prompt, sampling)
        tokens = 0
        for step in range(3):
            async for delta in request:
                tokens += len(delta.token_ids)
                if tokens > 50 * (step + 1):
                    break
            async with agent.asleep(level=2):  # the request is kept, weights and KV cache are gone
                for tensor in weights.values():  # "training": all the memory is yours
                    tensor.mul_(1.01)
                version = await agent.update_weights(weights, label=f"step {step}")
            print(f"step {step}: {tokens} tokens so far; awake again, with version {version}")
        async for delta in request:
            tokens += len(delta.token_ids)
            spans = delta.weight_versions
        print(f"{tokens} of {length} tokens, by versions {[span.version for span in spans]}")
        if tokens != length:
            raise SystemExit("tokens were lost")


if __name__ == "__main__":
    asyncio.run(main())
