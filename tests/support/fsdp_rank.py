"""One rank of a trainer that shards its model with FSDP2 over gloo, as a process.

Run as ``python -m tests.support.fsdp_rank '<JSON of its arguments>'``. It sends each of the
files of weights in turn, and says of each, as a line of JSON, which version the bus gave or what
was raised, and how many tensors were gathered here.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import bus.log
from bus.errors import WavebusError
from lab.bench.process import write_answer as say
from trainer_agent import SyncTrainerAgent
from trainer_agent._weights.cpu_cache import CpuCache
from trainer_agent._weights.source import PairSource

if TYPE_CHECKING:
    from collections.abc import Iterator


class Tree(nn.Module):
    """Nothing but the parameters, each in the module that its name tells."""

    def put(self, name: str, weight: torch.Tensor) -> None:
        first, _, rest = name.partition(".")
        if not rest:
            self.register_parameter(first, nn.Parameter(weight))
            return
        if first not in self._modules:
            self.add_module(first, Tree())
        child = self._modules[first]
        assert isinstance(child, Tree)
        child.put(rest, weight)


class Counted(PairSource):
    """Counts what is gathered."""

    gathered = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in super().__iter__():
            self.gathered += 1
            yield pair


def sharded(path: str) -> Counted:
    tree = Tree()
    for name, weight in load_file(path).items():
        tree.put(name, weight)
    fully_shard(tree)
    return Counted(dict(tree.named_parameters()))


def sharded_model(config: str, path: str) -> nn.Module:
    """transformers' model of that configuration, with these weights in the form of a checkpoint."""
    import transformers  # noqa: PLC0415 - few tests need it

    model = transformers.Qwen3MoeForCausalLM.from_pretrained(
        None, config=transformers.AutoConfig.from_pretrained(config), state_dict=load_file(path)
    )
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    sharded: nn.Module = model
    return sharded


def main() -> None:
    bus.log.configure(level="warning", json=True)
    told: dict[str, Any] = json.loads(sys.argv[1])
    rank, ranks = told["rank"], told["ranks"]
    dist.init_process_group(
        "gloo", init_method=f"file://{told['store']}", rank=rank, world_size=ranks
    )
    options = {"group": "policy", "rank": rank, "ranks": ranks, "chunk_bytes": told["chunk_bytes"]}
    with SyncTrainerAgent(told["broker"], backend=told["backend"], **options) as agent:
        if rank == 0:
            agent.wait_for_engines(told["engines"])
        for path in told["weights"]:
            source = Counted({}) if told["config"] else sharded(path)
            sent: Any = CpuCache(source, keep=rank == 0) if told["cached"] else source
            if told["config"]:
                sent = sharded_model(told["config"], path)
            answer: dict[str, Any] = {}
            try:
                answer["version"] = agent.update_weights(sent, dtype=told["dtype"])
            except WavebusError as error:
                answer["error"] = f"{type(error).__name__}: {error}"
            say(gathered=source.gathered, **answer)
        dist.barrier()  # an agent that leaves takes the group with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
