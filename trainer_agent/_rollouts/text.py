"""Makes tokens of text beside the event loop, makes text of content parts, and names tokens."""

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

# Not asyncio's own threads: those look up the host names of engines.
_THREADS: Final = ThreadPoolExecutor(4, "wavebus-text")
_PIECE_CHARS: Final = 1 << 16
_CHARS_PER_TOKEN: Final = 4  # of a text that is tokenized at once
_ADDED: Final = 2  # special tokens that a tokenizer may add to a text
# Content parts that are text, and the field that has it.
_TEXT_PARTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")


async def in_thread(work: Callable[..., _Result], *args: Any) -> _Result:
    """Runs work that may take long in a thread, and returns its result."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *args)


async def encode(tokenizer: Any, text: str, field: str, most: int) -> list[int]:
    """Returns a text's tokens.

    Args:
        tokenizer: has a method ``encode``.
        field: the name of the text in errors.
        most: the greatest number of tokens that the model takes; 0: unknown.

    Raises:
        UsageError: the text has more tokens: it is not tokenized to its end. Or the tokenizer does
            not take it.
    """
    return await in_thread(_encode, tokenizer, text, field, most)


def _encode(tokenizer: Any, text: str, field: str, most: int) -> list[int]:
    try:
        check_length(tokenizer, text, field, most)
        return list(tokenizer.encode(text))
    except UsageError:
        raise
    except Exception as error:  # whatever a tokenizer raises
        raise UsageError(f"{field}: the tokenizer does not take it: {error}") from error


def check_length(tokenizer: Any, text: str, field: str, most: int) -> None:
    """Raises ``UsageError`` if a long text has more than ``most`` tokens, as :func:`encode`."""
    if not most or len(text) <= _CHARS_PER_TOKEN * most:
        return
    count = 0
    for start in range(0, len(text), _PIECE_CHARS):
        # A token that a cut parts becomes several.
        count += len(tokenizer.encode(text[start : start + _PIECE_CHARS])) - 2 * _ADDED
        if count > most:
            raise UsageError(f"{field}: more than the {most} tokens that the model takes in all")


def flat_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns messages whose content is text, for a template that knows no content parts.

    Raises:
        UsageError: a message is malformed, or has a part that is no text.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise UsageError("messages: must be a list of messages")
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
            f"{field}: a part of type {kind!r:.50} needs engines that render messages; here, parts "
            "are texts"
        )
    return text


class HfTokenizer:
    """A tokenizer of transformers that skips special tokens when it decodes, as vLLM does."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self.encode: Callable[[str], list[int]] = loaded.encode
        self.apply_chat_template: Callable[..., Any] = loaded.apply_chat_template
        self._bytes = _byte_alphabet()
        loaded.encode("")  # sets up what threads must not set up at the same time

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Returns the text of tokens."""
        text: str = self._loaded.decode(token_ids, skip_special_tokens=True)
        return text

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, with the special ones, as vLLM's ``/detokenize``."""
        return str(self._loaded.decode(token_ids, skip_special_tokens=False))

    def name(self, token_id: int) -> tuple[str, list[int]]:
        """Returns a token's text and bytes, also of a special token or a part of a character."""
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
    """Returns the byte of each character with which byte-level BPE writes tokens."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [each for each in range(0x100) if each not in shown]
    return {chr(each): each for each in shown} | {
        chr(0x100 + at): each for at, each in enumerate(others)
    }
