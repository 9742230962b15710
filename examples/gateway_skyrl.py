"""SkyRL's own clients train a group of engines through one URL, as if it were one vLLM.

Two real vLLM engines serve, on the CPU, behind `wavebus gateway`. SkyRL's two clients use it as
they are: the driver's, which generates and pauses, and that under its trainer engine, which sends.
A run of SkyRL needs `generator.inference_engine.external_proxy_url=http://127.0.0.1:8000` alone.
Run it; it needs vLLM, SkyRL (pip install --no-deps skyrl cloudpathlib) and no GPU:

python examples/gateway_skyrl.py

On CPUs there is no NCCL: a stand-in over gloo takes its place (tests/support/nccl_pair.py), in the
engines and here. All else is vLLM's, SkyRL's and wavebus's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typing_extensions

from lab.demo.policy import Policy, make_policy, save_checkpoint
from lab.network import PolicyConfig
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ENGINES = 2
ROUNDS = 3
BOOT_S = 300.0
MODEL = "policy"
TOKENS = 12
PROMPTS = [[1, 3, 4, 5], [1, 6, 7], [1, 9, 10, 11, 12], [1, 4, 4]]
SAMPLING = {"temperature": 0.0, "max_tokens": TOKENS, "logprobs": 1, "ignore_eos": True}
ROOT = Path(__file__).resolve().parents[1]
# vLLM loads the stand-in for NCCL by this entry point.
ENTRY_POINTS = """\
[vllm.general_plugins]
wavebus = sidecar._vllm.plugin:register
wavebus_pair = tests.support.pair_plugin:register
"""


# -- SkyRL ------------------------------------------------------------------------------


async def train(url: str, model: Policy) -> int:
    """Returns how many rollouts were made with the newest weights."""
    import transformers  # noqa: F401, PLC0415 - before SkyRL changes how it logs
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: PLC0415
        RemoteInferenceClient,
    )

    asked = {"prompt_token_ids": PROMPTS, "sampling_params": SAMPLING}
    async with RemoteInferenceClient(
        proxy_url=url,
        server_urls=[url],
        data_parallel_size=1,
        model_name=MODEL,
        tokenizer=Numbers(),
    ) as driver:
        workers, _ = await driver.get_world_size()
        print(f"SkyRL sees one vLLM with {workers} workers")
        with trainer_engine(url, model, workers) as worker:
            for _ in range(ROUNDS):
                with torch.no_grad():  # "training"
                    for weight in model.parameters():
                        weight.add_(torch.randn_like(weight) * 0.1)
                rollouts = asyncio.create_task(driver.generate(asked))
                began = time.monotonic()
                await driver.pause_generation()
                await asyncio.to_thread(worker.send_weights)
                await driver.resume_generation()
                took_ms = (time.monotonic() - began) * 1000
                done = (await rollouts)["response_ids"]
                print(f"update in {took_ms:.0f} ms, {len(done)} rollouts went on across it")
        done = (await driver.generate(asked))["response_ids"]
    return sum(tokens == greedy(model, p) for tokens, p in zip(done, PROMPTS, strict=True))


@contextlib.contextmanager
def trainer_engine(url: str, model: Policy, workers: int) -> Iterator[Any]:
    """What `build_trainer_engine` of SkyRL makes on rank 0, without Ray."""
    from skyrl.backends.skyrl_train.weight_sync import (  # noqa: PLC0415
        control_plane,
        register,
        weight_senders,
    )
    from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource  # noqa: PLC0415
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

    register.register_trainer_engines()
    info, _ = weight_senders.get_skyrl_nccl_trainer()
    engine = WeightTransferTrainerFactory.trainer_init(
        info(master_address="127.0.0.1", master_port=free_port(), world_size=1 + workers, rank=0),
        client=control_plane.SkyrlWeightSyncClient(
            [url], 1, init_payload_fn=control_plane.nccl_init_payloads
        ),
        source=FsdpWeightSource(model, torch.float32),
    )
    try:
        yield engine
    finally:
        weight_senders.teardown_engine(engine)


class Numbers:
    """In place of a tokenizer: texts are lists of token ids."""

    def batch_decode(self, token_ids: list[list[int]]) -> list[str]:
        return [" ".join(map(str, each)) for each in token_ids]


def greedy(model: Policy, prompt: Sequence[int]) -> list[int]:
    """The tokens that an engine with these weights gives."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


# -- the group --------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def start(
    stack: contextlib.ExitStack, command: Sequence[str], env: dict[str, str], log: Path
) -> subprocess.Popen[str]:
    """Starts a command of wavebus, which ends with the stack."""
    process = stack.enter_context(
        subprocess.Popen(  # noqa: S603 - our own commands
            [sys.executable, "-m", "bus._cli.main", *command],
            stdout=subprocess.PIPE,
            stderr=stack.enter_context(log.open("w")),
            text=True,
            env=env,
        )
    )
    stack.callback(process.terminate)
    return process


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def group(stack: contextlib.ExitStack, folder: Path) -> str:
    """Starts a broker, engines with their sidecars, and a gateway; returns its URL."""
    info = folder / "plugin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "WAVEBUS_TESTS_NCCL": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_SIM_MULTI_NUMA": "0",
        "OMP_NUM_THREADS": "1",
    }
    broker = first_line(
        start(stack, ("broker", "--listen", "tcp://127.0.0.1:*"), env, folder / "broker.log")
    )
    vllm = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder / "model"), "--served-model-name", MODEL, "--skip-tokenizer-init"),
        *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"),
        *("--max-model-len", "256", "--weight-transfer-config", '{"backend": "nccl"}'),
    ]
    for number in range(ENGINES):
        port = ("--port", str(free_port()))
        command = ("sidecar", "--broker", broker, "--", *vllm, *port)
        start(stack, command, env, folder / f"engine-{number}.log")
    asyncio.run(wait_for_engines(broker))
    gateway = ("gateway", "--broker", broker, "--listen", "127.0.0.1:0")
    return first_line(start(stack, gateway, env, folder / "gateway.log"))


async def wait_for_engines(broker: str) -> None:
    async with TrainerAgent(broker) as agent:
        await agent.wait_for_engines(ENGINES, timeout_s=BOOT_S)


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if sys.version_info < (3, 12):  # SkyRL asks for 3.12, where this is Python's own
        typing.TypedDict = typing_extensions.TypedDict
    sys.path.insert(0, str(ROOT))
    torch.manual_seed(0)
    model = make_policy(PolicyConfig())
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        save_checkpoint(model, folder / "model")
        url = group(stack, folder)
        from tests.support import nccl_pair  # noqa: F401, PLC0415 - gloo instead of NCCL

        right = asyncio.run(train(url, model))
    print(f"{right} of {len(PROMPTS)} rollouts are those of the newest weights")
    if right != len(PROMPTS):
        sys.exit("an engine serves other weights")


if __name__ == "__main__":
    main()
