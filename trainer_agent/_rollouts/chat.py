"""Turns chat messages into a prompt, and tokens into messages.

Engines do both with vLLM's render and derender routes, with their own template and parsers. If
engines lack these routes (embedded engines, vLLM without a tokenizer), the client's tokenizer
renders and decodes; tool calls and reasoning are then not parsed.

vLLM's chat leaves out the token that ended an answer, but before vLLM 0.33 the derender route does
not. So the client leaves this token out of the requests to that route.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from bus.errors import BusClosed, RolloutFailed, UsageError
from trainer_agent._rollouts.attempt import (
    FAILURES,
    UNREACHABLE,
    Cut,
    encode,
    read_bounded,
    refused,
)
from trainer_agent._rollouts.engine_survey import ANSWER_S, ask_each
from trainer_agent._rollouts.request import make_request, plain_params, structured_outputs
from trainer_agent._rollouts.results import ChatCompletion
from trainer_agent._rollouts.text import check_length, flat_messages, in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from trainer_agent._rollouts.choice import Tokenizer
    from trainer_agent._rollouts.engine_pool import EnginePool
    from trainer_agent._rollouts.request import OnInexact
    from trainer_agent._rollouts.results import Choice, Completion, TokenDelta

_ROUTE: Final = "/v1/chat/completions"
_TEXT_ROUTE: Final = "/v1/completions"
_OK: Final = 200
_DEADLY: Final = 2  # number of engines that may die of one request
# Options of a tokenizer's method ``apply_chat_template``, not of the template.
_OWN_OPTIONS: Final = frozenset(
    (
        *("chat_template", "conversation", "messages", "tools", "tokenize", "padding"),
        *("truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        "return_assistant_tokens_mask",
    )
)
_CLOSED: Final = (403, 405, 501)  # statuses of a route that exists, but is disabled
# Fields of the rendered request that are copied to the request for tokens.
_HANDED_ON: Final = (
    *("model", "features", "reasoning_ended", "reasoning_parser_kwargs"),
    *("cache_salt", "priority"),
)


async def ask_any(
    pool: EnginePool,
    http: aiohttp.ClientSession,
    path: str,
    body: Any = None,
    avoid: set[str] | None = None,
    place: tuple[str | None, str] | None = None,
    kind: Any = Any,
) -> Any:
    """Requests JSON from a routable engine, and from another engine after a failure.

    Args:
        body: the JSON to POST. Default: a GET.
        avoid: names of engines to ask only if there are no others; engines that fail are added.
        place: (session, client) of a request that occupies a slot of the engine. Such a request
            waits for its turn, and is given up when two engines have failed.
        kind: the type to decode the answer to.

    Returns:
        The answer; None if engines have no such route.

    Raises:
        UsageError: the engine refuses the request as invalid.
        NoEngine: no engine is available.
        RolloutFailed: five engines in a row failed; with ``place``, two.
    """
    avoid = set() if avoid is None else avoid
    failures, refused_s = 0, 0.0
    sequences, most = (1, _DEADLY) if place else (0, FAILURES)
    method, raw_body = ("GET", None) if body is None else ("POST", encode(body))
    headers = {"Content-Type": "application/json"} if body is not None else None
    timeout = aiohttp.ClientTimeout(pool.stall_s, sock_connect=http.timeout.sock_connect)
    while True:
        tried = pool.refused_models.avoiding(avoid, body, pool.router.samplers)
        load = None if place else pool.router.least_loaded(pool.now_s(), tried)
        session, client = place or (None, "")
        load = load or await pool.acquire(session, sequences, tried, client)
        url = load.route.endpoint + path
        try:
            async with http.request(
                *(method, url),
                data=raw_body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                raw = await read_bounded(response)
            if response.status == _OK:
                return msgspec.json.decode(raw, type=kind)
            if response.status in _CLOSED or b"Not Found" in raw:
                return None
            name, engines = load.route.engine, pool.router.samplers
            cut = pool.refused_models.cut(refused(response.status, raw), body, name, engines)
            if isinstance(cut, UsageError):
                raise cut
        except Cut as error:
            cut = error
        except UNREACHABLE as error:
            cut = Cut("unreachable", str(error))
        except (
            *(aiohttp.ClientError, OSError, TimeoutError),
            *(msgspec.DecodeError, UnicodeDecodeError, RecursionError),
        ) as error:
            cut = Cut("died", f"{type(error).__name__}: {error}")
        finally:
            if sequences:
                pool.release(load, sequences)
        avoid.add(load.route.engine)
        if cut.how in ("rejected", "unreachable"):
            pool.router.rejected(load, pool.now_s())
            refused_s = refused_s or pool.now_s()
            await pool.require_engines(refused_s, f"{load.route.engine} at {url}: {cut}")
        elif cut.how != "unknown":
            failures += 1
        if failures == most:
            raise RolloutFailed(f"{most} engines failed; the last one, at {url}: {cut}")


class ChatClient:
    """Adds :meth:`chat`, and requests to engines' other routes, to :class:`RolloutClient`."""

    _pool: EnginePool
    _http: aiohttp.ClientSession | None
    _tokenizer: Tokenizer | None
    generate: Callable[..., Awaitable[Completion]]

    @property
    def engines(self) -> list[str]:
        """The names of the routable engines."""
        return list(self._pool.router.engines)

    async def most_tokens(self) -> int:
        """Returns how many tokens the model takes; 0 if engines do not report that.

        Raises:
            NoEngine: no engine is available.
        """
        await self._pool.until_routed()
        return self._pool.router.limits_of(0, 1).max_model_len

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling_params: Mapping[str, Any] = MappingProxyType({}),
        *,
        session_id: str | None = None,
        client_id: str = "",
        on_inexact: OnInexact = "restart",
        **extra: Any,
    ) -> ChatCompletion:
        """Generates the next message of a conversation.

        Args:
            messages: the conversation, as in OpenAI's API.
            tools: the tools, as in OpenAI's API.
            sampling_params: as in ``generate``.
            session_id: as in ``generate``.
            client_id: as in ``generate``.
            on_inexact: as in ``generate``.
            extra: other fields of vLLM's chat request: ``tool_choice``, ``chat_template_kwargs``, …

        Returns:
            The completion, with the message of each choice.

        Raises:
            UsageError: as in ``generate``; also if neither the engines nor the client's tokenizer
                render messages.
            NoEngine, RequestPoisoned, RolloutFailed: as in ``generate``.
        """
        chat = self.make_chat(messages, tools=tools, **extra)
        prompt, params, fields = await chat.render(sampling_params)
        done = await self.generate(
            prompt,
            params,
            session_id=session_id,
            client_id=client_id,
            on_inexact=on_inexact,
            **fields,
        )
        answers, _ = await chat.named_messages(done)
        return ChatCompletion(done.request_id, done.prompt_token_ids, done.choices, answers)

    def make_chat(self, messages: Any, **fields: Any) -> Chat:
        """Makes one turn of a conversation; ``fields`` are other fields of vLLM's chat request."""
        return Chat(self.ask, self._tokenizer, {"messages": messages, **fields}, self.most_tokens)

    async def ask(self, path: str, body: Any = None, avoid: set[str] | None = None) -> Any:
        """Requests JSON from a routable engine; arguments and errors as :func:`ask_any`."""
        return await ask_any(self._pool, self._session(), path, body, avoid)

    async def ask_placed(
        self, path: str, body: Any, place: tuple[str | None, str], kind: Any
    ) -> Any:
        """Requests JSON as :func:`ask_any`, after waiting for a turn and a slot."""
        return await ask_any(self._pool, self._session(), path, body, None, place, kind)

    def abort_requests(self, request_ids: Collection[str] | None = None) -> int:
        """Ends requests of this client; their choices keep their tokens, and end with ``abort``.

        An abort by an engine ends no request: the request continues elsewhere.

        Args:
            request_ids: the ids that were passed to :meth:`RolloutClient.generate`; None: all
                requests.

        Returns:
            How many requests were ended.
        """
        return self._pool.abort(request_ids)

    async def ask_each(
        self, path: str, body: Mapping[str, str] | None = None, timeout_s: float = ANSWER_S
    ) -> dict[str, bytes]:
        """Returns the bodies of all routable engines' answers, as :func:`ask_each`."""
        return await ask_each(self._pool, self._session(), path, body, timeout_s)

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise BusClosed("the client is not connected: call connect(), or use `async with`")
        self._pool.require_process()
        return self._http


class Chat:
    """One turn of a conversation: renders the prompt, and parses the answer.

    Args:
        ask: requests JSON from an engine's route.
        request: the messages, and the other fields of vLLM's chat request.
        most_tokens: returns how many tokens the engines' model takes.

    Attributes:
        has_parts: whether a stream may send the text of an answer in parts. Otherwise the text may
            turn out to be a tool call, and the message is known only at the end.
        is_parsed: whether engines look for reasoning or tool calls.
        is_decoded_here: whether the client's tokenizer decodes the answer.
    """

    def __init__(
        self,
        ask: Callable[[str, Any, set[str]], Awaitable[Any]],
        tokenizer: Tokenizer | None,
        request: dict[str, Any],
        most_tokens: Callable[[], Awaitable[int]],
    ) -> None:
        self._ask = ask
        self._tokenizer = tokenizer
        self._request = {name: value for name, value in request.items() if value is not None}
        self._most_tokens = most_tokens
        self._failed: set[str] = set()  # engines that failed, and are asked last
        self.is_parsed = False
        self._keeps_stop = False
        self.has_parts = True
        self.is_decoded_here = True

    async def render(
        self, sampling_params: Mapping[str, Any]
    ) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
        """Returns the prompt's tokens, the sampling parameters, and other fields for engines.

        Raises:
            UsageError: neither engines nor the client's tokenizer can render these messages.
            NoEngine: as :func:`ask_any`.
            RolloutFailed: as :func:`ask_any`.
        """
        decodes = self._tokenizer is not None
        make_request([0], sampling_params, decodes=decodes)  # checks before an engine is asked
        params = dict(plain_params(sampling_params))
        self._keeps_stop = bool(params.get("include_stop_str_in_output"))
        rendered = await self._ask(f"{_ROUTE}/render", self._request, self._failed)
        if rendered is None:
            return await self._render_here(params)
        added = rendered["sampling_params"]
        if params.get("max_tokens") is None:
            params["max_tokens"] = added.get("max_tokens")
        if grammar := added.get("structured_outputs"):  # of a required tool call, for example
            given = {n: v for n, v in grammar.items() if v is not None and n[0] != "_"}
            params.setdefault("structured_outputs", given)
        choice = self._request.get("tool_choice")
        has_tools = choice != "none" and (choice or self._request.get("tools"))
        skips = added.get("skip_special_tokens", True)
        reasons = rendered.get("reasoning_parser_kwargs", "unknown, before vLLM 0.32") is not None
        self.is_parsed = bool(has_tools or reasons or not skips)
        self.is_decoded_here = decodes and not self.is_parsed
        self.has_parts = not has_tools and not (self.is_parsed and params.get("stop"))
        extra = {n: rendered[n] for n in _HANDED_ON if rendered.get(n) is not None}
        return rendered["token_ids"], params, extra

    async def _render_here(
        self, params: dict[str, Any]
    ) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
        request = dict(self._request)
        template = getattr(self._tokenizer, "apply_chat_template", None)
        if template is None:
            raise UsageError(
                "messages: the engines have no route that renders them, and the client has no "
                "tokenizer with a chat template"
            )
        messages, tools = flat_messages(request.pop("messages")), request.pop("tools", None)
        options = dict(request.pop("chat_template_kwargs", {}))  # a copy of the caller's dict
        if bad := _OWN_OPTIONS & options.keys():
            raise UsageError(f"chat_template_kwargs.{min(bad)}: is not a variable of templates")
        wanted = request.pop("response_format", {"type": "text"})
        if (grammar := structured_outputs(wanted)) is not None:
            params.setdefault("structured_outputs", grammar)
        for name in ("add_generation_prompt", "continue_final_message", "documents"):
            if name in request:
                options[name] = request.pop(name)
        extra: dict[str, Any] = {n: request.pop(n) for n in _HANDED_ON if n in request}
        if request.get("tool_choice") == "none":  # tool calls need no parser then
            del request["tool_choice"]
        elif tools:
            request.setdefault("tool_choice", "auto")
        if unknown := request.keys():
            raise UsageError(f"{min(unknown)}: needs engines with vLLM's render route")
        options = {"add_generation_prompt": True, **options, "return_dict": False}
        most = await self._most_tokens()

        def render() -> list[int]:
            if hasattr(self._tokenizer, "encode"):
                text = "".join(str(each.get("content") or "") for each in messages)
                check_length(self._tokenizer, text, "messages", most)
            return list(template(messages, tools=tools, **options))

        try:
            return await in_thread(render), params, extra
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            raise UsageError(f"messages: the chat template fails for them: {error}") from None

    async def named_messages(
        self, done: Completion
    ) -> tuple[tuple[dict[str, Any], ...], dict[int, list[dict[str, Any]]]]:
        """Makes the messages of an answer; errors as :func:`ask_any`.

        Returns:
            The message of each choice (``role``, ``content``, and what parsers found); and by the
            choice's index, the engine's names of the tokens that have log-probabilities.
        """
        texts = {c.index: self._text_tokens(c) for c in done.choices}
        choices: list[dict[str, Any]] = [
            {
                "index": c.index,
                "token_ids": texts[c.index],
                "finish_reason": "length",
                "logprobs": logprobs_of(c),
            }
            for c in done.choices
            if texts[c.index]
        ]
        if self.is_decoded_here or not choices:
            return tuple(_plain(choice.text or "") for choice in done.choices), {}
        answer: dict[str, Any] = {"request_id": done.request_id, "choices": choices}
        answer["prompt_token_ids"] = done.prompt_token_ids
        if self.is_parsed:
            body = {"generate_response": answer, "chat_request": self._request}
            found = await self.derender(_ROUTE, body)
        else:
            found = await self.derender(_TEXT_ROUTE, {"generate_responses": [answer]})
        # The derender route of completions numbers the choices by their order.
        parsed = {c["index"]: each for c, each in zip(choices, found["choices"], strict=True)}
        messages = tuple(self._message(choice, parsed.get(choice.index)) for choice in done.choices)
        return messages, {index: named for index, c in parsed.items() if (named := _names(c))}

    async def derender(self, route: str, body: dict[str, Any]) -> Any:
        """Has an engine turn tokens into text; errors as :func:`ask_any`."""
        if "model" in self._request:
            body = {**body, "model": self._request["model"]}
        found = await self._ask(f"{route}/derender", body, self._failed)
        if found is None:
            raise RolloutFailed(f"no engine has the route {route}/derender any more")
        return found

    def _text_tokens(self, part: Choice | TokenDelta) -> Sequence[int]:
        """Returns the tokens of a choice, without the token that ended the choice."""
        by_string = isinstance(getattr(part, "stop_reason", None), str)
        is_kept = self._keeps_stop or by_string or part.finish_reason != "stop"
        return part.token_ids if is_kept else part.token_ids[:-1]

    async def derender_part(
        self, prompt: Sequence[int], state: Any, delta: TokenDelta
    ) -> tuple[Any, Any, list[dict[str, Any]] | None]:
        """Has an engine turn new tokens of a stream into a part of the message.

        Args:
            state: the state that the last call returned; None for the first call.

        Returns:
            The part of the message, the next state, and the tokens' names, or None.

        Raises:
            WavebusError: as :meth:`derender`.
            LookupError, TypeError, ValueError: the engine's vLLM can't derender a stream.
        """
        choice = {"index": 0, "token_ids": self._text_tokens(delta)}
        choice |= {
            "logprobs": logprobs_of(delta),
            "finish_reason": delta.finish_reason and "length",
        }
        body: dict[str, Any] = {"stream": True, "stream_state": state}
        body["generate_chunk"] = {"request_id": "-", "choices": [choice]}
        if self.is_parsed:
            body["chat_request"] = self._request
        if self.is_parsed or state is None:
            body["prompt_token_ids"] = prompt
        found = await self.derender(_ROUTE if self.is_parsed else _TEXT_ROUTE, body)
        (made,) = found["chunk"]["choices"]
        return made.get("delta") or {"content": made["text"]}, found["stream_state"], _names(made)

    def _message(self, choice: Choice, parsed: dict[str, Any] | None) -> dict[str, Any]:
        """Returns a choice's message, cut off where the choice's text ends."""
        text = choice.text or ""
        if parsed is None:
            return _plain(text)
        message: dict[str, Any] = parsed.get("message") or _plain(parsed.get("text", ""))
        content = message.get("content")
        if (
            isinstance(choice.stop_reason, str)
            and isinstance(content, str)
            and self._tokenizer is not None
        ):
            behind = self._tokenizer.decode(choice.token_ids)[len(text) :]
            return {**message, "content": content.removesuffix(behind)}
        return message


def _plain(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def logprobs_of(part: Choice | TokenDelta) -> dict[str, Any] | None:
    """Returns log-probabilities in the form of vLLM's ``/inference/v1/generate``."""
    if part.logprobs is None:
        return None
    tops: Sequence[Mapping[int, float]] = part.top_logprobs or [{}] * len(part.logprobs)
    content = [
        {
            "token_id": token,
            "logprob": logprob,
            "top_logprobs": [{"token_id": i, "logprob": v} for i, v in top.items()],
        }
        for token, logprob, top in zip(part.token_ids, part.logprobs, tops, strict=True)
    ]
    return {"content": content}


def _names(choice: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Returns the log-probabilities of an engine's answer in the form of OpenAI's chat, or None."""
    found = choice.get("logprobs") or {}
    if "tokens" not in found:
        return found.get("content") or None
    tops = found.get("top_logprobs") or [None] * len(found["tokens"])
    rows = zip(found["tokens"], found["token_logprobs"], tops, strict=False)
    return [
        {**_named(token, value), "top_logprobs": [_named(*each) for each in (top or {}).items()]}
        for token, value, top in rows
    ]


def _named(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
