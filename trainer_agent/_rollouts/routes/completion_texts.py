"""Has engines make the texts of completions, for a front without a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bus.errors import RolloutFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer_agent._rollouts.client import RolloutClient
    from trainer_agent._rollouts.results import Completion


async def make_texts(
    client: RolloutClient, done: Sequence[Completion], model: str | None
) -> tuple[list[str], dict[int, list[dict[str, Any]]]]:
    """Returns the texts of all choices, and the names of tokens that have log-probabilities.

    The names are by the choice's index in the whole answer. Texts are empty, and there are no
    names, if engines have no route for it.

    Args:
        model: the model that the request names, or None.

    Raises:
        UsageError, NoEngine: as :func:`~trainer_agent._rollouts.chat.ask_any`.
    """
    chat = client.make_chat([], model=model)
    chat.is_decoded_here = False
    texts: list[str] = []
    names: dict[int, list[dict[str, Any]]] = {}
    try:
        for each in done:
            messages, named = await chat.named_messages(each)
            names |= {len(texts) + index: found for index, found in named.items()}
            texts += (message["content"] or "" for message in messages)
    except RolloutFailed:
        return [""] * sum(len(each.choices) for each in done), {}
    return texts, names
