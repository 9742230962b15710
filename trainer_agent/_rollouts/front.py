"""Serves the rollout client over HTTP, for clients of vLLM's or OpenAI's API.

===============================  ==========================================================
``POST /inference/v1/generate``  tokens in, tokens out, as vLLM's route
``POST /v1/completions``         prompts as token ids, or as text
``POST /v1/chat/completions``    as :meth:`~trainer_agent._rollouts.client.RolloutClient.chat`
``GET /health``                  200 while an engine is routable, else 503; connections
===============================  ==========================================================

:mod:`~trainer_agent._rollouts.routes.engine_routes` and
:mod:`~trainer_agent._rollouts.routes.models` have other routes of vLLM. The routes that generate
return choices in OpenAI's form, with ``token_ids``. The last event of a choice adds its
``weight_versions``, and the reasons why the choice may be ``inexact``. A stream that fails ends
with an error event. Long work is bounded, or runs in a thread, so that other requests don't wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiohttp import web

from bus._runtime.http_access import HttpAccess
from bus._runtime.http_server import ClientRequests, HttpServer
from bus.errors import NoEngine, UsageError, WavebusError
from trainer_agent._rollouts.attempt import UnknownModel
from trainer_agent._rollouts.front_answer import (
    AnswerWriter,
    StreamedMessage,
    StreamedText,
    ending,
    error_answer,
)
from trainer_agent._rollouts.front_request import SESSION_HEADER, FrontRequest
from trainer_agent._rollouts.routes.completion_texts import make_texts
from trainer_agent._rollouts.routes.engine_routes import EngineRoutes
from trainer_agent._rollouts.routes.models import ModelRoutes
from trainer_agent._rollouts.routes.prompt_parts import PromptPart, PromptParts, prompt_alone
from trainer_agent._rollouts.text import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from aiohttp.abc import AbstractStreamWriter

    from trainer_agent._rollouts.chat import Chat
    from trainer_agent._rollouts.client import RolloutClient
    from trainer_agent._rollouts.results import Choice, Completion, TokenDelta

    # Takes the number of a prompt, and its new tokens.
    Deliver: TypeAlias = Callable[[int, list[TokenDelta]], Coroutine[Any, Any, None]]

_Result = TypeVar("_Result")

_STATUSES: Final = ((UnknownModel, 404), (UsageError, 400), (NoEngine, 503), (WavebusError, 500))
_ID_HEADER: Final = "X-Request-Id"
# Enough for a trainer's batch: 512 prompts of 8k tokens have 29 MiB, and 4 million values.
_MAX_BODY_BYTES: Final = 64 * 1024 * 1024
_MAX_VALUES: Final = 12_000_000
_PARSED_AT_ONCE: Final = 1 << 20  # most bytes that are parsed in the event loop
_WRITTEN_AT_ONCE: Final = 4096  # most tokens that are written in the event loop
# Shorter than an engine waits for the front to read (embedded: 60 s), because the front reads no
# faster than its client.
_UNREAD_S: Final = 30.0


class _Front:
    def __init__(
        self,
        client: RolloutClient,
        tokenizer: Any,
        api_key: str,
        control_key: str,
        control_routes: Sequence[web.RouteDef],
        client_requests: int,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._engines = EngineRoutes(client, tokenizer)
        self._parts = PromptParts(client, tokenizer)
        asking = [
            web.post("/inference/v1/generate", self._generate),
            web.post("/v1/completions", self._complete),
            web.post("/v1/chat/completions", self._chat),
        ]
        routes = [
            *asking,
            web.get("/health", self._health),
            *ModelRoutes(client).routes,
            *self._engines.routes,
            *control_routes,
        ]
        control = {route.path for route in control_routes}
        self.server = HttpServer(
            routes,
            error_answer,
            _answer_exception,
            max_body_bytes=_MAX_BODY_BYTES,
            max_values=_MAX_VALUES,
            access=HttpAccess(
                api_key, control_key, "/health".__eq__, control.__contains__, is_strict=True
            ),
            unread_s=_UNREAD_S,
            requests=ClientRequests(client_requests, [route.path for route in asking]),
        )

    async def _health(self, _: web.Request) -> web.Response:
        engines = len(self._client.engines)
        answer = {"engines": engines, **self.server.load}
        return web.json_response(answer, status=200 if engines else 503)

    async def _parse(self, http: web.Request) -> FrontRequest:
        raw, header = await http.read(), http.headers.get(SESSION_HEADER)
        if len(raw) > _PARSED_AT_ONCE:
            asked = await in_thread(FrontRequest, http.path, header, raw)
        else:
            asked = FrontRequest(http.path, header, raw)
        if named := http.headers.get(_ID_HEADER):
            asked.name(named)
        peer = http.transport and http.transport.get_extra_info("peername")
        asked.client_id = asked.client_id or f"connection {peer}"
        return asked

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        asked = await self._parse(http)
        return await self._answer(http, asked, asked.prompts())

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        asked = await self._parse(http)
        given, tokens = asked.prompts(), self._engines.tokens
        prompts = [await tokens(each) if isinstance(each, str) else each for each in given]
        return await self._answer(http, asked, prompts)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        asked = await self._parse(http)
        chat = self._client.make_chat(asked.prompt, **asked.chat_fields, **asked.extra)
        prompt, asked.params, asked.extra = await chat.render(asked.params)
        return await self._answer(http, asked, [prompt], chat)

    async def _answer(
        self, http: web.Request, asked: FrontRequest, prompts: list[Any], chat: Chat | None = None
    ) -> web.StreamResponse:
        if asked.kind and asked.params.get("max_tokens"):
            _check_room(asked.params["max_tokens"], prompts, await self._client.most_tokens())
        writer = AnswerWriter(asked, self._tokenizer)
        if asked.is_stream:
            stream = _Stream(http, asked, writer, prompts, chat, self._tokenizer)
            return await stream.answer(partial(self.generate, asked, prompts))
        parts: list[PromptPart] = []
        if asked.echo or asked.scored_logprobs is not None:
            pairs = zip(asked.prompts(), prompts, strict=True)
            parts = await _all(self._parts.find(asked, *pair) for pair in pairs)
        done = await self.generate(asked, prompts, None)
        choices = _choices(done)
        messages, names = await chat.named_messages(done[0]) if chat else ([{}] * len(choices), {})
        texts = [choice.text or "" for choice in choices]
        if asked.kind == "text_completion" and not (self._tokenizer or asked.with_ids):
            texts, names = await make_texts(self._client, done, asked.extra.get("model"))

        def write() -> bytes:
            whole = [
                writer.choice(index, choice, texts[index], message, names.get(index))
                | ending(choice, message, is_named=asked.names_tool)
                for index, (choice, message) in enumerate(zip(choices, messages, strict=True))
            ]
            fields = {}
            if parts and not asked.kind:
                fields["prompt_logprobs"] = parts[0].logprobs
            elif parts:
                for index, shown in enumerate(whole):
                    parts[index * len(parts) // len(whole)].add_to(shown, writer.named)
            shown_prompts = [each.prompt_token_ids for each in done]
            return writer.frame(whole, _usage(done), shown_prompts, fields)

        written = sum(len(choice.token_ids) for choice in choices)
        if asked.with_ids:
            written += sum(len(prompt) for prompt in prompts)
        is_long = written > _WRITTEN_AT_ONCE
        body = await in_thread(write) if is_long or parts else write()
        return web.Response(body=body, content_type="application/json")

    async def generate(
        self, asked: FrontRequest, prompts: list[Any], deliver: Deliver | None
    ) -> list[Completion]:
        """Generates for all prompts; one error cancels all.

        Args:
            prompts: the tokens of each prompt.
            deliver: called with the number of a prompt and its new tokens; None: not a stream.
        """
        if asked.is_prompt_alone:
            return [prompt_alone(asked, each) for each in prompts]

        def run(number: int, prompt: Any) -> Coroutine[Any, Any, Completion]:
            return self._client.generate(
                prompt,
                asked.params,
                session_id=asked.session_id,
                client_id=asked.client_id,
                request_id=asked.id_of(number),
                on_inexact="restart" if deliver is None else "continue",
                on_deltas=None if deliver is None else partial(deliver, number),
                **asked.extra,
            )

        return await _all(run(*each) for each in enumerate(prompts))


class _Stream:
    """Writes one answer as server-sent events."""

    def __init__(
        self,
        http: web.Request,
        asked: FrontRequest,
        writer: AnswerWriter,
        prompts: list[Any],
        chat: Chat | None,
        tokenizer: Any,
    ) -> None:
        self._http = http
        self._asked = asked
        self._writer = writer
        self._prompts = prompts
        self._chat = chat
        self._by_engine = chat is not None and chat.has_parts and not chat.is_decoded_here
        self._has_parts = chat is None or chat.has_parts
        stop = asked.params.get("stop")
        self._texts = defaultdict[int, StreamedText](partial(StreamedText, tokenizer, stop))
        self._messages = defaultdict[int, StreamedMessage](
            lambda: StreamedMessage(chat, prompts[0])
        )
        self._ended: set[int] = set()
        self._shown: set[int] = set()  # choices whose prompt was sent, by index
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._sink: AbstractStreamWriter | None = None  # None until the answer has begun

    async def answer(
        self, generate: Callable[[Deliver], Coroutine[Any, Any, list[Completion]]]
    ) -> web.StreamResponse:
        """Sends the tokens of ``generate`` as they arrive, and an error as the last event.

        Raises:
            WavebusError: the request failed before anything was sent.
        """
        try:
            await self._end(await generate(self._send_batch))
        except WavebusError as error:
            if not self._response.prepared:
                raise
            answer = _answer_exception(self._http, error)
            await self._write(f"data: {answer.text if answer else ''}\n\n".encode())
        await self._write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def _send_batch(self, number: int, batch: list[TokenDelta]) -> None:
        """Sends new tokens of a prompt; returns when the client can take more."""
        first = number * self._asked.params.get("n", 1)
        if self._by_engine:
            for delta in batch:
                self._messages[first + delta.index].gather(delta)
            for index in dict.fromkeys(first + delta.index for delta in batch):
                await self._send_part(index, self._messages[index].due())
            return
        frames = []
        for delta in batch:
            index = first + delta.index
            text = self._texts[index].add(delta)
            fields = {"content": text} if self._has_parts else {}
            frames.append(self._frame(index, delta, text, fields))
        await self._write(b"".join(frames))

    async def _send_part(self, index: int, delta: TokenDelta | None) -> None:
        if delta is None:
            return
        fields, names = await self._messages[index].make(delta)
        if delta.finish_reason:
            self._ended.add(index)
        await self._write(self._frame(index, delta, "", fields, names))

    def _frame(
        self,
        index: int,
        delta: TokenDelta | None,
        text: str,
        fields: Mapping[str, Any],
        names: Sequence[Mapping[str, Any]] | None = None,
        end: dict[str, Any] | None = None,
    ) -> bytes:
        message = self._messages[index].event(fields) if self._chat else {}
        shown = self._writer.choice(index, delta, text, message, names)
        of_choice = self._asked.kind == "text_completion"
        prompt = None
        if index not in self._shown and (of_choice or not self._shown):
            prompt = [self._prompts[index // self._asked.params.get("n", 1)]]
        self._shown.add(index)
        return self._writer.frame([shown | (end or {})], None, prompt)

    async def _end(self, done: list[Completion]) -> None:
        """Sends the last events: the rest of each text, messages with tool calls, the usage."""
        choices = _choices(done)
        for index, choice in enumerate(choices):
            if self._by_engine and index not in self._ended:
                await self._send_part(index, self._messages[index].due(ended=choice))
        messages: Sequence[Mapping[str, Any]] = [{}] * len(choices)
        if self._chat and (
            not self._has_parts or any(each.failed for each in self._messages.values())
        ):
            messages, _ = await self._chat.named_messages(done[0])
        for index, (choice, message) in enumerate(zip(choices, messages, strict=True)):
            text = (choice.text or "")[self._texts[index].sent :] if not self._by_engine else ""
            fields = self._messages[index].rest(message)
            if self._has_parts and not self._by_engine:
                fields = {"content": text}
            end = ending(choice, message, is_named=self._asked.names_tool)
            await self._write(self._frame(index, None, text, fields, None, end))
        if self._asked.with_usage:
            await self._write(self._writer.frame([], _usage(done)))

    async def _write(self, raw: bytes) -> None:
        """Sends bytes; returns when the client has read most of what was sent."""
        if self._sink is None:
            self._sink = await self._response.prepare(self._http)
        assert self._sink is not None
        await self._sink.write(raw)
        if self._http.protocol.writing_paused:
            await self._sink.drain()


async def _all(works: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Runs coroutines at once, and returns their results; one error cancels all."""
    tasks = []
    try:
        for each in works:
            tasks.append(asyncio.ensure_future(each))
            # Each begins with a check of its prompt; hundreds of checks would block the event loop.
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _check_room(max_tokens: Any, prompts: Sequence[Any], most: int) -> None:
    """Refuses a ``max_tokens`` that exceeds the model's length, as vLLM does.

    The rollout client alone would silently generate fewer tokens.
    """
    for prompt in prompts if most and isinstance(max_tokens, int) else ():
        if isinstance(prompt, list) and len(prompt) < most < len(prompt) + max_tokens:
            raise UsageError(
                f"max_tokens: {max_tokens} tokens after a prompt of {len(prompt)} exceed the "
                f"{most} tokens that the model takes"
            )


def _choices(done: Sequence[Completion]) -> list[Choice]:
    return [choice for each in done for choice in each.choices]


def _usage(done: Sequence[Completion]) -> dict[str, int]:
    given = sum(len(each.prompt_token_ids) for each in done)
    made = sum(len(choice.token_ids) for choice in _choices(done))
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _answer_exception(http: web.Request, error: Exception) -> web.Response | None:
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return error_answer(http, status, str(error))
    return None


@contextlib.asynccontextmanager
async def serve(
    client: RolloutClient,
    host: str,
    port: int,
    *,
    tokenizer: Any = None,
    api_key: str = "",
    control_key: str = "",
    control_routes: Sequence[web.RouteDef] = (),
    client_requests: int = 0,
) -> AsyncIterator[str]:
    """Serves a connected client over HTTP during a block; yields the base URL.

    Args:
        client: the client.
        host: the host name or address to listen on.
        port: the port; 0 chooses a free port.
        tokenizer: the client's tokenizer, or None.
        api_key: the bearer token or password that requests must have; empty: requests need none.
        control_key: the bearer token or password of control routes; also accepted by the other
            routes. Empty: control routes need ``api_key``.
        control_routes: further routes of the same server, which control the group.
        client_requests: how many requests for tokens one address may have at once; 0: any number.

    Raises:
        UsageError: the server can't listen at this address.
    """
    server = _Front(client, tokenizer, api_key, control_key, control_routes, client_requests).server
    try:
        try:
            url = await server.start(host, port)
        except OSError as error:
            raise UsageError(f"can't listen at {host}:{port}: {error.strerror}") from error
        yield url
    finally:
        await server.close()
