"""`wavebus journal`: what a broker has recorded, line by line."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from bus.cli.options import journal_argument
from bus.errors import UsageError
from bus.journal.reader import Gap, read
from bus.journal.records import FrameReceived, FrameRefused, FrameSent, TimerFired
from bus.journal.render import as_json, decode_frame, line, peer_of, wall_s
from bus.messages import WIRE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bus.journal.reader import Entry

F = TypeVar("F", bound="Callable[..., Any]")


@click.group()
def journal() -> None:
    """Read what a broker has recorded (`wavebus broker --journal DIR`).

    A broker that runs may be read, too: its last 5 milliseconds are not there yet.
    """


@dataclass(frozen=True, slots=True)
class _Moment:
    """``wall``: seconds since 1970; otherwise seconds on the broker's clock."""

    seconds: float
    wall: bool


def _moment(ctx: click.Context, param: click.Parameter, value: str | None) -> _Moment | None:
    if value is None:
        return None
    try:
        return _Moment(float(value), wall=False)
    except ValueError:
        pass
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


@dataclass(frozen=True, slots=True)
class Filters:
    """What is to be shown; what is None or empty shows all."""

    updates: tuple[str, ...]
    engines: tuple[str, ...]
    groups: tuple[str, ...]
    kinds: tuple[str, ...]
    since: _Moment | None
    until: _Moment | None
    timers: bool

    def pass_(self, entry: Entry) -> bool:
        """Whether the record is one of these."""
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


def _filter_options(command: F) -> F:
    """The options of both commands; they arrive as ``filters``, ``as_lines`` and ``full``."""
    options = (
        click.option(
            "--update", "updates", multiple=True, help="Messages of this update or pause."
        ),
        click.option("--engine", "engines", multiple=True, help="From or to this peer, by name."),
        click.option("--group", "groups", multiple=True, help="Messages of this group."),
        click.option(
            "--message",
            "kinds",
            multiple=True,
            metavar="NAME",
            callback=_kinds,
            help="By wire name, such as COMMIT.",
        ),
        click.option(
            "--since", metavar="TIME", callback=_moment, help="Not before this time (see above)."
        ),
        click.option("--until", metavar="TIME", callback=_moment, help="Not after this time."),
        click.option("--timers", is_flag=True, help="Also each time that the broker's timer rang."),
        click.option("--json", "as_lines", is_flag=True, help="One JSON object per line."),
        click.option(
            "--full", is_flag=True, help="With --json: long lists whole, such as a manifest's."
        ),
    )
    names = [each.name for each in fields(Filters)]

    @wraps(command)
    def packed(**given: Any) -> Any:
        filters = Filters(**{name: given.pop(name) for name in names})
        return command(filters=filters, **given)

    wrapped: Callable[..., Any] = packed
    for option in reversed(options):
        wrapped = option(wrapped)
    return cast("F", wrapped)


@journal.command()
@journal_argument
@_filter_options
def show(source: Path, filters: Filters, as_lines: bool, full: bool) -> None:
    """Show the records of a journal: a file, or the folder of a broker's --journal.

    A line has the record's number in this life of the broker, the time (UTC), the way
    (<- came in, -> went out, .. the broker's timer rang, with --timers), the message and
    its peers.
    Options given several times mean any of them; several options mean all of them.

    Times are seconds since the broker began (12.5), or UTC (2026-03-01T12:00:00).
    """
    _print(source, filters, None, as_lines=as_lines, full=full)


@journal.command()
@click.argument("pattern")
@journal_argument
@_filter_options
def grep(pattern: str, source: Path, filters: Filters, as_lines: bool, full: bool) -> None:
    """Show the records whose line (as `show` prints it) has PATTERN, a regular expression.

    Exits with 1 if there is none. Times are as in `wavebus journal show`.
    """
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"PATTERN {pattern!r} is no regular expression: {error}") from error
    if not _print(source, filters, wanted, as_lines=as_lines, full=full):
        raise click.exceptions.Exit(1)


def _print(
    source: Path, filters: Filters, pattern: re.Pattern[str] | None, *, as_lines: bool, full: bool
) -> int:
    """Print what passes; return how many those were. Gaps are told on stderr."""
    printed = 0
    for item in read(source):
        if isinstance(item, Gap):
            click.echo(str(item), err=True)
            continue
        if not filters.pass_(item):
            continue
        text = line(item)
        if pattern is not None and not pattern.search(text):
            continue
        printed += 1
        click.echo(json.dumps(as_json(item, full=full)) if as_lines else text)
    return printed
