"""`wavebus demo --chaos`: an RL run whose actors are killed in turn."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from tests.support.procs import run_wavebus

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.skipif(
    os.environ.get("WAVEBUS_CHAOS_FAULTS") != "all", reason="takes minutes: see make chaos"
)
def test_the_demo_outlives_its_actors(tmp_path: Path) -> None:
    """Each is killed, none of its requests is lost, no token is of mixed weights."""
    journal = tmp_path / "journal"
    done = run_wavebus(
        *("demo", "--chaos", "--json", "--seconds", "90", "--journal", str(journal)),
        timeout_s=600,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["kills"].keys() == {"broker", "engine-0", "engine-1", "trainer"}
    assert (told["requests_lost"], told["mixed_tokens"], told["healed"]) == (0, 0, True)
    assert told["tokens_checked"] > 1000
    assert told["updates"] > told["staged"] > 5
    assert told["updates"] > 10
    assert told["requests_cut_short"].keys() <= {"killed", "out_of_service"}
    assert told["journal"] == str(journal)
    shown = run_wavebus("journal", "show", str(journal), "--message", "COMMIT")
    assert "COMMIT" in shown.stdout


def test_chaos_is_for_the_embedded_engine() -> None:
    """Other options are refused, by name."""
    done = run_wavebus("demo", "--chaos", "--engine", "vllm")
    assert done.returncode == 2
    assert "--chaos" in done.stderr
