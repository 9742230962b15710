"""A tokenizer of one character for each token, with a chat template, in transformers' files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

# Token i is character i, but for these.
NAMES: Final = {2: "</s>", 3: "<think>", 4: "</think>"}
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if tools %}t:{{ tools | length }}\n{% endif %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def letters(text: str) -> list[int]:
    """The tokens of a text."""
    return [ord(each) for each in text]


def write_letters(folder: Path, vocab: int = 128) -> None:
    """Write the tokenizer's files."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    names = {NAMES.get(token, chr(token)): token for token in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token=chr(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
