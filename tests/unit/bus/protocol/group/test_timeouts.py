"""Which engines are late, and when."""

from __future__ import annotations

from bus.messages import Step, TransferDrain
from bus.protocol.core.ack_barrier import AckBarrier
from bus.protocol.group.timeouts import late_engines
from tests.unit.bus._scene import Scene


def test_a_drain_has_the_time_that_it_names_and_a_little_more() -> None:
    """Its client may be gone; an engine that is silent about that holds up the next client."""
    group = Scene(1).world.existing_group
    message = TransferDrain("d1", "t1", "sim", 5, b"", 5_000)
    barrier = AckBarrier(Step.TRANSFER_DRAIN, message, ["e0"], 0.0)
    assert late_engines(group, barrier, 15_000.0) == []
    assert late_engines(group, barrier, 15_001.0) == ["e0"]
