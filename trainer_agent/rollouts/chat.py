"""Turns chat messages into a prompt, and tokens into messages.

Engines do both with vLLM's render and derender routes, with the template and the parsers that they
were started with. If they have no such routes (embedded engines, vLLM without a tokenizer), the
client's tokenizer renders and decodes; tool calls and reasoning are then not parsed.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from bus.errors import BusClosed, RolloutFailed, UsageError
from trainer_agent.rollouts.attempt import FAILURES, UNREACHABLE, Cut, refused
from trainer_agent.rollouts.request import make_request, plain_params
from trainer_agent.rollouts.results import ChatCompletion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from trainer_agent.rollouts.choice import Tokenizer
    from trainer_agent.rollouts.engine_pool import EnginePool
    from trainer_agent.rollouts.request import OnInexact
    from trainer_agent.rollouts.results import Choice, Completion

_ROUTE: Final = "/v1/chat/completions"
_OK: Final = 200
_CLOSED: Final = (403, 405, 501)  # the route exists, but is disabled
# Fields of the rendered request that the request for tokens takes over.
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
) -> Any:
    """Requests JSON from a routable engine, and from another one if that fails.

    Args:
        pool: the engines.
        http: the client's session.
        path: the route.
        body: the JSON to POST. Default: a GET.
        avoid: names of engines to ask only if there are no others; those that fail are added.

    Returns:
        The answer; None if engines have no such route.

    Raises:
        UsageError: the engine refuses the request as invalid.
        NoEngine: no engine is available.
        RolloutFailed: five engines in a row failed.
    """
    avoid = set() if avoid is None else avoid
    failures, refused_s = 0, 0.0
    method = "GET" if body is None else "POST"
    timeout = aiohttp.ClientTimeout(pool.stall_s, sock_connect=http.timeout.sock_connect)
    while True:
        load = pool.router.pick(None, 0, pool.now_s(), avoid)
        load = load or await pool.acquire(None, 0, frozenset(avoid))
        url = load.route.endpoint + path
        try:
            async with http.request(method, url, json=body, timeout=timeout) as response:
                raw = await response.read()
            if response.status == _OK:
                return msgspec.json.decode(raw)
            if response.status in _CLOSED or b"Not Found" in raw:
                return None
            cut = refused(response.status, raw)
            if isinstance(cut, UsageError):
                raise cut
        except UNREACHABLE as error:
            cut = Cut("unreachable", str(error))
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            cut = Cut("died", f"{type(error).__name__}: {error}")
        avoid.add(load.route.engine)
        if cut.how in ("rejected", "unreachable"):
            pool.router.rejected(load, pool.now_s())
            refused_s = refused_s or pool.now_s()
            await pool.require_engines(refused_s, f"{load.route.engine} at {url}: {cut}")
        else:
            failures += 1
        if failures == FAILURES:
            raise RolloutFailed(f"five engines failed; the last, at {url}: {cut}")


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

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling_params: Mapping[str, Any] = MappingProxyType({}),
        *,
        session_id: str | None = None,
        on_inexact: OnInexact = "restart",
        **extra: Any,
    ) -> ChatCompletion:
        """Generates the next message of a conversation; raises the errors of ``generate`` too.

        Args:
            messages: the conversation, as in OpenAI's API.
            tools: the tools, as in OpenAI's API.
            sampling_params: as ``generate``.
            session_id: as ``generate``.
            on_inexact: as ``generate``.
            extra: other fields of vLLM's chat request: ``tool_choice``, ``chat_template_kwargs``, …

        Returns:
            The completion, with the message of each choice.

        Raises:
            UsageError: also if neither the engines nor the client's tokenizer render messages.
        """
        chat = self.make_chat(messages, tools=tools, **extra)
        prompt, params, fields = await chat.render(sampling_params)
        done = await self.generate(
            prompt, params, session_id=session_id, on_inexact=on_inexact, **fields
        )
        answers = await chat.messages(done)
        return ChatCompletion(done.request_id, done.prompt_token_ids, done.choices, answers)

    def make_chat(self, messages: Any, **fields: Any) -> Chat:
        """Makes one turn of a conversation; ``fields`` are the others of vLLM's chat request."""
        return Chat(self.ask, self._tokenizer, {"messages": messages, **fields})

    async def ask(self, path: str, body: Any = None, avoid: set[str] | None = None) -> Any:
        """Requests JSON from a routable engine, and from another one if that fails.

        Arguments, result and errors are those of :func:`ask_any`.
        """
        return await ask_any(self._pool, self._session(), path, body, avoid)

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise BusClosed("connect() first, or use `async with`")
        return self._http


class Chat:
    """Renders a conversation as a prompt, and turns generated tokens into messages.

    Args:
        ask: requests JSON from an engine, as :meth:`ChatClient.ask` does.
        tokenizer: renders and decodes if engines lack the routes; None: there is none.
        request: vLLM's chat request without sampling parameters: ``messages``, ``tools``, …

    Attributes:
        is_parsed: whether engines have rendered the conversation, and will parse the answer.
    """

    def __init__(
        self,
        ask: Callable[[str, Any, set[str]], Awaitable[Any]],
        tokenizer: Tokenizer | None,
        request: Mapping[str, Any],
    ) -> None:
        self._ask = ask
        self._tokenizer = tokenizer
        self._failed: set[str] = set()  # engines that failed a step of this turn
        self._request = {name: value for name, value in request.items() if value is not None}
        self.is_parsed = False
        messages = self._request.get("messages")
        if not isinstance(messages, list | tuple) or not messages:
            raise UsageError("messages: is no list with at least one")

    async def render(
        self, sampling_params: Mapping[str, Any]
    ) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
        """Renders the messages as a prompt.

        Args:
            sampling_params: the caller's sampling parameters. They are checked, and completed by
                those that the engine's template needs.

        Returns:
            The prompt's token ids, the sampling parameters, and other fields of the request.

        Raises:
            UsageError: neither engines nor the client's tokenizer can render these messages.
            NoEngine: as :func:`ask_any`.
            RolloutFailed: as :func:`ask_any`.
        """
        decodes = self._tokenizer is not None
        make_request(  # bad ones are refused before an engine is asked
            [0], sampling_params, session_id=None, on_inexact="restart", decodes=decodes, extra={}
        )
        params = dict(plain_params(sampling_params))
        rendered = await self._ask(f"{_ROUTE}/render", self._request, self._failed)
        self.is_parsed = rendered is not None
        if rendered is None:
            fields = self._request
            return self._render_here(), params, {n: fields[n] for n in _HANDED_ON if n in fields}
        added = rendered["sampling_params"]
        if params.get("max_tokens") is None:
            params["max_tokens"] = added.get("max_tokens")
        if grammar := added.get("structured_outputs"):  # of a tool that must be called
            given = {n: v for n, v in grammar.items() if v is not None and n[0] != "_"}
            params.setdefault("structured_outputs", given)
        extra = {n: rendered[n] for n in _HANDED_ON if rendered.get(n) is not None}
        return rendered["token_ids"], params, extra

    def _render_here(self) -> list[int]:
        request = dict(self._request)
        template = getattr(self._tokenizer, "apply_chat_template", None)
        if template is None:
            raise UsageError(
                "messages: the engines have no route that renders them, and the client has no "
                "tokenizer with a chat template"
            )
        messages, tools = request.pop("messages"), request.pop("tools", None)
        options = dict(request.pop("chat_template_kwargs", {}))  # a copy: it is the caller's
        if unknown := request.keys() - set(_HANDED_ON):
            raise UsageError(f"{min(unknown)}: needs engines that render messages")
        options |= {"add_generation_prompt": True, "return_dict": False}
        try:
            return list(template(messages, tools=tools, **options))
        except Exception as error:  # noqa: BLE001 - a template raises what it likes
            raise UsageError(f"messages: the chat template refuses them: {error}") from None

    async def messages(self, done: Completion) -> tuple[dict[str, Any], ...]:
        """Returns the message of each choice: ``role``, ``content``, and the parsers' results.

        Raises:
            UsageError: as :func:`ask_any`.
            NoEngine: as :func:`ask_any`.
            RolloutFailed: as :func:`ask_any`.
        """
        choices = [
            {"index": c.index, "token_ids": c.token_ids} for c in done.choices if c.token_ids
        ]
        found: Any = {"choices": ()}
        if self.is_parsed and choices:
            prompt = {"request_id": done.request_id, "prompt_token_ids": done.prompt_token_ids}
            answer = {"generate_response": {**prompt, "choices": choices}}
            body = {**answer, "chat_request": self._request}
            found = await self._ask(f"{_ROUTE}/derender", body, self._failed)
        if found is None:
            raise RolloutFailed("no engine has a route any more that makes messages of tokens")
        parsed = {each["index"]: each["message"] for each in found["choices"]}
        return tuple(self._message(choice, parsed.get(choice.index)) for choice in done.choices)

    def _message(self, choice: Choice, parsed: dict[str, Any] | None) -> dict[str, Any]:
        """Returns a choice's message, which ends where the choice's text does."""
        text = choice.text or ""
        if parsed is None:
            return {"role": "assistant", "content": text}
        content = parsed.get("content")
        if isinstance(content, str) and self._tokenizer is not None:
            behind = self._tokenizer.decode(choice.token_ids)[len(text) :]
            return {**parsed, "content": content.removesuffix(behind)}
        return parsed
