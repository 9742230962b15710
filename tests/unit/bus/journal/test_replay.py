"""A journal says again what the broker did; one that was changed is found out, and where."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import pytest

from bus._journal.explain import Finding, findings
from bus._journal.reader import Entry, Gap, read
from bus._journal.records import FileBegan, FrameReceived, FrameSent, RecordsLost
from bus._journal.replay import Replay, Unplayable, replay_lives
from bus._protocol.engine.calls import CallPause
from bus.messages import Commit, GroupAck, Heartbeat, HeartbeatAck, Status, Step
from tests.unit.bus.journal._recorded import (
    ask_status,
    difference,
    is_ack,
    message_of,
    updated,
    without,
    world_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from bus._journal.reader import Item
    from tests.sim.world import SimWorld

STEPS = (
    Step.PAUSE_LOCAL,
    Step.PAUSE_GLOBAL,
    Step.RESUME,
    Step.ARM,
    Step.START,
    Step.CHUNK,
    Step.FINISH,
    Step.COMMIT,
)


@pytest.fixture(scope="module")
def recorded() -> list[Entry]:
    """A whole update of two ranks, whose pause has two phases."""
    world = world_of(1, ranks=2)
    updated(world)
    return world.journals[0].entries()


def test_an_update_is_replayed(recorded: list[Entry]) -> None:
    """Every record, to the end; the machine stands where the broker stood."""
    last = None
    count = 0
    for each in replay_lives(recorded):
        assert not isinstance(each, Unplayable)
        last, step = each
        assert step.difference is None
        count += 1
    assert last is not None
    assert count == len(recorded) - 1
    assert last.machine.groups["policy"].version == 1
    assert last.unsent == 0
    assert sum(isinstance(message_of(entry), GroupAck) for entry in recorded) >= 8


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("peer", ["e0", "e1"])
def test_an_ack_taken_out_is_missed(recorded: list[Entry], step: Step, peer: str) -> None:
    """At the first thing that the broker did because of it; the peer and the step are named."""
    taken = next(entry for entry in recorded if is_ack(step, peer)(entry))
    found = difference(without(recorded, is_ack(step, peer)))
    assert found is not None
    assert found.entry.number > taken.number
    assert isinstance(found.entry.record, FrameSent)
    assert any(f"{peer} has not acked {_word(step)} of" in text for text in found.waits), found


def test_an_ack_of_a_pause_in_one_phase_taken_out_is_missed() -> None:
    """Of engines alone. It is the step's that is named, not the message's."""
    world = world_of()
    updated(world)
    entries = world.journals[0].entries()
    assert difference(entries) is None
    found = difference(without(entries, is_ack(Step.PAUSE_GLOBAL, "e1")))
    assert found is not None
    assert any("e1 has not acked pause_global of" in text for text in found.waits), found


def _word(step: Step) -> str:
    return "chunk 0" if step is Step.CHUNK else step.value


def test_what_was_sent_and_is_taken_out_is_missed(recorded: list[Entry]) -> None:
    """At the next thing that comes in: by then it was to be sent."""

    def is_sent_commit(entry: Entry) -> bool:
        return isinstance(entry.record, FrameSent) and isinstance(message_of(entry), Commit)

    taken = next(entry for entry in recorded if is_sent_commit(entry))
    found = difference(without(recorded, is_sent_commit))
    assert found is not None
    assert found.expected.startswith("COMMIT to e0, e1")
    assert found.entry.number == taken.number + 1
    assert "before it was sent" in found.found


def test_a_status_is_replayed() -> None:
    """But for what the machine can't know: the process's memory, and its time on a CPU."""
    world = world_of()
    ask_status(world)
    entries = world.journals[0].entries()
    (told,) = [message_of(entry) for entry in entries if isinstance(message_of(entry), Status)]
    assert isinstance(told, Status)
    assert told.rss_bytes > 0
    assert difference(entries) is None


def test_an_answer_to_nobody_is_found(recorded: list[Entry]) -> None:
    """A heartbeat taken out: its answer goes to a peer that asked for none."""
    beats = [e for e in recorded if isinstance(message_of(e), Heartbeat)]
    found = difference([entry for entry in recorded if entry is not beats[5]])
    assert found is not None
    assert isinstance(message_of(found.entry), HeartbeatAck)


def test_another_message_is_found(recorded: list[Entry]) -> None:
    """And in which field it is another."""
    index = next(
        index
        for index, entry in enumerate(recorded)
        if isinstance(entry.record, FrameSent) and isinstance(message_of(entry), GroupAck)
    )
    entry = recorded[index]
    assert isinstance(entry.record, FrameSent)
    frame = entry.record.frame.replace(b"slowest\xa2e", b"slowest\xa2f")
    assert frame != entry.record.frame
    record = msgspec.structs.replace(entry.record, frame=frame)
    changed = dataclasses.replace(entry, record=record)
    found = difference([*recorded[:index], changed, *recorded[index + 1 :]])
    assert found is not None
    assert found.entry.number == entry.number
    assert "its slowest is" in found.found


def test_a_journal_may_end_anywhere(recorded: list[Entry]) -> None:
    """The broker was killed then; what it had yet to send is told, and is no difference."""
    unsent = 0
    for end in range(1, len(recorded), 7):
        last: Replay | None = None
        for each in replay_lives(recorded[:end]):
            assert not isinstance(each, Unplayable)
            last, step = each
            assert step.difference is None
        unsent += last.unsent if last else 0
    assert unsent > 0


def test_upto_ends_there(recorded: list[Entry]) -> None:
    """After the record of that number."""
    steps = [each for each in replay_lives(recorded, upto=9) if not isinstance(each, Unplayable)]
    assert [step.entry.number for _, step in steps] == list(range(1, 10))


def test_a_restarted_broker_has_a_life_of_its_own() -> None:
    """Both are replayed, each by a machine of its own."""
    world = world_of()
    world.restart_broker()
    assert world.run_until(lambda: world.trainers["trainer"].is_joined and world.has_joined())
    updated(world)
    entries = [entry for journal in world.journals for entry in journal.entries()]
    lives = {each[0].boot for each in replay_lives(entries) if not isinstance(each, Unplayable)}
    assert lives == {1, 2}
    assert difference(entries) is None


def in_files(entries: list[Entry], cuts: tuple[int, ...]) -> list[Item]:
    """The journal as it lies in several files, with a head of its own for each."""
    (head, *rest) = entries
    assert isinstance(head.record, FileBegan)
    items: list[Item] = []
    for file, (begin, end) in enumerate(zip((0, *cuts), (*cuts, len(rest)), strict=True)):
        began = msgspec.structs.replace(head.record, file=file, records=begin)
        items.append(dataclasses.replace(head, record=began, began=began))
        items += rest[begin:end]
    return items


def test_several_files_are_one_life(recorded: list[Entry]) -> None:
    """The machine goes on from one to the next; a file that is not there is missed by name."""
    whole = in_files(recorded, (20, 50))
    assert difference(whole) is None
    heads = [index for index, item in enumerate(whole) if _begins(item)]
    for begin, end in ((0, heads[1]), (heads[1], heads[2])):
        (told, *others) = [
            each
            for each in replay_lives(whole[:begin] + whole[end:])
            if isinstance(each, Unplayable)
        ]
        assert "a replay needs its first file" in told.reason
        assert not told.damaged
        assert others == []


def _begins(item: Item) -> bool:
    return isinstance(item, Entry) and isinstance(item.record, FileBegan)


def test_what_follows_damage_is_not_replayed(recorded: list[Entry], tmp_path: Path) -> None:
    """Nobody knows what came in there."""
    gap = Gap(tmp_path / "x", 100, 20, "damaged")
    each = list(replay_lives([*recorded[:30], gap, *recorded[31:]]))
    assert isinstance(each[-1], Unplayable)
    assert each[-1].damaged
    assert "byte 100" in each[-1].reason


def test_what_follows_lost_records_is_not_replayed(recorded: list[Entry]) -> None:
    """It is said, with how many they are; what was before them is the same."""
    half = len(recorded) // 2
    gone = dataclasses.replace(recorded[half], record=RecordsLost(0.0, 7))
    *before, last = replay_lives([*recorded[:half], gone, *recorded[half:]])
    assert len(before) == half - 1  # without the file's head
    assert isinstance(last, Unplayable)
    assert not last.damaged
    assert "7 records are missing" in last.reason


def test_a_frame_that_is_none_is_replayed() -> None:
    """What can't be decoded gets its NACK again."""
    world = world_of()
    for frame in (b"", b"\xff" * 30, b"\x80"):
        world.network.send_to_server(b"stranger#1", frame)
    world.run_for(10.0)
    entries = world.journals[0].entries()
    assert sum(e.number > 0 and getattr(e.record, "route", b"") == b"stranger#1" for e in entries)
    assert difference(entries) is None


def test_a_file_is_replayed_as_the_memory_is(tmp_path: Path) -> None:
    """What is written is what was recorded."""
    world = world_of()
    updated(world)
    (tmp_path / "x").write_bytes(world.journals[0].data())
    assert difference(read(tmp_path / "x")) is None


def test_a_commit_is_on_disk_before_anybody_hears_of_it() -> None:
    """The trainer's COMMIT before the engines', every engine's ack before the trainer's answer."""
    world = world_of()
    journal = world.journals[0]
    seen: list[str] = []
    to_client = world.network.send_to_client

    def looked(route: bytes, frame: bytes) -> bool:
        told = message_of(journal.entries()[-1])  # what is being sent
        if isinstance(told, Commit) or (isinstance(told, GroupAck) and told.step is Step.COMMIT):
            inputs = [
                number
                for number, record in enumerate(journal.records, 1)
                if isinstance(record, FrameReceived)
            ]
            assert journal.flushed >= inputs[-1], f"{told} left before what led to it was flushed"
            seen.append(type(told).__name__)
        return to_client(route, frame)

    world.network.send_to_client = looked  # type: ignore[method-assign]
    updated(world)
    assert seen == ["Commit", "Commit", "GroupAck"]


# -- why ----------------------------------------------------------------------


def status_findings(world: SimWorld, about: str = "") -> list[Finding]:
    return findings(world.broker.machine.status(world.now_ms), about)


def test_nothing_is_waited_for_between_updates() -> None:
    """And nobody is out."""
    world = world_of()
    updated(world)
    assert status_findings(world) == []


def test_who_has_not_acked_is_named() -> None:
    """With the step, and for how long; others are not; the journal tells the same."""
    world = world_of(3)
    world.engines["e1"].behaviour.hold.add(CallPause)
    trainer = world.trainers["trainer"]
    trainer.run(trainer.pause(hold_ms=1.0))
    world.run_for(4000.0)
    (found,) = status_findings(world)
    assert (found.peer, found.step, found.state) == ("e1", "pause_global", "blocked")
    assert 3000 < found.waited_ms <= 4000
    assert found.waiting
    assert "its own call has not returned" in found.text
    assert status_findings(world, "e1") == status_findings(world, found.update_id) == [found]
    assert status_findings(world, "e0") == []
    last = list(replay_lives(world.journals[0].entries()))[-1]
    assert not isinstance(last, Unplayable)
    (again,) = findings(last[0].status())
    assert (again.peer, again.step, again.state) == ("e1", "pause_global", "blocked")


def test_an_engine_that_is_stale_is_named_though_nobody_waits_for_it() -> None:
    """It rejects requests until it has the group's weights."""
    world = world_of()
    updated(world)
    late = world.add_engine("late")
    assert world.run_until(lambda: late.is_joined)
    (found,) = status_findings(world)
    assert (found.peer, found.state, found.waiting) == ("late", "stale", False)
    assert "serves version 0, its group 1" in found.text
    assert "update of trainer trainer" in found.text
    assert status_findings(world, "late") == [found]
    updated(world)
    assert status_findings(world) == []


def test_who_is_silent_is_called_so_and_then_gone() -> None:
    """First it is waited for; when it is lost, nobody waits, and it is told that it is gone."""
    world = world_of()
    trainer = world.trainers["trainer"]
    world.engines["e1"].behaviour.hold.add(CallPause)
    trainer.run(trainer.pause(hold_ms=60_000.0))
    world.run_for(100.0)
    world.network.cut(world.engines["e1"].route)
    world.run_for(1500.0)
    (found,) = status_findings(world)
    assert (found.peer, found.state) == ("e1", "silent")
    world.run_for(3000.0)
    (gone,) = [each for each in status_findings(world) if each.peer == "e1"]
    assert gone.state == "dead"
    assert not gone.waiting
    assert "was not heard" in gone.text
    world.network.heal(world.engines["e1"].route)
    world.restart_engine("e1")
    assert world.run_until(world.has_joined)
    assert [each for each in status_findings(world) if each.peer == "e1"] == []


def test_who_holds_a_pause_is_to_say_what_comes_next() -> None:
    """No engine is waited for; the trainer is, and whether it is heard."""
    world = world_of()
    trainer = world.trainers["trainer"]
    trainer.run(trainer.pause(hold_ms=60_000.0))
    world.run_for(1000.0)
    (found,) = status_findings(world)
    assert (found.peer, found.state, found.waiting) == ("trainer", "trainer", True)
    assert "alive" in found.text


def test_who_has_yet_to_send_a_chunk_is_the_trainer() -> None:
    """Nobody can ack what was not sent."""
    world = world_of()
    trainer = world.trainers["trainer"]
    trainer.send_ms = 20_000.0
    trainer.run(trainer.update(1))
    world.run_for(5000.0)
    found = status_findings(world)
    assert {each.state for each in found} == {"trainer"}
    assert "has not sent it yet" in found[0].text
    assert {each.peer for each in found} == {"trainer"}
