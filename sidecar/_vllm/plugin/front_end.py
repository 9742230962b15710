"""Extends vLLM's front ends: labels streamed tokens, checks token ids, protects routes.

vLLM's API key protects ``/v1`` and ``/inference``. It does not protect the RL routes, which pause
an engine and replace its weights. So if a server listens beyond loopback, clients of other hosts
may use only the routes in :data:`DATA_ROUTES`. Of ``/server_info`` they get a few settings, without
the environment of the engine, and of ``/weight_checker`` the checksums alone, whatever they ask.
"""

from __future__ import annotations

import ipaddress
import json
from typing import TYPE_CHECKING, Any, Final

from bus._vllm.seams import Has, Says, Seam, Takes
from sidecar._vllm.plugin.vllm_names import OUTPUTS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

DATA_ROUTES: Final = frozenset(
    (
        *("/inference/v1/generate", "/v1/models", "/health", "/load", "/metrics", "/version"),
        *("/tokenize", "/detokenize"),  # they read no state, and change none
        *("/v1/completions", "/v1/completions/render", "/v1/completions/derender"),
        *("/v1/chat/completions", "/v1/chat/completions/render", "/v1/chat/completions/derender"),
    )
)
# The fields of ``vllm_config`` that clients of other hosts get: those that trainers' clients read.
_SERVER_INFO: Final = "/server_info"
_SHOWN: Final[dict[str, tuple[str, ...]]] = {
    "model_config": ("model", "served_model_name", "dtype", "max_model_len"),
    "parallel_config": (*("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"),),
    "lora_config": ("max_lora_rank", "max_loras"),
    "weight_transfer_config": ("backend",),
}
# This route can also set all weights to zero.
_CHECKER: Final = "/weight_checker"
_CHECKSUMS: Final = b'{"action": "checksum"}'
# uvicorn reads a client's address from such a header if it trusts the peer.
_FORWARDED: Final = (b"x-forwarded-for", b"forwarded")
_REFUSAL: Final = b"only clients on the engine's host may use this route"


_STATE: Final = f"{OUTPUTS}:RequestState"
STREAMED_VERSIONS: Final = Seam(
    "streamed versions",
    ("streamed_versions",),
    (
        Takes(f"{_STATE}._weight_version_spans", "self"),
        Has("vllm.outputs:CompletionOutput", "weight_versions"),
        Says(
            "vllm.outputs:RequestOutput.add",
            "completion.weight_versions = next_completion.weight_versions",
        ),
        Says(
            "vllm.entrypoints.scale_out.token_in_token_out.serving",
            "weight_versions=output.weight_versions",
        ),
    ),
    process="core",
)
TOKEN_CHECKS: Final = Seam(
    "token checks",
    ("token_checks",),
    (
        Says(
            "vllm.v1.engine.input_processor:InputProcessor",
            "self.renderer.validate_token_ids(prompt_ids)",
        ),
        Has("vllm.config.model:ModelConfig", "get_vocab_size"),
        Has("vllm.exceptions:VLLMValidationError"),
    ),
    process="core",
)


@STREAMED_VERSIONS.wrap(
    f"{_STATE}._new_completion_output", "self, token_ids, finish_reason, stop_reason"
)
def label_completion_output(original: Callable[..., Any], state: Any, *args: Any) -> Any:
    """Adds to each piece of a request's output the versions of its tokens so far.

    vLLM itself names the versions only in the last piece, which a client may lose.
    """
    output = original(state, *args)
    if output.weight_versions is None:
        output.weight_versions = state._weight_version_spans()  # noqa: SLF001
    return output


@TOKEN_CHECKS.wrap(
    "vllm.renderers.base:BaseRenderer.validate_token_ids", "self, token_ids, parameter"
)
def check_token_ids(
    original: Callable[..., Any], renderer: Any, token_ids: Sequence[int], **named: Any
) -> None:
    """Refuses requests with token ids beyond the vocabulary, which would crash an engine core.

    vLLM 0.32 checks token ids only if it has a tokenizer.
    """
    original(renderer, token_ids, **named)
    if renderer.tokenizer is None and token_ids:
        size = renderer.model_config.get_vocab_size()
        if min(token_ids) < 0 or max(token_ids) >= size:
            from vllm.exceptions import VLLMValidationError  # noqa: PLC0415 - in a front end

            raise VLLMValidationError(f"A token id outside the vocabulary of {size}", **named)


class DataRoutesOnly:
    """ASGI middleware that gives clients of other hosts only routes for generation.

    vLLM's option ``--middleware`` installs it; if several are given, the last one gets a request
    first. A client is on this host if its connection comes from loopback, or from the address to
    which it has connected. A request that a proxy forwarded counts as remote, whatever the proxy
    says.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Passes a request on to vLLM, or refuses it with HTTP 403. The parameters are ASGI's."""
        kind = scope["type"]
        if kind == "lifespan" or scope["path"] in DATA_ROUTES or _is_local(scope):
            await self._app(scope, receive, send)
        elif kind == "http" and scope["path"] == _SERVER_INFO and scope.get("method") == "GET":
            await self._send_shown_info(scope, receive, send)
        elif kind == "http" and scope["path"] == _CHECKER and scope.get("method") == "POST":
            asked = {**scope, "headers": _headers(len(_CHECKSUMS))}
            await self._app(asked, _given(_CHECKSUMS, receive), send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": _REFUSAL})

    async def _send_shown_info(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answers ``/server_info`` with the settings in :data:`_SHOWN`."""
        status, raw = 500, bytearray()

        async def gather(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            raw.extend(message.get("body", b""))

        await self._app({**scope, "query_string": b"config_format=json"}, receive, gather)
        body = json.dumps(_shown_info(bytes(raw)) if status == 200 else {}).encode()  # noqa: PLR2004
        start = {"type": "http.response.start", "status": status, "headers": _headers(len(body))}
        await send(start)
        await send({"type": "http.response.body", "body": body})


def _shown_info(raw: bytes) -> dict[str, Any]:
    config = json.loads(raw)["vllm_config"]
    shown = {
        part: {name: config[part][name] for name in names if name in config[part]}
        if isinstance(config.get(part), dict)
        else None
        for part, names in _SHOWN.items()
    }
    return {"vllm_config": shown, "vllm_env": {}, "system_env": {}}


def _headers(size_bytes: int) -> list[tuple[bytes, bytes]]:
    """Returns the headers of a JSON body of this size."""
    length = str(size_bytes).encode()
    return [(b"content-type", b"application/json"), (b"content-length", length)]


def _given(body: bytes, receive: Any) -> Callable[[], Awaitable[dict[str, Any]]]:
    """Returns ASGI's ``receive`` of a request with this body in place of the client's own."""
    bodies = [body]

    async def receive_given() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        message: dict[str, Any] = await receive()
        while message["type"] != "http.disconnect":
            message = await receive()
        return message

    return receive_given


def _is_local(scope: dict[str, Any]) -> bool:
    client, server = scope.get("client"), scope.get("server")
    if not client or not server or any(name in _FORWARDED for name, _ in scope["headers"]):
        return False
    address = ipaddress.ip_address(client[0])
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback) or client[0] == server[0]
