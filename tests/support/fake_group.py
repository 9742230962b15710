"""A DP group without engines: front ends and cores that are sockets and nothing else."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Self

import zmq

from bus._protocol.dp.coordinator import Publish, StartCores
from sidecar._dp_coordinator import frames
from tests.support.procs import Proc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

PATIENCE_MS = 30_000
DP_GROUP = "moe"


def gateway_process(size: int, *arguments: str) -> Proc:
    """A DP coordinator, as the plugin starts it."""
    return Proc(
        *(
            sys.executable,
            "-m",
            "sidecar._dp_coordinator",
            "--dp-group",
            DP_GROUP,
            "--size",
            str(size),
        ),
        *arguments,
        stdin=subprocess.PIPE,
    )


class Wire:
    """One socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> None:
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def send(self, frame: bytes) -> None:
        self.socket.send(frame)

    def receive(self) -> list[bytes]:
        return self.socket.recv_multipart()

    def silent(self, for_ms: int) -> bool:
        return not self.socket.poll(for_ms)


class FakeCore:
    """One rank's core: it hears STARTs and reports."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], rank: int, core_in: str, core_out: str
    ) -> None:
        self.rank = rank
        self._context = context
        self._core_in = core_in
        self.input = Wire(context, zmq.XSUB, core_in)
        self.output = Wire(context, zmq.PUSH, core_out)

    def subscribe(self) -> None:
        self.input.send(frames.SUBSCRIBE)

    def lose_connection(self) -> None:
        """What was sent to it is lost."""
        self.input.socket.close(linger=0)

    def connect_anew(self) -> None:
        """And subscribe, as ZeroMQ does for a core."""
        self.input = Wire(self._context, zmq.XSUB, self._core_in)
        self.subscribe()

    def heard(self) -> StartCores | None:
        """The next word; None is READY."""
        return frames.decode_frame_to_core(self.input.receive())

    def heard_start(self, wave: int, excluded: int | None = None) -> None:
        """Wait for this START; what was repeated before it is skipped."""
        deadline_s = time.monotonic() + PATIENCE_MS / 1000
        while time.monotonic() < deadline_s:
            if self.heard() == StartCores(wave, excluded):
                return
        raise AssertionError(f"rank {self.rank} heard no START {wave}, {excluded}")

    def report(self, *, complete: int | None = None, started: int | None = None) -> None:
        self.output.send(frames.encode_core_report(frames.CoreReport(self.rank, complete, started)))

    def drain(self) -> int:
        """Take what is there; how much that was."""
        count = 0
        while not self.input.silent(0):
            self.input.receive()
            count += 1
        return count


class FakeFront:
    """One front end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], rank: int, front: str) -> None:
        self.rank = rank
        self.wire = Wire(context, zmq.XSUB, front)

    def subscribe(self) -> None:
        self.wire.send(frames.SUBSCRIBE)

    def first_request(self, wave: int) -> None:
        self.wire.send(frames.encode_first_request(frames.FirstRequest(self.rank, wave)))

    def heard(self) -> Publish:
        return frames.decode_frame_to_front(self.wire.receive())

    def heard_standing(self, wave: int, *, running: bool) -> None:
        """Wait until it is told that things stand so."""
        deadline_s = time.monotonic() + PATIENCE_MS / 1000
        last = None
        while time.monotonic() < deadline_s:
            last = self.heard()
            if last == Publish(wave, running):
                return
        raise AssertionError(f"front end {self.rank} heard {last} at last")


class FakeGroup:
    """A DP coordinator process, and a group's sockets connected to it."""

    def __init__(self, size: int, *arguments: str) -> None:
        self.process = gateway_process(size, *arguments)
        self.told = json.loads(self.process.first_line())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        core_in, core_out, front = (self.told[k] for k in ("core_in", "core_out", "front"))
        self.cores = [FakeCore(self._context, rank, core_in, core_out) for rank in range(size)]
        self.fronts = [FakeFront(self._context, rank, front) for rank in range(size)]

    def subscribe(self) -> None:
        """All of them; then READY, and where things stand."""
        for core in self.cores:
            core.subscribe()
        for core in self.cores:
            assert core.heard() is None
        for front in self.fronts:
            front.subscribe()
            front.heard_standing(0, running=False)

    def run_wave(self, wave: int, rank: int = 0) -> None:
        """From a first request to the end, as cores that obey report it."""
        self.fronts[rank].first_request(wave)
        for core in self.cores:
            core.heard_start(wave)
        self.cores[0].report(started=wave)
        for front in self.fronts:
            front.heard_standing(wave, running=True)
        self.end(wave)

    def begin_by_engine(self, wave: int, rank: int) -> None:
        """As in vLLM 0.33: a core gets a request and steps, the others are started."""
        self.cores[rank].report(started=wave)
        for core in self.cores:
            core.heard_start(wave, excluded=rank)
        for front in self.fronts:
            front.heard_standing(wave, running=True)

    def end(self, wave: int) -> None:
        """Rank 0 says that all are idle."""
        self.cores[0].report(complete=wave)
        for front in self.fronts:
            front.heard_standing(wave + 1, running=False)

    def __enter__(self) -> Self:
        self.process.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)
        self.process.__exit__(exc_type, exc, traceback)


@contextlib.contextmanager
def ready_group(size: int, *arguments: str) -> Iterator[FakeGroup]:
    """A group that has subscribed."""
    with FakeGroup(size, *arguments) as group:
        group.subscribe()
        yield group
