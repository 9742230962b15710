"""Draws the diagrams of the docs from the machines' tables. For developers of wavebus.

``python -m bus.cli.diagrams --write docs/waves.md`` updates a page; without ``--write`` the exit
code 1 says that it is outdated.
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
