"""A trainer engine of vLLM's kind, in the trainer's process, that broadcasts chunk by chunk."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from bus.errors import UpdateFailed
from sidecar._supervision.launch import free_port
from tests.support.broadcasts import described
from tests.support.checkpoints import perturbed
from tests.support.gloo_group import join, start_broadcast
from tests.support.http_fleet import fleet
from trainer_agent import SyncTrainerAgent
from trainer_agent._update.plan import UpdatePlan
from trainer_agent._weights.source import tensor_metas

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from torch import Tensor

    from tests.support.checkpoints import Checkpoint

LIMIT_S = 100.0
POLL_S = 0.002
CHUNK_BYTES = 1 << 14
BROKEN = 1  # the chunk that one engine can't load


class Trainer:
    """As vLLM's ``nccl``: each chunk is broadcast beside the call that tells of it.

    Attributes:
        entered: how many chunks it has begun to broadcast.
    """

    def __init__(self, agent: SyncTrainerAgent, weights: Mapping[str, Tensor]) -> None:
        self.entered = 0
        self._client = agent.client(chunk_bytes=CHUNK_BYTES, how="paused")
        self._left = threading.Event()
        self._client.on_trainer_engine(self._left.set)
        self._source = agent.source(weights)
        self._calls = ThreadPoolExecutor(1)
        port = free_port()
        place = {"master_address": "127.0.0.1", "master_port": port}
        info = {**place, "rank_offset": 1, "world_size": 3}
        opened = self._calls.submit(self._client.init_weight_transfer_engine, info)
        self._group = join("127.0.0.1", port, 0, 3)
        opened.result()

    def send(self) -> None:
        plan = UpdatePlan.of_source(tensor_metas(self._source.metadata()), chunk_bytes=CHUNK_BYTES)
        assert plan.chunks > BROKEN + 1
        self._client.start_weight_update()
        tensors = iter(self._source)
        for seq in range(plan.chunks):
            chunk = dict(itertools.islice(tensors, plan.tensor_count(seq)))
            told = self._calls.submit(self._client.update_weights, described(chunk))
            assert seq <= BROKEN, "nobody else enters this broadcast"
            self.entered += 1
            for tensor in chunk.values():
                self._broadcast(tensor.clone(), told)
            told.result()

    def _broadcast(self, tensor: Tensor, told: Future[None]) -> None:
        """Until it has ended, or its communicator is aborted as that of NCCL."""
        work = start_broadcast(self._group, tensor)
        while not (work.is_completed() or self._left.wait(POLL_S)):
            if told.done() and told.exception() is not None:
                assert self._left.is_set(), "it stays in its broadcast"

    def close(self) -> None:
        self._calls.shutdown()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_trainer_enters_no_collective_after_a_chunk_that_an_engine_could_not_load(
    checkpoint: Checkpoint, broken: int
) -> None:
    """It is the last one that answers. The next trainer engine's update mends both."""

    def train(broker: str, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
        with SyncTrainerAgent(broker) as agent:
            trainer = Trainer(agent, first)
            with pytest.raises(UpdateFailed, match="broken on purpose") as failed:
                trainer.send()
            assert failed.value.nack.peer == f"e{broken}"
            assert trainer.entered == BROKEN + 1, str(failed.value)
            trainer.close()
            agent.update_weights(second)

    async def scenario() -> None:
        async with fleet(checkpoint) as served:
            bad, good = served.engines[broken], served.engines[1 - broken]
            bad.breaks_at = BROKEN
            good.loaded = lambda seq: bad.may_go.set() if seq == BROKEN else None
            first, second = perturbed(served.weights, 7), perturbed(served.weights, 8)
            await asyncio.to_thread(train, served.broker, first, second)
            await served.assert_serve(second)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_a_trainer_leaves_a_collective_that_no_engine_enters(checkpoint: Checkpoint) -> None:
    """Its thread is in it when engines refuse the chunk; the bus makes it leave."""

    def train(broker: str, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
        with SyncTrainerAgent(broker) as agent:
            trainer = Trainer(agent, first)
            with pytest.raises(UpdateFailed, match="refused on purpose"):
                trainer.send()
            trainer.close()
            agent.update_weights(second)

    async def scenario() -> None:
        async with fleet(checkpoint) as served:
            for engine in served.engines:
                engine.refuses_at = BROKEN
            first, second = perturbed(served.weights, 9), perturbed(served.weights, 10)
            await asyncio.to_thread(train, served.broker, first, second)
            await served.assert_serve(second)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
