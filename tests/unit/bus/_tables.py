"""What every machine with a transition table does with each event in each state."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import pytest

from bus._protocol.core.state_table import IllegalTransition, StateMachine

if TYPE_CHECKING:
    from collections.abc import Mapping

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


def lead_to(machine: StateMachine[S, E], table: Mapping[tuple[S, E], S], state: S) -> list[E]:
    """Bring a new machine there by the fewest events; they are returned."""
    ways: dict[S, list[E]] = {machine.state: []}
    reached = deque(ways)
    while state not in ways:
        before = reached.popleft()  # no state is without a way
        for (each, event), following in table.items():
            if each is before and following not in ways:
                ways[following] = [*ways[before], event]
                reached.append(following)
    for event in ways[state]:
        machine._go(event)
    assert machine.state is state
    return ways[state]


def check_event(
    machine: StateMachine[S, E], table: Mapping[tuple[S, E], S], state: S, event: E
) -> None:
    """The new machine takes the table's row; without one it raises, tells its story, and nothing
    of it has changed."""
    way = lead_to(machine, table, state)
    following = table.get((state, event))
    if following is not None:
        machine._go(event)
        assert machine.state is following
        return
    before = {**vars(machine), "_story": list(machine._story)}
    with pytest.raises(IllegalTransition, match=f"{event.value} in state {state.value}") as raised:
        machine._go(event)
    told = str(raised.value).partition("before it: ")[2].split(", ")
    assert [each.partition(" in ")[0] for each in told] == (
        [each.value for each in way] or ["none"]
    )
    assert {**vars(machine), "_story": list(machine._story)} == before
