"""A trace shows who did what, when: tracks, spans that nest, in the shape that Perfetto reads."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from bus._journal.reader import Entry
from bus._journal.records import FrameReceived, FrameSent
from bus._journal.spans import TraceSpan, spans
from bus._journal.trace import trace
from bus._protocol.engine.calls import CallPause
from bus.messages import Step
from bus.messages.codec import encode
from bus.operations import LoadChunk
from tests.sim.engine import Behaviour
from tests.unit.bus._builders import ack, engine_join, envelope
from tests.unit.bus.journal._recorded import updated, world_of

if TYPE_CHECKING:
    from bus.messages import Message
    from tests.sim.world import SimWorld

LOAD_MS = 50.0


def the_spans(world: SimWorld) -> list[TraceSpan]:
    return spans(entry for journal in world.journals for entry in journal.entries())


@pytest.fixture(scope="module")
def world() -> SimWorld:
    """An update of three engines; each load of ``e1`` takes a while."""
    made = world_of(3)
    made.engines["e1"].behaviour = Behaviour(slow_ms={LoadChunk: LOAD_MS})
    updated(made)
    return made


@pytest.fixture(scope="module")
def events(world: SimWorld) -> list[dict[str, Any]]:
    """As they are read back from JSON."""
    drawn: dict[str, Any] = json.loads(json.dumps(trace(the_spans(world))))
    assert set(drawn) == {"traceEvents", "displayTimeUnit"}
    found: list[dict[str, Any]] = drawn["traceEvents"]
    return found


def of(events: list[dict[str, Any]], track: str) -> list[dict[str, Any]]:
    """The spans of one track, by its name."""
    (named,) = [e for e in events if e["name"] == "thread_name" and e["args"]["name"] == track]
    return [e for e in events if e["ph"] == "X" and e["tid"] == named["tid"]]


def test_every_event_has_the_shape_that_the_format_asks_for(events: list[dict[str, Any]]) -> None:
    """Complete events with whole microseconds, and names of tracks; nothing else."""
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert isinstance(event["ts"], int)
            assert isinstance(event["dur"], int)
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["args"]["result"] == "done"
        else:
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")


def test_spans_of_an_update_have_its_version_and_label(events: list[dict[str, Any]]) -> None:
    """All from ARM on, also those that enclose others, and a pause that begins before it has one;
    what comes before that is of no version yet."""
    for track in ("trainer trainer", "e0"):
        drawn = {e["name"]: e["args"] for e in of(events, track)}
        for name in ("arm", "commit", "resume", "transfer" if track == "e0" else "finish"):
            assert (drawn[name]["version"], drawn[name]["label"]) == (1, "p1")


def test_spans_of_a_track_nest(events: list[dict[str, Any]]) -> None:
    """Two of them are one after the other, or one holds the other, and comes first."""
    for track in {event["tid"] for event in events}:
        mine = [e for e in events if e["ph"] == "X" and e["tid"] == track]
        mine.sort(key=lambda e: (e["ts"], -e["dur"]))
        for one, other in pairwise(mine):
            end, other_end = one["ts"] + one["dur"], other["ts"] + other["dur"]
            assert other["ts"] >= end or other_end <= end, (one, other)


def test_each_engine_has_a_track_with_its_phases(events: list[dict[str, Any]]) -> None:
    """pause, transfer, commit and resume, once, in order, with their steps in them."""
    for peer in ("e0", "e1", "e2"):
        mine = of(events, peer)
        names = [event["name"] for event in mine]
        for phase in ("pause", "transfer", "commit", "resume"):
            assert names.count(phase) == 1, names
        by_name = {event["name"]: event for event in mine}
        order = ["arm", "pause", "transfer", "commit", "resume"]
        begins = [by_name[name]["ts"] for name in order]
        assert begins == sorted(begins)
        inside = ["start", "chunk 0", "chunk 1", "chunk 2", "chunk 3", "finish"]
        transfer = by_name["transfer"]
        for before, after in pairwise(["transfer", *inside]):
            begin = by_name[before]["ts"]
            if before != "transfer":  # each begins when the engine is done with the one before
                begin += by_name[before]["dur"]
            assert by_name[after]["ts"] >= begin, (before, after)
        assert by_name["finish"]["ts"] + by_name["finish"]["dur"] == (
            transfer["ts"] + transfer["dur"]
        )


def test_what_takes_long_is_long(events: list[dict[str, Any]]) -> None:
    """And is whose it is: others are done before, and wait."""
    slow = sum(e["dur"] for e in of(events, "e1") if e["name"].startswith("chunk"))
    quick = sum(e["dur"] for e in of(events, "e0") if e["name"].startswith("chunk"))
    assert slow >= 4 * LOAD_MS * 1000
    assert quick < slow


def test_the_trainer_has_a_track_of_its_steps(events: list[dict[str, Any]]) -> None:
    """Each as long as it waited, in the span of its update; it comes first in the picture."""
    mine = of(events, "trainer trainer")
    names = [event["name"] for event in mine]
    for step in ("arm", "pause_global", "start", "chunk 0", "finish", "commit", "resume"):
        assert step in names, names
    (named,) = [e for e in events if e["name"] == "thread_name" and "trainer" in e["args"]["name"]]
    assert named["tid"] == min(event["tid"] for event in events)
    assert any(name.startswith("u") and "-" in name for name in names), names


def test_what_is_not_finished_is_drawn_to_the_end() -> None:
    """An engine that hangs is seen to hang, and the trainer to wait."""
    world = world_of()
    world.engines["e1"].behaviour.hold.add(CallPause)
    trainer = world.trainers["trainer"]
    trainer.run(trainer.pause(hold_ms=1.0))
    world.run_for(5000.0)
    hanging = [span for span in the_spans(world) if span.result == "unfinished"]
    assert {(span.peer, span.name) for span in hanging} == {
        ("e1", "pause_global"),
        ("trainer", "pause_global"),
    }
    assert all(span.end_ms - span.begin_ms > 4000 for span in hanging)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pause_has_the_spans_of_its_phases(ranks: int) -> None:
    """That of one phase has one."""
    world = world_of(1, ranks=ranks)
    trainer = world.trainers["trainer"]
    trainer.run(trainer.pause(hold_ms=1.0))
    assert world.settle()
    mine = [span for span in the_spans(world) if span.peer == "e0"]
    phases = ["pause_global"] if ranks == 1 else ["pause_local", "pause_global"]
    assert [(span.name, span.result) for span in mine] == [
        (name, "done") for name in (*phases, "resume")
    ]
    assert all(span.end_ms > span.begin_ms for span in mine)


def test_what_was_refused_says_so() -> None:
    """With the code."""
    world = world_of()
    world.engines["e1"].behaviour.fail_next.add(LoadChunk)
    trainer = world.trainers["trainer"]
    trainer.run(trainer.update(1))
    assert world.settle()
    results = {span.result for span in the_spans(world) if span.peer == "e1"}
    assert "engine_failed" in results
    assert "unfinished" not in results


def test_a_trainer_that_is_started_again_under_its_name_has_all_its_steps() -> None:
    """Its requests have the ids of those that the first one sent."""
    world = world_of()
    for _ in range(2):
        trainer = world.trainers["trainer"]
        trainer.run(trainer.pause(hold_ms=1.0))
        assert world.settle()
        trainer.leave()
        world.add_trainer()
        assert world.run_until(lambda: world.trainers["trainer"].is_joined)
    mine = [span.name for span in the_spans(world) if span.role == "trainer"]
    assert mine == ["pause_global", "resume"] * 2


def test_a_request_that_is_repeated_over_another_connection_counts_once() -> None:
    """Its answer was lost with the first one."""
    world = world_of()
    trainer = world.trainers["trainer"]
    world.network.cut(trainer.route, up=False)
    trainer.run(trainer.pause(hold_ms=1.0))
    assert world.run_until(lambda: any(span.role == "trainer" for span in the_spans(world)))
    world.network.heal(trainer.route)
    assert world.settle()
    mine = [span for span in the_spans(world) if span.role == "trainer"]
    assert [(span.name, span.result) for span in mine] == [
        ("pause_global", "done"),
        ("resume", "done"),
    ]


def test_another_one_under_a_peers_name_draws_nothing(world: SimWorld) -> None:
    """Nor ends a span of the peer's: neither its JOIN, which was refused, nor its acks."""
    entries = world.journals[0].entries()
    (update_id,) = {span.update_id for span in the_spans(world) if span.name == "start"}
    words: list[Message] = [engine_join(), *(ack(step, update_id) for step in Step)]
    forged: list[Entry] = []
    for entry in entries:
        forged.append(entry)
        if isinstance(entry.record, FrameSent):
            now_ms = entry.record.now_ms
            for word in words:
                frame = encode(envelope(word, "e1", boot=99))
                record = FrameReceived(now_ms, b"e1#99", frame)
                forged.append(Entry(entry.path, 0, entry.number, record, entry.began))
    assert len(forged) > 10 * len(world.engines)
    assert spans(forged) == the_spans(world)
