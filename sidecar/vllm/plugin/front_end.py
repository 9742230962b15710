"""Inside vLLM's front ends: versions of streamed tokens, checks of token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def label_completion_output(original: Callable[..., Any], state: Any, *args: Any) -> Any:
    """Have each piece of a request's output name the versions of its tokens so far, as the last one
    does: whoever loses the rest knows them."""
    output = original(state, *args)
    if output.weight_versions is None:
        output.weight_versions = state._weight_version_spans()  # noqa: SLF001
    return output


def check_token_ids(
    original: Callable[..., Any],
    renderer: Any,
    token_ids: Sequence[int],
    *,
    parameter: str | None = None,
) -> None:
    """Refuse ids beyond the vocabulary also without a tokenizer: the engine core dies of them."""
    original(renderer, token_ids, parameter=parameter)
    if renderer.tokenizer is not None or not token_ids:
        return
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= renderer.model_config.get_vocab_size():
        from vllm.exceptions import VLLMValidationError  # noqa: PLC0415 - loaded in a front end

        worst = lowest if lowest < 0 else highest
        raise VLLMValidationError(f"Token id {worst} is out of vocabulary", parameter=parameter)
