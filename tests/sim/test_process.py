"""A simulated process is stopped, continued and killed between two of its sends."""

from __future__ import annotations

from tests.sim.clock import SimScheduler
from tests.sim.memory_network import MemoryNetwork
from tests.sim.process import Process


def test_what_comes_to_a_stopped_process_piles_up() -> None:
    """It is done when the process goes on, in its order; what was cancelled meanwhile is not."""
    clock = SimScheduler()
    network = MemoryNetwork(clock)
    process = Process(clock, network)
    seen: list[object] = []
    process.client(b"e0").listen(seen.append)
    process.call_at(3.0, lambda: seen.append("timer"))
    cancelled = process.call_at(4.0, lambda: seen.append("cancelled"))
    process.stop()
    network.server().send([b"e0"], b"frame")
    clock.run_for(10.0)
    assert seen == []
    cancelled.cancel()
    process.cont()
    clock.run_for(1.0)
    assert seen == [b"frame", "timer"]
    assert process.continued_ms == process.last_frame_ms == 10.0


def test_a_process_dies_between_two_of_its_sends() -> None:
    """Of three frames in a row the first is sent; nothing comes to it, or from it, any more."""
    clock = SimScheduler()
    network = MemoryNetwork(clock)
    process = Process(clock, network)
    arrived: list[bytes] = []
    network.server().listen(lambda _route, frame, _user: arrived.append(frame))
    client = process.client(b"e0")
    process.die_after(1, process.kill)

    def three() -> None:
        for frame in (b"1", b"2", b"3"):
            client.send(frame)

    process.call_at(1.0, three)
    process.call_at(2.0, three)
    clock.run_for(10.0)
    assert arrived == [b"1"]
    assert not process.alive
