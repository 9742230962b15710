"""What a whole update takes in a vLLM engine on a CPU: by its loader, and by a copy plan, in turn.

    python -m tests.vllm.load_ways --rounds 7

A Qwen3 of 0.5 B parameters with random weights; the trainer's side is this process, through shared
memory, in chunks of 64 MiB. Both ways verify a sample, and have the same engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from sidecar._vllm.inprocess_engine import VllmEngine
from tests.support.push import Push, plan
from tests.support.steps import steps
from tests.vllm._vllm import async_llm, boot_environment, engine_args, ways

if TYPE_CHECKING:
    from collections.abc import Awaitable

CHUNK_BYTES = 64 << 20


def make_model(folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    """Its configuration in ``folder``, and all of its weights."""
    config = transformers.Qwen3Config(
        vocab_size=65536,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        dtype=dtype,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(p.shape, generator=generator).mul_(0.02).to(getattr(torch, dtype))
        for name, p in model.named_parameters()
    }


async def timed(what: Awaitable[Any], took: dict[str, float], step: str) -> None:
    since = time.perf_counter()
    await what
    took[step] = took.get(step, 0.0) + (time.perf_counter() - since) * 1000


async def one(
    engine: VllmEngine, weights: dict[str, torch.Tensor], number: int
) -> dict[str, float]:
    """A whole update of a paused engine: ms of each step, over all chunks."""
    took: dict[str, float] = {}
    push = Push(engine, weights, plan(weights, CHUNK_BYTES), verify="sample")
    await push.open()
    await timed(steps(engine).arm(push.manifest), took, "arm")
    await timed(steps(engine).start_update(recover=False), took, "start")
    for seq in range(push.manifest.chunks):
        chunk = push.offer(seq)
        await timed(steps(engine).receive(chunk), took, "receive")
        await timed(push.load(seq), took, "verify and load")
    await timed(steps(engine).finish_update(), took, "finish")
    await engine.commit(number)
    push.close()
    took["start to finish"] = sum(took.values()) - took["arm"]
    return took


async def main(rounds: int, dtype: str) -> None:
    folder = Path(tempfile.mkdtemp())
    weights = make_model(folder / "model", dtype)
    numel = sum(tensor.numel() for tensor in weights.values())
    args = engine_args(folder / "model", load_format="dummy", max_model_len=512) | {"dtype": dtype}
    results: dict[str, list[dict[str, float]]] = {"loader": [], "plan": []}
    async with async_llm(boot_environment(folder), args) as llm:
        engine = VllmEngine(llm)
        await engine.start()
        await engine.pause("keep", clear_cache=True)
        first = await one(engine, weights, 1)  # compared
        await one(engine, weights, 2)
        for number in range(rounds):
            for way in ("loader", "plan"):
                await llm.collective_rpc("wavebus_tests_know", args=(way == "plan",))
                results[way].append(await one(engine, weights, number + 3))
                assert await ways(llm) == {way}, way
    print(json.dumps({"parameters": numel, "dtype": dtype, "first, compared": first}))
    for way, all_of in results.items():
        medians = {step: statistics.median(one[step] for one in all_of) for step in all_of[0]}
        print(json.dumps({"way": way, **{step: round(ms, 1) for step, ms in medians.items()}}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    asyncio.run(main(given.rounds, given.dtype))
