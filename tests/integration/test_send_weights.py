"""A trainer goes on as soon as its tensors are sent, and awaits the version later."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import bus.log
from bus._weight_transfer.registry import register_receiver, register_sender
from bus._weight_transfer.shm import ShmReceiver, ShmSender
from bus.errors import ManifestRefused, NonFiniteWeights, UsageError
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.serving import an_engine, assert_serve
from trainer_agent import CpuCache, SyncTrainerAgent, TrainerAgent, share_memory

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence

    from tests.support.checkpoints import Checkpoint
    from trainer_agent._options import How

LIMIT_S = 300.0
CHUNK_BYTES = 1 << 15  # many


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=3)


def run(scenario: Coroutine[object, object, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, LIMIT_S)

    asyncio.run(bounded())


def slow_trainer(broker: str) -> TrainerAgent:
    return TrainerAgent(broker, group="policy", backend="shm-slow", chunk_bytes=CHUNK_BYTES)


def spoil(weights: Mapping[str, torch.Tensor]) -> None:
    """The trainer's next step changes all of them."""
    for tensor in weights.values():
        tensor.fill_(float("nan"))


def lent(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same in shared memory, from where engines read them."""
    model = torch.nn.Module()
    names = {name: name.replace(".", "/") for name in weights}
    for name, weight in weights.items():
        model.register_parameter(names[name], torch.nn.Parameter(weight))
    share_memory(model)
    return {name: model.get_parameter(names[name]).detach() for name in names}


class SlowSender(ShmSender):
    """Sends a chunk when it may: more than one waits for that."""

    may = threading.Event()
    put_one = threading.Event()

    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        if seq:
            assert self.may.wait(LIMIT_S)
        handle = super().put(seq, tensors)
        self.put_one.set()
        return handle


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SlowSender]]:
    """The backend ``shm-slow``."""
    monkeypatch.setattr(SlowSender, "may", threading.Event())
    monkeypatch.setattr(SlowSender, "put_one", threading.Event())
    register_sender("shm-slow", SlowSender)
    register_receiver("shm-slow", ShmReceiver)
    yield SlowSender
    SlowSender.may.set()


@pytest.mark.parametrize("how", ["staged", "paused"])
@pytest.mark.parametrize("way", ["packed", "unpacked", "snapshot"])
def test_what_was_sent_may_change(checkpoint: Checkpoint, how: How, way: str) -> None:
    """Engines serve what it was, wherever it is sent from."""

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            TrainerAgent(
                broker, group="policy", chunk_bytes=CHUNK_BYTES, packed=way != "unpacked"
            ) as agent,
            an_engine(checkpoint, broker, "e0") as engine,
        ):
            await agent.wait_for_engines(1)
            for version in (1, 2):
                new = perturbed(checkpoint.weights, version)
                sent = {name: tensor.clone() for name, tensor in new.items()}
                if way == "unpacked":
                    sent = lent(sent)
                update = await agent.send_weights(sent, snapshot=way == "snapshot", how=how)
                spoil(sent)
                assert await update == version
                assert agent.last_update is not None
                assert agent.last_update.how == how
                await assert_serve(checkpoint, new, version, engine)

    run(scenario())


@pytest.mark.parametrize("packed", [True, False])
def test_the_trainer_hears_once_that_its_tensors_are_sent(
    checkpoint: Checkpoint, packed: bool
) -> None:
    """A packed tensor is sent when it is in a buffer, another when engines have loaded it; who
    starts the next step then must not start it twice."""

    async def scenario() -> None:
        told = []
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, group="policy", chunk_bytes=CHUNK_BYTES, packed=packed) as agent,
            an_engine(checkpoint, broker, "e0"),
        ):
            await agent.wait_for_engines(1)
            sent = checkpoint.weights if packed else lent(checkpoint.weights)
            await agent.update_weights(sent, on_sent=lambda: told.append(agent.last_update))
        assert told == [None]

    run(scenario())


def test_a_snapshot_waits_for_nothing(checkpoint: Checkpoint, slow: type[SlowSender]) -> None:
    """Not one chunk has been sent, and the trainer's tensors are its own again; without one they
    are not, until the last is in the sender's buffers."""

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            slow_trainer(broker) as agent,
            an_engine(checkpoint, broker, "e0") as engine,
        ):
            await agent.wait_for_engines(1)
            new = perturbed(checkpoint.weights, 5)
            sent = {name: tensor.clone() for name, tensor in new.items()}
            update = await agent.send_weights(sent, snapshot=True)
            spoil(sent)
            assert not update.done()
            slow.may.set()
            assert await update == 1
            await assert_serve(checkpoint, new, 1, engine)
            slow.may.clear()
            slow.put_one.clear()
            sending = asyncio.create_task(agent.send_weights(new))
            await asyncio.to_thread(slow.put_one.wait, LIMIT_S)
            assert not sending.done()
            slow.may.set()
            assert await (await sending) == 2

    run(scenario())


@pytest.mark.parametrize("how", ["staged", "paused"])
def test_a_pause_waits_for_what_was_sent_before(
    checkpoint: Checkpoint, slow: type[SlowSender], how: How
) -> None:
    """Else who awaits the update in the pause would wait for himself."""

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            slow_trainer(broker) as agent,
            an_engine(checkpoint, broker, "e0"),
        ):
            await agent.wait_for_engines(1)
            update = await agent.send_weights(checkpoint.weights, snapshot=True, how=how)

            async def pause() -> int:
                async with agent.paused():
                    return await update

            pausing = asyncio.create_task(pause())
            await asyncio.to_thread(slow.put_one.wait, LIMIT_S)
            slow.may.set()
            assert await pausing == 1

    run(scenario())


def test_what_goes_wrong_is_raised_where_it_is_known(checkpoint: Checkpoint) -> None:
    """Before anything is sent, by the call itself; an agent makes one update at a time."""

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, group="policy", chunk_bytes=CHUNK_BYTES) as agent,
            an_engine(checkpoint, broker, "e0"),
        ):
            await agent.wait_for_engines(1)
            with pytest.raises(ManifestRefused):
                await agent.send_weights({"nobody.knows": torch.zeros(3)})
            update = await agent.send_weights(checkpoint.weights, snapshot=True)
            with pytest.raises(UsageError, match="under way"):
                await agent.update_weights(checkpoint.weights)
            with pytest.raises(UsageError, match="under way"):
                await agent.send_weights(checkpoint.weights)
            assert await update == 2  # the one that was refused had a version, too

    run(scenario())


def test_who_leaves_gives_up_what_it_has_not_awaited(
    checkpoint: Checkpoint, slow: type[SlowSender]
) -> None:
    """So does who is cancelled; the next trainer begins with the version after."""

    async def scenario() -> None:
        async with a_broker() as (_, broker), an_engine(checkpoint, broker, "e0") as engine:
            async with slow_trainer(broker) as agent:
                await agent.wait_for_engines(1)
                sending = asyncio.create_task(agent.send_weights(checkpoint.weights))
                await asyncio.to_thread(slow.put_one.wait, LIMIT_S)
                sending.cancel()
                slow.may.set()
                with pytest.raises(asyncio.CancelledError):
                    await sending
                slow.may.clear()
                left = await agent.send_weights(checkpoint.weights, snapshot=True)
                slow.may.set()
            assert left.cancelled()
            async with TrainerAgent(broker, group="policy") as agent:
                await agent.wait_for_engines(1)
                new = perturbed(checkpoint.weights, 6)
                version = await agent.update_weights(new)
                await assert_serve(checkpoint, new, version, engine)

    run(scenario())


@pytest.mark.parametrize("how", ["staged", "paused"])
def test_weights_that_are_not_finite(
    checkpoint: Checkpoint,
    how: How,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are refused before the commit, if that was asked for; else a warning names the first,
    once. What is sent before the tensor with the NaN leaves no mark on an engine that stages."""
    monkeypatch.setattr(bus.log, "_settings", bus.log._Settings(json=True))
    weights = perturbed(checkpoint.weights, 1)
    names = list(weights)
    bad = names[-1 if how == "staged" else 0]

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, group="policy", chunk_bytes=CHUNK_BYTES, verify="off") as agent,
            an_engine(checkpoint, broker, "e0") as engine,
        ):
            await agent.wait_for_engines(1)
            assert await agent.update_weights(weights, how=how, check_finite=True) == 1
            spoiled = perturbed(checkpoint.weights, 2)
            spoiled[bad].view(-1)[0] = float("inf")
            with pytest.raises(NonFiniteWeights, match=f"source: {bad} contains") as caught:
                await agent.update_weights(spoiled, how=how, check_finite=True)
            assert (caught.value.tensor, caught.value.outcome) == (bad, "not_committed")
            await assert_serve(checkpoint, weights, 1, engine)
            assert await agent.update_weights(spoiled, how=how) == 3  # nothing is looked at

            agent.verify = "sample"
            spoiled[names[-1]].fill_(float("nan"))
            assert await agent.update_weights(spoiled, how=how) == 4
            assert await agent.update_weights(weights, how=how) == 5
            await assert_serve(checkpoint, weights, 5, engine)

    run(scenario())
    lines = map(json.loads, capsys.readouterr().err.splitlines())
    (warning,) = [line for line in lines if line["event"] == "weights_not_finite"]
    assert warning["tensor"] == bad
    assert warning["update_id"].startswith("u")


def test_a_cache_takes_other_weights_as_soon_as_its_update_has_failed(
    checkpoint: Checkpoint,
) -> None:
    """Also where the error is handled, which holds on to what was under way."""

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, group="policy", chunk_bytes=CHUNK_BYTES) as agent,
            an_engine(checkpoint, broker, "e0") as engine,
        ):
            await agent.wait_for_engines(1)
            weights = perturbed(checkpoint.weights, 1)
            next(iter(weights.values())).view(-1)[0] = float("nan")
            cache = CpuCache(weights)
            weights = perturbed(checkpoint.weights, 2)
            try:
                await agent.update_weights(cache, check_finite=True)
            except NonFiniteWeights:
                cache.store(weights)
            version = await agent.update_weights(cache)
            cache.store(weights)
            await assert_serve(checkpoint, weights, version, engine)

    run(scenario())


def test_several_ranks_take_no_snapshot() -> None:
    """Each has a part of every tensor."""

    async def scenario() -> None:
        agent = TrainerAgent(group="policy", rank=0, ranks=2)
        with pytest.raises(UsageError, match="several ranks"):
            await agent.send_weights({}, snapshot=True)

    run(scenario())


def test_without_an_event_loop(checkpoint: Checkpoint) -> None:
    """The result of what is returned is the version."""

    async def scenario() -> None:
        async with a_broker() as (_, broker), an_engine(checkpoint, broker, "e0") as engine:
            new = perturbed(checkpoint.weights, 7)

            def train() -> int:
                with SyncTrainerAgent(broker, group="policy", chunk_bytes=CHUNK_BYTES) as agent:
                    agent.wait_for_engines(1)
                    sent = {name: tensor.clone() for name, tensor in new.items()}
                    update = agent.send_weights(sent, label="step 1")
                    spoil(sent)
                    return update.result(LIMIT_S)

            assert await asyncio.to_thread(train) == 1
            await assert_serve(checkpoint, new, 1, engine)

    run(scenario())
