"""Has engines detokenize completions, for a front without a tokenizer."""

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
    """Has engines make the texts of all choices.

    Args:
        model: the model that the request names, or None.

    Returns:
        The text of each choice; and by the choice's index in the whole answer, the names of the
        tokens that have log-probabilities. Texts are empty if engines have no derender route.

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
