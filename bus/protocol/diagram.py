"""A machine's table as a diagram: Mermaid text, and a page's diagrams brought up to date.

A page marks where a diagram stands, and everything between the two lines is made here::

    <!-- diagram: wave -->
    <!-- end of diagram -->

``python -m bus.commands.diagrams`` writes them; a test compares.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeVar

from bus.errors import UsageError
from bus.protocol import gateway, pause, sleep, update, wave

if TYPE_CHECKING:
    from collections.abc import Mapping

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)

_MARKED: Final = re.compile(
    r"(?P<begin><!-- diagram: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end of diagram -->)",
    re.DOTALL,
)


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


def diagrams() -> dict[str, str]:
    """The machines that have a table, by name."""
    return {
        "wave": state_diagram(wave.TRANSITIONS, wave.WaveState.IDLE),
        "pause": state_diagram(pause.TRANSITIONS, pause.PauseState.RUNNING),
        "sleep": state_diagram(sleep.TRANSITIONS, sleep.SleepState.AWAKE),
        "gateway": state_diagram(gateway.TRANSITIONS, gateway.GatewayState.IDLE),
        "update": state_diagram(update.TRANSITIONS, update.UpdateState.IDLE),
    }


def filled(page: str) -> str:
    """The page with all its diagrams as the tables are now.

    Raises:
        UsageError: it names a machine that has no table, or marks no diagram at all.
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
