"""Parses the body of a request to the front.

A field whose value has no effect here passes. A field that would be ignored is refused by name
(docs/rollouts.md lists all fields).
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Final

import msgspec

from bus.errors import UsageError
from trainer_agent._rollouts.request import MAX_SESSION_CHARS, named, structured_outputs

SESSION_HEADER: Final = "X-Session-ID"  # of vLLM, and of vllm-router
# The field of the prompt, the ``object`` of the answer, and the prefix of its id.
ROUTES: Final = {
    "/inference/v1/generate": ("token_ids", "", "generate-tokens-"),
    "/v1/completions": ("prompt", "text_completion", "cmpl-"),
    "/v1/chat/completions": ("messages", "chat.completion", "chatcmpl-"),
}
# Fields that only concern how engines render and parse messages.
_CHAT_FIELDS: Final = (
    *("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "include_reasoning"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "documents", "response_format", "truncate_prompt_tokens"),
    *("truncation_side", "media_io_kwargs", "mm_processor_kwargs"),
)
# Fields that only concern how OpenAI stores, prices or caches a request.
_WITHOUT_EFFECT: Final = (
    *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prediction"),
)
# Values of fields that have no effect here, but that clients send.
_IDLE: Final[dict[str, tuple[Any, ...]]] = {
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "verbosity": ("medium",),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "watermarking": (False,),
    "stream_interval": (1,),
    "output_mode": ("tokens",),
    "top_logprobs": (0,),
    "logprob_token_ids": ([],),
    "routed_experts_prompt_start": (0,),
    "mm_payload": ("tensors",),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "include_reasoning": (True,),
    "parallel_tool_calls": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
_MOST_CHOICES: Final = 16_384
# Limit for one field or prompt, which is decoded in one go, at up to 0.1 µs a value.
_MOST_VALUES: Final = 3_000_000
_PARTED: Final = 1 << 20  # bytes; a longer list of prompts is decoded prompt by prompt
# Sampling parameters of vLLM's own route that only concern text, or that ``stream`` decides.
_IDLE_PARAMS: Final[dict[str, tuple[Any, ...]]] = {
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True, False),
    "output_kind": (0, 1, 2),
}
_LISTS: Final = re.compile(rb"\s*\[\s*\[")


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = False
    include_obfuscation: bool | None = False  # has no effect


class _Common(msgspec.Struct):
    """The fields that a body may have on every route, besides prompt and sampling parameters."""

    model: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    session_id: str | None = None
    request_id: str | None = None
    user: str | None = None  # no session, because one user may send all the requests
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False


class FrontRequest:
    """A parsed request.

    Args:
        path: the route.
        header: the value of the session's header, or None.
        raw: the body.

    Raises:
        UsageError: the text names the field at fault.

    Attributes:
        id: the request's id in its answer, as vLLM makes it.
        kind: the ``object`` of the answer; empty: vLLM's own route, which OpenAI's API lacks.
        is_chat: whether the prompt consists of messages.
        prompt: the prompt.
        params: the sampling parameters.
        chat_fields: other fields of a chat request.
        names_tool: whether the request names the tool to call.
        extra: other fields for engines.
        session_id: the session, or None.
        client_id: the client that takes turns with others; empty: the request names no user.
        is_stream: whether the answer is streamed.
        with_usage: whether a stream ends with the usage.
        with_ids: whether the answer shows the token ids of the prompt.
        with_names: whether the answer names tokens by their text.
        echo: whether the answer repeats the prompt.
        is_prompt_alone: whether the answer has the prompt alone, and no tokens.
        scored_logprobs: how many log-probabilities the answer has for each token of the prompt, or
            None. With ``echo`` on ``/v1/completions``, ``logprobs`` sets this number.
    """

    def __init__(self, path: str, header: str | None, raw: bytes) -> None:
        field, self.kind, self._id_prefix = ROUTES[path]
        self.is_chat = field == "messages"
        body, common = _decode(raw, field)
        body = {n: v for n, v in body.items() if v is not None}
        self.prompt = body.pop(field, ())
        for name in _WITHOUT_EFFECT:
            body.pop(name, None)
        for name, values in {**_IDLE, "add_special_tokens": (not self.is_chat,)}.items():
            if name in body and body[name] in values:
                del body[name]
        self.session_id = _session(header, common)
        self.name(common.request_id or secrets.token_hex(16))
        self.client_id = f"user {common.user}" if common.user else ""
        self.extra: dict[str, Any] = {
            name: value
            for name in ("model", "cache_salt", "priority")
            if (value := getattr(common, name)) is not None
        }
        self.is_stream = bool(common.stream)
        self.with_usage = bool(common.stream_options and common.stream_options.include_usage)
        self.with_ids = bool(common.return_token_ids)
        self.with_names = not common.return_tokens_as_token_ids
        self.chat_fields: dict[str, Any] = {}
        if self.is_chat:
            self.chat_fields = {n: body.pop(n) for n in _CHAT_FIELDS if n in body}
        self.names_tool = isinstance(self.chat_fields.get("tool_choice"), dict)
        if not self.kind and "features" in body:  # image features from an engine's render route
            self.extra["features"] = body.pop("features")
        self.echo = self.is_prompt_alone = False
        self.params: dict[str, Any] = self._openai(body) if self.kind else _own(body)
        self.scored_logprobs = None if self.is_chat else _scored(self.params)
        if self.echo and self.scored_logprobs is None:
            self.scored_logprobs = self.params.get("logprobs")
        for name, value in (("echo", self.echo), ("prompt_logprobs", self.scored_logprobs)):
            if self.is_stream and value is not None and value is not False:
                raise UsageError(f"{name}: not in a stream; set stream to false")

    def name(self, request_id: str) -> None:
        """Sets the id by which a client can abort the request.

        Raises:
            UsageError: the id is too long, or is not UTF-8.
        """
        if len(request_id) > MAX_SESSION_CHARS:
            raise UsageError(f"request_id: must have at most {MAX_SESSION_CHARS} characters")
        if not is_text(request_id):
            raise UsageError("request_id: must be valid UTF-8")
        self.id = self._id_prefix + request_id

    def id_of(self, number: int) -> str:
        """Returns the id of the request for prompt ``number``, as vLLM makes it."""
        return f"{self.id}-{number}" if self.kind == "text_completion" else self.id

    def _openai(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the sampling parameters of a request of OpenAI's API."""
        if "best_of" in body and body["best_of"] in (1, body.get("n", 1)):
            del body["best_of"]
        if "vllm_xargs" in body:
            body["extra_args"] = body.pop("vllm_xargs")
        if "response_format" in body:
            grammar = structured_outputs(body.pop("response_format"))
            if grammar is not None:
                body.setdefault("structured_outputs", grammar)
        if not self.is_chat:
            body = {"max_tokens": 16, **body}  # OpenAI's default
            self.echo = body.pop("echo", False)
            if not isinstance(self.echo, bool):
                raise UsageError("echo: must be true or false")
            if self.echo and body["max_tokens"] == 0:
                body["max_tokens"], self.is_prompt_alone = 1, True
            return body
        if "max_completion_tokens" in body:
            body["max_tokens"] = body.pop("max_completion_tokens")
        if isinstance(body.get("logprobs"), bool):  # vLLM also takes the number of top_logprobs
            body["logprobs"] = 0 if body["logprobs"] else None
        if "top_logprobs" in body:
            top = body.pop("top_logprobs")
            if not isinstance(top, int) or isinstance(top, bool) or top <= 0:
                raise UsageError("top_logprobs: must be a number, at least 0")
            if body.get("logprobs") is None:
                raise UsageError("top_logprobs: needs logprobs")
            body["logprobs"] = top
        return body

    def prompts(self) -> list[Any]:
        """Returns the prompts: texts, or lists of tokens.

        Raises:
            UsageError: the request asks for so many choices that preparing them would delay other
                clients.
        """
        if self.kind != "text_completion" or not isinstance(self.prompt, list):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]
        count, n = len(self.prompt), self.params.get("n") or 1
        if count * (n if isinstance(n, int) else 1) > _MOST_CHOICES:
            raise UsageError(
                f"prompt: {count} prompts with {n} choices each; at most {_MOST_CHOICES} choices "
                "are allowed"
            )
        return self.prompt


def _decode(raw: bytes, field: str) -> tuple[dict[str, Any], _Common]:
    """Returns the fields of a body, of which ``field`` is the prompt.

    Long prompts are decoded one by one, so that other threads run in between.
    """
    try:
        parts = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        body = {}
        for name, part in parts.items():
            prompts = [part]
            if is_list := name == field and len(part) > _PARTED and bool(_LISTS.match(part)):
                prompts = msgspec.json.decode(part, type=list[msgspec.Raw])
            values = [_value(name, each) for each in prompts]
            body[name] = values if is_list else values[0]
        own = {each: body.pop(each) for each in _Common.__struct_fields__ if each in body}
        return body, msgspec.convert(own, _Common)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(named("", error).lstrip(".: ")) from None


def _value(name: str, raw: msgspec.Raw) -> Any:
    if len(raw) > _MOST_VALUES and bytes(raw).count(b",") > _MOST_VALUES:
        raise UsageError(f"{name}: must have at most {_MOST_VALUES} values")
    return msgspec.json.decode(raw)


def _own(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the sampling parameters of a request of vLLM's own route."""
    params = body.pop("sampling_params", {})
    if body or not isinstance(params, dict):
        raise UsageError(f"{min(body, default='sampling_params')}: no such field")
    return {
        name: value
        for name, value in params.items()
        if value is not None and value not in _IDLE_PARAMS.get(name, ())
    }


def _scored(params: dict[str, Any]) -> int | None:
    """Removes ``prompt_logprobs`` from sampling parameters, and returns it."""
    count = params.pop("prompt_logprobs", None)
    if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
        raise UsageError("prompt_logprobs: must be a number")
    return count


def _session(header: str | None, common: _Common) -> str | None:
    source, session = (
        (SESSION_HEADER, header) if header is not None else ("session_id", common.session_id)
    )
    for name, value in ((source, session), ("user", common.user)):
        if len(value or "") > MAX_SESSION_CHARS:
            raise UsageError(f"{name}: must have at most {MAX_SESSION_CHARS} characters")
    if session is not None and not is_text(session):
        raise UsageError(f"{source}: must be valid UTF-8")
    return session


def is_text(value: str) -> bool:
    """Returns whether UTF-8 can encode a string; JSON and headers may hold lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
