"""Reads the body of a request to the front: what each field means here.

A field that changes nothing here passes; one that would be ignored is refused, with its name
(docs/rollouts.md lists them).
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Final

import msgspec

from bus.errors import UsageError
from trainer_agent._rollouts.request import MAX_SESSION_CHARS, named, structured_outputs

SESSION_HEADER: Final = "X-Session-ID"  # of vLLM, and of vllm-router
# The field of the prompt, and the ``object`` of the answer.
ROUTES: Final = {
    "/inference/v1/generate": ("token_ids", ""),
    "/v1/completions": ("prompt", "text_completion"),
    "/v1/chat/completions": ("messages", "chat.completion"),
}
_ID_PREFIXES: Final = {
    "/inference/v1/generate": "generate-tokens-",
    "/v1/completions": "cmpl-",
    "/v1/chat/completions": "chatcmpl-",
}
# Fields that only concern how engines render messages, and make messages of tokens.
_CHAT_FIELDS: Final = (
    *("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "include_reasoning"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "documents", "response_format", "truncate_prompt_tokens"),
    *("truncation_side", "media_io_kwargs", "mm_processor_kwargs"),
)
# They name a request, or say how OpenAI should store, price or cache it.
_WITHOUT_EFFECT: Final = (
    *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prediction"),
)
# Values that clients send although they change nothing.
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
# Of one field, or of one prompt: they are decoded at once, which takes up to 0.1 µs for a value.
_MOST_VALUES: Final = 3_000_000
_PARTED: Final = 1 << 20  # bytes; a longer list of prompts is decoded prompt by prompt
# Of the sampling parameters of vLLM's own route: they concern text, or ``stream`` decides them.
_IDLE_PARAMS: Final[dict[str, tuple[Any, ...]]] = {
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True, False),
    "output_kind": (0, 1, 2),
}
_LISTS: Final = re.compile(rb"\s*\[\s*\[")


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = False
    include_obfuscation: bool | None = False  # never needed


class _Common(msgspec.Struct):
    """The fields that a body may have on every route, besides prompt and sampling parameters."""

    model: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    session_id: str | None = None
    request_id: str | None = None
    user: str | None = None  # has no effect: one user may be all the requests
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False


class FrontRequest:
    """A parsed request.

    Args:
        header: the value of the session's header, if there is one.

    Raises:
        UsageError: the text names the field at fault.

    Attributes:
        path: the route.
        id: the request's id in its answer, as vLLM makes it.
        kind: the ``object`` of the answer; empty: vLLM's own route, not one of OpenAI's API.
        is_chat: whether the prompt is messages.
        prompt: the prompt.
        params: the sampling parameters.
        chat_fields: other fields of a chat request.
        names_tool: whether it names the tool to call.
        extra: other fields for engines.
        session_id: the session, or None.
        client_id: who takes turns with others; empty: the request names no user.
        is_stream: whether the answer is streamed.
        with_usage: whether a stream ends with the usage.
        with_ids: whether the answer shows the token ids of the prompt.
        with_names: whether the answer names tokens by their text.
        echo: whether the answer repeats the prompt.
        is_prompt_alone: whether the answer has the prompt alone, and no tokens.
        scored_logprobs: how many log-probabilities the answer has in each place of the prompt, or
            None. Of ``/v1/completions``, ``logprobs`` are those of a repeated prompt, too.
    """

    def __init__(self, path: str, header: str | None, raw: bytes) -> None:
        self.path = path
        field, self.kind = ROUTES[path]
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
        if not self.kind and "features" in body:  # of images, as engines have rendered them
            self.extra["features"] = body.pop("features")
        self.echo = self.is_prompt_alone = False
        self.params: dict[str, Any] = self._openai(body) if self.kind else _own(body)
        self.scored_logprobs = None if self.is_chat else _scored(self.params)
        if self.echo and self.scored_logprobs is None:
            self.scored_logprobs = self.params.get("logprobs")
        for name, value in (("echo", self.echo), ("prompt_logprobs", self.scored_logprobs)):
            if self.is_stream and value is not None and value is not False:
                raise UsageError(f"{name}: not in a stream")

    def name(self, request_id: str) -> None:
        """Sets the id by which a client can abort the request.

        Raises:
            UsageError: the client's id is too long.
        """
        if len(request_id) > MAX_SESSION_CHARS:
            raise UsageError(f"request_id: more than {MAX_SESSION_CHARS} characters")
        if not is_text(request_id):
            raise UsageError("request_id: is no UTF-8")
        self.id = _ID_PREFIXES[self.path] + request_id

    def id_of(self, number: int) -> str:
        """Returns the id of the request for one of the prompts, as vLLM makes it."""
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
        if isinstance(body.get("logprobs"), bool):  # a number says how many others are wanted
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
            UsageError: they ask for too many choices. Other clients would wait while these are
                prepared.
        """
        if self.kind != "text_completion" or not isinstance(self.prompt, list):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]
        count, n = len(self.prompt), self.params.get("n") or 1
        if count * (n if isinstance(n, int) else 1) > _MOST_CHOICES:
            raise UsageError(
                f"prompt: {count} prompts with {n} choices each; at most {_MOST_CHOICES} choices"
            )
        return self.prompt


def _decode(raw: bytes, field: str) -> tuple[dict[str, Any], _Common]:
    """Returns the fields of a body, of which ``field`` is the prompt.

    Long prompts are decoded one by one: other threads run in between.
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
        raise UsageError(f"{name}: more than {_MOST_VALUES} values")
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
    """Returns ``prompt_logprobs`` of sampling parameters, and removes it there."""
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
            raise UsageError(f"{name}: more than {MAX_SESSION_CHARS} characters")
    if session is not None and not is_text(session):
        raise UsageError(f"{source}: is no UTF-8")
    return session


def is_text(value: str) -> bool:
    """Returns whether UTF-8 has it; JSON and headers may hold halves of characters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
