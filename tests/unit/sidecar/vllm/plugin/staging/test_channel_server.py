"""A worker's channel: real sockets, real threads, on both ends what serves there in production."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from bus import operations as ops
from bus.errors import EngineDead, EngineError
from bus.messages import NackCode
from sidecar._vllm.plugin import operations
from sidecar._vllm.plugin.staging.channel_server import (
    LENGTH,
    MAX_FRAME_BYTES,
    StagingChannelServer,
)
from sidecar._vllm.staging_channel import StagingChannels

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 60.0
NOBODY = 65534


class Worker:
    """What it was asked, and who waits in it.

    A chunk with the number of ``waits_for`` comes when ``came`` is set; with that of ``fails_at``,
    it is not what was sent.
    """

    def __init__(self, *, waits_for: int = -1, fails_at: int = -1) -> None:
        self.told: list[operations.WorkerOperation] = []
        self.began = threading.Event()
        self.came = threading.Event()
        self.interrupted = False
        self.channel = StagingChannelServer(self._carry_out, self._interrupt)
        self._waits_for, self._fails_at = waits_for, fails_at

    def _carry_out(self, operation: operations.WorkerOperation) -> ops.Done:
        if isinstance(operation, operations.Greet):
            return ops.Done()
        seq = operation.chunks[0].seq if isinstance(operation, operations.Stage) else -2
        self.began.set()
        if seq == self._waits_for:
            assert self.came.wait(LIMIT_S)
        if self.interrupted:
            raise EngineError("given up", code=NackCode.TRANSFER_FAILED)
        if seq == self._fails_at:
            raise EngineError("another sum", code=NackCode.CHECKSUM_MISMATCH, tensor="a.b")
        self.told.append(operation)
        return ops.Done(in_place=seq == 0)

    def _interrupt(self) -> None:
        self.interrupted = True
        self.came.set()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for worker in made:
        worker.came.set()
        worker.channel.close()


def stage(seq: int) -> operations.Stage:
    return operations.Stage((ops.LoadChunk(seq, staged=True),))


async def reached(*workers: Worker) -> StagingChannels:
    channels = StagingChannels()
    await channels.open([worker.channel.name for worker in workers])
    return channels


def test_all_workers_do_what_is_asked_in_its_order(workers: list[Worker]) -> None:
    """And it has been done when it is answered."""
    workers += Worker(), Worker()

    async def scenario() -> None:
        channels = await reached(*workers)
        for seq in range(3):
            answers = await channels.perform(stage(seq))
            assert answers == [ops.Done(in_place=seq == 0)] * 2
            assert [len(worker.told) for worker in workers] == [seq + 1] * 2
        await channels.perform(ops.Finish(staged=True))
        channels.close()

    asyncio.run(scenario())
    for worker in workers:
        assert worker.told == [stage(0), stage(1), stage(2), ops.Finish(staged=True)]


def test_a_failure_keeps_its_code_and_its_tensor_and_the_lane(workers: list[Worker]) -> None:
    """All others have done it; the next thing is asked as ever."""
    workers += Worker(), Worker(fails_at=1)

    async def scenario() -> None:
        channels = await reached(*workers)
        await channels.perform(stage(0))
        with pytest.raises(EngineError, match="another sum") as failed:
            await channels.perform(stage(1))
        assert failed.value.code is NackCode.CHECKSUM_MISMATCH
        assert failed.value.tensor == "a.b"
        await channels.perform(stage(2))
        channels.close()

    asyncio.run(scenario())
    assert workers[0].told == [stage(0), stage(1), stage(2)]
    assert workers[1].told == [stage(0), stage(2)]


def test_who_waits_for_a_chunk_gives_way_to_the_core(workers: list[Worker]) -> None:
    """At once; and nothing is staged until the core is done."""
    worker = Worker(waits_for=0)
    workers.append(worker)
    core_has_it, core_is_done = threading.Event(), threading.Event()

    def core() -> None:
        with worker.channel.preempted():
            core_has_it.set()
            assert core_is_done.wait(LIMIT_S)

    async def scenario() -> None:
        channels = await reached(worker)
        waiting = asyncio.create_task(channels.perform(stage(0)))
        await asyncio.to_thread(worker.began.wait, LIMIT_S)
        held = threading.Thread(target=core)
        held.start()
        with pytest.raises(EngineError, match="given up"):
            await waiting
        assert await asyncio.to_thread(core_has_it.wait, LIMIT_S)
        worker.interrupted = False
        worker.began.clear()
        later = asyncio.create_task(channels.perform(stage(1)))
        assert not await asyncio.to_thread(worker.began.wait, 0.2)
        core_is_done.set()
        await later
        held.join(LIMIT_S)
        channels.close()

    asyncio.run(scenario())
    assert worker.told == [stage(1)]


def test_the_core_does_not_wait_for_who_opens_a_transport(workers: list[Worker]) -> None:
    """That may wait for half a minute, for an end that never comes; and all steps with it."""
    worker = Worker(waits_for=-2)  # where it does not stage
    workers.append(worker)

    async def scenario() -> None:
        channels = await reached(worker)
        opening = asyncio.create_task(channels.perform(ops.Open("o1", "gloo", b"", 1, 2, 1)))
        assert await asyncio.to_thread(worker.began.wait, LIMIT_S)
        with worker.channel.preempted():
            assert not worker.interrupted
            assert not opening.done()
        # Nor does a sidecar that comes then; but what it asks, comes behind it.
        later = await reached(worker)
        staging = asyncio.create_task(later.perform(stage(1)))
        assert not opening.done()
        worker.came.set()
        await opening
        await staging
        channels.close()
        later.close()

    asyncio.run(scenario())
    assert [type(each) for each in worker.told] == [ops.Open, operations.Stage]


def test_the_answer_to_a_call_that_was_given_up_is_nobodys(workers: list[Worker]) -> None:
    """It comes to a connection that is gone: the next call has its own."""
    worker = Worker(waits_for=0, fails_at=0)
    workers.append(worker)

    async def scenario() -> None:
        channels = await reached(worker)
        waiting = asyncio.create_task(channels.perform(stage(0)))
        await asyncio.to_thread(worker.began.wait, LIMIT_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        later = asyncio.create_task(channels.perform(stage(1)))
        worker.came.set()
        await later
        channels.close()

    asyncio.run(scenario())
    assert worker.told == [stage(1)]


def test_another_sidecar_is_not_kept_out_by_one_that_hangs(workers: list[Worker]) -> None:
    """Whose connection is open, and silent. If it asks for something afterwards, it is not done."""
    worker = Worker()
    workers.append(worker)

    async def scenario() -> None:
        hangs, comes = await reached(worker), await reached(worker)
        await comes.perform(stage(0))
        with pytest.raises(EngineDead, match="closed its connection"):
            await hangs.perform(stage(1))
        await comes.perform(stage(2))
        comes.close()
        hangs.close()

    asyncio.run(scenario())
    assert worker.told == [stage(0), stage(2)]


def test_what_a_sidecar_has_asked_before_another_came_is_not_begun(workers: list[Worker]) -> None:
    """It waits for the core, while the other one comes."""
    worker = Worker()
    workers.append(worker)

    async def scenario() -> None:
        before = await reached(worker)
        known = worker.channel._newest
        with worker.channel.preempted():
            asked = asyncio.create_task(before.perform(stage(0)))
            after = asyncio.create_task(reached(worker))
            async with asyncio.timeout(LIMIT_S):
                while worker.channel._newest is known:  # noqa: ASYNC110 - a channel has no event for it
                    await asyncio.sleep(0)
        with pytest.raises(EngineError, match="closed its connection"):
            await asked
        other = await after
        await other.perform(stage(1))
        other.close()

    asyncio.run(scenario())
    assert worker.told == [stage(1)]


def test_a_worker_that_is_gone_is_an_error(workers: list[Worker]) -> None:
    """Whether it goes before, or in the middle."""
    gone = Worker()
    gone.channel.close()
    name = gone.channel.name  # of a new one
    gone.channel.close()

    async def scenario() -> None:
        with pytest.raises(EngineError, match="must run on one host"):
            await StagingChannels().open([name])
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}-deaf")
            listener.listen()
            asked = asyncio.create_task(StagingChannels().open([f"{name}-deaf"]))
            connection, _ = await asyncio.to_thread(listener.accept)
            connection.close()
            with pytest.raises(EngineDead, match="closed its connection"):
                await asked

    asyncio.run(scenario())
    assert workers == []


_RUNS_OUT_OF_DESCRIPTORS = """
import os, resource, sys, threading, time
from types import SimpleNamespace
from bus import operations as ops
from sidecar._vllm.plugin.staging import channel_server as channel

found_none = threading.Event()

def sleep(seconds):
    found_none.set()
    time.sleep(seconds)

channel.time = SimpleNamespace(sleep=sleep)
worker = channel.StagingChannelServer(lambda _: ops.Done(), lambda: None)
print(worker.name, flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
kept = []
try:
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    print("none is left", flush=True)
sys.stdin.readline()
assert found_none.wait(30)
for each in kept:
    os.close(each)
print("there are some again", flush=True)
sys.stdin.readline()
"""


@pytest.mark.ci
def test_a_worker_that_had_no_descriptor_left_listens_on() -> None:
    """Who came meanwhile is let in as soon as there is one."""
    command = [sys.executable, "-c", _RUNS_OUT_OF_DESCRIPTORS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        name = child.stdout.readline().strip()

        def goes_on() -> str:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            return child.stdout.readline().strip()

        async def scenario() -> None:
            assert goes_on() == "none is left"
            first, second = StagingChannels(), StagingChannels()
            async with asyncio.timeout(LIMIT_S):
                # Where it waits for somebody already, it has a descriptor for that, and finds none
                # for the next one.
                coming = asyncio.create_task(first.open([name]))
                assert await asyncio.to_thread(goes_on) == "there are some again"
                await coming
                await second.open([name])
            first.close()
            second.close()

        asyncio.run(scenario())
        goes_on()


@pytest.mark.parametrize(
    "sent", [LENGTH.pack(MAX_FRAME_BYTES + 1), LENGTH.pack(8) + b"abc", b"\0"], ids=str
)
def test_what_is_no_frame_ends_the_connection_and_nothing_else(
    sent: bytes, workers: list[Worker]
) -> None:
    """Others come through as before."""
    worker = Worker()
    workers.append(worker)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{worker.channel.name}")
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(LIMIT_S)
        assert stranger.recv(1) == b""

    async def scenario() -> None:
        channels = await reached(worker)
        await channels.perform(stage(0))
        channels.close()

    asyncio.run(scenario())
    assert worker.told == [stage(0)]


def test_what_is_no_operation_is_refused(workers: list[Worker]) -> None:
    """By an answer."""
    worker = Worker()
    workers.append(worker)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{worker.channel.name}")
        stranger.settimeout(LIMIT_S)
        stranger.sendall(LENGTH.pack(3) + b"abc")
        assert LENGTH.unpack(stranger.recv(LENGTH.size))[0] > 0
    assert worker.told == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_not_let_in(workers: list[Worker]) -> None:
    """Whatever the socket is called, and whoever may see its name."""
    worker = Worker()
    workers.append(worker)
    script = f"""
import os, socket
os.setuid({NOBODY})
end = socket.socket(socket.AF_UNIX)
end.connect("\\0{worker.channel.name}")
blob = {operations.pack(stage(0))!r}
try:
    end.sendall(len(blob).to_bytes(4, "big") + blob)
    print(end.recv(4))
except (BrokenPipeError, ConnectionResetError):
    print(b"")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert done.stdout == "b''\n"
    assert worker.told == []
