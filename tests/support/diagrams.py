"""Draws the machines' tables as diagrams, into the pages of the docs.

A page marks the place of a diagram by two lines; the lines between them are generated::

    <!-- diagram: wave -->
    <!-- end of diagram -->

``python -m tests.support.diagrams --write docs/waves.md`` updates a page; without ``--write`` the
exit code 1 says that it is outdated.
"""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import click

from bus._protocol.dp import coordinator, wave
from bus._protocol.engine import lease, memory, update_states
from bus._protocol.engine import pause as engine_pause
from bus._protocol.group import pause, sleep, update
from bus._protocol.trainer import chunk_window, pause_window
from bus._protocol.trainer import update as trainer_update
from bus.errors import UsageError
from sidecar import _lease_agreement as lease_agreement

if TYPE_CHECKING:
    from collections.abc import Mapping

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)

_MARKED: Final = re.compile(
    r"(?P<begin><!-- diagram: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end of diagram -->)",
    re.DOTALL,
)


def state_diagram(transitions: Mapping[tuple[S, E], S], initial: S) -> str:
    """Returns a Mermaid ``stateDiagram-v2`` of the table's transitions, in the table's order.

    Events that lead from one state to the same next state share an arrow.
    """
    arrows: dict[tuple[S, S], list[str]] = {}
    for (state, event), following in transitions.items():
        arrows.setdefault((state, following), []).append(event.name)
    states = dict.fromkeys(state for arrow in arrows for state in arrow)
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{s.value}" as {_id(s)}' for s in states if s.value != _id(s)]
    lines.append(f"    [*] --> {_id(initial)}")
    lines += [
        f"    {_id(state)} --> {_id(following)}: {', '.join(events)}"
        for (state, following), events in arrows.items()
    ]
    return "\n".join(lines) + "\n"


def _id(state: StrEnum) -> str:
    return re.sub(r"\W+", "_", state.value)


def diagrams() -> dict[str, str]:
    """Returns the diagram of every machine that has a table, by name."""
    return {
        "wave": state_diagram(wave.TRANSITIONS, wave.WaveState.IDLE),
        "pause": state_diagram(pause.TRANSITIONS, pause.PauseState.RUNNING),
        "sleep": state_diagram(sleep.TRANSITIONS, sleep.SleepState.AWAKE),
        "coordinator": state_diagram(coordinator.TRANSITIONS, coordinator.CoordinatorState.IDLE),
        "update": state_diagram(update.TRANSITIONS, update.UpdateState.IDLE),
        "trainer-update": state_diagram(
            trainer_update.TRANSITIONS, trainer_update.TrainerUpdateState.IDLE
        ),
        "trainer-chunk": state_diagram(chunk_window.TRANSITIONS, chunk_window.ChunkState.WAITING),
        "trainer-pause": state_diagram(
            pause_window.TRANSITIONS, pause_window.PauseWindowState.NONE
        ),
        "engine-pause": state_diagram(
            engine_pause.TRANSITIONS, engine_pause.EnginePauseState.RUNNING
        ),
        "engine-lease": state_diagram(lease.TRANSITIONS, lease.LeaseState.FREE),
        "lease-agreement": state_diagram(
            lease_agreement.TRANSITIONS, lease_agreement.AgreementState.HELD
        ),
        "engine-memory": state_diagram(memory.TRANSITIONS, memory.MemoryState.AWAKE),
        "engine-update": state_diagram(
            update_states.TRANSITIONS, update_states.EngineUpdateState.NONE
        ),
    }


def fill_page(page: str) -> str:
    """Returns the page with its diagrams drawn from the present tables.

    Raises:
        UsageError: the page names a machine without a table, or marks no diagram at all.
    """
    drawn = diagrams()

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in drawn:
            raise UsageError(f"diagram: {name!r}: there are {', '.join(drawn)}")
        return f"{match['begin']}```mermaid\n{drawn[name]}```\n{match['end']}"

    text, count = _MARKED.subn(fill, page)
    if not count:
        raise UsageError("no `<!-- diagram: NAME -->` … `<!-- end of diagram -->` in this page")
    return text


@click.command()
@click.argument("page", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--write", is_flag=True, help="Change the page; without it, only compare.")
def command(page: Path, write: bool) -> None:
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
    command()
