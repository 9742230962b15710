"""Adds the prompt to an answer, for the fields ``echo`` and ``prompt_logprobs``.

An engine computes the log-probabilities of a prompt in a separate request, which makes one token.
The request for the answer follows, and finds the prompt in the engine's cache. So the answer itself
is generated and continued as without these fields. If an update happens between the two requests,
they use different versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bus.errors import UsageError
from trainer_agent._rollouts.request import make_request
from trainer_agent._rollouts.results import Choice, Completion
from trainer_agent._rollouts.text import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainer_agent._rollouts.client import RolloutClient
    from trainer_agent._rollouts.front_request import FrontRequest

_GENERATE: Final = "/inference/v1/generate"
_NULL: Final = msgspec.Raw(b"null")


class _Scored(msgspec.Struct):
    prompt_logprobs: msgspec.Raw = _NULL


class _Score(msgspec.Struct):
    logprob: float
    decoded_token: str | None = None


_SCORES: Final = msgspec.json.Decoder(list[dict[int, _Score] | None])


@dataclass(frozen=True, slots=True)
class PromptPart:
    """One prompt, as an answer shows it.

    Attributes:
        prompt: the tokens of the prompt.
        text: the text of the prompt, if the answer repeats it; else None.
        logprobs: the JSON of the prompt's log-probabilities, in vLLM's form, or None.
        is_named_by_engine: whether tokens are named as by the engine.
    """

    prompt: Sequence[int]
    text: str | None
    logprobs: msgspec.Raw | None
    is_named_by_engine: bool = False

    def add_to(self, choice: dict[str, Any], name: Callable[[int, Any], dict[str, Any]]) -> None:
        """Adds the prompt to a choice of ``/v1/completions``.

        Args:
            name: makes the entry of a token from its id and log-probability.
        """
        if self.logprobs is not None:
            choice["prompt_logprobs"] = self.logprobs
        if self.text is None:
            return
        choice["text"] = self.text + choice["text"]
        if choice["logprobs"] is None or self.logprobs is None:
            return
        shown = choice["logprobs"]
        scored = _SCORES.decode(self.logprobs)
        entries, likeliest = [], []
        for token, scores in zip(self.prompt, scored, strict=True):
            shown_scores = {
                i: name(i, each.logprob) | self._engine_name(each.decoded_token)
                for i, each in (scores or {}).items()
            }
            top = list(shown_scores.values())
            own = shown_scores.get(token) or name(token, None) | self._first_name(scored)
            entries.append(own | {"top_logprobs": top})
            likeliest.append({each["token"]: each["logprob"] for each in top} or None)
        *offsets, length = accumulate((len(each["token"]) for each in entries), initial=0)
        before = {
            "content": entries,
            "tokens": [each["token"] for each in entries],
            "token_logprobs": [each["logprob"] for each in entries],
            "top_logprobs": likeliest,
            "text_offset": offsets,
        }
        shown["text_offset"] = [length + each for each in shown["text_offset"]]
        choice["logprobs"] = {field: [*own, *shown[field]] for field, own in before.items()}

    def _engine_name(self, text: str | None) -> dict[str, Any]:
        if not self.is_named_by_engine or text is None:
            return {}
        return {"token": text, "bytes": list(text.encode())}

    def _first_name(self, scored: Sequence[dict[int, _Score] | None]) -> dict[str, Any]:
        """Returns the name of the first token, which has no log-probability.

        The name is the part of the text that precedes the names of all other tokens.
        """
        rest = ""
        for token, scores in zip(self.prompt[1:], scored[1:], strict=True):
            score = (scores or {}).get(token)
            rest += (score and score.decoded_token) or ""
        text = self.text or ""
        first = text.removesuffix(rest)
        return self._engine_name(first if 0 < len(first) == len(text) - len(rest) else None)


class PromptParts:
    def __init__(self, client: RolloutClient, tokenizer: Any) -> None:
        self._client = client
        self._tokenizer = tokenizer

    async def find(self, asked: FrontRequest, given: Any, prompt: Sequence[int]) -> PromptPart:
        """Gets the text and the log-probabilities of a prompt, if the request asks for them.

        Args:
            given: the prompt as the client sent it: a text, or tokens.

        Raises:
            UsageError: engines can't detokenize, or give no log-probabilities of prompts.
            NoEngine: no engine is available.
            RolloutFailed: two engines died of the request.
        """
        text = await self._text(asked, given) if asked.echo else None
        count = asked.scored_logprobs
        raw = await self._score(asked, prompt, count) if count is not None else None
        return PromptPart(prompt, text, raw, asked.with_names and self._tokenizer is None)

    async def _text(self, asked: FrontRequest, given: Any) -> str:
        if asked.with_ids:  # as vLLM, which leaves out the text if the answer has token ids
            return ""
        if isinstance(given, str):
            return given
        if self._tokenizer is not None:
            return str(await in_thread(self._tokenizer.decode, given))
        found = await self._client.ask("/detokenize", {"tokens": given})
        if found is None:
            raise UsageError(
                "echo: a prompt of token ids needs engines with a tokenizer, or `--tokenizer`"
            )
        return str(found["prompt"])

    async def _score(self, asked: FrontRequest, prompt: Sequence[int], count: int) -> msgspec.Raw:
        make_request(prompt, {}, decodes=True)  # checks before an engine is asked
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": count}
        body = {"token_ids": prompt, "sampling_params": sampling, "stream": False, **asked.extra}
        place = asked.session_id, asked.client_id
        found = await self._client.ask_placed(_GENERATE, body, place, _Scored)
        if found is None or found.prompt_logprobs == _NULL:
            raise UsageError("prompt_logprobs: these engines do not support it; vLLM does")
        raw: msgspec.Raw = found.prompt_logprobs
        return raw


def prompt_alone(asked: FrontRequest, prompt: Sequence[int]) -> Completion:
    """Returns the answer to a request that echoes its prompt, and asks for no tokens."""
    tokens = make_request(prompt, asked.params, decodes=True).prompt
    logprobs = None if asked.params.get("logprobs") is None else ()
    choices = (
        Choice(index, (), logprobs, "", "length", None, (), (), ())
        for index in range(asked.params.get("n", 1))
    )
    return Completion("", tokens, tuple(choices))
