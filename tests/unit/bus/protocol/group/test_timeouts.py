"""Which engines are late, and when."""

from __future__ import annotations

from bus._protocol.core.ack_barrier import AckBarrier
from bus._protocol.group.timeouts import late_engines
from bus.messages import Abort, Step, TransferDrain
from tests.unit.bus._scene import Scene


def test_a_drain_has_the_time_that_it_names_and_a_little_more() -> None:
    """Its client may be gone; an engine that is silent about that holds up the next client."""
    group = Scene(1).world.existing_group
    message = TransferDrain("d1", "t1", "sim", 5, b"", 5_000)
    barrier = AckBarrier(Step.TRANSFER_DRAIN, message, ["e0"], 0.0)
    assert late_engines(group, barrier, 15_000.0) == []
    assert late_engines(group, barrier, 15_001.0) == ["e0"]


def test_a_silent_engine_has_half_a_peers_time_to_undo_an_update() -> None:
    """One that is heard has the whole time of a step."""
    group = Scene(1, 1).world.existing_group
    half_ms = group.config.peer_timeout_ms / 2
    asked_ms = max(peer.last_heard_ms for peer in group.registry.engines.values()) + 1.0
    group.registry.engines["e1"].last_heard_ms = asked_ms + 1.0
    barrier = AckBarrier(Step.ABORT, Abort("u1", ""), ["e0", "e1"], asked_ms)
    assert late_engines(group, barrier, asked_ms + half_ms) == []
    assert late_engines(group, barrier, asked_ms + half_ms + 1.0) == ["e0"]
