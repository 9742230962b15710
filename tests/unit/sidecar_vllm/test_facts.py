"""What is asked of workers about their draft model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.vllm_plugin import facts


@pytest.mark.parametrize(
    ("answer", "draft"),
    [
        ([True, True], True),
        ([True, False], False),
        ([], False),
        ([1], False),
        (None, False),
        ("True", False),
    ],
)
def test_a_draft_is_there_if_every_worker_has_it(answer: Any, draft: bool) -> None:
    """Of half of them nobody could be updated."""
    assert facts.read_draft(answer) is draft


@pytest.mark.parametrize(
    "worker", [SimpleNamespace(), SimpleNamespace(supports_draft_weight_updates=lambda: False)]
)
def test_a_worker_that_cannot_update_a_draft_says_so(worker: SimpleNamespace) -> None:
    """An older vLLM has no such question; it must not fail, or all workers fail at once."""
    base = SimpleNamespace(WorkerBase=type("Base", (), {}), WorkerWrapperBase=type("W", (), {}))
    facts.install(base)
    ask: Any = getattr(base.WorkerBase, facts.ASK_DRAFT)
    assert ask(worker) is False
