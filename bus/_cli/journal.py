"""The command `wavebus journal`: shows the records of a journal, one per line."""

from __future__ import annotations

import contextlib
import json
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from bus._cli.options import echo, journal_argument, option, options_of
from bus._journal.reader import Gap, read
from bus._journal.records import FrameReceived, FrameRefused, FrameSent, TimerFired
from bus._journal.render import as_json, decode_frame, line, peer_of, wall_s
from bus.errors import UsageError
from bus.messages import WIRE_NAMES

if TYPE_CHECKING:
    from pathlib import Path

    from bus._journal.reader import Entry


@click.group()
def journal() -> None:
    """Read what a broker has recorded (`wavebus broker --journal DIR`).

    The journal of a running broker can be read, too, except for the last 5 milliseconds.
    """


@dataclass(frozen=True, slots=True)
class _Moment:
    """A time in seconds: since 1970 if ``wall``, else on the broker's clock."""

    seconds: float
    wall: bool


def _moment(ctx: click.Context, param: click.Parameter, value: str | None) -> _Moment | None:
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        if math.isfinite(seconds := float(value)):
            return _Moment(seconds, wall=False)
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r}: give seconds since the broker began (12.5), or a time "
            "(2026-03-01T12:00:00, UTC unless it says otherwise)",
            ctx,
            param,
        ) from None
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    return _Moment(found.timestamp(), wall=True)


def _kinds(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    kinds = tuple(each.upper().replace("-", "_") for each in value)
    for kind in kinds:
        if kind not in WIRE_NAMES.values():
            known = ", ".join(sorted(WIRE_NAMES.values()))
            raise click.BadParameter(f"no message {kind}; there are: {known}", ctx, param)
    return kinds


@dataclass(frozen=True)
class Filters:
    """Says which records are shown, and how. A filter that is None or empty lets all pass."""

    updates: tuple[str, ...] = option(
        (), "Only messages of this update or pause.", "--update", type=str, multiple=True
    )
    engines: tuple[str, ...] = option(
        (), "Only messages from or to the peer of this name.", "--engine", type=str, multiple=True
    )
    groups: tuple[str, ...] = option(
        (), "Only messages of this group.", "--group", type=str, multiple=True
    )
    kinds: tuple[str, ...] = option(
        (),
        "Only messages of this wire name, such as COMMIT.",
        "--message",
        type=str,
        multiple=True,
        metavar="NAME",
        callback=_kinds,
    )
    since: _Moment | None = option(
        None,
        "Only records from this time on (see above).",
        type=str,
        metavar="TIME",
        callback=_moment,
    )
    until: _Moment | None = option(
        None, "Only records up to this time.", type=str, metavar="TIME", callback=_moment
    )
    timers: bool = option(False, "Also show when the broker's timer fired.")
    as_lines: bool = option(False, "One JSON object per line.", "--json")
    full: bool = option(False, "With --json: print long lists in full, such as a manifest's.")

    def pass_(self, entry: Entry) -> bool:
        """Returns whether a record is shown: no filter excludes it."""
        if isinstance(entry.record, TimerFired) and not self.timers:
            return False
        if self.since is not None and _at(entry, self.since) < self.since.seconds:
            return False
        if self.until is not None and _at(entry, self.until) > self.until.seconds:
            return False
        if not (self.updates or self.engines or self.groups or self.kinds):
            return True
        if isinstance(entry.record, FrameRefused):
            others = self.updates or self.groups or self.kinds
            return not others and peer_of(entry.record.route) in self.engines
        if not isinstance(entry.record, FrameReceived | FrameSent):
            return False
        decoded = decode_frame(entry.record)
        group = decoded.envelope.group if decoded.envelope else ""
        return (
            (not self.updates or decoded.update_id in self.updates)
            and (not self.engines or not set(self.engines).isdisjoint(decoded.peers))
            and (not self.groups or group in self.groups)
            and (not self.kinds or decoded.kind in self.kinds)
        )


def _at(entry: Entry, moment: _Moment) -> float:
    seconds = wall_s(entry) if moment.wall else None
    return entry.record.now_ms / 1000 if seconds is None else seconds


@journal.command()
@journal_argument
@options_of(Filters, "filters")
def show(source: Path, filters: Filters) -> None:
    """Show the records of a journal: a file, or the folder of a broker's --journal.

    A line has the record's number since the broker's start, the time (UTC), the direction (<-
    received, -> sent, .. the broker's timer, with --timers), the message and its peers. A record
    must pass every option; an option given several times passes any of its values.

    Times are seconds since the broker's start (12.5), or UTC (2026-03-01T12:00:00).
    """
    if not _print(source, filters, None):
        echo(f"{source}: no record passes the filters", err=True)


@journal.command()
@click.argument("pattern")
@journal_argument
@options_of(Filters, "filters")
def grep(pattern: str, source: Path, filters: Filters) -> None:
    """Show the records whose line matches PATTERN, a regular expression.

    Lines and times are those of `wavebus journal show`. Exits with 1 if no line matches.
    """
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"PATTERN {pattern!r} is no regular expression: {error}") from error
    if not _print(source, filters, wanted):
        raise click.exceptions.Exit(1)


def _print(source: Path, filters: Filters, pattern: re.Pattern[str] | None) -> int:
    """Prints the records that pass, and gaps to stderr; returns the number of records."""
    printed = 0
    for item in read(source):
        if isinstance(item, Gap):
            echo(str(item), err=True)
            continue
        if not filters.pass_(item):
            continue
        text = line(item)
        if pattern is not None and not pattern.search(text):
            continue
        printed += 1
        echo(json.dumps(as_json(item, full=filters.full)) if filters.as_lines else text)
    return printed
