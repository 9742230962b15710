"""The command `wavebus why`: names the peers that delay a group."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from bus._cli.options import (
    NamedPath,
    broker_option,
    echo,
    json_option,
    key_options,
    timeout_option,
)
from bus._journal.explain import findings
from bus._journal.reader import read
from bus._runtime.event_loop import run
from bus._runtime.status_client import fetch_status
from bus.errors import JournalError

if TYPE_CHECKING:
    from pathlib import Path

    from bus._cli.options import BrokerAddress, Keys
    from bus._journal.replay import Replay
    from bus.messages import Status


@click.command()
@click.argument("about", metavar="[UPDATE|ENGINE]", default="")
@broker_option
@click.option(
    "--journal",
    "journal_path",
    type=NamedPath(exists=True),
    help="Answer from this journal (a file or a folder): the state at its end.",
)
@timeout_option
@key_options
@json_option
def why(
    about: str,
    address: BrokerAddress,
    journal_path: Path | None,
    timeout_s: float,
    keys: Keys,
    as_json: bool,
) -> None:
    """Say why a group makes no progress, and which engine blocks it.

    An engine is blocked (alive, but its own call has not returned), silent (no heartbeat for two
    intervals), wedged (a rank of its data-parallel group hangs in a collective) or dead (a rank of
    its data-parallel group is gone). Engines that are quarantined, stale or gone come last. With
    the name of an update or an engine, shows only what concerns this update or engine.

    Exits with 3 if no broker answers.
    """
    if journal_path is not None:
        status = _final_status(journal_path)
    else:
        status = run(fetch_status(address.broker, timeout_s=timeout_s, security=keys.security()))
    found = findings(status, about)
    waiting = any(each.waiting for each in found)
    if as_json:
        echo(json.dumps({"waiting": waiting, "findings": [asdict(each) for each in found]}))
        return
    if not waiting:
        echo(_nothing(status, about))
    for each in found:
        echo(f"{each.group}: {each.text}")


def _nothing(status: Status, about: str) -> str:
    if not about:
        return "nothing is waited for"
    for group in status.groups:
        for end in group.ended:
            if end.update_id == about:
                return f"{about} {end.outcome}"
    known = {group.update_id for group in status.groups}
    known |= {engine.name for group in status.groups for engine in group.engines}
    known |= {out.engine for group in status.groups for out in group.out}
    known |= {group.owner for group in status.groups}
    if about in known:
        return f"nothing is waited for that concerns {about}"
    return f"nothing is waited for: no update under way, and no peer, is called {about}"


def _final_status(source: Path) -> Status:
    """Returns the final status of the last broker in a journal.

    Raises:
        JournalError: the journal can't be replayed.
    """
    # Imported here, because the help text needs no state machine.
    from bus._journal.replay import Unplayable, replay_lives  # noqa: PLC0415

    last: Replay | None = None
    reason = f"{source}: nothing is recorded in it"
    for each in replay_lives(read(source)):
        if isinstance(each, Unplayable):
            last, reason = None, each.reason
            continue
        last, step = each
        if step.difference is not None:
            raise JournalError(
                f"{source}: this version of wavebus would have sent other messages than the "
                f"journal has, so the broker's state is unknown\n{step.difference}"
            )
    if last is None:
        raise JournalError(reason)
    return last.status()
