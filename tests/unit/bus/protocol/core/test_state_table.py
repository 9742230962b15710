"""A machine moves by its table alone, and its error tells what came before."""

from __future__ import annotations

from enum import StrEnum

import pytest

from bus._protocol.core.state_table import STORY_EVENTS, IllegalTransition, StateMachine


class Lamp(StrEnum):
    OFF = "off"
    ON = "on"


class Switch(StrEnum):
    ON = "switch_on"
    OFF = "switch_off"


TABLE = {(Lamp.OFF, Switch.ON): Lamp.ON, (Lamp.ON, Switch.OFF): Lamp.OFF}


def lamp() -> StateMachine[Lamp, Switch]:
    return StateMachine("lamp", TABLE, Lamp.OFF)


def test_the_error_tells_the_last_sixteen_events_in_their_order() -> None:
    """Each with the state that it came in; the refused one is none of them."""
    machine = lamp()
    for _ in range(STORY_EVENTS):
        machine._go(Switch.ON)
        machine._go(Switch.OFF)
    machine._go(Switch.ON)
    for _ in range(2):
        with pytest.raises(IllegalTransition) as raised:
            machine._go(Switch.ON)
    assert str(raised.value) == (
        "lamp: event switch_on in state on is not allowed: a bug in wavebus; "
        "the last events before it: " + ", ".join(["switch_off in on", "switch_on in off"] * 8)
    )


def test_a_new_machine_has_no_story() -> None:
    """And says so."""
    with pytest.raises(IllegalTransition, match="before it: none"):
        lamp()._go(Switch.OFF)


def test_nothing_but_an_event_changes_the_state() -> None:
    """It can't be assigned."""
    with pytest.raises(AttributeError):
        lamp().state = Lamp.ON  # type: ignore[misc]
