"""A source's chunks on their way, without a bus."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import pytest
import torch

from bus._kept_dtypes import kept_refusal
from bus._protocol.core.failures import Failure
from bus._weight_transfer.base import Sender
from bus.errors import Refused, UpdateFailed, WavebusError
from bus.messages import GroupAck, NackCode, Step
from trainer_agent._connection import Connection
from trainer_agent._update.chunk_stream import ChunkStream
from trainer_agent._update.steps import Steps
from trainer_agent._update.transport import Transport
from trainer_agent._weights.any_source import as_source
from trainer_agent._weights.cast import CastSource
from trainer_agent._weights.source import PairSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from bus._weight_transfer.allocation import World
    from bus.messages import ChunkSent, WeightChunkMeta

LIMIT_S = 30.0
CHUNKS = 8


class Queueing(Sender):
    """Its chunks leave one after the other, and of two the threads that wait for that come back in
    the other order."""

    prefetch_depth = 3
    is_collective: ClassVar[bool] = True
    can_queue: ClassVar[bool] = True

    def __init__(self) -> None:
        self.later = [threading.Event() for _ in range(CHUNKS // 2)]

    def open(self, chunk_bytes: int, world: World) -> bytes:  # noqa: ARG002 - of all senders
        return b""

    def put(self, seq: int, tensors: Sequence[Tensor]) -> bytes:  # noqa: ARG002 - of all senders
        return b"handle"

    def queue(self, seq: int) -> None:
        """It takes no time."""

    def transfer(self, seq: int) -> None:
        later = self.later[seq // 2]  # the pair's own: the next pair may be on its way by then
        if seq % 2:
            later.set()
        else:
            assert later.wait(LIMIT_S)

    def close(self) -> None:
        """Nothing is open."""


class Running:
    """An update that has begun everywhere."""

    id = "u1"

    def __init__(self) -> None:
        self.paused = anyio.Event()
        self.started = anyio.Event()
        self.paused.set()
        self.started.set()


def test_engines_hear_in_order_what_was_sent() -> None:
    """They take a word that comes out of turn for a late one, and wait until it is said again."""
    told: list[tuple[str, int]] = []

    class Answered(Steps):
        async def send_chunk(self, message: WeightChunkMeta | ChunkSent) -> GroupAck:
            told.append((type(message).__name__, message.chunk))
            return GroupAck(Step.CHUNK, "u1", 0, 1, (), 0, "", 0.0, 0.0, 0.0, (), ())

    async def scenario() -> None:
        tensors = {str(number): torch.zeros(16) for number in range(CHUNKS)}
        stream = ChunkStream(as_source(tensors), Queueing(), chunk_bytes=64, verify="off")
        stream.connection = Connection("", role="trainer", name="t", group="g", timeout_s=LIMIT_S)
        update: Any = Running()
        async with asyncio.timeout(LIMIT_S):
            await stream.send(update, Answered(stream.connection, lease_ms=1, timeout_s=LIMIT_S))

    asyncio.run(scenario())
    assert [seq for name, seq in told if name == "ChunkSent"] == list(range(CHUNKS))


@pytest.mark.parametrize("which", ["queue", "transfer"])
def test_a_chunk_that_can_not_be_sent_fails_the_update(which: str) -> None:
    """As an engine's refusal does, with the chunk and the update."""

    def broken(_: int) -> None:
        raise WavebusError("the broadcast broke: e1 is gone")

    class Answered(Steps):
        async def send_chunk(self, message: WeightChunkMeta | ChunkSent) -> GroupAck:  # noqa: ARG002
            return GroupAck(Step.CHUNK, "u1", 0, 1, (), 0, "", 0.0, 0.0, 0.0, (), ())

    async def scenario() -> None:
        sender = Queueing()
        setattr(sender, which, broken)
        stream = ChunkStream(
            as_source({"w": torch.zeros(16)}), sender, chunk_bytes=64, verify="off"
        )
        stream.connection = Connection("", role="trainer", name="t", group="g", timeout_s=LIMIT_S)
        update: Any = Running()
        with pytest.raises(UpdateFailed, match=r"transfer_failed: .*e1 is gone") as failed:
            await stream.send(update, Answered(stream.connection, lease_ms=1, timeout_s=LIMIT_S))
        nack = failed.value.nack
        assert (nack.update_id, nack.step, nack.chunk) == ("u1", "chunk", 0)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_a_cast_is_planned_again_with_what_engines_keep() -> None:
    """After each refusal that names such tensors, and after no other one. If a refusal names none
    that is new, engines are not asked about it again."""
    sent = {name: torch.ones(4) for name in ("l.0.A_log", "l.1.A_log", "l.0.scale", "norm")}
    source = CastSource(as_source(sent), "bfloat16")
    stream = ChunkStream(source, Queueing(), chunk_bytes=64, verify="off")

    def dtypes() -> list[str]:
        return [meta.dtype for meta in stream.plan.metas]

    def refuses(code: NackCode, *names: str) -> bool:
        detail = kept_refusal(names).detail if names else "unknown: the model has no such tensor"
        return stream.cast_less(Refused(Failure(code, detail).nack("update")))

    assert stream.plan.manifest.is_cast
    assert not refuses(NackCode.MANIFEST_REFUSED)
    assert dtypes() == ["bfloat16"] * 4
    assert refuses(NackCode.DTYPE_KEPT, "l.0.A_log")
    assert dtypes() == ["float32", "float32", "bfloat16", "bfloat16"]
    assert refuses(NackCode.DTYPE_KEPT, "l.0.scale")
    assert dtypes() == ["float32", "float32", "float32", "bfloat16"]
    assert stream.plan.manifest.is_cast
    assert refuses(NackCode.DTYPE_KEPT, "l.0.scale")
    assert not stream.plan.manifest.is_cast


class Busy(Sender):
    """Is in a call until it may return."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.ended = (threading.Event() for _ in range(3))

    def open(self, chunk_bytes: int, world: World) -> bytes:  # noqa: ARG002 - of all senders
        return self._work()

    def put(self, seq: int, tensors: Sequence[Tensor]) -> bytes:  # noqa: ARG002 - of all senders
        return self._work()

    def close(self) -> None:
        """Nothing is open."""

    def _work(self) -> bytes:
        self.begun.set()
        assert self.may_end.wait(LIMIT_S)
        self.ended.set()
        return b""


@pytest.mark.parametrize("call", ["open", "put"])
def test_a_cancelled_update_leaves_no_thread_in_its_sender(call: str) -> None:
    """The next update would open it beside, or fill the same buffers; the agent's end frees it."""

    async def scenario() -> None:
        sender = Busy()
        line = Connection("", role="trainer", name="t", group="g", timeout_s=LIMIT_S)
        source = as_source({"a": torch.zeros(16)})
        stream = ChunkStream(source, sender, chunk_bytes=64, verify="off")
        stream.connection = line
        transport = Transport("busy", sender, Steps(line, lease_ms=1, timeout_s=LIMIT_S))
        work = stream.fill("u1") if call == "put" else transport.reopen(64)
        cancelled = asyncio.create_task(work)
        await asyncio.to_thread(sender.begun.wait, LIMIT_S)
        for _ in range(3):
            cancelled.cancel()
            await asyncio.sleep(0)
        is_waiting = not cancelled.done()
        sender.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert is_waiting
        assert sender.ended.is_set()

    asyncio.run(scenario())


class Blocked(PairSource):
    """Gives one tensor, and the next one much later than it has time for."""

    let_go = threading.Event()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().__iter__():
            yield name, tensor
            self.let_go.wait(LIMIT_S)


@pytest.mark.parametrize("lost", [False, True])
def test_a_source_is_left_when_it_stands_still_or_a_rank_is_lost(*, lost: bool) -> None:
    """By the tensor that is next, or by the rank; what is left of it is drained for nobody."""

    async def scenario() -> None:
        source = Blocked({str(number): torch.zeros(16) for number in range(CHUNKS)})
        stream = ChunkStream(source, Queueing(), chunk_bytes=64, verify="off")
        line = Connection("", role="trainer", name="t", group="g", timeout_s=LIMIT_S if lost else 1)
        stream.connection = line
        if lost:
            lost_rank = Failure(NackCode.PEER_LOST, "it was not heard", "rank-1")
            line.lost_rank = lost_rank.nack("update")
        expected = "rank-1: it was not heard" if lost else "next is 1, of chunk 1"
        with pytest.raises(WavebusError, match=expected):
            await stream.fill("u1")
        stream.drain()
        source.let_go.set()

    asyncio.run(scenario())
