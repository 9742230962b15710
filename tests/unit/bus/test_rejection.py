"""Which answers say that a request may be sent again."""

from __future__ import annotations

from typing import Any

import pytest

from bus.rejection import is_rejected
from tests.support.generating import PAUSED


def test_a_paused_engines_answer_is_one() -> None:
    assert is_rejected(PAUSED)


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"token_ids": [], "finish_reason": "abort"}]},
        {"error": {"message": "the engine is dead", "type": "InternalServerError", "code": 503}},
        {"error": {"message": "no such model", "type": "NotFoundError", "code": 404}},
        {"error": "The model is currently scaling. Please try again later."},
        ["ServiceUnavailableError"],
        None,
    ],
)
def test_others_are_none(answer: Any) -> None:
    """A closed admission's, a dead engine's, a refusal, and what has another form."""
    assert not is_rejected(answer)
