"""One rank of a trainer that shards its model with FSDP2 over gloo, and sends its shards with
vLLM's ``nccl_m2n``, as a process.

Run as ``python -m tests.support.m2n_rank '<JSON of its arguments>'``. It makes a trainer engine of
each of the files of weights in turn, sends them as often as is said, and says of each, as a line of
JSON, which version the bus gave (rank 0 alone knows it), or what was raised.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import bus.log
from bus.errors import WavebusError
from bus.runtime.lines import answer as say
from tests.support import pair_plugin
from tests.support.fsdp_rank import Tree
from trainer_agent import SyncTrainerAgent


def source(path: str, ranks: int) -> Any:
    """vLLM's own, of parameters that are DTensors."""
    from vllm.distributed.weight_transfer.m2n_source import (  # noqa: PLC0415 - only here
        DTensorModuleSource,
    )

    tree = Tree()
    for name, weight in load_file(path).items():
        tree.put(name, weight)
    fully_shard(tree)
    return DTensorModuleSource(tree, ranks)


def send(agent: SyncTrainerAgent, path: str, ranks: int, times: int) -> int | None:
    """What a user writes."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

    trainer = WeightTransferTrainerFactory.trainer_init(
        agent.init_info("nccl_m2n"),
        client=agent.client(),
        source=agent.source(source(path, ranks)),
    )
    try:
        for _ in range(times):
            trainer.send_weights()
    finally:
        trainer.shutdown()
    return None if agent.last_update is None else agent.last_update.version


def main() -> None:
    bus.log.configure(level="warning", json=True)
    pair_plugin.register_m2n()
    told: dict[str, Any] = json.loads(sys.argv[1])
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
                answer["version"] = send(agent, path, ranks, told["times"])
            except WavebusError as error:
                answer["error"] = f"{type(error).__name__}: {error}"
            say(**answer)
        dist.barrier()  # an agent that leaves takes the group with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
