"""The models of a group, from the lists of its engines."""

from __future__ import annotations

import json
from typing import Any

from trainer_agent._rollouts.routes.models import merged


def listed(*cards: dict[str, Any]) -> bytes:
    return json.dumps({"object": "list", "data": list(cards)}).encode()


def test_each_model_and_adapter_is_listed_once_and_models_come_first() -> None:
    """Also adapters that only some engines have. Of cards that differ, the first one counts."""
    base, again = ({"id": "base", "parent": None, "created": when} for when in (1, 2))
    a, b = ({"id": name, "parent": "base"} for name in "ab")
    found = merged([listed(base, b), listed(again, a), listed({"id": "alias"}, again, a, b)])
    assert [json.loads(bytes(raw)) for _, raw in found] == [base, {"id": "alias"}, b, a]


def test_an_answer_that_can_not_be_read_is_left_out() -> None:
    answers = [b"", b"[]", b'{"data": [{}]}', b"\xff", listed({"id": "base"})]
    assert [card.id for card, _ in merged(answers)] == ["base"]
    assert merged([]) == []
