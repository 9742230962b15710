"""Serves the routes of vLLM that don't generate tokens, for a group of engines.

=====================================  ====================================================
``POST /tokenize``, ``/detokenize``    by the front's tokenizer, or by an engine
``POST /v1/chat/completions/render``   an engine's answer
``POST /finish_session?session_id=``   ends a session, as vllm-router's route
``GET /version``                       an engine's answer
``GET /server_info``                   an engine's answer, without its environment
``GET /load``                          ``server_load``, summed over the engines
``GET /metrics``                       the engines' metrics, merged
=====================================  ====================================================
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from bus.errors import UsageError
from trainer_agent._rollouts.request import MAX_SESSION_CHARS, named
from trainer_agent._rollouts.routes.metrics import MergedMetrics
from trainer_agent._rollouts.text import encode, in_thread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer_agent._rollouts.client import RolloutClient

_RENDER: Final = "/v1/chat/completions/render"
_FORMATS: Final = ("text", "json")
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECRETS: Final = frozenset({"hf_token"})
# Fields of ``/tokenize`` that the front's tokenizer serves.
_PLAIN: Final = frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"})


class _Load(msgspec.Struct):
    server_load: int


class _Detokenize(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class EngineRoutes:
    """The handlers of these routes.

    Args:
        tokenizer: the front's tokenizer; None: engines tokenize.
    """

    def __init__(self, client: RolloutClient, tokenizer: Any) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._metrics = MergedMetrics()
        self._merging = asyncio.Lock()
        self.routes = (
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
            web.post(_RENDER, self._render),
            web.post("/finish_session", self._finish_session),
            web.get("/version", self._version),
            web.get("/server_info", self._server_info),
            web.get("/load", self._load),
            web.get("/metrics", self._show_metrics),
        )

    async def tokens(self, text: str) -> list[int]:
        """Returns the tokens of a prompt.

        Raises:
            UsageError: neither the front nor engines have a tokenizer, or the text is too long.
            NoEngine: no engine is available.
            RolloutFailed: as :func:`~trainer_agent._rollouts.chat.ask_any`.
        """
        if self._tokenizer is not None:
            return await encode(self._tokenizer, text, "prompt", await self._client.most_tokens())
        found = await self._client.ask("/tokenize", {"prompt": text})
        if found is None:
            raise UsageError(
                "prompt: a text needs engines with a tokenizer, or `wavebus gateway --tokenizer`"
            )
        tokens: list[int] = found["tokens"]
        return tokens

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = _decode(await http.read(), dict[str, Any])
        is_plain = body.get("add_special_tokens", True) is True and not body.get(
            "return_token_strs"
        )
        if self._tokenizer is None or not is_plain or body.keys() - _PLAIN or "prompt" not in body:
            return _found(await self._client.ask("/tokenize", body))
        if not isinstance(body["prompt"], str):
            raise UsageError("prompt: must be a text")
        length = await self._client.most_tokens()
        tokens = await encode(self._tokenizer, body["prompt"], "prompt", 0)
        fields = {"count": len(tokens), "max_model_len": length, "tokens": tokens}
        return web.json_response({**fields, "token_strs": None})

    async def _detokenize(self, http: web.Request) -> web.Response:
        raw = await http.read()
        if self._tokenizer is None:
            return _found(await self._client.ask("/detokenize", _decode(raw, dict[str, Any])))
        tokens = _decode(raw, _Detokenize).tokens
        decode = getattr(self._tokenizer, "decode_all", self._tokenizer.decode)
        try:
            text = await in_thread(decode, tokens)
        except (OverflowError, ValueError, LookupError, TypeError) as error:
            raise UsageError(f"tokens: {error}") from None
        return web.json_response({"prompt": text})

    async def _render(self, http: web.Request) -> web.Response:
        return _found(await self._client.ask(_RENDER, _decode(await http.read(), dict[str, Any])))

    async def _finish_session(self, http: web.Request) -> web.Response:
        session = http.query.get("session_id", "")
        if not 0 < len(session) <= MAX_SESSION_CHARS:
            raise UsageError(f"session_id: must have 1 to {MAX_SESSION_CHARS} characters")
        self._client.finish_session(session)
        return web.json_response({"status": "ok", "session_id": session})

    async def _version(self, _: web.Request) -> web.Response:
        return _found(await self._client.ask("/version"))

    async def _server_info(self, http: web.Request) -> web.Response:
        kind = http.query.get("config_format", "text")
        if kind not in _FORMATS:
            raise UsageError(f"config_format={kind!r:.99}: must be text or json")
        found = await self._client.ask(f"/server_info?config_format={kind}")
        if not isinstance(found, dict):
            return _found(None)
        # The environment of an engine may contain API keys.
        config = _without_secrets(found.get("vllm_config"))
        return _found({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def _load(self, _: web.Request) -> web.Response:
        loads = (await self._client.ask_each("/load")).values()
        total = 0
        for raw in loads:
            try:
                total += msgspec.json.decode(raw, type=_Load).server_load
            except (msgspec.DecodeError, RecursionError):
                continue
        return web.json_response({"server_load": total})

    async def _show_metrics(self, _: web.Request) -> web.Response:
        async with self._merging:
            answers = await self._client.ask_each("/metrics")
            body = await in_thread(self._merge, answers)
        return web.Response(body=body, headers={"Content-Type": _METRICS_TYPE})

    def _merge(self, answers: Mapping[str, bytes]) -> bytes:
        texts = {engine: raw.decode(errors="replace") for engine, raw in answers.items()}
        return self._metrics.merge(texts).encode()


def _decode(raw: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(named("", error).lstrip(".: ")) from None


def _found(answer: Any) -> web.Response:
    """Returns an engine's answer, or 404 for None: no engine has such a route."""
    if answer is None:
        raise web.HTTPNotFound(text="no engine has this route")
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {n: _without_secrets(v) for n, v in value.items() if n not in _SECRETS}
    return [_without_secrets(each) for each in value] if isinstance(value, list) else value
