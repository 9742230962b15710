"""Writes the answers of the front, in the form of OpenAI's API."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from itertools import accumulate, chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from bus.errors import WavebusError
from trainer_agent._rollouts.choice import GrowingText
from trainer_agent._rollouts.front_request import ROUTES
from trainer_agent._rollouts.results import TokenDelta
from trainer_agent._rollouts.text import name_token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer_agent._rollouts.chat import Chat
    from trainer_agent._rollouts.front_request import FrontRequest
    from trainer_agent._rollouts.results import Choice

_FIELD: Final = re.compile(
    r"(?:the engine refuses the request: )?([A-Za-z_][\w.-]*)(\[[\w.]+\][\w.\[\]]*)?: "
)
_PARAMETER: Final = re.compile(r"\(parameter=([\w.]+)")  # of vLLM's own errors
_TEXTS: Final = ("reasoning", "content")
# Routes of vLLM or OpenAI that the gateway lacks, and what to use instead.
_CHAT_INSTEAD: Final = "use /v1/chat/completions"
_UNSERVED: Final = {
    "/v1/responses": _CHAT_INSTEAD,
    "/v1/messages": _CHAT_INSTEAD,
    "/v1/assistants": _CHAT_INSTEAD,
    "/v1/threads": _CHAT_INSTEAD,
    "/v1/chat/completions/batch": _CHAT_INSTEAD,
    "/v1/realtime": _CHAT_INSTEAD,
    "/v1/batches": "send the requests of a batch at once",
    "/v1/embeddings": "use a server of an embedding model",
    "/v1/moderations": "use a server of a moderation model",
    "/v1/audio": "use a server of a speech model",
    "/v1/images": "use a server of an image model",
}
_GROWTH: Final = 16
_KINDS: Final = {
    401: "AuthenticationError",
    404: "NotFoundError",
    409: "ConflictError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class AnswerWriter:
    """Writes the answer to one request.

    Args:
        tokenizer: names tokens; None: tokens are named by their ids.
    """

    def __init__(self, request: FrontRequest, tokenizer: Any) -> None:
        self._request = request
        self._tokenizer = tokenizer if request.with_names else None
        self._offsets: dict[int, int] = {}
        head = {"id": request.id, "request_id": request.id, "created": int(time.time())}
        is_chunk = request.is_stream and request.is_chat
        if not request.kind:
            head["output_mode"] = "tokens"
        head["object"] = request.kind + (".chunk" if is_chunk else "")
        head["model"] = request.extra.get("model", "")
        event = (b"data: ", b"\n\n") if request.is_stream else (b"", b"")
        self._begin, self._end = event[0] + msgspec.json.encode(head)[:-1], event[1]

    def frame(
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, int] | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        fields: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        """Encodes an answer, or one event of a stream.

        Args:
            usage: the numbers of tokens; None: not known yet.
            prompts: the token ids of the choices' prompts; None: the prompts are not shown.
            fields: further fields of the answer.
        """
        rest: dict[str, Any] = {"choices": choices, "usage": usage, **fields}
        if prompts and self._request.with_ids:
            if self._request.kind == "text_completion":
                each = len(choices) // len(prompts)
                for index, choice in enumerate(choices):
                    choice["prompt_token_ids"] = prompts[index // each]
            else:
                rest["prompt_token_ids"] = prompts[0]
        return b"%b,%b%b" % (self._begin, msgspec.json.encode(rest)[1:], self._end)

    def choice(
        self,
        index: int,
        part: TokenDelta | Choice | None,
        text: str,
        message: Mapping[str, Any],
        names: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Returns a choice, or a part of a choice, in the common form.

        Args:
            names: the engine's names of the tokens, with their log-probabilities; None: unknown.
        """
        ids = part.token_ids if part is not None else ()
        shown = {
            "index": index,
            "token_ids": ids,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
        }
        if self._request.is_chat:
            shown["delta" if self._request.is_stream else "message"] = message
        if part is not None and part.logprobs is not None:
            shown["logprobs"] = self._logprobs(index, part, names)
        return shown

    def _logprobs(
        self, index: int, part: TokenDelta | Choice, names: Sequence[Mapping[str, Any]] | None
    ) -> dict[str, Any]:
        logprobs = part.logprobs or ()
        tops = part.top_logprobs
        if names is not None and len(names) == len(logprobs) and self._request.with_names:
            content = [
                {**each, "token_id": i} for each, i in zip(names, part.token_ids, strict=True)
            ]
        else:
            content = [self.named(*each) for each in zip(part.token_ids, logprobs, strict=True)]
            for at, each in enumerate(content):
                each["top_logprobs"] = [self.named(*t) for t in tops[at].items()] if tops else []
        if not self._request.kind:
            for at, each in enumerate(content):
                each["rank"] = _rank(each["logprob"], tops[at]) if tops else None
        if self._request.kind != "text_completion":
            return {"content": content}
        tokens = [each["token"] for each in content]
        first = self._offsets.get(index, 0)
        *offsets, self._offsets[index] = accumulate(map(len, tokens), initial=first)
        likeliest = [  # as in vLLM: the sampled token is always there, and comes first
            {top["token"]: top["logprob"] for top in (each, *each["top_logprobs"])}
            for each in content
        ]
        return {
            "content": content,
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": likeliest,
            "text_offset": offsets,
        }

    def named(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        """Returns a token with its name and its log-probability; None: unknown."""
        text, raw = name_token(self._tokenizer, token_id)
        return {"token": text, "token_id": token_id, "logprob": logprob, "bytes": raw}


def _rank(logprob: float, top: Mapping[int, float]) -> int | None:
    """Returns a token's rank in the vocabulary, from 1; None: ``top`` does not show the rank.

    Engines add the sampled token to the likeliest tokens, whatever its rank. So the last token of
    the list may have any rank.
    """
    rank = sum(each >= logprob for each in top.values())
    return rank if 0 < rank < len(top) else None


class StreamedText:
    """Tracks how much of a choice's text a stream has sent.

    Args:
        tokenizer: decodes tokens; None: no text is sent.

    Attributes:
        sent: the number of characters that were sent.
    """

    def __init__(self, tokenizer: Any, stop: str | Sequence[str] | None) -> None:
        self._growing = GrowingText(tokenizer) if tokenizer else None
        # The last characters may begin a stop string, and wait for the next ones.
        self._held = max(map(len, [stop] if isinstance(stop, str) else stop or "x")) - 1
        self._rest = ""  # text that was not sent
        self.sent = 0

    def add(self, delta: TokenDelta) -> str:
        """Adds tokens; returns the text to send, except characters that may begin a stop string."""
        if self._growing is not None:
            self._rest += self._growing.add(delta.token_ids)
        end = 0 if delta.finish_reason else max(0, len(self._rest) - self._held)
        text, self._rest = self._rest[:end], self._rest[end:]
        self.sent += end
        return text


class StreamedMessage:
    """Makes the parts of one choice's message in the form of OpenAI's stream events.

    An engine that parses reasoning reads the whole answer again for each part. So the parts grow
    with the answer, and the number of parts grows only as the logarithm of its length.

    Attributes:
        failed: whether no engine could make the last part.
    """

    def __init__(self, chat: Chat | None, prompt: Sequence[int]) -> None:
        self._chat = chat
        self._is_parsed = chat is not None and chat.is_parsed
        self._prompt = prompt
        self._state: Any = None
        self._tokens = 0
        self._waiting: list[TokenDelta] = []
        self._sent: dict[str, str] = {}
        self._role = {"role": "assistant"}
        self.failed = False

    def gather(self, delta: TokenDelta) -> None:
        self._waiting.append(delta)

    def due(self, ended: Choice | None = None) -> TokenDelta | None:
        """Returns the tokens of the next part; None if the part should get more tokens.

        Args:
            ended: the choice, if it has ended.
        """
        waiting = self._waiting
        new = sum(len(each.token_ids) for each in waiting)
        if ended is not None:
            waiting = [*waiting, TokenDelta(ended.index, (), None, None, "", ended.finish_reason)]
        elif self._is_parsed and not waiting[-1].finish_reason and _GROWTH * new < self._tokens:
            return None
        self._tokens += new
        self._waiting = []
        return _joined(waiting)

    async def make(self, delta: TokenDelta) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
        """Has an engine turn tokens into a part of the message, and name the tokens."""
        if self.failed or self._chat is None:
            return {}, None
        try:
            made, self._state, names = await self._chat.derender_part(
                self._prompt, self._state, delta
            )
        except (WavebusError, LookupError, TypeError, ValueError):
            self.failed = True  # vLLM may be too old; the message is sent at the end
            return {}, None
        fields = {name: made[name] for name in _TEXTS if made.get(name)}
        for name, value in fields.items():
            self._sent[name] = self._sent.get(name, "") + value
        return fields, names

    def rest(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the part of ``message`` that was not sent."""
        found = dict(message)
        for name, sent in self._sent.items():
            whole = found.pop(name, None)
            if isinstance(whole, str) and whole.startswith(sent) and whole != sent:
                found[name] = whole[len(sent) :]
        return found

    def event(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a part of the message as an event; the first event has the role."""
        shown = {name: value for name, value in fields.items() if name != "role"} | self._role
        self._role = {}
        calls = enumerate(fields.get("tool_calls") or ())
        return shown | {"tool_calls": [{"index": i, **call} for i, call in calls] or None}


def _no_route(path: str) -> str:
    for prefix, instead in _UNSERVED.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return f"{prefix} is not served here: {instead}"
    return (
        f"{path:.200} is not served here. A gateway with --read-only has no routes that pause or "
        "update; docs/gateway.md and docs/rollouts.md list all routes"
    )


def _joined(deltas: list[TokenDelta]) -> TokenDelta:
    """Returns one delta with the tokens of all deltas of a choice."""
    whole: dict[str, Any] = {}
    for name in ("token_ids", "logprobs", "top_logprobs"):
        parts = [getattr(each, name) for each in deltas]
        if parts[0] is not None:
            whole[name] = tuple(chain.from_iterable(part or () for part in parts))
    return replace(deltas[-1], **whole)


def ending(choice: Choice, message: Mapping[str, Any], *, is_named: bool = False) -> dict[str, Any]:
    """Returns the last fields of a choice, such as its end and its versions.

    Args:
        is_named: whether the request names the tool to call. Then the finish reason stays
            ``stop``, as in OpenAI's API.
    """
    calls = message.get("tool_calls") and choice.finish_reason == "stop" and not is_named
    return {
        "finish_reason": "tool_calls" if calls else choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "inexact": choice.inexact,
        "weight_versions": [
            {
                "version": None if s.version is None else str(s.version),
                "start": s.start,
                "end": s.end,
            }
            for s in choice.spans
        ],
    }


def error_answer(request: web.Request, status: int, text: str) -> web.Response:
    """Returns an error in OpenAI's form, with the field names of the route."""
    if status == 404 and request.match_info.http_exception is not None:  # noqa: PLR2004 - HTTP's
        text = _no_route(request.path)
    field, kind, _ = ROUTES.get(request.path, ("", "", ""))
    if text.startswith("prompt_token_ids"):
        text = field + text.removeprefix("prompt_token_ids")
    text = text.replace("sampling_params.", "", 1) if kind else text
    found = None
    if status < 500:  # noqa: PLR2004 - HTTP's
        found = _FIELD.match(text) or _PARAMETER.search(text)
    name = found and found[1]
    if name == "logprobs" and field == "messages":
        name = "top_logprobs"
    error = {"message": text, "type": _KINDS.get(status, "BadRequestError"), "code": status}
    # Keeps OpenAI's client from repeating a request of which two engines have died.
    headers = {"x-should-retry": "false"} if status == 500 else None  # noqa: PLR2004 - HTTP's
    of_model = field and status == 404  # noqa: PLR2004 - HTTP's
    error["param"] = "model" if of_model else name
    return web.json_response({"error": error}, status=status, headers=headers)
