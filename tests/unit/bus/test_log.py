"""Logs: one JSON object per line on stderr, who and what first."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import bus.log
from bus._protocol.core.effects import Note

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = bus.log._settings
    yield
    bus.log._settings = before


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    captured = capsys.readouterr()
    assert captured.out == "", "logs belong on stderr"
    return [json.loads(line) for line in captured.err.splitlines()]


def test_a_line_is_one_object_with_who_and_what_first(capsys: pytest.CaptureFixture[str]) -> None:
    """In an order that a person reads, whatever the order in which fields were given."""
    bus.log.configure(level="info", json=True)
    log = bus.log.logger(group="policy", peer="e0")
    fields = {"duration_ms": 3.5, "epoch": 2, "update_id": "u1", "engines": 4}
    bus.log.write(log, Note("paused", fields=fields))
    (line,) = lines(capsys)
    assert list(line) == [
        "timestamp",
        "level",
        "event",
        "peer",
        "group",
        "update_id",
        "epoch",
        "duration_ms",
        "engines",
    ]
    assert line["event"] == "paused"
    assert line["level"] == "info"
    assert str(line["timestamp"]).endswith("Z")


def test_fields_that_say_nothing_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Empty text and None; a zero says something."""
    bus.log.configure(level="info", json=True)
    note = Note("x", fields={"tensor": "", "detail": None, "count": 0, "ok": False})
    bus.log.write(bus.log.logger(), note)
    (line,) = lines(capsys)
    assert set(line) == {"timestamp", "level", "event", "count", "ok"}


@pytest.mark.parametrize("level", bus.log.LEVELS)
def test_levels_below_the_chosen_one_are_silent(
    capsys: pytest.CaptureFixture[str], level: str
) -> None:
    """The notes carry their own."""
    bus.log.configure(level=level, json=True)
    log = bus.log.logger()
    for each in bus.log.LEVELS:
        bus.log.write(log, Note("x", each))
    shown = [line["level"] for line in lines(capsys)]
    assert shown == list(bus.log.LEVELS)[bus.log.LEVELS.index(level) :]


@pytest.mark.parametrize("text", ['say "x"', "two\nlines", "ünïcödé", "\x1b[31m"])
def test_whatever_a_field_holds_a_line_is_a_line(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """A peer's text can't forge a second one."""
    bus.log.configure(level="info", json=True)
    bus.log.write(bus.log.logger(), Note("x", fields={"detail": text}))
    (line,) = lines(capsys)
    assert line["detail"] == text


def test_an_exception_is_a_field(capsys: pytest.CaptureFixture[str]) -> None:
    """Its traceback stays in the one line."""
    bus.log.configure(level="info", json=True)
    log = bus.log.logger()
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("broke")
    (line,) = lines(capsys)
    assert "ValueError: no" in str(line["exception"])


def test_for_people_it_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, the event before its fields."""
    bus.log.configure(level="info", json=False)
    bus.log.write(bus.log.logger(peer="e0"), Note("paused", fields={"engines": 2}))
    (line,) = capsys.readouterr().err.splitlines()
    assert "paused" in line
    assert line.index("paused") < line.index("peer=") < line.index("engines=")


def test_a_line_on_a_terminal_has_no_escapes_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    bus.log.configure(level="info", json=False)
    bus.log.logger(peer="e\x1b[2J").warning("engine_lost", reason="a\nb\u202e", count=3)
    (line,) = capsys.readouterr().err.splitlines()
    assert "\\u001b[2J" in line
    assert "a\\nb\\u202e" in line
    assert line.isprintable()


@pytest.mark.parametrize("stderr", ["full", "closed", "none"])
def test_a_line_that_can_not_be_written_ends_nobody(
    stderr: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, or where the reader of stderr is gone."""
    full = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - its end fails as well
    if stderr == "closed":
        full.close()
    monkeypatch.setattr(sys, "stderr", None if stderr == "none" else full)
    for as_json in (True, False, None):
        bus.log.configure(level="info", json=as_json)
        bus.log.write(bus.log.logger(), Note("x"))
    with contextlib.suppress(OSError):
        full.close()
