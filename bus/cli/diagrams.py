"""The diagrams of the docs, from the machines' tables; a tool of ours, no user's command.

``python -m bus.cli.diagrams --write docs/waves.md`` brings a page up to date; without
``--write`` it says whether it is (exit code 1: it is not).
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bus.protocol.diagrams import fill_page


@click.command()
@click.argument("page", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--write", is_flag=True, help="Change the page; without it, only compare.")
def diagrams(page: Path, write: bool) -> None:
    """Draw the machines' tables into PAGE, between its markers."""
    before = page.read_text(encoding="utf-8")
    after = fill_page(before)
    if after == before:
        return
    if not write:
        click.echo(f"{page}: a diagram is not what the tables say; run with --write", err=True)
        sys.exit(1)
    page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    diagrams()
