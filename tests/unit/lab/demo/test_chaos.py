"""Which requests an engine may end: those that it had while it was out of service."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bus.errors import WavebusError
from bus.operations import LoadChunk
from lab.demo.chaos import Chaos, out_of_service
from lab.demo.plan import DemoPlan
from lab.demo.processes import HEARTBEAT_MS
from tests.unit.bus._scene import Scene

if TYPE_CHECKING:
    from pathlib import Path


def quarantined_for_a_time() -> tuple[Scene, float, float]:
    """Two engines; e1 has loaded a part of an update between these times, in seconds."""
    scene = Scene(1, 1)
    scene.update()
    scene.settled()
    scene.engine("e1").behaviour.fail_next.add(LoadChunk)
    begun_s = scene.world.now_ms / 1000
    scene.update()
    scene.settled()
    scene.world.run_for(20_000.0)
    assert "e1" in scene.world.existing_group.registry.quarantined
    scene.update()
    scene.settled()
    assert not scene.world.existing_group.registry.quarantined
    return scene, begun_s, scene.world.now_ms / 1000


def test_an_engine_is_out_of_service_from_its_failure_to_its_next_update() -> None:
    """Others are not, apart from before the first update."""
    scene, begun_s, ended_s = quarantined_for_a_time()
    spans = out_of_service(scene.world.journals[0].entries())
    ((since, until),) = [span for span in spans["e1"] if span[1] > begun_s]
    assert begun_s < since < until < ended_s
    assert until - since > 20
    assert all(span[1] <= begun_s for span in spans["e0"])


def test_who_is_out_when_the_broker_is_killed_is_out_until_another_knows_better() -> None:
    """What is between two brokers is in the journal of none."""
    scene = Scene(1, 1)
    scene.update()
    scene.settled()
    scene.engine("e1").behaviour.fail_next.add(LoadChunk)
    scene.update()
    scene.settled()
    killed_s = scene.world.now_ms / 1000
    scene.world.kill_broker()
    scene.world.run_for(3000.0)
    scene.world.start_broker()
    assert scene.world.run_until(scene.world.has_joined)
    scene.rest()
    entries = [each for journal in scene.world.journals for each in journal.entries()]
    assert len(scene.world.journals) == 2
    spans = out_of_service(entries)
    since, until = spans["e1"][-1]
    assert since < killed_s
    assert until > killed_s + 3


def test_a_request_that_an_engine_in_service_has_ended_is_lost(tmp_path: Path) -> None:
    """Nobody else's trouble excuses it, nor its own of another time."""
    scene, begun_s, _ = quarantined_for_a_time()
    journal = scene.world.journals[0]
    (tmp_path / "00.journal").write_bytes(journal.data())
    ((since, until),) = [s for s in out_of_service(journal.entries())["e1"] if s[1] > begun_s]
    late_s = HEARTBEAT_MS / 1000
    chaos = Chaos(DemoPlan(journal=tmp_path), print)
    excused = [
        ("e1", since + 1, since + 2),
        ("e1", since - 9, since - late_s / 2),  # ended before the broker heard why
        ("e1", until - 1, until + 9),
    ]
    lost = [
        ("e0", since + 1, since + 2),
        ("e1", since - 9, since - 2 * late_s),
        ("e1", until + 1, until + 9),
    ]
    counts = chaos.result.counts
    counts.aborted = [*excused, *lost]
    chaos._judge_aborted()
    assert counts.lost == counts.why_lost.total() == len(lost)
    assert not chaos.result.clean


def test_a_journal_that_can_not_be_replayed_excuses_nobody() -> None:
    """It is said instead."""
    scene, _, _ = quarantined_for_a_time()
    entries = scene.world.journals[0].entries()
    with pytest.raises(WavebusError):
        out_of_service(entries[:20] + entries[40:])
