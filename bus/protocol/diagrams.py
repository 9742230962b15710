"""Draws the machines' diagrams, and updates the diagrams in a page.

A page marks the place of a diagram by two lines; the lines between them are generated::

    <!-- diagram: wave -->
    <!-- end of diagram -->

``python -m bus.cli.diagrams`` writes them; a test compares.
"""

from __future__ import annotations

import re
from typing import Final

from bus.errors import UsageError
from bus.protocol.core.state_table import state_diagram
from bus.protocol.dp import coordinator, wave
from bus.protocol.engine import lease, memory, update_states
from bus.protocol.engine import pause as engine_pause
from bus.protocol.group import pause, sleep, update
from bus.protocol.trainer import chunk_window, pause_window
from bus.protocol.trainer import update as trainer_update

_MARKED: Final = re.compile(
    r"(?P<begin><!-- diagram: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end of diagram -->)",
    re.DOTALL,
)


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
