"""Serves the rollout client over HTTP, for clients of vLLM's or OpenAI's API.

===============================  ==========================================================
``POST /inference/v1/generate``  tokens in, tokens out, as vLLM's route
``POST /v1/completions``         prompts as token ids; with a tokenizer, also as text
``POST /v1/chat/completions``    as :meth:`~trainer_agent.rollouts.client.RolloutClient.chat`
``GET /v1/models``               the answer of an engine
``GET /health``                  200 while an engine is routable, else 503
===============================  ==========================================================

A field that is unknown or would be ignored is refused, with its name. All routes return choices in
OpenAI's form, with ``token_ids``; the last event of a choice adds the ``weight_versions`` and the
reasons why it may be ``inexact``. A stream that fails ends with an error event.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from bus.errors import NoEngine, UsageError, WavebusError
from bus.net import http_url
from trainer_agent.rollouts.choice import GrowingText
from trainer_agent.rollouts.request import MAX_SESSION_CHARS, named

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Mapping

    from aiohttp.typedefs import Handler

    from trainer_agent.rollouts.chat import Chat
    from trainer_agent.rollouts.client import RolloutClient
    from trainer_agent.rollouts.results import Choice, Completion, TokenDelta

_SESSION_HEADER: Final = "X-Session-ID"  # of vLLM, and of vllm-router
_MAX_BODY_BYTES: Final = 16 * 1024 * 1024
_SHUTDOWN_S: Final = 1.0
# The field of the prompt, and the ``object`` of the answer.
_ROUTES: Final = {
    "/inference/v1/generate": ("token_ids", ""),
    "/v1/completions": ("prompt", "text_completion"),
    "/v1/chat/completions": ("messages", "chat.completion"),
}
_CHAT_FIELDS: Final = (
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort"),
)
# Values that clients send although they change nothing.
_IDLE: Final = {"echo": False, "best_of": 1, "skip_special_tokens": True}
_FIELD: Final = re.compile(r"(?:the engine refuses the request: )?([A-Za-z_][\w.-]*)(\[\d+\])*: ")


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class _Common(msgspec.Struct):
    """The fields that a body may have on every route, besides prompt and sampling parameters."""

    model: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    session_id: str | None = None
    user: str | None = None


class _Asked:
    """A parsed HTTP request; ``params``: all fields but the prompt and those of ``_Common``."""

    def __init__(self, http: web.Request, raw: bytes) -> None:
        prompt, kind = _ROUTES[http.path]
        try:
            body = msgspec.json.decode(raw, type=dict[str, Any])
            own = {each: body.pop(each) for each in _Common.__struct_fields__ if each in body}
            common = msgspec.convert(own, _Common)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(named("", error).lstrip(".: ")) from None
        if kind:  # an API in which null is the default
            body = {n: v for n, v in body.items() if v is not None and _IDLE.get(n) != v}
        ids: dict[str, str | None] = {
            _SESSION_HEADER: http.headers.get(_SESSION_HEADER),
            "session_id": common.session_id,
            "user": common.user,
        }
        source = next((name for name, value in ids.items() if value is not None), "user")
        self.session_id = ids[source]
        if len(self.session_id or "") > MAX_SESSION_CHARS:
            raise UsageError(f"{source}: more than {MAX_SESSION_CHARS} characters")
        extra = {each: own.get(each) for each in ("model", "cache_salt", "priority")}
        self.extra = {name: value for name, value in extra.items() if value is not None}
        self.is_stream = bool(common.stream)
        self.with_usage = bool(common.stream_options and common.stream_options.include_usage)
        self.prompt, self.params, self.is_chat = body.pop(prompt, ()), body, prompt == "messages"
        ident = secrets.token_hex(12)
        self._head = {"id": ident, "request_id": ident, "created": int(time.time())}
        self._head["object"] = kind + (".chunk" if self.is_stream and self.is_chat else "")

    def frame(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        """Encodes an answer, or one event of a stream."""
        rest = {"model": self.extra.get("model", ""), "choices": choices, "usage": usage}
        raw = msgspec.json.encode({**self._head, **rest})
        return b"data: " + raw + b"\n\n" if self.is_stream else raw

    def choice(
        self, index: int, part: TokenDelta | Choice | None, text: str, message: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns a choice, or a part of one, in the form that all routes share."""
        ids, logprobs = (part.token_ids, part.logprobs) if part is not None else ((), None)
        shown = {"index": index, "token_ids": ids, "text": text, "logprobs": None}
        if self.is_chat:
            shown["delta" if self.is_stream else "message"] = message
        if logprobs is not None:
            pairs = [{"token": f"token_id:{i}", "token_id": i} for i in ids]
            content = [{**p, "logprob": v} for p, v in zip(pairs, logprobs, strict=True)]
            tokens = [each["token"] for each in pairs]
            shown["logprobs"] = {"content": content, "tokens": tokens, "token_logprobs": logprobs}
        return {**shown, "finish_reason": None}


class _Reader:
    """Tracks how much of a choice's text a stream has sent."""

    def __init__(self, tokenizer: Any, params: Mapping[str, Any]) -> None:
        self._growing = GrowingText(tokenizer) if tokenizer else None
        stop = params.get("stop") or "x"
        # The last characters that are there may be the beginning of a stop string.
        self._held = max(map(len, [stop] if isinstance(stop, str) else stop)) - 1
        self._text = ""
        self._role = {"role": "assistant"}
        self.sent = 0

    def add(self, delta: TokenDelta) -> str:
        """Adds tokens; returns the text to send, without what may begin a stop string."""
        if self._growing is not None:
            self._text += "".join(map(self._growing.add, delta.token_ids))
        end = self.sent if delta.finish_reason else max(self.sent, len(self._text) - self._held)
        text, self.sent = self._text[self.sent : end], end
        return text

    def message(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a part of a message in the form of OpenAI's stream events."""
        shown = {name: value for name, value in part.items() if name != "role"} | self._role
        self._role = {}
        calls = enumerate(part.get("tool_calls") or ())
        return shown | {"tool_calls": [{"index": i, **call} for i, call in calls] or None}


class _Front:
    """The handlers of the routes."""

    def __init__(self, client: RolloutClient, tokenizer: Any) -> None:
        self._client = client
        self._tokenizer = tokenizer

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._client.engines else 503)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response(await self._client.ask("/v1/models"))

    async def generate(self, http: web.Request) -> web.StreamResponse:
        asked = _Asked(http, await http.read())
        params = asked.params.pop("sampling_params", {})
        asked.params.pop("request_id", None)
        if asked.params or not isinstance(params, dict):
            raise UsageError(f"{min(asked.params, default='sampling_params')}: no such field")
        asked.params = params
        return await self._answer(http, asked, [asked.prompt])

    async def completions(self, http: web.Request) -> web.StreamResponse:
        asked = _Asked(http, await http.read())
        asked.params.setdefault("max_tokens", 16)  # OpenAI's
        prompts = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
        if not prompts or isinstance(prompts[0], int):
            prompts = [prompts]
        return await self._answer(http, asked, [self._ids(each) for each in prompts])

    def _ids(self, prompt: Any) -> Any:
        if isinstance(prompt, str) and self._tokenizer is None:
            raise UsageError("prompt: a text needs `wavebus rollouts --tokenizer`")
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    async def chat(self, http: web.Request) -> web.StreamResponse:
        asked = _Asked(http, await http.read())
        params = asked.params
        fields = {name: params.pop(name) for name in _CHAT_FIELDS if name in params}
        if "max_completion_tokens" in params:
            params["max_tokens"] = params.pop("max_completion_tokens")
        if isinstance(params.get("logprobs"), bool):
            params["logprobs"] = 0 if params["logprobs"] else None
        chat = self._client.make_chat(asked.prompt, **fields, **asked.extra)
        prompt, asked.params, asked.extra = await chat.render(params)
        return await self._answer(http, asked, [prompt], chat)

    async def _answer(
        self, http: web.Request, asked: _Asked, prompts: list[Any], chat: Chat | None = None
    ) -> web.StreamResponse:
        if asked.is_stream:
            return await self._stream(http, asked, prompts, chat)
        choices, usage = await self._finish(asked, prompts, chat, None)
        whole = [
            asked.choice(index, choice, choice.text or "", message) | _ending(choice, message)
            for index, (choice, message) in enumerate(choices)
        ]
        return web.Response(body=asked.frame(whole, usage), content_type="application/json")

    async def _stream(
        self, http: web.Request, asked: _Asked, prompts: list[Any], chat: Chat | None
    ) -> web.StreamResponse:
        deltas: asyncio.Queue[tuple[int, TokenDelta] | None] = asyncio.Queue()
        finish = asyncio.ensure_future(self._finish(asked, prompts, chat, deltas))
        finish.add_done_callback(lambda _: deltas.put_nowait(None))
        readers: defaultdict[int, _Reader] = defaultdict(
            partial(_Reader, self._tokenizer, asked.params)
        )
        is_parsed = chat is not None and chat.is_parsed
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            while (event := await deltas.get()) is not None:
                await response.prepare(http)
                number, delta = event
                index = number * asked.params.get("n", 1) + delta.index
                text = readers[index].add(delta)
                part = readers[index].message({} if is_parsed else {"content": text})
                await response.write(asked.frame([asked.choice(index, delta, text, part)]))
            choices, usage = await finish
            await response.prepare(http)
            for index, (choice, message) in enumerate(choices):
                text = (choice.text or "")[readers[index].sent :]
                part = readers[index].message(message if is_parsed else {"content": text})
                end = asked.choice(index, None, text, part) | _ending(choice, message)
                await response.write(asked.frame([end]))
            if asked.with_usage:
                await response.write(asked.frame([], usage))
        except WavebusError as error:
            if not response.prepared:
                raise
            await response.write(f"data: {_error_of(http, error).text}\n\n".encode())
        finally:
            finish.cancel()
            await asyncio.wait([finish])
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _finish(
        self,
        asked: _Asked,
        prompts: list[Any],
        chat: Chat | None,
        deltas: asyncio.Queue[tuple[int, TokenDelta] | None] | None,
    ) -> tuple[list[tuple[Choice, Mapping[str, Any]]], dict[str, int]]:
        """Generates for all prompts; returns choices, messages and usage. One error cancels all."""

        def generate(number: int, prompt: Any) -> Coroutine[Any, Any, Completion]:
            return self._client.generate(
                prompt,
                asked.params,
                session_id=asked.session_id,
                on_inexact="restart" if deltas is None else "continue",
                on_delta=None
                if deltas is None
                else lambda delta: deltas.put_nowait((number, delta)),
                **asked.extra,
            )

        tasks = [asyncio.ensure_future(generate(*each)) for each in enumerate(prompts)]
        try:
            done = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        choices = [choice for each in done for choice in each.choices]
        messages = await chat.messages(done[0]) if chat is not None else [{}] * len(choices)
        given = sum(len(each.prompt_token_ids) for each in done)
        made = sum(len(choice.token_ids) for choice in choices)
        usage = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
        return list(zip(choices, messages, strict=True)), usage


def _ending(choice: Choice, message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls") and choice.finish_reason == "stop"
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


def _error_of(http: web.Request, error: WavebusError) -> web.Response:
    status = 400 if isinstance(error, UsageError) else 500
    return _error(http, 503 if isinstance(error, NoEngine) else status, str(error))


def _error(http: web.Request, status: int, text: str) -> web.Response:
    """Returns an error in OpenAI's form, with the field names of the route."""
    field, is_openai = _ROUTES.get(http.path, ("", ""))
    if text.startswith("prompt_token_ids"):
        text = field + text.removeprefix("prompt_token_ids")
    text = text.removeprefix("sampling_params.") if is_openai else text
    found = _FIELD.match(text)
    kind = {500: "InternalServerError", 503: "ServiceUnavailableError"}.get(status)
    error = {"message": text, "type": kind or "BadRequestError", "code": status}
    # OpenAI's client would send again what two engines have died of.
    headers = {"x-should-retry": "false"} if kind == "InternalServerError" else None
    error["param"] = found and found[1]
    return web.json_response({"error": error}, status=status, headers=headers)


@contextlib.asynccontextmanager
async def serve(
    client: RolloutClient, host: str, port: int, *, tokenizer: Any = None, api_key: str = ""
) -> AsyncIterator[str]:
    """Serves a connected client over HTTP during a block; yields the base URL.

    Args:
        client: the client.
        host: the host name or address to listen on.
        port: the port; 0 chooses a free one.
        tokenizer: the client's tokenizer, if it has one.
        api_key: the bearer token that requests must have; empty: none.

    Raises:
        UsageError: the address can't be used.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks the key, and answers errors as OpenAI does."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        if request.path != "/health" and not hmac.compare_digest(given, api_key.encode() or given):
            return _error(request, 401, "the API key is missing or wrong")
        try:
            return await handler(request)
        except WavebusError as error:
            return _error_of(request, error)
        except web.HTTPException as error:
            return _error(request, error.status, error.text or error.reason)

    front = _Front(client, tokenizer)
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[guard])
    app.router.add_post("/inference/v1/generate", front.generate)
    app.router.add_post("/v1/completions", front.completions)
    app.router.add_post("/v1/chat/completions", front.chat)
    app.router.add_get("/v1/models", front.models)
    app.router.add_get("/health", front.health)
    # A handler is cancelled when its client goes away, and its request ends on the engine.
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise UsageError(f"can't listen at {host}:{port}: {error.strerror}") from error
        at, port = runner.addresses[0][:2]
        yield http_url(at, port)
    finally:
        await runner.cleanup()
