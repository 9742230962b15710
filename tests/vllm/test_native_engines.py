"""Worker engines of vLLM's own kind over the bus, with trainer engines of vLLM's own kind.

vLLM's need CUDA even to be made; :mod:`tests.support.pair` is made like them. Two engines were
booted with it: one in this process, with two workers, and one that is served, with one.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from bus._weight_transfer.allocation import RankAssignment
from bus.errors import ManifestRefused, UpdateFailed, UsageError
from sidecar._supervision.launch import free_port
from tests.support import pair_plugin
from tests.support.checkpoints import perturbed
from tests.vllm._two import TOKENS, Two, booted_two
from tests.vllm._vllm import require_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer_agent import SyncTrainerAgent

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

CHUNK_BYTES = 1 << 14
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with booted_two(tmp_path_factory.mktemp("native"), "pair") as tested:
        pair_plugin.register()
        yield tested


@pytest.mark.parametrize(
    ("external", "index", "rank", "first", "own"),
    [
        (False, 0, 0, 1, 1),  # alone
        (False, 0, 1, 4, 5),  # the second of two workers, behind another engine
        (False, 1, 1, 4, 7),  # an internal balancer: its engines are one on the bus
        (True, 1, 1, 4, 5),  # an external one: each is its own
        (True, 3, 0, 1, 1),  # and the ranks before it may be gone
    ],
)
def test_a_worker_of_any_layout_comes_to_its_place(
    external: bool, index: int, rank: int, first: int, own: int
) -> None:
    """vLLM's workers add what they know of themselves to the offset that they are told."""
    from sidecar._vllm.plugin.worker.engine import worker_index  # noqa: PLC0415 - same
    from sidecar._vllm.plugin.worker.native_engine import NativeUpdates  # noqa: PLC0415 - it needs vLLM

    workers = 2
    parallel = SimpleNamespace(
        data_parallel_index=index,
        data_parallel_external_lb=external,
        world_size=workers,
        rank=rank,
    )
    updates = NativeUpdates.__new__(NativeUpdates)
    updates.vllm_config = SimpleNamespace(parallel_config=parallel)
    updates._index = worker_index(parallel)
    placed = updates._placed(
        {"rank_offset": 1, "world_size": 2, "more": 3}, RankAssignment(9, 12, first)
    )
    assert placed["rank_offset"] + index * workers + rank == own
    assert (placed["world_size"], placed["more"]) == (12, 3)


def trainer_of(agent: SyncTrainerAgent, weights: Any, **fields: Any) -> Any:
    """What a user writes."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

    return WeightTransferTrainerFactory.trainer_init(
        agent.init_info("pair", buffer_bytes=CHUNK_BYTES, **fields),
        client=agent.client(chunk_bytes=CHUNK_BYTES),
        source=agent.source(weights),
    )


def send(agent: SyncTrainerAgent, weights: Any, **fields: Any) -> Any:
    """One update with a trainer engine that is made for it."""
    trainer = trainer_of(agent, weights, **fields)
    try:
        trainer.send_weights()
    finally:
        trainer.shutdown()
    assert agent.last_update is not None
    return agent.last_update


def test_two_engines_are_updated_by_one_trainer_engine(two: Two) -> None:
    """Each worker in its own place; nothing can be verified, and the report says so. Half of a
    fused tensor is refused before anybody enters a collective, and the next one goes through."""
    first, second = perturbed(two.weights, 1), perturbed(two.weights, 2)
    weights = dict(first)

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            trainer = await asyncio.to_thread(trainer_of, agent, weights)
            await asyncio.to_thread(trainer.send_weights)
            report = agent.last_update
            assert report is not None
            assert (report.verified, report.engines, report.excluded) == ("unsupported", 2, ())
            assert report.chunks > 3
            await two.assert_serve(first)

            weights.clear()
            weights.update({n: w for n, w in second.items() if n != K_PROJ})
            with pytest.raises(ManifestRefused, match=r"k_proj.*missing"):
                await asyncio.to_thread(trainer.send_weights)
            await two.assert_serve(first)

            weights.clear()
            weights.update(second)
            await asyncio.to_thread(trainer.send_weights)
            await two.assert_serve(second)
            await asyncio.to_thread(trainer.shutdown)

    two.run(scenario())


@pytest.mark.parametrize(("rank", "broken"), [(1, "here"), (2, "here"), (3, "served")])
def test_a_chunk_that_one_worker_can_not_load_is_mended_by_the_next_whole_update(
    two: Two, rank: int, broken: str
) -> None:
    """Nobody waits in the next collective for who dropped out. Engines that received, have loaded:
    they are quarantined until then."""
    new = perturbed(two.weights, 3)

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            with pytest.raises(UpdateFailed, match=rf"{broken}: .*broken on purpose"):
                await asyncio.to_thread(send, agent, perturbed(two.weights, 4), breaks=[rank])
            status = await asyncio.to_thread(agent.status)
            phases = {view.name: view.phase for view in status.groups[0].engines}
            assert phases == {"here": "quarantined", "served": "quarantined"}
            report = await asyncio.to_thread(send, agent, new)
            assert (report.engines, report.excluded) == (2, ())
            await two.assert_serve(new)

    two.run(scenario())


def test_both_failing_name_what_failed(two: Two) -> None:
    new = perturbed(two.weights, 5)

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            with pytest.raises(UpdateFailed, match="broken on purpose"):
                await asyncio.to_thread(send, agent, new, breaks=[1, 3])
            await asyncio.to_thread(send, agent, new)
            await two.assert_serve(new)

    two.run(scenario())


def test_engines_of_vllms_own_take_wavebus_s_backends_too(two: Two) -> None:
    """And are checked as others are."""
    new, later = perturbed(two.weights, 6), perturbed(two.weights, 7)

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            await asyncio.to_thread(agent.update_weights, new)
            assert agent.last_update is not None
            assert agent.last_update.verified == "sample"
            await two.assert_serve(new)
            await asyncio.to_thread(send, agent, later)
            await two.assert_serve(later)

    two.run(scenario())


def test_what_can_not_meet_is_refused_before_the_rendezvous(two: Two) -> None:
    """By the engine's name, or with the size that it should be."""

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            with pytest.raises(UsageError, match=r"here was not booted with .* 'nccl'"):
                await asyncio.to_thread(agent.init_info, "nccl")
            with pytest.raises(UsageError, match="pull shards"):
                await asyncio.to_thread(agent.init_info, "sharded_rdt")
            client = agent.client()
            worker = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1}
            init = client.init_weight_transfer_engine
            with pytest.raises(UsageError, match=r"world_size=9, and .* are 4"):
                await asyncio.to_thread(init, worker | {"world_size": 9})
            with pytest.raises(UsageError, match="rank_offset=4"):
                await asyncio.to_thread(init, worker | {"rank_offset": 4, "world_size": 4})

    two.run(scenario())


def test_who_has_no_bus_notices_nothing(two: Two) -> None:
    """vLLM's own client drives the engine as if there were no wavebus; the bus then does."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient  # noqa: PLC0415

    from lab.bench.programs.native import NativeWeights  # noqa: PLC0415 - same
    from tests.support.pair import PairTrainerInitInfo  # noqa: PLC0415 - it needs vLLM

    alone, both = perturbed(two.weights, 8), perturbed(two.weights, 9)
    url = two.server.base_url

    def send_alone() -> None:
        trainer = WeightTransferTrainerFactory.trainer_init(
            PairTrainerInitInfo("127.0.0.1", free_port(), 2, rank=0),
            client=HTTPVLLMWeightSyncClient(url),
            source=NativeWeights(alone),
        )
        trainer.send_weights()
        trainer.shutdown()

    async def scenario() -> None:
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            how = {"mode": "keep", "clear_cache": "true"}
            async with session.post(f"{url}/pause", params=how):
                await asyncio.to_thread(send_alone)
            async with session.post(f"{url}/resume"):
                pass
        assert await two.served_tokens() == two.oracle.greedy(alone, TOKENS)
        async with two.on_the_bus() as agent:
            await asyncio.to_thread(send, agent, both)
            await two.assert_serve(both)

    two.run(scenario())
