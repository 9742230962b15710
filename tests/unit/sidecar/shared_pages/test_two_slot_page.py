"""Records in shared memory: what is read is whole, and the newest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar._shared_pages.two_slot_page import (
    RECORDS_AT,
    NoPage,
    TwoSlotRecord,
    make_page,
    open_page,
)

if TYPE_CHECKING:
    import mmap
    from pathlib import Path

BODY_BYTES = 64
RECORD_BYTES = TwoSlotRecord.size_of(BODY_BYTES)
SIZE_BYTES = RECORDS_AT + 2 * RECORD_BYTES


def page() -> mmap.mmap:
    return make_page(None, b"TEST", 1, SIZE_BYTES)


def record(memory: mmap.mmap, number: int = 0) -> TwoSlotRecord:
    return TwoSlotRecord(memory, RECORDS_AT + number * RECORD_BYTES, BODY_BYTES)


def changed(memory: mmap.mmap, before: bytes) -> list[int]:
    return [at for at in range(SIZE_BYTES) if memory[at] != before[at]]


def test_records_of_a_page_do_not_touch_each_other() -> None:
    memory = page()
    first, second = record(memory), record(memory, 1)
    assert (first.read(), second.read()) == (None, None)
    for number in range(5):
        first.write(bytes([number]) * BODY_BYTES)
        second.write(b"")
        assert (first.read(), second.read()) == (bytes([number]) * BODY_BYTES, b"")


def test_a_write_that_broke_off_is_not_read_and_the_next_one_is() -> None:
    """Whoever writes next, the same process or another, keeps the record that is whole."""
    for same in (True, False):
        memory = page()
        writer = record(memory)
        writer.write(b"one")
        before = memory[:]
        writer.write(b"two")
        memory[changed(memory, before)[-1]] ^= 0xFF
        assert record(memory).read() == b"one"
        (writer if same else record(memory)).write(b"three")
        assert record(memory).read() == b"three"


def test_the_newest_of_several_writers_one_after_the_other_counts() -> None:
    memory = page()
    old, new = record(memory), record(memory)
    for number in range(7):
        (old if number % 3 else new).write(bytes([number]))
        assert record(memory).read() == bytes([number])


def test_a_record_of_which_no_slot_is_whole_is_none() -> None:
    memory = page()
    before = memory[:]
    record(memory).write(b"one")
    memory[changed(memory, before)[-1]] ^= 0xFF
    with pytest.raises(NoPage, match="no complete record"):
        record(memory).read()


def test_a_page_of_another_kind_or_layout_is_not_opened(tmp_path: Path) -> None:
    make_page(tmp_path / "page", b"TEST", 1, SIZE_BYTES).close()
    open_page(tmp_path / "page", b"TEST", 1, SIZE_BYTES).close()
    for kind, layout in ((b"ELSE", 1), (b"TEST", 2)):
        with pytest.raises(NoPage, match="layout"):
            open_page(tmp_path / "page", kind, layout, SIZE_BYTES)
