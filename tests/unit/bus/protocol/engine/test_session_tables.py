"""The engine's machines move by their tables, and no peer can bring them to where these end."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bus._protocol.engine import lease, memory, pause, update_states
from tests.unit.bus._play import ACTIONS, BEGINNINGS, AnyOrder
from tests.unit.bus._session import Driver
from tests.unit.bus._tables import check_event

if TYPE_CHECKING:
    from enum import StrEnum

TABLES: dict[str, dict[Any, Any]] = {
    "memory": memory.TRANSITIONS,
    "lease": lease.TRANSITIONS,
    "pause": pause.TRANSITIONS,
    "update": update_states.TRANSITIONS,
}
ENUMS: dict[str, tuple[type[StrEnum], type[StrEnum]]] = {
    "memory": (memory.MemoryState, memory.MemoryEvent),
    "lease": (lease.LeaseState, lease.LeaseEvent),
    "pause": (pause.EnginePauseState, pause.EnginePauseEvent),
    "update": (update_states.EngineUpdateState, update_states.EngineUpdateEvent),
}


@pytest.mark.parametrize(
    ("name", "state", "event"),
    [(name, *each) for name, enums in ENUMS.items() for each in product(*enums)],
)
def test_the_table_says_what_follows_and_refuses_the_rest(
    name: str, state: StrEnum, event: StrEnum
) -> None:
    """Of each machine as a session has it."""
    check_event(getattr(Driver().session, name), TABLES[name], state, event)


# Most of all calls return, and time passes.
OFTEN = ["return"] * 30 + ["fail", "time passes"] * 5


@given(
    beginning=st.sampled_from(list(BEGINNINGS)),
    names=st.lists(st.sampled_from([*OFTEN, *ACTIONS]), max_size=40),
    dp_size=st.sampled_from([1, 2]),
)
@example(  # an escalation still runs, when the engine is found to have ended the pause by itself
    beginning="new",
    names=["pause u1 wait", "time passes", "return", "found running", "escalation returns"],
    dp_size=1,
)
@example(  # a probe fails, behind which the pause waits to be strengthened
    beginning="finished",
    names=["return", "probe u1", "pause p2 abort", "fail", "return"],
    dp_size=1,
)
@example(  # an update is armed while the one before waits for a call to end, to be given up
    beginning="armed",
    names=["open t2", "abort u1", "arm u2", "return", "return"],
    dp_size=1,
)
@example(  # the same, and the one before is started
    beginning="armed",
    names=["open t2", "abort u1", "start u1", "return", "return"],
    dp_size=1,
)
@example(  # requests of a stale engine end while its staged update is given up
    beginning="staging",
    names=["return", "version 9", "abort u1", "return", "return"],
    dp_size=1,
)
def test_no_order_of_messages_leads_where_no_table_does(
    beginning: str, names: list[str], dp_size: int
) -> None:
    """Whatever a peer sends, is refused before a table is asked: no step of this raises."""
    driver = AnyOrder(dp_size=dp_size)
    BEGINNINGS[beginning](driver)
    driver.play(names)
