"""vLLM's trainer engines over the bus: two arguments change, `client` and `source`.

A real vLLM engine serves, on the CPU, while a trainer sends it new weights through vLLM's own
WeightTransferTrainerFactory. Run it; it needs vLLM (pip install 'wavebus[vllm]') and no GPU:

python examples/vllm_trainer_engine.py

The bus does what vLLM's own clients don't: it checks the weights against every engine's model
before anything is touched, pauses all engines together, and has them go on if the trainer dies.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bus.errors import ManifestRefused
from lab.demo.policy import Policy, make_policy, save_checkpoint
from lab.network import PolicyConfig
from sidecar import Sidecar
from sidecar.embedded import EmbeddedEngine
from sidecar.embedded import SamplingParams as EmbeddedParams
from trainer_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

# What a tiny model on a CPU needs. vLLM reads it when it is imported, so that comes later.
ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",  # what is shown here is said by the bus
}
PROMPT = (1, 3, 4, 5)
TOKENS = 12


# -- the trainer ----------------------------------------------------------------------


def train(broker: str, model: Policy) -> int:
    """Your loop. Returns the version that engines serve at its end."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

    with SyncTrainerAgent(broker, group="policy") as agent:
        agent.wait_for_engines(1)
        trainer = WeightTransferTrainerFactory.trainer_init(
            agent.init_info(), client=agent.client(), source=agent.source(model)
        )
        for _ in range(2):
            with torch.no_grad():  # "training"
                for weight in model.parameters():
                    weight.add_(torch.randn_like(weight) * 0.1)
            trainer.send_weights()  # arm, pause, send, commit, resume
            print(agent.last_update)
        refused(agent, model)
        trainer.shutdown()
        assert agent.last_update is not None
        return agent.last_update.version


def refused(agent: SyncTrainerAgent, model: Policy) -> None:
    """Half of a fused tensor: vLLM alone would load it, and serve tokens of neither model."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

    half = {name: w for name, w in model.named_parameters() if "k_proj" not in name}
    trainer = WeightTransferTrainerFactory.trainer_init(
        agent.init_info(), client=agent.client(), source=agent.source(half)
    )
    try:
        trainer.send_weights()
    except ManifestRefused as error:
        print(f"refused, and the engine serves on: {error}")
    else:
        sys.exit("half of a fused tensor was taken")
    finally:
        trainer.shutdown()


# -- the engine -----------------------------------------------------------------------


async def serve_and_update(broker: str, folder: Path) -> None:
    from sidecar.vllm import VllmEngine  # noqa: PLC0415

    torch.manual_seed(0)
    model = make_policy(PolicyConfig())
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    save_checkpoint(model, folder / "old")
    llm = boot(folder / "old")
    try:
        async with Sidecar(VllmEngine(llm), broker=broker, group="policy"):
            before = await greedy(llm)
            # The trainer is a process of its own, mostly; a thread does here.
            version = await asyncio.to_thread(train, broker, model)
            after = await greedy(llm)
    finally:
        llm.shutdown()
    save_checkpoint(model, folder / "new")
    expected = await greedy_of_a_fresh_engine(folder / "new")
    print(f"version 0: {before}")
    print(f"version {version}: {after}")
    if after != expected or after == before:
        sys.exit(f"a fresh engine with the new weights says {expected}")


def boot(checkpoint: Path) -> AsyncLLM:
    from vllm.config import WeightTransferConfig  # noqa: PLC0415
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    args = AsyncEngineArgs(
        model=str(checkpoint),
        weight_transfer_config=WeightTransferConfig(backend="wavebus"),  # all that the bus needs
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=8,
        max_model_len=256,
    )
    return AsyncLLM.from_engine_args(args)


async def greedy(llm: AsyncLLM) -> list[int]:
    from vllm import SamplingParams  # noqa: PLC0415

    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    tokens: list[int] = []
    async for output in llm.generate(
        {"prompt_token_ids": list(PROMPT)}, params, os.urandom(4).hex()
    ):
        tokens = list(output.outputs[0].token_ids)
    return tokens


async def greedy_of_a_fresh_engine(checkpoint: Path) -> list[int]:
    """What the weights should say: in float32 every engine says the same."""
    engine = EmbeddedEngine(checkpoint)
    await engine.start()
    params = EmbeddedParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    tokens = [token async for delta in engine.generate(PROMPT, params) for token in delta.token_ids]
    await engine.close()
    return tokens


def main() -> None:
    os.environ.update({name: os.environ.get(name, value) for name, value in ON_A_CPU.items()})
    command = [sys.executable, "-m", "bus._cli.main", "broker", "--listen", "tcp://127.0.0.1:*"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker,  # noqa: S603
    ):
        assert broker.stdout is not None
        try:
            asyncio.run(serve_and_update(broker.stdout.readline().strip(), Path(folder)))
        finally:
            broker.terminate()


if __name__ == "__main__":  # vLLM starts its engine core by importing this file again
    main()
