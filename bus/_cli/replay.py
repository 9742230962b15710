"""The command `wavebus replay`: replays a broker's journal, and reports differences."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from bus._cli.options import echo, journal_argument, json_option
from bus._journal.reader import Gap, read
from bus._journal.render import line
from bus.errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from bus._journal.reader import Item
    from bus._journal.replay import Difference, Replay, ReplayStep


@click.command()
@journal_argument
@click.option(
    "--upto", type=click.IntRange(min=1), default=None, help="Stop after this record's number."
)
@click.option(
    "--verbose", is_flag=True, help="Print every record, and what the broker logs with it."
)
@json_option
def replay(source: Path, upto: int | None, verbose: bool, as_json: bool) -> None:
    """Replay a journal in memory, and compare what the broker sends.

    FILE_OR_DIR is a journal's file, or the folder of a broker's --journal. A new broker gets the
    recorded messages one by one, at the recorded times. It must send the same messages as the
    recorded broker did.

    Exits with 1 at the first difference, and prints the record, what was expected, and what was
    found. Exits with 1 also if a record is damaged, or if nothing could be replayed. A life of a
    broker (one run of its process) can be replayed only from its first file on, by the same version
    of wavebus. Lives whose first file was deleted (--journal-bytes) are listed.
    """
    # Imported here, because the help text needs no state machine.
    from bus._journal.replay import Unplayable, replay_lives  # noqa: PLC0415

    lives: dict[int, Replay] = {}
    left: list[str] = []  # lives that can't be replayed
    damaged = False
    difference: Difference | None = None
    for each in replay_lives(_collect_torn(read(source), left), upto=upto):
        if isinstance(each, Unplayable):
            left.append(each.reason)
            damaged = damaged or each.damaged
            continue
        life, step = each
        lives[life.boot] = life
        difference = step.difference
        if verbose and not as_json:
            _say(step)
    if not lives:
        raise JournalError("\n".join(left) or f"{source}: nothing is recorded in it")
    if as_json:
        echo(json.dumps(_report(lives.values(), left, difference)))
    else:
        for life in lives.values():
            echo(_summary(life, differs=difference is not None and life.boot == [*lives][-1]))
        for text in left:
            echo(text)
        if difference is not None:
            echo(*str(difference).split("\n"))
    raise click.exceptions.Exit(1 if difference is not None or damaged else 0)


def _collect_torn(items: Iterator[Item], torn: list[str]) -> Iterator[Item]:
    for item in items:
        if isinstance(item, Gap) and item.kind == "torn":
            torn.append(str(item))
        yield item


def _say(step: ReplayStep) -> None:
    echo(line(step.entry))
    for note in step.notes:
        fields = " ".join(f"{key}={value}" for key, value in note.fields.items())
        echo(f"{'':>9}{note.event}  {fields}")


def _summary(life: Replay, *, differs: bool) -> str:
    how = "differs" if differs else "the same"
    end = "it ended normally" if life.closed else "it was killed, or still runs"
    if life.unsent:
        end += f"; {life.unsent} more would follow, but the journal ends"
    return f"broker {life.boot:x}: {life.received} messages in, {life.sent} out: {how}; {end}"


def _report(
    lives: Iterable[Replay], left: list[str], difference: Difference | None
) -> dict[str, Any]:
    return {
        "same": difference is None,
        "lives": [
            {
                "boot": life.boot,
                "received": life.received,
                "sent": life.sent,
                "unsent": life.unsent,
                "closed": life.closed,
            }
            for life in lives
        ],
        "left": left,
        "difference": None
        if difference is None
        else {
            "record": difference.entry.number,
            "file": difference.entry.path.name,
            "now_ms": difference.entry.record.now_ms,
            "expected": difference.expected,
            "came": difference.found,
            "waits": list(difference.waits),
        },
    }
