"""What front ends of vLLM get: versions of pieces, checks of token ids, who gets which routes."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar._vllm.plugin.front_end import (
    DATA_ROUTES,
    DataRoutesOnly,
    check_token_ids,
    label_completion_output,
)

HERE = "192.0.2.2"


def asked(
    path: str, client: str | None, server: str | None = HERE, kind: str = "http", **headers: str
) -> list[Any]:
    """What the middleware sends, or ``served``."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("served")

    async def send(message: Any) -> None:
        sent.append(message.get("status") or message["type"])

    scope = {
        "type": kind,
        "path": path,
        "client": client and (client, 5000),
        "server": server and (server, 8000),
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ],
    }
    asyncio.run(DataRoutesOnly(app)(scope, None, send))
    return sent


@pytest.mark.parametrize("client", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", HERE])
def test_clients_of_this_host_get_every_route(client: str) -> None:
    assert asked("/pause", client) == ["served"]
    assert asked("/collective_rpc", client) == ["served"]


@pytest.mark.parametrize(
    ("client", "server"),
    [
        ("192.0.2.3", HERE),
        ("192.0.2.2", "127.0.0.1"),
        ("::ffff:192.0.2.3", "::ffff:192.0.2.2"),
        ("fd00::3", "fd00::2"),
        (None, HERE),
        (HERE, None),
    ],
)
def test_clients_of_other_hosts_get_data_routes_alone(
    client: str | None, server: str | None
) -> None:
    for path in DATA_ROUTES:
        assert asked(path, client, server) == ["served"]
    for path in (
        *("/pause", "/collective_rpc", "/v1/load_lora_adapter", "/inference/v1/abort_requests"),
        *("/v1/completions/../../pause", "//pause", "/v1/models/", "/docs", ""),
    ):
        assert asked(path, client, server) == [403, "http.response.body"]
    assert asked("/v1/realtime", client, server, "websocket") == ["websocket.close"]


@pytest.mark.parametrize(("client", "is_whole"), [("192.0.2.3", False), (HERE, True)])
def test_clients_of_other_hosts_get_no_environment(client: str, is_whole: bool) -> None:
    config = {"model_config": {"dtype": "torch.bfloat16", "hf_token": "x"}, "lora_config": None}
    whole = {"vllm_config": config, "vllm_env": {"VLLM_X": 1}, "system_env": {"a": "b"}}
    queries: list[bytes] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        queries.append(scope["query_string"])
        raw = json.dumps(whole).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": raw[:9], "more_body": True})
        await send({"type": "http.response.body", "body": raw[9:]})

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/server_info", "headers": []}
    scope |= {"client": (client, 5000), "server": (HERE, 8000), "query_string": b""}
    asyncio.run(DataRoutesOnly(app)(scope, None, send))
    told = json.loads(b"".join(each.get("body", b"") for each in sent))
    if is_whole:
        assert (told, queries) == (whole, [b""])
        return
    assert queries == [b"config_format=json"]
    assert told["vllm_config"]["model_config"] == {"dtype": "torch.bfloat16"}
    assert (
        told["vllm_config"]["weight_transfer_config"] is told["vllm_config"]["lora_config"] is None
    )
    assert told["vllm_env"] == told["system_env"] == {}


@pytest.mark.parametrize(("client", "is_own"), [("192.0.2.3", False), (HERE, True)])
def test_clients_of_other_hosts_get_checksums_and_reset_no_weights(
    client: str, is_own: bool
) -> None:
    reset = b'{"action": "reset"}'
    comes = [
        {"type": "http.request", "body": reset, "more_body": False},
        {"type": "http.disconnect"},
    ]
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope["headers"]).get(b"content-length"))
        seen.append((await receive())["body"])
        seen.append((await receive())["type"])

    async def receive() -> Any:
        return comes.pop(0)

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/weight_checker"}
    scope |= {"client": (client, 5000), "server": (HERE, 8000)}
    scope["headers"] = [(b"content-length", str(len(reset)).encode())]
    asyncio.run(DataRoutesOnly(app)(scope, receive, None))
    body = reset if is_own else b'{"action": "checksum"}'
    assert seen == [str(len(body)).encode(), body, "http.disconnect"]


@pytest.mark.parametrize("header", ["x_forwarded_for", "forwarded"])
def test_who_is_forwarded_is_not_of_this_host(header: str) -> None:
    """Whatever it says: a server may believe that of anybody."""
    for client in ("127.0.0.1", HERE):
        assert asked("/pause", client, **{header: "127.0.0.1"}) == [403, "http.response.body"]
        assert asked("/v1/models", client, **{header: "127.0.0.1"}) == ["served"]


def test_each_piece_names_the_versions_of_the_tokens_so_far() -> None:
    state = SimpleNamespace(_weight_version_spans=lambda: ["so far"])
    for given, expected in ((None, ["so far"]), (["all"], ["all"])):
        piece = SimpleNamespace(weight_versions=given)
        made = label_completion_output(lambda *_, piece=piece: piece, state, [1], None, None)
        assert made.weight_versions == expected


@pytest.mark.parametrize("tokens", [[10], [0, 12], [-1, 3]])
def test_ids_beyond_the_vocabulary_are_refused_without_a_tokenizer(tokens: list[int]) -> None:
    exceptions = pytest.importorskip("vllm.exceptions")
    config = SimpleNamespace(get_vocab_size=lambda: 10)
    renderer = SimpleNamespace(tokenizer=None, model_config=config)
    calls: list[Any] = []

    def original(*args: Any, **named: Any) -> None:
        calls.append((args, named))

    with pytest.raises(exceptions.VLLMValidationError, match="vocabulary of 10"):
        check_token_ids(original, renderer, tokens, parameter="prompt")
    for fine in ([0, 9], []):
        check_token_ids(original, renderer, fine)
    check_token_ids(original, SimpleNamespace(tokenizer=1), tokens)  # checked by vLLM
    assert len(calls) == 4
