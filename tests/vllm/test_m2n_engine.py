"""vLLM's own ``nccl_m2n`` over the bus, on CPUs: every rank of a trainer sends its shards, straight
to those workers that need them.

The communicator is gloo's, and a stand-in of the tests moves what NVIDIA's library moves on GPUs
(:mod:`tests.support.m2n_pair`); the rest is vLLM's, both ends of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import save_file

from bus import operations as ops
from bus._manifest import Manifest
from bus._weight_transfer.allocation import RankAssignment
from bus.errors import EngineError, ManifestRefused, Refused, UsageError
from bus.messages import NackCode
from tests.support import pair_plugin
from tests.support.checkpoints import perturbed
from tests.vllm._two import TOKENS, Two, booted_two
from tests.vllm._vllm import require_vllm
from trainer_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("m2n")
    with booted_two(folder, "nccl_m2n", pair_plugin.M2N) as tested:
        pair_plugin.register_on_cpu("nccl_m2n")
        yield tested


def replicated(weights: Mapping[str, Tensor]) -> Any:
    """A source of vLLM's kind, of a trainer with one rank."""
    from tests.support.m2n_source import Replicated  # noqa: PLC0415 - it needs vLLM

    return Replicated(weights)


def trainer_of(agent: SyncTrainerAgent, weights: Mapping[str, Tensor], **fields: Any) -> Any:
    """What a user writes."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

    return WeightTransferTrainerFactory.trainer_init(
        agent.init_info("nccl_m2n", **fields),
        client=agent.client(),
        source=agent.source(replicated(weights)),
    )


def send(agent: SyncTrainerAgent, weights: Mapping[str, Tensor], **fields: Any) -> None:
    trainer = trainer_of(agent, weights, **fields)
    try:
        trainer.send_weights()
    finally:
        trainer.shutdown()


async def tokens_of(two: Two, name: str) -> list[int]:
    return await (two.tokens_here() if name == "here" else two.served_tokens())


@pytest.mark.parametrize(
    ("external", "index", "rank", "first", "own"),
    [
        (False, 0, 0, 1, 0),  # alone
        (False, 0, 1, 4, 4),  # the second of two workers, behind another engine
        (False, 1, 1, 4, 6),  # an internal balancer: its engines are one on the bus
        (True, 3, 0, 1, 0),  # an external one, and the ranks before it are gone
    ],
)
def test_a_worker_of_any_layout_comes_to_its_place_in_the_mesh(
    external: bool, index: int, rank: int, first: int, own: int
) -> None:
    """Behind three ranks of the trainer, of which the broker counts one."""
    from sidecar._vllm.plugin.worker.engine import worker_index  # noqa: PLC0415 - same
    from sidecar._vllm.plugin.worker.native_engine import NativeUpdates  # noqa: PLC0415 - it needs vLLM

    parallel = SimpleNamespace(
        data_parallel_index=index, data_parallel_external_lb=external, world_size=2, rank=rank
    )
    updates = NativeUpdates.__new__(NativeUpdates)
    updates.vllm_config = SimpleNamespace(parallel_config=parallel)
    updates._index = worker_index(parallel)
    info, placed = updates._in_mesh(
        {"rank_offset": 3, "world_size": 5}, RankAssignment(9, 12, first)
    )
    assert info == {"rank_offset": 3, "world_size": 14}
    assert placed.data_parallel_index * placed.world_size + placed.rank == own
    assert (parallel.data_parallel_index, parallel.rank) == (index, rank)
    with pytest.raises(EngineError, match="must be the first worker's rank, 1 or more"):
        updates._in_mesh({"rank_offset": 0, "world_size": 5}, RankAssignment(9, 12, first))


# One worker, and two; those once with whole tensors for both, once with a shard for each.
@pytest.mark.parametrize(
    ("name", "fields"), [("served", {}), ("here", {}), ("here", {"dst_mesh_dims": (1, 2)})]
)
def test_one_rank_updates_an_engine_again_and_again(
    two: Two, name: str, fields: dict[str, Any]
) -> None:
    """What does not fit is refused before anybody enters a collective; nothing is touched."""
    first, second, third = (perturbed(two.weights, seed) for seed in (1, 2, 3))
    weights = dict(first)

    async def scenario() -> None:
        async with two.joined(name) as broker:
            agent = SyncTrainerAgent(broker, timeout_s=60.0)
            await asyncio.to_thread(agent.connect)
            try:
                await asyncio.to_thread(agent.wait_for_engines, 1)
                trainer = await asyncio.to_thread(trainer_of, agent, weights, **fields)
                version = 0
                for new in (first, second):
                    weights.update(new)
                    await asyncio.to_thread(trainer.send_weights)
                    report = agent.last_update
                    assert report is not None
                    assert (report.engines, report.excluded, report.chunks) == (1, (), 1)
                    assert report.verified == "unsupported"
                    assert report.version > version
                    version = report.version
                    assert await tokens_of(two, name) == two.oracle.greedy(new, TOKENS)
                weights.pop(K_PROJ)
                agent.source(replicated(weights))
                with pytest.raises(UsageError, match="make a new info"):
                    await asyncio.to_thread(trainer.send_weights)
                await asyncio.to_thread(trainer.shutdown)
                with pytest.raises(ManifestRefused, match=r"k_proj.*missing"):
                    await asyncio.to_thread(send, agent, weights, **fields)
                assert await tokens_of(two, name) == two.oracle.greedy(second, TOKENS)
                await asyncio.to_thread(send, agent, third, **fields)
                assert await tokens_of(two, name) == two.oracle.greedy(third, TOKENS)
            finally:
                await asyncio.to_thread(agent.close)

    two.run(scenario())


async def train(
    folder: Path,
    broker: str,
    updates: Sequence[Mapping[str, Tensor]],
    engines: int = 1,
    engine: str = "nccl_m2n",
    **fields: Any,
) -> list[list[dict[str, Any]]]:
    """Two processes send each of these weights, of which they have a half each, twice; what each
    rank says."""
    paths = [str(folder / f"{number}.safetensors") for number in range(len(updates))]
    for path, weights in zip(paths, updates, strict=True):
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
    told = {
        "ranks": 2,
        "store": str(folder / "store"),
        "broker": broker,
        "engines": engines,
        "engine": engine,
        "fields": fields,
        "weights": paths,
        "times": 2,
    }
    return await asyncio.gather(*(_rank({**told, "rank": rank}) for rank in range(2)))


async def _rank(told: dict[str, Any]) -> list[dict[str, Any]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.native_rank", json.dumps(told)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    return [json.loads(line) for line in said.decode().splitlines() if line.startswith("{")]


@pytest.mark.parametrize("name", ["served", "here"])
def test_two_ranks_send_a_half_each(two: Two, name: str, tmp_path: Path) -> None:
    """Rank 0 tells the other one where they meet. What is refused, both of them raise."""
    first, last = perturbed(two.weights, 4), perturbed(two.weights, 5)
    wrong = {n: w for n, w in first.items() if n != K_PROJ}

    async def scenario() -> None:
        async with two.joined(name) as broker:
            leader, other = await train(tmp_path, broker, [first, wrong, last])
            assert "k_proj" in leader[1]["error"]
            assert leader[1]["error"] == other[1]["error"]
            assert leader[2]["version"] > leader[0]["version"] > 0
            assert other[0]["version"] is None
            assert await tokens_of(two, name) == two.oracle.greedy(last, TOKENS)

    two.run(scenario())


def test_engines_of_different_layout_can_not_be_one_mesh(two: Two) -> None:
    """vLLM's workers see it when they meet. From 0.33 on they tell the trainer, which raises it by
    itself; before, the bus does, and names the engine that differs."""

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            with pytest.raises(
                (Refused, RuntimeError), match=r"different nccl_m2n destinations"
            ) as refused:
                await asyncio.to_thread(trainer_of, agent, two.weights)
            if isinstance(refused.value, Refused):
                assert refused.value.nack.peer == "served"

    two.run(scenario())


def test_shards_are_for_this_engine_alone(two: Two) -> None:
    """Not for one that broadcasts whole tensors."""

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            with pytest.raises(UsageError, match="yields each rank's shards"):
                await asyncio.to_thread(broadcast, agent)

    def broadcast(agent: SyncTrainerAgent) -> None:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

        trainer = WeightTransferTrainerFactory.trainer_init(
            agent.init_info(),
            client=agent.client(),
            source=agent.source(replicated(two.weights)),
        )
        trainer.send_weights()

    two.run(scenario())


def test_it_has_no_draft() -> None:
    """vLLM's engine plans for the model that it was made with."""
    from sidecar._vllm.plugin.worker.native_engine import NativeUpdates  # noqa: PLC0415 - same

    updates = NativeUpdates.__new__(NativeUpdates)
    transport: Any = SimpleNamespace(is_open=True)
    updates._transport, updates._name = transport, "nccl_m2n"
    updates._engine = SimpleNamespace(supports_draft_weight_update=False)
    manifest = Manifest(("a",), ("float32",), ((2,),), (1,))
    with pytest.raises(EngineError, match="does not update draft models") as refused:
        updates._arm(ops.ArmManifest(manifest, "draft"), manifest)
    assert refused.value.code is NackCode.DRAFT_MISSING
