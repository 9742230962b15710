"""The command `wavebus trace`: converts a journal to a trace of all peers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from bus._cli.options import NamedPath, echo, journal_argument
from bus._journal.reader import read
from bus._journal.spans import spans
from bus._journal.trace import trace as traced
from bus.errors import JournalError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


@click.command()
@journal_argument
@click.option(
    "-o",
    "--output",
    type=NamedPath(dir_okay=False),
    required=True,
    help="The file to write, such as trace.json.",
)
@click.option("--group", default=None, help="Draw this group alone.")
def trace(source: Path, output: Path, group: str | None) -> None:
    """Draw a journal as a trace: open it at https://ui.perfetto.dev, or in chrome://tracing.

    FILE_OR_DIR is a journal's file, or the folder of a broker's --journal. Each engine has a track,
    with spans for pause, transfer and canary and their steps, and for commit and resume. The
    trainer has a track with the steps that it waited for.
    """
    found = [span for span in spans(read(source)) if group in (None, span.group)]
    if not found:
        of = f" of group {group}" if group else ""
        raise JournalError(f"{source}: no step{of} is recorded in it, so there is nothing to draw")
    try:
        output.write_text(json.dumps(traced(found)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}") from error
    peers = len({(span.life, span.group, span.peer) for span in found})
    echo(f"{output}: {len(found)} steps of {peers} peers")
