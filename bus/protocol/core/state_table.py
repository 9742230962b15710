"""Transition tables of machines: the next state, the error of an event, and the diagram."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from bus.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping


S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


def next_state(machine: str, transitions: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """The state that an event leads to.

    Args:
        machine: the machine's name, for the error.
        transitions: its table.

    Raises:
        IllegalTransition: the table has no such event in this state.
    """
    following = transitions.get((state, event))
    if following is None:
        raise IllegalTransition(machine, state.value, event.value)
    return following


def state_diagram(transitions: Mapping[tuple[S, E], S], initial: S) -> str:
    """A ``stateDiagram-v2`` with every transition of the table, in the table's order.

    Events that lead from one state to the same other one share an arrow.
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


class IllegalTransition(ProtocolError):
    """A machine was told something that cannot happen in its state: a defect here."""

    def __init__(self, machine: str, state: str, event: str) -> None:
        super().__init__(f"{machine}: {event} in state {state} is not in its table")
