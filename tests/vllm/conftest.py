"""In which order files are run, where two processes share them: long ones first.

So neither waits at the end for the other's last file. For `-n 2 --dist loadfile
--no-loadscope-reorder`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pytest

_HERE: Final = Path(__file__).parent
# Those with many tests or several boots of an engine, then all that boot one; the rest has none.
_LONGEST: Final = (
    *("engine_inprocess", "engine_http", "pd", "offload", "rollouts", "deadline", "faults"),
    *("draft", "trainer_engine", "rollouts_chat", "adapters", "engine_sharded", "families"),
    *("canary", "engine_cores", "connector_sleep", "dp_ranks"),
)
_PLACES: Final = {_HERE / f"test_{name}.py": place for place, name in enumerate(_LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by file; tests of one file keep their order."""
    items.sort(key=lambda item: _PLACES.get(item.path, len(_PLACES)))
