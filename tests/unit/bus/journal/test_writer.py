"""The journal on disk: nothing that was flushed is lost, and torn is told from damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus._journal.reader import Entry, Gap, read
from bus._journal.records import (
    MAGIC,
    MARK,
    PREFIX_BYTES,
    BrokerClosed,
    FileBegan,
    FrameReceived,
    FrameRefused,
    FrameSent,
    KeysChanged,
    Record,
    RecordsLost,
    TimerFired,
    pack,
    unpack,
)
from bus._journal.writer import DEFAULT_BYTES, LEAST_BYTES, JournalWriter, journal_files
from bus._protocol.core.access import KeyRole, Limits, Rate
from bus._protocol.core.config import BrokerConfig
from bus.errors import JournalError, UsageError
from bus.messages import MAX_FRAME_BYTES
from tests.sim.clock import SimScheduler
from tests.support.procs import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMITS = Limits(peer=Rate(100, 1000), stranger=Rate(10, 40), status=Rate(5, 8))
KEYS: dict[str, KeyRole] = {"key-e": "engine", "key-t": "trainer"}
BEGAN = FileBegan(1, 0, 0, 0.0, 1000.0, "test", BrokerConfig(), KEYS)
RECORDS: list[Record] = [
    FrameReceived(1.5, b"e0#1", b"frame in", "key-e"),
    FrameRefused(1.75, b"e0#1", 70_000),
    KeysChanged(2.0, {"key-o": "observer"}),
    TimerFired(2.25),
    FrameSent(3.0, (b"e0#1", b"e1#2"), b"frame out"),
    BrokerClosed(4.0),
]


class Journal:
    """A writer on a clock of its own. ``failed`` are the errors that it was told of."""

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int = DEFAULT_BYTES,
        boot: int = 1,
        keys: dict[str, KeyRole] | None = None,
    ) -> None:
        self.clock = SimScheduler()
        self.failed: list[OSError] = []
        self.writer = JournalWriter(
            folder,
            limit_bytes=limit_bytes,
            boot=boot,
            config=BrokerConfig(limits=LIMITS),
            keys=keys,
            scheduler=self.clock,
            on_failure=self.failed.append,
        )

    def fill(self, count: int, size_bytes: int = 1000) -> None:
        for index in range(count):
            self.writer.on_received(float(index), b"e0#1", bytes(size_bytes), "")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "journal", keys=KEYS)
    yield made
    made.writer.close()


def entries(source: Path) -> list[Entry]:
    """What is read back, if nothing of it is torn or damaged."""
    items = list(read(source))
    assert all(isinstance(item, Entry) for item in items), items
    return [item for item in items if isinstance(item, Entry)]


def records(source: Path) -> list[Record]:
    return [entry.record for entry in entries(source) if entry.number]


def a_file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


WHOLE = MAGIC + b"".join(pack(each) for each in [BEGAN, *RECORDS])


@given(
    st.one_of(
        st.builds(
            FrameReceived,
            st.floats(0, 1e12),
            st.binary(max_size=40),
            st.binary(max_size=300),
            st.text(max_size=40),
        ),
        st.builds(
            FrameRefused,
            st.floats(0, 1e12),
            st.binary(max_size=40),
            st.integers(0, 2 * MAX_FRAME_BYTES),
        ),
        st.builds(
            KeysChanged,
            st.floats(0, 1e12),
            st.dictionaries(st.text(max_size=40), st.sampled_from(get_args(KeyRole))),
        ),
        st.builds(
            FrameSent,
            st.floats(0, 1e12),
            st.lists(st.binary(max_size=40), max_size=5).map(tuple),
            st.binary(max_size=300),
        ),
        st.builds(TimerFired, st.floats(0, 1e12)),
        st.builds(RecordsLost, st.floats(0, 1e12), st.integers(0, 2**40)),
    )
)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    """Times too, to the last bit: a replay gives them to the machine."""
    data = b"before" + pack(record)
    assert unpack(data, 6) == (record, len(data))


def test_what_is_recorded_is_read_back(journal: Journal, tmp_path: Path) -> None:
    """In order, with the numbers of one life; the head says which broker it was, and when."""
    journal.writer.on_received(1.5, b"e0#1", b"frame in", "key-e")
    journal.writer.on_refused(1.75, b"e0#1", 70_000)
    journal.writer.on_keys_changed(2.0, {"key-o": "observer"})
    journal.writer.on_timer(2.25)
    journal.writer.on_sent(3.0, (b"e0#1", b"e1#2"), b"frame out")
    journal.clock.run_for(4.0)
    journal.writer.close()
    head, *rest = entries(tmp_path / "journal")
    assert [(entry.number, entry.record) for entry in rest] == list(enumerate(RECORDS, 1))
    assert isinstance(head.record, FileBegan)
    assert (head.record.boot, head.record.file) == (1, 0)
    assert head.record.config == BrokerConfig(limits=LIMITS)
    assert head.record.keys == KEYS
    assert all(entry.began == head.record for entry in rest)


def test_nothing_is_written_before_some_milliseconds_or_a_flush(
    journal: Journal, tmp_path: Path
) -> None:
    """One call to the system for many records; and what is flushed is the system's at once."""
    folder = tmp_path / "journal"
    journal.fill(3)
    assert records(folder) == []
    journal.clock.run_for(20.0)
    assert len(records(folder)) == 3
    journal.fill(2)
    journal.writer.flush()
    assert len(records(folder)) == 5


def test_much_is_written_at_once(journal: Journal, tmp_path: Path) -> None:
    """The buffer does not grow with what comes in one turn of the loop."""
    journal.fill(400)
    assert len(records(tmp_path / "journal")) > 200


@pytest.mark.parametrize("cut", range(len(pack(RECORDS[-2])) + len(pack(RECORDS[-1]))))
def test_a_write_that_broke_off_is_torn(cut: int, tmp_path: Path) -> None:
    """At whatever byte: all records before it are read, and the end is called torn."""
    data = WHOLE[: len(WHOLE) - cut]
    items = list(read(a_file(tmp_path / "x", data)))
    found = [item.record for item in items if isinstance(item, Entry)]
    whole = 1 + len(RECORDS) - (0 if cut == 0 else 1 if cut < len(pack(RECORDS[-1])) + 1 else 2)
    assert found == [BEGAN, *RECORDS][:whole]
    ends = {0, len(pack(RECORDS[-1]))}
    kinds = [item.kind for item in items if isinstance(item, Gap)]
    assert kinds == ([] if cut in ends else ["torn"])


def test_a_head_that_broke_off_is_torn(tmp_path: Path) -> None:
    """At whatever byte, from a file without any."""
    for size in range(len(MAGIC) + len(pack(BEGAN))):
        items = list(read(a_file(tmp_path / "x", WHOLE[:size])))
        if size != len(MAGIC):
            assert [item.kind for item in items if isinstance(item, Gap)] == ["torn"], size
        assert len(items) <= 1


def test_zeros_at_the_end_are_torn(tmp_path: Path) -> None:
    """As a file system leaves them when the power goes."""
    for zeros in (1, PREFIX_BYTES, 4096):
        *found, last = read(a_file(tmp_path / "x", WHOLE + bytes(zeros)))
        assert len(found) == 1 + len(RECORDS)
        assert isinstance(last, Gap)
        assert last.kind == "torn"


def test_a_damaged_record_is_left_out_and_told(tmp_path: Path) -> None:
    """At whatever byte of it a bit flips, its length among them: the next one is read."""
    begin = len(MAGIC) + len(pack(BEGAN))
    size = len(pack(RECORDS[0]))
    for offset in range(begin, begin + size):
        data = bytearray(WHOLE)
        data[offset] ^= 0x10
        items = list(read(a_file(tmp_path / "x", bytes(data))))
        assert [item.record for item in items if isinstance(item, Entry)] == [BEGAN, *RECORDS[1:]]
        assert [item for item in items if isinstance(item, Gap)] == [
            Gap(tmp_path / "x", begin, size, "damaged")
        ]


def test_what_looks_like_a_record_in_a_damaged_one_is_none(tmp_path: Path) -> None:
    """A frame may have a record's first bytes in it."""
    frame = MARK + bytes(40) + MARK + b"\xff" * 40
    data = bytearray(WHOLE + pack(FrameReceived(5.0, b"e0#1", frame)) + pack(RECORDS[1]))
    data[len(WHOLE) + PREFIX_BYTES] ^= 1
    *found, gap, last = read(a_file(tmp_path / "x", bytes(data)))
    assert len(found) == 1 + len(RECORDS)
    assert isinstance(gap, Gap)
    assert gap.kind == "damaged"
    assert isinstance(last, Entry)
    assert last.record == RECORDS[1]


def test_a_damaged_last_record_is_not_torn(tmp_path: Path) -> None:
    """It is all there, and is not what was written."""
    data = bytearray(WHOLE)
    data[-1] ^= 1
    *_, last = read(a_file(tmp_path / "x", bytes(data)))
    assert isinstance(last, Gap)
    assert last.kind == "damaged"


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    """By name."""
    with pytest.raises(JournalError, match="not a journal"):
        list(read(a_file(tmp_path / "x", b"something else, and long enough to be one")))
    with pytest.raises(JournalError, match="no journal is in this folder"):
        list(read(tmp_path))


def test_the_oldest_file_goes(tmp_path: Path) -> None:
    """All files together stay within the limit at any time; records go on in number."""
    folder = tmp_path / "journal"
    journal = Journal(folder, limit_bytes=LEAST_BYTES)
    for _ in range(40):
        journal.fill(10)
        journal.writer.flush()
        assert sum(path.stat().st_size for path in journal_files(folder)) <= LEAST_BYTES
    journal.writer.close()
    found = entries(folder)
    heads = [entry.record for entry in found if isinstance(entry.record, FileBegan)]
    assert len(heads) == 4
    assert heads[0].file > 20
    numbers = [entry.number for entry in found if entry.number]
    assert numbers == list(range(heads[0].records + 1, 402))


def test_a_record_larger_than_a_file_has_one_of_its_own(tmp_path: Path) -> None:
    """It is not lost, and what it takes is taken from the older files."""
    folder = tmp_path / "journal"
    journal = Journal(folder, limit_bytes=LEAST_BYTES)
    journal.fill(50)
    journal.writer.on_received(1.0, b"e0#1", bytes(LEAST_BYTES // 2), "")
    journal.writer.flush()
    assert sum(path.stat().st_size for path in journal_files(folder)) <= LEAST_BYTES
    journal.fill(1)
    journal.writer.close()
    *_, big, _, _ = records(folder)
    assert isinstance(big, FrameReceived)
    assert len(big.frame) == LEAST_BYTES // 2
    assert sum(path.stat().st_size for path in journal_files(folder)) <= LEAST_BYTES


def test_every_file_begins_with_the_keys_of_then(tmp_path: Path) -> None:
    """Those that the broker had when it began the file."""
    journal = Journal(tmp_path / "journal", limit_bytes=LEAST_BYTES, keys=KEYS)
    journal.fill(20)
    journal.writer.on_keys_changed(1.0, {"key-o": "observer"})
    journal.fill(20)
    journal.writer.close()
    heads = [e.record for e in entries(tmp_path / "journal") if isinstance(e.record, FileBegan)]
    assert [head.keys for head in heads] == [KEYS, KEYS, {"key-o": "observer"}]


def test_many_keys_leave_room_for_records(tmp_path: Path) -> None:
    """Where the keys alone take as much as a file may, each has as much again."""
    folder = tmp_path / "journal"
    many: dict[str, KeyRole] = {f"{number:040}": "engine" for number in range(400)}
    journal = Journal(folder, limit_bytes=LEAST_BYTES, keys=many)
    for _ in range(40):
        journal.fill(10)
        journal.writer.flush()
        assert sum(path.stat().st_size for path in journal_files(folder)) <= LEAST_BYTES
    journal.writer.close()
    heads = [entry.record for entry in entries(folder) if isinstance(entry.record, FileBegan)]
    assert heads[-1].file < 40
    assert heads[-1].keys == many


def test_the_next_life_goes_on_in_the_folder(tmp_path: Path) -> None:
    """In a file of its own; what the one before wrote stays, within the limit for both."""
    folder = tmp_path / "journal"
    for boot in (1, 2):
        journal = Journal(folder, limit_bytes=LEAST_BYTES, boot=boot)
        journal.fill(20)
        journal.writer.close()
    heads = [entry.record for entry in entries(folder) if isinstance(entry.record, FileBegan)]
    assert [(head.boot, head.file) for head in heads] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for boot in range(3, 90):
        Journal(folder, limit_bytes=LEAST_BYTES, boot=boot).writer.close()
    assert len(journal_files(folder)) <= 64
    assert sum(path.stat().st_size for path in journal_files(folder)) <= LEAST_BYTES


def test_two_brokers_do_not_share_a_folder(journal: Journal, tmp_path: Path) -> None:
    """The second one is told which option to change; after the first has ended, it may."""
    with pytest.raises(UsageError, match=r"--journal=.*another broker"):
        Journal(tmp_path / "journal")
    journal.writer.close()
    Journal(tmp_path / "journal").writer.close()


def test_a_folder_that_can_not_be_is_refused(tmp_path: Path) -> None:
    """With the option's name."""
    a_file(tmp_path / "file", b"")
    with pytest.raises(UsageError, match="--journal="):
        Journal(tmp_path / "file" / "journal")


def test_nobody_else_may_read_it(journal: Journal, tmp_path: Path) -> None:
    """Frames have paths and addresses in them."""
    assert journal.failed == []
    folder = tmp_path / "journal"
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in journal_files(folder))


@pytest.mark.parametrize(("limit", "kept"), [("size", 3), ("files", 15)])
def test_a_journal_goes_on_when_there_is_room_again(tmp_path: Path, limit: str, kept: int) -> None:
    """It is told once; what was written stays whole, and a record says how many are missing. With
    no descriptor left, a file is full before it matters."""
    script = ROOT / "tests" / "support" / "small_disk.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), limit],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert json.loads(done.stdout) == {"errors": 1, "lost": [20 - kept]}
    found = records(tmp_path)
    assert [each.now_ms for each in found[:kept]] == [float(number) for number in range(kept)]
    gone, *after, closed = found[kept:]
    assert isinstance(gone, RecordsLost)
    assert gone.count == 20 - kept
    assert [each.now_ms for each in after] == [20.0, 21.0]
    assert isinstance(closed, BrokerClosed)
    assert [entry.number for entry in entries(tmp_path) if entry.number] == [
        number + 1 for number in range(len(found))
    ]
