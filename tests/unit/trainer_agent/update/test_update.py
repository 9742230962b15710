"""What a trainer logs of updates that its engines' vLLM can't stage."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

import bus.log
from trainer_agent._update.update import Updates

WHY = "receive_weights does not say `load_weights`"
THEIRS = f"e0: this vLLM's 'nccl' can't stage: {WHY}"


@pytest.mark.parametrize(
    ("feature", "why_paused", "warned"),
    [
        ("staged_updates", "e0: no room", True),
        ("staged_worker_engines", THEIRS, True),
        ("staged_worker_engines", "e0: no room", False),  # it is another backend, say
        ("draft_updates", "e0: no room", False),
    ],
)
def test_a_vllm_that_cannot_stage_is_named_once(
    feature: str, why_paused: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not one that lacks something else, or something that the update does not need."""

    async def engines() -> list[Any]:
        return [SimpleNamespace(name="e0", software="vllm 9", features={feature: WHY})]

    steps: Any = SimpleNamespace(connection=SimpleNamespace(engines=engines))
    bus.log.configure(level="info", json=True)
    updates = Updates(steps, alone=True)
    for reason in (why_paused, f"{why_paused}, again"):
        asyncio.run(updates.warn_of_fallback(reason))
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    found = [(each["event"], each["engine"], each["reason"]) for each in lines]
    assert found == ([("staged_updates_off", "e0", WHY)] if warned else [])
