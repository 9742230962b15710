"""Weights over every backend, from trainers of one rank and of several, to several engines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from bus._weight_transfer.registry import register_receiver, register_sender
from bus._weight_transfer.shm import ShmReceiver, ShmSender
from bus.errors import ManifestRefused, Refused, UpdateFailed, UsageError
from bus.messages import NackCode
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.fsdp import train
from tests.support.serving import an_engine, assert_serve
from trainer_agent import CpuCache, TrainerAgent, share_memory

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from tests.support.checkpoints import Checkpoint

LIMIT_S = 300.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=3)


def run(scenario: Coroutine[object, object, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, LIMIT_S)

    asyncio.run(bounded())


def test_a_communicator_is_made_anew_when_engines_come_and_go(checkpoint: Checkpoint) -> None:
    """One, then two, then the other one alone: each update reaches whoever is there."""
    first, second, third = (perturbed(checkpoint.weights, seed) for seed in (1, 2, 3))

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, group="policy", backend="gloo", chunk_bytes=1 << 15) as agent,
            an_engine(checkpoint, broker, "stays") as stays,
        ):
            async with an_engine(checkpoint, broker, "goes") as goes:
                await agent.wait_for_engines(2)
                assert await agent.update_weights(first) == 1
                await assert_serve(checkpoint, first, 1, stays, goes)
            async with an_engine(checkpoint, broker, "comes") as comes:
                await agent.wait_for_engines(2)
                assert await agent.update_weights(second) == 2
                await assert_serve(checkpoint, second, 2, stays, comes)
            assert await agent.update_weights(third) == 3
            await assert_serve(checkpoint, third, 3, stays)
            assert agent.last_update is not None
            assert agent.last_update.verified == "sample"

    run(scenario())


@pytest.mark.parametrize("verify", ["off", "sample", "full"])
def test_how_much_was_verified_is_reported(checkpoint: Checkpoint, verify: str) -> None:
    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, group="policy", verify=verify) as agent,  # type: ignore[arg-type]
            an_engine(checkpoint, broker, "e0") as engine,
        ):
            await agent.wait_for_engines(1)
            new = perturbed(checkpoint.weights, 4)
            await agent.update_weights(new)
            await assert_serve(checkpoint, new, 1, engine)
            assert agent.last_update is not None
            assert agent.last_update.verified == verify

    run(scenario())


class FlippingSender(ShmSender):
    """Flips a bit of one chunk, after its sums were taken."""

    chunk: ClassVar[int] = 0

    def transfer(self, seq: int) -> None:
        if seq == self.chunk:
            packed = self.packed
            memory = (
                self._segments[seq % self.prefetch_depth].memory if packed else self._lent[seq][0]
            )
            memory.view(torch.uint8).view(-1)[0] ^= 1


class UnverifiedSender(ShmSender):
    """Sends something that is not bit by bit what was put, for all that is known."""

    is_bit_exact: ClassVar[bool] = False


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("chunk", [0, 2])
def test_a_byte_that_flips_fails_the_update(
    checkpoint: Checkpoint, chunk: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor, chunk and engine are named. With nothing loaded yet the old weights serve on;
    otherwise the engine is quarantined until the next update."""
    register_sender("shm-flipping", FlippingSender)
    register_receiver("shm-flipping", ShmReceiver)
    monkeypatch.setattr(FlippingSender, "chunk", chunk)
    new = perturbed(checkpoint.weights, 5)

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            an_engine(checkpoint, broker, "e0") as engine,
        ):
            async with TrainerAgent(
                broker, backend="shm-flipping", packed=packed, chunk_bytes=1 << 14, verify="full"
            ) as agent:
                await agent.wait_for_engines(1)
                with pytest.raises(UpdateFailed) as failed:
                    await agent.update_weights(new)
                nack = failed.value.nack
                assert (nack.code, nack.peer) == (NackCode.CHECKSUM_MISMATCH, "e0")
                assert nack.tensor in new
                assert f"in chunk {chunk}" in nack.detail
                if chunk == 0:
                    await assert_serve(checkpoint, checkpoint.weights, 0, engine)
            async with TrainerAgent(broker, group="policy") as agent:
                await agent.wait_for_engines(1)
                await agent.update_weights(new)
                await assert_serve(checkpoint, new, agent.last_update.version, engine)  # type: ignore[union-attr]

    run(scenario())


def test_a_model_in_shared_memory_is_lent_to_several_engines(checkpoint: Checkpoint) -> None:
    """Each takes what is there at the time, without a copy of the trainer's."""
    model = torch.nn.Module()
    names = {name: name.replace(".", "/") for name in checkpoint.weights}
    for name, weight in perturbed(checkpoint.weights, 12).items():
        model.register_parameter(names[name], torch.nn.Parameter(weight.clone()))
    share_memory(model)
    source = {name: model.get_parameter(names[name]).detach() for name in names}

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, packed=False, chunk_bytes=1 << 14) as agent,
            an_engine(checkpoint, broker, "e0") as first,
            an_engine(checkpoint, broker, "e1") as second,
        ):
            await agent.wait_for_engines(2)
            for version in (1, 2):
                assert await agent.update_weights(source) == version
                await assert_serve(checkpoint, source, version, first, second)
                for weight, new in zip(
                    source.values(), perturbed(checkpoint.weights, 13).values(), strict=True
                ):
                    weight.copy_(new)
            assert agent.last_update is not None
            assert (agent.last_update.verified, agent.last_update.engines) == ("sample", 2)

    run(scenario())


class StoringSender(ShmSender):
    """Has the trainer store its next weights, while engines are yet to read these."""

    cache: ClassVar[CpuCache]
    refused: ClassVar[list[str]]

    def transfer(self, seq: int) -> None:
        try:
            self.cache.store({"w": torch.ones(1)})
        except UsageError as error:  # kept no longer: it holds the update, which holds the cache
            self.refused.append(f"{seq}: {error}")


def test_a_cache_that_is_lent_can_not_be_stored_again_before_the_update_has_ended(
    checkpoint: Checkpoint,
) -> None:
    """Not even when all of it was put; and then it can."""
    register_sender("shm-storing", StoringSender)
    register_receiver("shm-storing", ShmReceiver)
    StoringSender.cache = cache = CpuCache(perturbed(checkpoint.weights, 14), shared=True)
    refused: list[str] = []
    StoringSender.refused = refused

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, backend="shm-storing", packed=False) as agent,
            an_engine(checkpoint, broker, "e0") as engine,
        ):
            await agent.wait_for_engines(1)
            for version, seed in ((1, 14), (2, 15)):
                new = perturbed(checkpoint.weights, seed)
                cache.store(new)
                await agent.update_weights(cache)
                await assert_serve(checkpoint, new, version, engine)

    run(scenario())
    assert refused == ["0: the cache is being sent: await the update first"] * 2


def test_a_backend_that_cannot_verify_says_so(checkpoint: Checkpoint) -> None:
    register_sender("shm-unverified", UnverifiedSender)
    register_receiver("shm-unverified", ShmReceiver)

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, backend="shm-unverified", verify="full") as agent,
            an_engine(checkpoint, broker, "e0") as engine,
        ):
            await agent.wait_for_engines(1)
            new = perturbed(checkpoint.weights, 6)
            await agent.update_weights(new)
            await assert_serve(checkpoint, new, 1, engine)
            assert agent.last_update is not None
            assert agent.last_update.verified == "unsupported"

    run(scenario())


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_trainer_of_two_ranks(checkpoint: Checkpoint, tmp_path: Path, backend: str) -> None:
    """FSDP2: both gather, rank 0 sends; a refused update is raised on both, with no tensor
    gathered on either, and the next one goes through."""
    good, other = perturbed(checkpoint.weights, 7), perturbed(checkpoint.weights, 8)
    unknown = {**good, "model.layers.9.mlp.up_proj.weight": torch.ones(64, 64)}

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            an_engine(checkpoint, broker, "e0") as first,
            an_engine(checkpoint, broker, "e1") as second,
        ):
            said = await train(
                tmp_path, [good, unknown, other], broker=broker, engines=2, backend=backend
            )
            await assert_serve(checkpoint, other, said[0][2]["version"], first, second)
        count = len(good)
        for rank in said:
            assert rank[0] == {"gathered": count, "version": 1}
            assert rank[1]["gathered"] == 0
            assert rank[1]["error"].startswith("ManifestRefused: manifest_refused: e")
            assert rank[2]["gathered"] == count
            assert rank[2]["version"] > 1

    run(scenario())


@pytest.mark.ci
def test_what_two_ranks_have_gathered_before_is_sent_from_a_cache(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Each gathers every tensor once, when it is stored; rank 0 has the copy."""
    new = perturbed(checkpoint.weights, 10)

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            an_engine(checkpoint, broker, "e0") as engine,
        ):
            said = await train(
                tmp_path, [new], broker=broker, engines=1, backend="gloo", cached=True
            )
            assert said == [[{"gathered": len(new), "version": 1}]] * 2
            await assert_serve(checkpoint, new, 1, engine)

    run(scenario())


@pytest.mark.parametrize("buffers", [1, 3])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_any_number_of_buffers(checkpoint: Checkpoint, backend: str, buffers: int) -> None:
    """One is enough; three are under way at a time."""

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, backend=backend, chunk_bytes=1 << 13, buffers=buffers) as agent,
            an_engine(checkpoint, broker, "e0") as engine,
        ):
            await agent.wait_for_engines(1)
            new = perturbed(checkpoint.weights, 11)
            await agent.update_weights(new)
            await assert_serve(checkpoint, new, 1, engine)

    run(scenario())


@pytest.mark.parametrize("buffers", [0, -1, 17])
def test_too_few_or_too_many_buffers_are_refused(buffers: int) -> None:
    with pytest.raises(UsageError, match="buffers"):
        TrainerAgent("tcp://127.0.0.1:7710", buffers=buffers)


def test_an_engine_without_the_backend_is_named(checkpoint: Checkpoint) -> None:
    """Before anybody enters a rendezvous that would wait for it."""
    register_sender("pigeons", UnverifiedSender)

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, group="policy", backend="pigeons") as agent,
            an_engine(checkpoint, broker, "e0") as engine,
        ):
            await agent.wait_for_engines(1)
            with pytest.raises(Refused, match="no transfer backend 'pigeons'") as refused:
                await agent.update_weights(perturbed(checkpoint.weights, 9))
            assert not isinstance(refused.value, ManifestRefused)
            assert (refused.value.code, refused.value.nack.peer) == (NackCode.BACKEND_MISSING, "e0")
            await assert_serve(checkpoint, checkpoint.weights, 0, engine)

    run(scenario())
