"""Tokenizes and decodes in threads, flattens messages with content parts, and names tokens."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainer_agent._rollouts.choice import Tokenizer

_Result = TypeVar("_Result")

# Separate from asyncio's own threads, which look up host names of engines.
_THREADS: Final = ThreadPoolExecutor(4, "wavebus-text")
_PIECE_CHARS: Final = 1 << 16
_CHARS_PER_TOKEN: Final = 4  # texts with fewer characters per allowed token are tokenized at once
_ADDED: Final = 2  # special tokens that a tokenizer may add to a text
# Types of content parts that are text, and the field with the text.
_TEXT_PARTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")


async def in_thread(work: Callable[..., _Result], *args: Any) -> _Result:
    """Runs long work in a thread, and returns its result."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *args)


async def encode(tokenizer: Any, text: str, field: str, most: int) -> list[int]:
    """Returns a text's tokens.

    Args:
        tokenizer: has a method ``encode``.
        field: the name of the text in errors.
        most: the greatest number of tokens that the model takes; 0: unknown.

    Raises:
        UsageError: the text has more than ``most`` tokens, or the tokenizer fails for the text. A
            text that is too long is not tokenized to its end.
    """
    return await in_thread(_encode, tokenizer, text, field, most)


def _encode(tokenizer: Any, text: str, field: str, most: int) -> list[int]:
    try:
        check_length(tokenizer, text, field, most)
        return list(tokenizer.encode(text))
    except UsageError:
        raise
    except Exception as error:  # a tokenizer may raise anything
        raise UsageError(f"{field}: the tokenizer fails for this text: {error}") from error


def check_length(tokenizer: Any, text: str, field: str, most: int) -> None:
    """Raises ``UsageError`` if a long text has more than ``most`` tokens, as :func:`encode`."""
    if not most or len(text) <= _CHARS_PER_TOKEN * most:
        return
    count = 0
    for start in range(0, len(text), _PIECE_CHARS):
        # A cut may split a token into several.
        count += len(tokenizer.encode(text[start : start + _PIECE_CHARS])) - 2 * _ADDED
        if count > most:
            raise UsageError(f"{field}: has more than the {most} tokens that the model takes")


def flat_messages(messages: Any) -> list[dict[str, Any]]:
    """Joins the content parts of each message into one text, for templates without parts.

    Raises:
        UsageError: a message is malformed, or has a part that is not text.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise UsageError("messages: must be a list of messages, and not empty")
    flat = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError(f"messages[{index}].role: is missing")
        content = message.get("content")
        if isinstance(content, list | tuple):
            texts = [
                _text(part, f"messages[{index}].content[{i}]") for i, part in enumerate(content)
            ]
            message = {**message, "content": "\n".join(texts)}  # noqa: PLW2901 - as vLLM joins them
        elif content is not None and not isinstance(content, str):
            raise UsageError(f"messages[{index}].content: must be a text or a list of parts")
        flat.append(message)
    return flat


def _text(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    text = part.get(name) if name is not None else None
    if not isinstance(text, str):
        raise UsageError(
            f"{field}: a part of type {kind!r:.50} needs engines with vLLM's render route; the "
            "client's tokenizer takes text alone"
        )
    return text


class HfTokenizer:
    """A tokenizer of transformers whose :meth:`decode` skips special tokens, as vLLM does."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self.encode: Callable[[str], list[int]] = loaded.encode
        self.apply_chat_template: Callable[..., Any] = loaded.apply_chat_template
        self._bytes = _byte_alphabet()
        loaded.encode("")  # lazy set-up, which is not thread-safe

    def decode(self, token_ids: Sequence[int], /) -> str:
        text: str = self._loaded.decode(token_ids, skip_special_tokens=True)
        return text

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, with special tokens, as vLLM's ``/detokenize``."""
        return str(self._loaded.decode(token_ids, skip_special_tokens=False))

    def name(self, token_id: int) -> tuple[str, list[int]]:
        """Returns a token's text and bytes, also if the token is a part of a UTF-8 character."""
        text: str = self._loaded.decode([token_id], skip_special_tokens=False)
        if "\N{REPLACEMENT CHARACTER}" in text:
            raw = self._loaded.convert_ids_to_tokens(token_id) or ""
            if found := _BYTE.fullmatch(raw):
                return text, [int(found[1], 16)]
            if all(each in self._bytes for each in raw):
                return text, [self._bytes[each] for each in raw]
        return text, list(text.encode())


def name_token(tokenizer: Tokenizer | None, token_id: int) -> tuple[str, list[int] | None]:
    """Returns a token's text and bytes; without a tokenizer ``token_id:5``, and no bytes."""
    if tokenizer is None:
        return f"token_id:{token_id}", None
    if isinstance(tokenizer, HfTokenizer):
        return tokenizer.name(token_id)
    text = tokenizer.decode([token_id])
    return text, list(text.encode())


def _byte_alphabet() -> dict[str, int]:
    """Returns the alphabet of byte-level BPE: the byte that each character stands for."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [each for each in range(0x100) if each not in shown]
    return {chr(each): each for each in shown} | {
        chr(0x100 + at): each for at, each in enumerate(others)
    }
