"""The command `wavebus keygen`: makes a pair of keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from bus._cli.options import NamedPath, echo
from bus._keys import AUTHORIZED, ROLES, Key, write_pair
from bus._runtime.zmq_curve import new_pair

if TYPE_CHECKING:
    from bus._keys import FileRole


_HELP: Final = """Make a pair of CURVE keys: NAME.secret and NAME.pub.

The secret key stays with its owner; the public key goes to the other side.

\b
wavebus keygen broker --role broker -o keys    # then: wavebus broker --curve-keys keys
wavebus keygen engine-1 --role engine          # then: copy engine-1.pub to keys/authorized,
                                               # and send SIGHUP to a running broker

Existing files are never overwritten.
"""


@click.command(help=_HELP)
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(ROLES),
    required=True,
    help="What the key's owner may do; broker: the key of the broker itself.",
)
@click.option(
    "-o",
    "--output",
    type=NamedPath(file_okay=False),
    default=Path(),
    show_default="this folder",
    help="The folder that the files are written to.",
)
def keygen(name: str, role: FileRole, output: Path) -> None:
    """Makes a key pair, and prints where to copy its files."""
    public, secret = new_pair()
    secret_path, public_path = write_pair(output, Key(name, role, public, secret))
    echo(f"{secret_path}: keep it secret")
    if role == "broker":
        echo(f"{public_path}: for every peer (--broker-key)")
    else:
        echo(f"{public_path}: copy it to the {AUTHORIZED} folder of the broker's keys")
