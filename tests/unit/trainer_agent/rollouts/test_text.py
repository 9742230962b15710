"""Names of tokens, and messages without content parts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bus.errors import UsageError
from trainer_agent._rollouts.text import (
    HfTokenizer,
    check_length,
    encode,
    flat_messages,
    name_token,
)


@pytest.fixture(scope="module")
def byte_level() -> HfTokenizer:
    """A token for each byte, and one special token."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = {each: index for index, each in enumerate(alphabet)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(names, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    loaded = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>")
    return HfTokenizer(loaded)


def test_tokens_are_named_by_text_and_bytes(byte_level: HfTokenizer) -> None:
    """Also one that is a part of a character, or special."""
    raw = "a \N{SNOWMAN}".encode()
    tokens = byte_level.encode(raw.decode())
    assert len(tokens) == len(raw)
    named = [byte_level.name(token) for token in tokens]
    assert [data for _, data in named] == [[each] for each in raw]
    assert [text for text, _ in named][:2] == ["a", " "]
    end = 256
    assert byte_level.decode([tokens[0], end]) == "a"
    assert byte_level.name(end) == ("<|im_end|>", list(b"<|im_end|>"))


def test_without_a_tokenizer_a_token_is_its_number() -> None:
    assert name_token(None, 5) == ("token_id:5", None)


def test_parts_that_are_texts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]},
        {"role": "user", "content": "d"},
    ]
    assert flat_messages(messages) == [
        {"role": "user", "content": "a\nb\nc"},
        *messages[1:],
    ]
    assert messages[0]["content"] is parts, "the caller's"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hi", "messages: "),
        ([], "messages: "),
        (["hi"], r"messages\[0\]\.role: "),
        ([{"content": "hi"}], r"messages\[0\]\.role: "),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content: "),
        ([{"role": "user", "content": [5]}], r"messages\[0\]\.content\[0\]: "),
        (
            [{"role": "user", "content": ["a", {"type": "image_url", "image_url": {"url": "x"}}]}],
            r"messages\[0\]\.content\[1\]: a part of type 'image_url' needs engines",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]: "),
        ([{"role": "user", "content": [{"type": []}]}], r"messages\[0\]\.content\[0\]: "),
    ],
)
def test_other_contents_are_refused(messages: Any, field: str) -> None:
    with pytest.raises(UsageError, match=f"^{field}"):
        flat_messages(messages)


def test_a_long_text_is_tokenized_up_to_the_model_s_length() -> None:
    class Letters:
        read = 0

        def encode(self, text: str) -> list[int]:
            self.read += len(text)
            return [*map(ord, text)]

    tokenizer = Letters()
    check_length(tokenizer, "x" * 10**6, "prompt", 0)
    check_length(tokenizer, "x" * 10**3, "prompt", 1000)
    assert tokenizer.read == 0
    with pytest.raises(UsageError, match=r"^prompt: has more than the 100000 tokens"):
        check_length(tokenizer, "x" * 10**6, "prompt", 100_000)
    assert tokenizer.read < 2 * 10**5


def test_a_text_that_the_tokenizer_does_not_take_is_the_callers_fault() -> None:
    """One of words, with a word that it lacks and no token for such."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"yes": 0}, unk_token="<unk>"))
    with pytest.raises(UsageError, match=r"^prompt: the tokenizer fails for this text"):
        asyncio.run(encode(model, "no", "prompt", 0))
