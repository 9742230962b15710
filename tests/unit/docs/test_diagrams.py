"""Tables of the machines as diagrams, and pages that hold them."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import pytest
from click.testing import CliRunner

from bus._protocol.dp import coordinator, wave
from bus._protocol.engine import lease, memory, update_states
from bus._protocol.engine import pause as engine_pause
from bus._protocol.group import pause, sleep, update
from bus._protocol.trainer import chunk_window, pause_window
from bus._protocol.trainer import update as trainer_update
from bus.errors import UsageError
from sidecar import _lease_agreement as lease_agreement
from tests.support.diagrams import command, diagrams, fill_page, state_diagram

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class Lamp(StrEnum):
    OFF = "off"
    ON = "on"
    OUT = "burnt out"


class Switch(StrEnum):
    PRESS = "press"
    HOLD = "hold"
    BURN = "burn"


TABLE = {
    (Lamp.OFF, Switch.PRESS): Lamp.ON,
    (Lamp.OFF, Switch.HOLD): Lamp.ON,
    (Lamp.ON, Switch.PRESS): Lamp.OFF,
    (Lamp.ON, Switch.HOLD): Lamp.ON,
    (Lamp.ON, Switch.BURN): Lamp.OUT,
}


def test_a_table_becomes_a_diagram() -> None:
    """Every transition in the table's order; events between the same two states together."""
    assert state_diagram(TABLE, Lamp.OFF) == (
        "stateDiagram-v2\n"
        '    state "burnt out" as burnt_out\n'
        "    [*] --> off\n"
        "    off --> on: PRESS, HOLD\n"
        "    on --> off: PRESS\n"
        "    on --> on: HOLD\n"
        "    on --> burnt_out: BURN\n"
    )


def test_every_transition_of_every_machine_is_drawn() -> None:
    """None is left out, and none made up."""
    tables = {
        "wave": arrows_of(wave.TRANSITIONS),
        "pause": arrows_of(pause.TRANSITIONS),
        "sleep": arrows_of(sleep.TRANSITIONS),
        "coordinator": arrows_of(coordinator.TRANSITIONS),
        "update": arrows_of(update.TRANSITIONS),
        "trainer-update": arrows_of(trainer_update.TRANSITIONS),
        "trainer-chunk": arrows_of(chunk_window.TRANSITIONS),
        "trainer-pause": arrows_of(pause_window.TRANSITIONS),
        "engine-pause": arrows_of(engine_pause.TRANSITIONS),
        "engine-lease": arrows_of(lease.TRANSITIONS),
        "lease-agreement": arrows_of(lease_agreement.TRANSITIONS),
        "engine-memory": arrows_of(memory.TRANSITIONS),
        "engine-update": arrows_of(update_states.TRANSITIONS),
    }
    assert {name: arrows_in(text) for name, text in diagrams().items()} == tables


def arrows_of(table: Mapping[tuple[S, E], S]) -> set[tuple[str, str, str]]:
    return {
        (state.value.replace(" ", "_"), event.name, following.value.replace(" ", "_"))
        for (state, event), following in table.items()
    }


def arrows_in(text: str) -> set[tuple[str, str, str]]:
    arrows = set()
    for line in text.splitlines():
        if "-->" in line and "[*]" not in line:
            states, events = line.strip().split(": ")
            before, after = states.split(" --> ")
            arrows |= {(before, event, after) for event in events.split(", ")}
    return arrows


def test_a_page_is_filled_between_its_markers() -> None:
    """What stands around them stays, and a second time changes nothing."""
    page = "before\n<!-- diagram: pause -->\nold\n<!-- end of diagram -->\nafter\n"
    full = fill_page(page)
    assert full == (
        "before\n<!-- diagram: pause -->\n"
        f"```mermaid\n{diagrams()['pause']}```\n"
        "<!-- end of diagram -->\nafter\n"
    )
    assert fill_page(full) == full


@pytest.mark.parametrize(
    ("page", "word"),
    [
        (
            "<!-- diagram: lamp -->\n<!-- end of diagram -->\n",
            "wave, pause, sleep, coordinator, update, trainer-update",
        ),
        ("no marker\n", "end of diagram"),
        ("<!-- diagram: pause -->\nwithout an end\n", "end of diagram"),
    ],
)
def test_a_page_without_a_place_for_its_diagram_is_refused(page: str, word: str) -> None:
    """It says what there is."""
    with pytest.raises(UsageError, match=word):
        fill_page(page)


def test_the_command_compares_and_writes(tmp_path: Path) -> None:
    """An old page is left alone, and told of; with --write it is changed."""
    page = tmp_path / "page.md"
    old = "<!-- diagram: pause -->\n<!-- end of diagram -->\n"
    page.write_text(old, encoding="utf-8")
    told = CliRunner().invoke(command, [str(page)])
    assert (told.exit_code, page.read_text(encoding="utf-8")) == (1, old)
    assert "--write" in told.output
    assert CliRunner().invoke(command, ["--write", str(page)]).exit_code == 0
    assert page.read_text(encoding="utf-8") == fill_page(old)
    assert CliRunner().invoke(command, [str(page)]).exit_code == 0
