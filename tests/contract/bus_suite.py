"""What the whole bus must do with an engine: broker, sidecar and trainer over real sockets.

The counterpart of :mod:`tests.contract.engine_suite` one floor up, over the same
:class:`EngineUnderTest`: the trainer says only ``update_weights``.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest

from bus._weight_transfer.allocation import StagingCapacity
from bus._weight_transfer.registry import make_receiver, receiver_backends
from bus.errors import ManifestRefused, Refused, UsageError
from bus.messages import NackCode, Resume
from bus.operations import ArmManifest, Done, Open, ReceiveChunk
from examples.own_backend import register as register_own_backend
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from sidecar.engine import Engine, EngineInfo
from tests.contract.engine_suite import PROMPT, EngineUnderTest, Watch, contract
from tests.support.broker import a_broker
from tests.support.links import Links
from tests.support.steps import ByStep
from trainer_agent import TrainerAgent
from trainer_agent._weights.source import meta_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from torch import Tensor

    from bus._manifest import Manifest
    from bus._runtime.broker_server import BrokerServer
    from bus._weight_transfer.base import Receiver
    from bus.messages import Escalation, SleepLevel
    from trainer_agent._options import How

LEASE_MS = 20_000
LOOK_S = 0.01


class Borrowed:
    """An engine that is started already, and lives on: for a sidecar that comes and goes."""

    def __init__(self, under_test: EngineUnderTest) -> None:
        self._engine = under_test.engine

    async def start(self) -> EngineInfo:
        return EngineInfo(
            "borrowed", "test", "model", 0, 1, 1, receiver_backends(), "", can_sleep=True
        )

    async def close(self) -> None:
        """The suite's fixture closes it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(frozen=True)
class Whole:
    """A bus with one engine on it."""

    agent: TrainerAgent
    server: BrokerServer
    address: str


@contextlib.asynccontextmanager
async def whole_bus(under_test: EngineUnderTest, **options: Any) -> AsyncIterator[Whole]:
    """Broker, sidecar and trainer agent around the engine."""
    engine = cast("Engine", Borrowed(under_test))
    options = {"lease_ms": LEASE_MS, **options}
    async with (
        a_broker() as (server, address),
        Sidecar(engine, broker=address, name="engine"),
        TrainerAgent(address, name="trainer", **options) as agent,
    ):
        await agent.wait_for_engines(1)
        yield Whole(agent, server, address)


async def until(true: Callable[[], bool]) -> None:
    """Look until it is so."""
    while not true():  # noqa: ASYNC110 - the broker calls nobody
        await asyncio.sleep(LOOK_S)


def falsified(weights: dict[str, Tensor], fault: str) -> tuple[dict[str, Tensor], str]:
    """The weights with one fault, and a word of the name that must be told."""
    layer = "model.layers.0.self_attn"
    if fault == "unknown":
        return {**weights, f"{layer}.x_proj.weight": weights[f"{layer}.o_proj.weight"]}, "x_proj"
    broken = dict(weights)
    if fault == "missing":
        del broken[f"{layer}.o_proj.weight"]
        return broken, "o_proj"
    if fault == "misshapen":
        broken[f"{layer}.o_proj.weight"] = broken[f"{layer}.o_proj.weight"].T[1:].contiguous()
        return broken, "o_proj"
    if fault == "wrong dtype":
        broken[f"{layer}.o_proj.weight"] = broken[f"{layer}.o_proj.weight"].half()
        return broken, "o_proj"
    del broken[f"{layer}.q_proj.weight"], broken[f"{layer}.v_proj.weight"]
    return broken, "proj"


class Taker(ByStep, StubEngine):
    """Takes every chunk from its transport, as an engine does, and has no weights."""

    def __init__(self) -> None:
        self._receiver: Receiver | None = None
        self._manifest: Manifest | None = None

    async def start(self) -> EngineInfo:
        return EngineInfo("stub", "test", "none", 0, 1, 1, receiver_backends(), "")

    async def on_open(self, opening: Open) -> None:
        self._receiver = receiver = make_receiver(opening.backend)
        await asyncio.to_thread(receiver.open, opening.params, opening.place)

    async def on_arm(self, arm: ArmManifest) -> Done:
        self._manifest = arm.manifest
        return Done(room=StagingCapacity())

    async def on_receive(self, chunk: ReceiveChunk) -> None:
        assert self._receiver is not None
        assert self._manifest is not None
        metas = self._manifest.chunk(chunk.seq)
        await asyncio.to_thread(self._receiver.receive, metas, chunk.handle)
        self._receiver.release()


@contextlib.asynccontextmanager
async def out_of_reach(
    under_test: EngineUnderTest, **options: Any
) -> AsyncIterator[tuple[Links, Callable[[], AbstractAsyncContextManager[TrainerAgent]]]]:
    """A trainer has updated the engine and another one, and is gone; so is the engine, until its
    links heal, with the transport that it has open. There is another broker by now, so that nobody
    waits until one misses the engine. What makes the next trainer is given."""
    engine = cast("Engine", Borrowed(under_test))
    options = {"lease_ms": LEASE_MS, "verify": "off", **options}
    async with contextlib.AsyncExitStack() as later, contextlib.AsyncExitStack() as peers:
        async with a_broker() as (_, address):
            port = int(address.rpartition(":")[2])
            links = await peers.enter_async_context(Links(port, lambda _: None))
            for name, each, broker in (
                ("engine", engine, links.address),
                ("other", Taker(), address),
            ):
                await peers.enter_async_context(Sidecar(each, broker=broker, name=name))
            async with TrainerAgent(address, name="first", **options) as first:
                await first.wait_for_engines(2)
                await first.update_weights(under_test.other_weights(61))
            links.cut("engine")
        await later.enter_async_context(a_broker(address))
        yield links, lambda: TrainerAgent(address, name="second", **options)


class BusContract:
    """The suite. A subclass, or its module, has a fixture ``under_test``."""

    @pytest.mark.parametrize("how", ["staged", "paused"])
    @pytest.mark.parametrize("backend", ["shm", "gloo", "files"])
    @contract
    async def test_a_transport_of_a_trainer_that_is_gone_is_opened_anew(
        self, under_test: EngineUnderTest, backend: str, how: How
    ) -> None:
        """Also if nothing is verified, and the sizes are the same."""
        register_own_backend()
        async with (
            out_of_reach(under_test, backend=backend) as (links, another),
            another() as agent,
        ):
            await agent.wait_for_engines(1)
            await agent.update_weights(under_test.other_weights(62), how="paused")
            links.heal()
            await agent.wait_for_engines(2)
            new = under_test.other_weights(63)
            version = await agent.update_weights(new, how=how)
            under_test.version, under_test.weights = version, new
            report = agent.last_update
            assert report is not None
            assert (report.engines, report.excluded, report.how) == (2, (), how)
            fresh = await under_test.generate(PROMPT, 16)
            assert fresh.tokens == under_test.reference(new, PROMPT, 16)
            assert fresh.weight_versions == [(version, 0, 16)]

    @contract
    async def test_a_first_chunk_that_is_larger_than_that_of_a_trainer_that_is_gone(
        self, under_test: EngineUnderTest
    ) -> None:
        """It fits the transport that is opened anew."""
        async with out_of_reach(under_test, chunk_bytes=20_000) as (links, another):
            async with another() as agent:
                await agent.wait_for_engines(1)
                agent.chunk_bytes = 1 << 26
                await agent.update_weights(under_test.other_weights(64), how="paused")
                links.heal()
                await agent.wait_for_engines(2)
                new = under_test.other_weights(65)
                under_test.version = await agent.update_weights(new)
                under_test.weights = new
            fresh = await under_test.generate(PROMPT, 16)
            assert fresh.tokens == under_test.reference(new, PROMPT, 16)

    @contract
    async def test_update_weights_in_the_middle_of_a_request(
        self, under_test: EngineUnderTest
    ) -> None:
        """One call: the request ends whole, and new ones get the new weights' greedy tokens."""
        async with whole_bus(under_test) as bus:
            watch = Watch()
            request = asyncio.create_task(
                under_test.generate(PROMPT, under_test.long_tokens, watch=watch)
            )
            await watch.reached(4)
            before = under_test.version
            new = under_test.other_weights(31)
            version = await bus.agent.update_weights(new, label="step 1", how="paused")
            under_test.version, under_test.weights = version, new
            report = bus.agent.last_update
            assert report is not None
            assert (report.version, report.label, report.engines) == (version, "step 1", 1)
            assert version > before
            assert report.interrupted == 1
            assert report.paused_ms > 0
            fresh = await under_test.generate(PROMPT, 16)
            assert fresh.tokens == under_test.reference(new, PROMPT, 16)
            assert fresh.weight_versions == [(version, 0, 16)]
            result = await request
            assert result.finish_reason == "length"
            assert len(result.tokens) == under_test.long_tokens
            assert [v for v, _, _ in result.weight_versions] == [before, version]

    @contract
    async def test_many_small_chunks(self, under_test: EngineUnderTest) -> None:
        """A small byte budget makes many chunks, two of them under way at a time."""
        async with whole_bus(under_test, chunk_bytes=20_000) as bus:
            new = under_test.other_weights(32)
            version = await bus.agent.update_weights(new, how="paused")
            under_test.version, under_test.weights = version, new
            report = bus.agent.last_update
            assert report is not None
            assert report.chunks > 4
            result = await under_test.generate(PROMPT, 16)
            assert result.tokens == under_test.reference(new, PROMPT, 16)

    @pytest.mark.parametrize(
        "fault", ["unknown", "missing", "misshapen", "wrong dtype", "half fused"]
    )
    def test_bad_tensors_are_refused_before_anything_is_loaded(
        self, under_test: EngineUnderTest, fault: str
    ) -> None:
        """The error names engine and tensor; nothing was paused, and the old weights serve."""

        async def scenario() -> None:
            async with whole_bus(under_test) as bus:
                bad, word = falsified(dict(under_test.weights), fault)
                with pytest.raises(ManifestRefused) as refused:
                    await bus.agent.update_weights(bad, how="paused")
                nack = refused.value.nack
                assert nack.peer == "engine"
                assert word in nack.tensor
                status = await bus.agent.status()
                assert (status.groups[0].pause, status.groups[0].update) == ("running", "idle")
                result = await under_test.generate(PROMPT, 8)
                assert result.tokens == under_test.reference(under_test.weights, PROMPT, 8)
                assert result.weight_versions == [(under_test.version, 0, 8)]
                # The way is free for a good one.
                version = await bus.agent.update_weights(dict(under_test.weights), how="paused")
                under_test.version = version

        under_test.run(asyncio.wait_for(scenario(), under_test.wait_s))

    @contract
    async def test_an_update_inside_a_pause_of_the_trainers_own(
        self, under_test: EngineUnderTest
    ) -> None:
        """``paused`` holds the engine over the update, and lets it go at its end."""
        async with whole_bus(under_test) as bus:
            new = under_test.other_weights(33)
            async with bus.agent.paused(mode="keep", clear_cache=True):
                watch = Watch()
                request = asyncio.create_task(under_test.generate(PROMPT, 8, watch=watch))
                version = await bus.agent.update_weights(new, how="paused")
                under_test.version, under_test.weights = version, new
                assert watch.count == 0
            assert (await request).tokens == under_test.reference(new, PROMPT, 8)
            with pytest.raises(Refused) as caught:
                await bus.agent._steps.step(Resume("u0"))
            assert caught.value.code is NackCode.WRONG_STATE

    @contract
    async def test_a_source_that_breaks_off_leaves_the_engine_quarantined(
        self, under_test: EngineUnderTest
    ) -> None:
        """It serves nobody half-loaded: its requests end, and so does what reaches it. The next
        whole update frees it."""
        async with whole_bus(under_test, chunk_bytes=20_000) as bus:
            watch = Watch()
            request = asyncio.create_task(
                under_test.generate(PROMPT, under_test.long_tokens, watch=watch)
            )
            await watch.reached(4)
            new = under_test.other_weights(34)
            with pytest.raises(UsageError, match="ended before"):
                await bus.agent.update_weights(BreaksOff(new, after=len(new) // 2), how="paused")
            result = await request
            assert result.finish_reason == "abort"
            assert 0 < len(result.tokens) < under_test.long_tokens
            assert "engine" in bus.server.machine.groups["policy"].registry.quarantined
            turned_away = await under_test.generate(PROMPT, 8)
            assert (turned_away.tokens, turned_away.finish_reason) == ([], "abort")
            version = await bus.agent.update_weights(new, how="paused")
            under_test.version, under_test.weights = version, new
            served = await under_test.generate(PROMPT, 8)
            assert served.tokens == under_test.reference(new, PROMPT, 8)
            assert served.weight_versions == [(version, 0, 8)]
            assert not bus.server.machine.groups["policy"].registry.quarantined

    @contract
    async def test_a_quarantined_engine_catches_up_alone(self, under_test: EngineUnderTest) -> None:
        """With the weights of the last update that was committed, and with its version; not with
        those of the one that broke off."""
        async with whole_bus(under_test, chunk_bytes=20_000, keep_last=True) as bus:
            group = bus.server.machine.groups["policy"]
            kept = under_test.other_weights(45)
            version = await bus.agent.update_weights(kept, how="paused")
            under_test.version, under_test.weights = version, kept
            size_bytes = sum(w.numel() * w.element_size() for w in kept.values())
            report = bus.agent.last_update
            assert report is not None
            assert report.kept_bytes == size_bytes
            new = under_test.other_weights(46)
            with pytest.raises(UsageError, match="ended before"):
                await bus.agent.update_weights(BreaksOff(new, after=len(new) // 2), how="paused")
            assert "engine" in group.registry.quarantined
            await until(lambda: group.routing.now.engines != ())
            assert "engine" not in group.registry.quarantined
            result = await under_test.generate(PROMPT, 16)
            assert result.tokens == under_test.reference(kept, PROMPT, 16)
            assert result.weight_versions == [(version, 0, 16)]
            assert group.version == version
            assert bus.agent.last_update is report
            again = await bus.agent.update_weights(new, how="paused")
            under_test.version, under_test.weights = again, new
            assert again > version
            assert bus.agent.last_update.kept_bytes == 2 * size_bytes
            result = await under_test.generate(PROMPT, 8)
            assert result.tokens == under_test.reference(new, PROMPT, 8)

    @contract
    async def test_a_source_that_breaks_off_at_once_changes_nothing(
        self, under_test: EngineUnderTest
    ) -> None:
        """Nothing was loaded: the old weights are restored, and requests go on."""
        async with whole_bus(under_test) as bus:
            watch = Watch()
            request = asyncio.create_task(
                under_test.generate(PROMPT, under_test.long_tokens, watch=watch)
            )
            await watch.reached(4)
            with pytest.raises(UsageError, match="ended before"):
                await bus.agent.update_weights(
                    BreaksOff(under_test.other_weights(35), after=0), how="paused"
                )
            result = await request
            assert result.finish_reason == "length"
            expected = under_test.reference(under_test.weights, PROMPT, under_test.long_tokens)
            assert result.tokens == expected

    @contract
    async def test_wait_and_abort_over_the_bus(self, under_test: EngineUnderTest) -> None:
        """``wait`` lets a running request end first; ``abort`` ends it with what it has."""
        async with whole_bus(under_test) as bus:
            for mode, reason in (("wait", "length"), ("abort", "abort")):
                watch = Watch()
                request = asyncio.create_task(
                    under_test.generate(PROMPT, under_test.long_tokens, watch=watch)
                )
                await watch.reached(4)
                async with bus.agent.paused(mode=cast("Any", mode)):
                    result = await request
                assert result.finish_reason == reason
                assert (len(result.tokens) == under_test.long_tokens) is (mode == "wait")

    @pytest.mark.parametrize("escalate", ["keep", "abort"])
    @contract
    async def test_a_wait_that_takes_too_long_escalates(
        self, under_test: EngineUnderTest, escalate: Escalation
    ) -> None:
        """At its deadline the pause becomes what the caller chose, and says whom it waited
        for; what is kept goes on to its end."""
        async with whole_bus(under_test) as bus:
            watch = Watch()
            request = asyncio.create_task(
                under_test.generate(PROMPT, under_test.long_tokens, watch=watch)
            )
            await watch.reached(4)
            async with bus.agent.paused(mode="wait", wait_s=0.05, escalate=escalate) as ack:
                assert len(ack.escalated) == 1
                known = await under_test.engine.request_ids()
                if escalate == "keep":
                    assert ack.waited_for == known
                    assert not request.done()
                else:
                    assert (await request).finish_reason == "abort"
            result = await request
            whole = len(result.tokens) == under_test.long_tokens
            assert whole is (escalate == "keep")

    @pytest.mark.parametrize("level", [1, 2])
    @contract
    async def test_an_update_of_an_engine_that_sleeps(
        self, under_test: EngineUnderTest, level: SleepLevel
    ) -> None:
        """In the block its memory is the trainer's; after it, everything serves the new weights,
        and the request that was kept goes on with them."""
        async with whole_bus(under_test) as bus:
            watch = Watch()
            request = asyncio.create_task(
                under_test.generate(PROMPT, under_test.long_tokens, watch=watch)
            )
            await watch.reached(4)
            before, new = under_test.version, under_test.other_weights(36 + level)
            async with bus.agent.asleep(level=level):
                status = await bus.agent.status()
                assert status.groups[0].pause == "asleep"
                count = watch.count
                version = await bus.agent.update_weights(new, how="paused")
                under_test.version, under_test.weights = version, new
                status = await bus.agent.status()
                assert status.groups[0].pause == "weights_awake"
                assert watch.count <= count + under_test.late_tokens
            result = await request
            assert len(result.tokens) == under_test.long_tokens
            assert [v for v, _, _ in result.weight_versions] == [before, version]
            assert (await under_test.generate(PROMPT, 8)).tokens == under_test.reference(
                new, PROMPT, 8
            )
            assert (await bus.agent.status()).groups[0].pause == "running"

    @contract
    async def test_a_draft_that_no_engine_has(self, under_test: EngineUnderTest) -> None:
        """The trainer hears who, before anything is paused."""
        async with whole_bus(under_test) as bus:
            with pytest.raises(Refused, match="no draft model") as refused:
                await bus.agent.update_weights(
                    under_test.other_weights(40), target="draft", how="paused"
                )
            assert refused.value.code is NackCode.DRAFT_MISSING
            assert (refused.value.nack.peer, refused.value.nack.step) == ("engine", "arm")
            (group,) = (await bus.agent.status()).groups
            assert (group.pause, group.update, group.update_target) == ("running", "idle", "model")
            assert not group.engines[0].draft

    @contract
    async def test_a_sleep_without_an_update(self, under_test: EngineUnderTest) -> None:
        """At level 1 the old weights serve on; at level 2 there are none until an update."""
        async with whole_bus(under_test) as bus:
            async with bus.agent.asleep():
                pass
            result = await under_test.generate(PROMPT, 8)
            assert result.tokens == under_test.reference(under_test.weights, PROMPT, 8)
            with pytest.raises(Refused) as refused:
                async with bus.agent.asleep(level=2):
                    pass
            assert refused.value.code is NackCode.EMPTY_GROUP
            with pytest.raises(KeyError) as failed:  # what the trainer did is what is raised
                async with bus.agent.asleep(level=2):
                    raise KeyError("loss")
            assert "no engine is left" in failed.value.__notes__[0]
            assert "engine" in bus.server.machine.groups["policy"].registry.quarantined
            waiting = asyncio.create_task(under_test.generate(PROMPT, 8))
            new = under_test.other_weights(39)
            version = await bus.agent.update_weights(new, how="paused")
            under_test.version, under_test.weights = version, new
            assert not bus.server.machine.groups["policy"].registry.quarantined
            result = await under_test.generate(PROMPT, 8)
            assert result.tokens == under_test.reference(new, PROMPT, 8)
            # What came meanwhile was ended when the engine heard that nobody brings weights,
            # or else served by the new ones.
            late = await waiting
            assert late.finish_reason == "abort" or late.weight_versions == [(version, 0, 8)]


class BreaksOff:
    """A source that promises all tensors and ends after a few."""

    def __init__(self, weights: dict[str, Tensor], after: int) -> None:
        self._weights = weights
        self._after = after

    def metadata(self) -> list[Any]:
        return [meta_of(name, tensor) for name, tensor in self._weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(list(self._weights.items())[: self._after])
