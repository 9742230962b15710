"""Records ``tests/data/hang.journal``: a pause that one engine of three never makes.

Run it again when the broker is meant to do something else than it did: ``python -m
tests.support.record_hang``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import bus.log
from bus._protocol.engine.calls import CallPause
from tests.sim.memory_network import Faults
from tests.sim.world import SimWorld

HANG: Final = Path(__file__).resolve().parents[1] / "data" / "hang.journal"


def recorded() -> bytes:
    """An update that goes well; then a pause that ``e1`` is asked for, and never acks."""
    world = SimWorld(seed=7, faults=Faults(delay_ms=1.0))
    for _ in range(3):
        world.add_dp_group(1)
    trainer = world.add_trainer()
    world.run_until(lambda: trainer.is_joined and world.has_joined())
    trainer.run(trainer.update(1))
    world.settle()
    world.engines["e1"].behaviour.hold.add(CallPause)
    trainer.run(trainer.pause(hold_ms=1.0))
    world.run_for(8000.0)
    return world.journals[0].data()


if __name__ == "__main__":
    bus.log.configure(level="error")
    HANG.parent.mkdir(exist_ok=True)
    HANG.write_bytes(recorded())
