"""One rank of a trainer that shards its model with FSDP2 over gloo, and sends it with one of vLLM's
trainer engines, as a process.

Run as ``python -m tests.support.native_rank '<JSON of its arguments>'``. It makes a trainer engine
of each of the files of weights in turn, sends them as often as is said, and says of each, as a line
of JSON, which version the bus gave (rank 0 alone knows it), or what was raised.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import bus.log
from bus._runtime.json_lines import write_answer as say
from bus.errors import WavebusError
from tests.support import pair_plugin
from tests.support.fsdp_rank import Tree
from trainer_agent import SyncTrainerAgent

SHARDING = "nccl_m2n"


def source(path: str, ranks: int, engine: str) -> Any:
    """vLLM's own, of parameters that are DTensors."""
    from tests.support.m2n_source import module_source  # noqa: PLC0415 - it needs vLLM

    tree = Tree()
    for name, weight in load_file(path).items():
        tree.put(name, weight)
    fully_shard(tree)
    return module_source(tree, ranks, shards=engine == SHARDING)


def send(agent: SyncTrainerAgent, path: str, told: dict[str, Any]) -> int | None:
    """What a user writes."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

    engine: str = told["engine"]
    trainer = WeightTransferTrainerFactory.trainer_init(
        agent.init_info(engine, **told["fields"]),
        client=agent.client(),
        source=agent.source(source(path, told["ranks"], engine)),
    )
    try:
        for _ in range(told["times"]):
            trainer.send_weights()
    finally:
        trainer.shutdown()
    return None if agent.last_update is None else agent.last_update.version


def main() -> None:
    bus.log.configure(level="warning", json=True)
    told: dict[str, Any] = json.loads(sys.argv[1])
    pair_plugin.register_on_cpu(told["engine"])
    rank, ranks = told["rank"], told["ranks"]
    dist.init_process_group(
        "gloo", init_method=f"file://{told['store']}", rank=rank, world_size=ranks
    )
    with SyncTrainerAgent(told["broker"], rank=rank, ranks=ranks, timeout_s=60.0) as agent:
        if rank == 0:
            agent.wait_for_engines(told["engines"])
        for path in told["weights"]:
            answer: dict[str, Any] = {}
            try:
                answer["version"] = send(agent, path, told)
            except WavebusError as error:
                answer["error"] = f"{type(error).__name__}: {error}"
            say(**answer)
        dist.barrier()  # an agent that leaves takes the group with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
