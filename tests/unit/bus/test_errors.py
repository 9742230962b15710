"""What an error says: who, in which step, with which chunk."""

from __future__ import annotations

import pytest

from bus.errors import refusal
from bus.messages import Nack, NackCode


def nack(step: str, chunk: int, detail: str, field: str = "") -> Nack:
    return Nack(NackCode.PEER_LOST, step, "u1", chunk, detail, field, "e1", "", "do this", 0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (nack("chunk", 3, "lost"), "peer_lost: e1: lost (step chunk 3); do this"),
        (nack("start", 0, "lost"), "peer_lost: e1: lost (step start); do this"),
        (nack("arm", 0, "lost", "names[0]"), "peer_lost: e1: lost (field names[0], step arm)"),
        (nack("", 0, "lost"), "peer_lost: e1: lost; do this"),
        (
            nack("chunk", 3, "has not acked chunk 3"),
            "peer_lost: e1: has not acked chunk 3; do this",
        ),
    ],
)
def test_a_refusal_names_peer_step_and_chunk(given: Nack, text: str) -> None:
    """Once: where the detail has them, nothing is added."""
    assert str(refusal(given)).startswith(text)
