"""Staged updates back to back, while requests never end: nothing grows, nothing is lost.

The processes of the other soak, without its faults: four engines with eight requests each, and
every quarter of a second an update, which no engine is paused for.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import TYPE_CHECKING, Final

import pytest

from tests.soak._actors import segments
from tests.soak._fleet import FILES, Fleet
from tests.support.procs import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

UPDATES: Final = int(os.environ.get("WAVEBUS_SOAK_STAGED", "30"))
EVERY_S: Final = 0.25  # there is an update, or as soon as the one before has ended
ENGINES: Final = 4
# Nobody dies here, and a process may get no processor for a while: as long as the lease permits.
PEER_TIMEOUT_MS: Final = 3000


@pytest.mark.ci
def test_staged_updates_back_to_back(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Each goes in as it was asked for, on all engines, as the next version; each request ends with
    all its tokens, their versions in order; memory grows by no more than a twentieth (a half in a
    short run)."""
    fleet = Fleet(
        tmp_path, engines=ENGINES, processes=2, load="always", peer_timeout_ms=PEER_TIMEOUT_MS
    )
    took_s: list[float] = []
    try:
        for number in range(UPDATES):
            began_s = time.monotonic()
            fleet.ask(number, "staged")
            told = fleet.trainer.answer()
            took_s.append(time.monotonic() - began_s)
            assert told == {"version": number + 1, "excluded": [], "how": "staged", "why": ""}
            fleet.sample(number)
            time.sleep(max(0.0, EVERY_S - took_s[-1]))  # the pace
        requests = fleet.requests(UPDATES)
    except BaseException:
        shutil.copytree(tmp_path, ROOT / "build" / "soak", dirs_exist_ok=True)  # logs, journal
        raise
    finally:
        for actor in fleet.alive:
            actor.kill()
    left = segments({actor.pid for actor in fleet.lives})
    (growth, allowed), files = fleet.growth_of(UPDATES), fleet.files()
    record_property("staged updates", UPDATES)
    record_property("requests", json.dumps(requests))
    for name, values in growth.items():
        record_property(f"growth of {name}, %", [round(100 * value, 1) for value in values])
    record_property("files more", json.dumps(files))
    record_property("left in shared memory", len(left))
    record_property("longest update, ms", round(max(took_s) * 1000))
    assert left == []
    assert requests["ended"] > UPDATES
    assert (requests["aborted"], requests["wrong"]) == (0, 0)
    assert requests["versions_met"] > UPDATES, "updates met too few requests"
    assert {name: more for name, more in files.items() if more > FILES} == {}
    assert {name: by for name, by in growth.items() if max(by) > allowed} == {}
    assert set(growth) == {"broker", "trainer", *fleet.engines}
