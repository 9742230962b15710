"""How long a step of the embedded engine takes, at least."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

from sidecar.embedded import EmbeddedEngine, SamplingParams
from tests.support.checkpoints import make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

STEP_S = 1000.0
TOKENS = 6


def test_a_core_rests_after_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what the step itself has left of its time."""
    checkpoint = make_checkpoint(tmp_path, seed=1)
    rests_s: list[float] = []
    sleep = time.sleep

    def rest(for_s: float) -> None:
        if threading.current_thread().name == "wavebus-embedded":
            rests_s.append(for_s)
        else:
            sleep(for_s)  # of another thread: all have one module

    monkeypatch.setattr("sidecar._embedded.core.time.sleep", rest)

    async def scenario() -> None:
        engine = EmbeddedEngine(checkpoint.folder, host=None, step_ms=STEP_S * 1000)
        await engine.start()
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        (output,) = await engine.generate((5, 9, 7), params).outputs()
        assert len(output.token_ids) == TOKENS
        await engine.close()

    asyncio.run(scenario())
    assert len(rests_s) == TOKENS
    assert all(0 < rest_s < STEP_S for rest_s in rests_s)
