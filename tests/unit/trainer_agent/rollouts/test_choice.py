"""Text that grows by tokens, which may be parts of characters, or of none."""

from __future__ import annotations

import random
from collections.abc import Sequence  # noqa: TC003 - a protocol's method has it
from typing import Any

import pytest

from bus.messages import RequestLimits
from trainer_agent._rollouts.attempt import Piece
from trainer_agent._rollouts.choice import ChoiceState, GrowingText, _StopSearch
from trainer_agent._rollouts.request import make_request

TEXTS = [
    "plain",
    "\N{SNOWMAN}\N{PILE OF POO}\N{LATIN SMALL LETTER E WITH ACUTE}",
    "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b\N{CJK UNIFIED IDEOGRAPH-4E2D}",
]


class Bytes:
    """A token is one byte, or two."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, token_ids: Sequence[int], /) -> str:
        self.decoded += len(token_ids)
        raw = b"".join(
            bytes([each]) if each < 256 else (each - 256).to_bytes(2) for each in token_ids
        )
        return raw.decode(errors="replace")


def tokens_of(raw: bytes, rng: random.Random) -> list[int]:
    found, at = [], 0
    while at < len(raw):
        size = rng.randint(1, 2) if at + 1 < len(raw) else 1
        part = raw[at : at + size]
        found.append(part[0] if size == 1 else 256 + int.from_bytes(part))
        at += size
    return found


def batches(tokens: list[int], rng: random.Random) -> list[list[int]]:
    found = []
    while tokens:
        size = rng.choice((1, 1, 2, 3, 40))
        found.append(tokens[:size])
        tokens = tokens[size:]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_growing_text_is_the_beginning_of_the_whole(seed: int) -> None:
    """Of characters, of noise, and of both; it lacks a few tokens at most."""
    rng = random.Random(seed)
    raw = b"".join(
        rng.choice((rng.randbytes(20), b"\xe2\x82" * 9, b"\xff" * 9, rng.choice(TEXTS).encode()))
        for _ in range(12)
    )
    tokenizer, tokens = Bytes(), tokens_of(raw, rng)
    whole = tokenizer.decode(tokens)
    growing, text, given = GrowingText(tokenizer), "", 0
    for batch in batches(tokens, rng):
        text += growing.add(batch)
        given += len(batch)
        assert whole.startswith(text)
        assert len(text) >= len(tokenizer.decode(tokens[: max(0, given - 16)])) - 1


def test_its_cost_is_linear() -> None:
    """Also if no character ever ends."""
    for token in (0xFF, 0xE2, 256 + 0xE282, ord("x")):
        tokenizer = Bytes()
        growing = GrowingText(tokenizer)
        for _ in range(2000):
            growing.add([token])
        assert tokenizer.decoded < 2000 * 100


@pytest.mark.parametrize("seed", range(20))
def test_a_stop_string_is_found_however_tokens_come(seed: int) -> None:
    rng = random.Random(seed)
    raw = rng.choice(TEXTS).encode() + b"\xff" * rng.randint(0, 30) + b"STOP" + rng.randbytes(9)
    found = set()
    for size in (1, 3, len(raw)):
        search, tokens = _StopSearch(Bytes()), list(raw)
        parts = (tokens[at : at + size] for at in range(0, len(raw), size))
        found.add(next(filter(None, (search.search(each, ["STOP", "PST"])[0] for each in parts))))
    assert found == {"STOP"}


@pytest.mark.parametrize(
    ("ending", "params", "text"),
    [
        ({"finish_reason": "stop"}, {}, "ab"),
        ({"finish_reason": "stop", "stop_reason": 99}, {"stop_token_ids": [99]}, "ab"),
        ({"finish_reason": "stop"}, {"include_stop_str_in_output": True}, "abc"),
        ({"finish_reason": "length"}, {}, "abc"),
        ({}, {"stop": "b"}, "a"),
    ],
)
def test_a_text_lacks_what_ended_it(
    ending: dict[str, Any], params: dict[str, Any], text: str
) -> None:
    """As vLLM's own texts do."""
    request = make_request([1], params, session_id=None, on_inexact="raise", decodes=True, extra={})
    state = ChoiceState(request, 0, Bytes(), RequestLimits())
    state.take(Piece(0, list(b"abc"), **ending), "e0")
    state.end_attempt("e0")
    assert state.result().text == text
