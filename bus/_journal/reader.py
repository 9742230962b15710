"""Reads a journal record by record, and reports torn and damaged records.

A record is **torn** if the file ends in the middle of the record, because the process died during a
write. Bytes that are no valid record, with valid records after them, are **damaged**; reading
continues with the next valid record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from bus._journal.records import MAGIC, MARK, PREFIX_BYTES, FileBegan, Record, body_span, unpack
from bus._journal.writer import journal_files
from bus.errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole record of a journal, with its place.

    Attributes:
        path: the file that has the record.
        offset: where the record begins in the file, in bytes.
        number: the record's number in this life of the broker, from 1; a :class:`FileBegan` has 0.
        record: the record.
        began: the first record of the file; None if the first record is damaged.
    """

    path: Path
    offset: int
    number: int
    record: Record
    began: FileBegan | None


@dataclass(frozen=True, slots=True)
class Gap:
    """A range of bytes in a journal's file that is no valid record.

    Attributes:
        path: the file.
        offset: where the range begins in the file, in bytes.
        size_bytes: the length of the range.
        kind: ``torn`` or ``damaged``; see the module.
    """

    path: Path
    offset: int
    size_bytes: int
    kind: Literal["torn", "damaged"]

    def __str__(self) -> str:
        if self.kind == "torn":
            return (
                f"{self.path}: ends in the middle of a record, at byte {self.offset}: the broker "
                "was killed then, or is still writing"
            )
        return (
            f"{self.path}: {self.size_bytes} bytes from byte {self.offset} on are damaged, and "
            "are skipped"
        )


Item: TypeAlias = Entry | Gap


def read(source: Path) -> Iterator[Item]:
    """Yields a journal's records and gaps in the order of writing.

    Args:
        source: a file, or a folder whose files are read in order.

    Raises:
        JournalError: there is no journal, or it can't be read.
    """
    if not source.is_dir():
        yield from _read_file(source, _bytes_of(source))
        return
    paths = journal_files(source)
    if not paths:
        raise JournalError(f"{source}: no journal is in this folder")
    for path in paths:
        try:
            data = _bytes_of(path)
        except FileNotFoundError:  # the broker has just deleted it
            continue
        yield from _read_file(path, data)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror}") from error


def _read_file(path: Path, data: bytes) -> Iterator[Item]:
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            yield Gap(path, 0, len(data), "torn")
            return
        raise JournalError(f"{path}: not a journal of wavebus")
    began: FileBegan | None = None
    offset, number = len(MAGIC), 0
    while offset < len(data):
        found = unpack(data, offset)
        if found is None:
            gap = _gap(path, data, offset)
            yield gap
            offset += gap.size_bytes
            continue
        record, after = found
        if isinstance(record, FileBegan):
            began, number = record, record.records
            yield Entry(path, offset, 0, record, began)
        else:
            number += 1
            yield Entry(path, offset, number, record, began)
        offset = after


def _gap(path: Path, data: bytes, offset: int) -> Gap:
    following = data.find(MARK, offset + 1)
    while following >= 0:
        if unpack(data, following) is not None:
            return Gap(path, offset, following - offset, "damaged")
        following = data.find(MARK, following + 1)
    size = len(data) - offset
    return Gap(path, offset, size, "torn" if _is_torn(data, offset) else "damaged")


def _is_torn(data: bytes, offset: int) -> bool:
    """Returns whether a record begins here without an end, or only zeros follow (power loss)."""
    rest = data[offset : offset + PREFIX_BYTES]
    if len(rest) < PREFIX_BYTES:
        return MARK.startswith(rest[: len(MARK)]) or not any(rest)
    span = body_span(data, offset)
    if span is not None:
        return span[1] > len(data)
    return not any(data[offset:])
