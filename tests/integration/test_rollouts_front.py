"""Generation over HTTP: what the front promises, in the test's own process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from bus._runtime.status_client import fetch_status
from bus.messages import RequestLimits
from tests.integration.test_rollouts import clients_of, event, honest, then
from tests.support.generating import generating, streamed
from trainer_agent import RolloutClient
from trainer_agent._rollouts import front
from trainer_agent._rollouts.attempt import UnknownModel
from trainer_agent._rollouts.front import serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.conftest import Bus
    from trainer_agent._rollouts.engine_pool import AttemptWatch

TIMEOUT_S = 60.0
PROMPT = [5, 9, 77]
TOKENS = 40
SAMPLED = {"temperature": 1.0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0, "seed": 3}
STEP_MS = ("--step-ms", "15")


async def post(url: str, body: Any, **headers: str) -> tuple[int, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, data=io.BytesIO(raw), headers=headers) as response,
    ):
        return response.status, json.loads(await response.read())


async def events(
    url: str, body: dict[str, Any], begun: asyncio.Event | None = None
) -> list[dict[str, Any]]:
    """Those of a stream, which must end as it should."""
    found: list[dict[str, Any]] = []
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json=body | {"stream": True}) as response,
    ):
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                found.append(json.loads(line[6:]))
                if begun is not None:
                    begun.set()
    assert line == b"\n"
    return found


async def in_flight(bus: Bus) -> int:
    """Requests that engines say they have."""
    status = await fetch_status(bus.address, timeout_s=TIMEOUT_S)
    return sum(engine.in_flight for group in status.groups for engine in group.engines)


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


def joined(streamed: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A choice of a stream, as if it had come at once."""
    parts = [c for event in streamed for c in event["choices"] if c["index"] == index]
    whole = {**parts[-1], "token_ids": [t for c in parts for t in c["token_ids"]]}
    whole["logprobs"] = {
        "content": [each for c in parts if c["logprobs"] for each in c["logprobs"]["content"]]
    }
    whole["text"] = "".join(c["text"] for c in parts)
    return whole


def test_a_client_that_leaves_ends_its_request_on_the_engine(bus: Bus) -> None:
    """It would run for longer than the test does."""
    bus.sidecar("e0", "--step-ms", "200")

    async def main() -> None:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 400, "ignore_eos": True}}
        async with (
            RolloutClient(bus.address) as client,
            serve(client, "127.0.0.1", 0) as url,
            aiohttp.ClientSession() as http,
        ):

            async def until(requests: int) -> None:
                while await in_flight(bus) != requests:
                    pass

            for stream in (True, False):
                asks = asyncio.create_task(
                    http.post(f"{url}/inference/v1/generate", json=body | {"stream": stream})
                )
                await until(1)
                if stream:
                    (await asks).close()
                else:
                    asks.cancel()
                await until(0)

    run(main())


MEGABYTE = "s" * 2**20
BAD = [
    ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [1, 10**6], "sampling_params": {}}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [1, "x"], "sampling_params": {}}, "token_ids"),
    ("/inference/v1/generate", {"sampling_params": {}}, "token_ids"),
    (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": [["n", 2]]},
        "sampling_params",
    ),
    ("/inference/v1/generate", {"token_ids": [1], "tokens": 3}, "tokens"),
    (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"max_token": 3}},
        "sampling_params.max_token",
    ),
    (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"max_tokens": 0}},
        "sampling_params.max_tokens",
    ),
    ("/inference/v1/generate", {"token_ids": [1], "session_id": MEGABYTE}, "session_id"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [[1], []]}, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, "prompt"),
    ("/v1/completions", {"prompt": "text"}, "prompt"),
    ("/v1/completions", {"prompt": {"a": 1}}, "prompt"),
    ("/v1/completions", {"prompt": [1] * 600}, "prompt"),
    ("/v1/completions", {"prompt": [1], "echo": True}, "echo"),
    ("/v1/completions", {"prompt": [1], "best_of": 2}, "best_of"),
    ("/v1/completions", {"prompt": [1], "max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"prompt": [1], "max_tokens": 10**6}, "max_tokens"),
    ("/v1/completions", {"prompt": [1], "min_tokens": 20}, "min_tokens"),
    ("/v1/completions", {"prompt": [1], "stop": "x"}, "stop"),
    ("/v1/completions", {"prompt": [1], "stream": "yes"}, "stream"),
    ("/v1/completions", {"prompt": [1], "stream_options": {"usage": True}}, "stream_options.usage"),
    ("/v1/completions", {"prompt": [1], "user": MEGABYTE}, "user"),
    ("/v1/completions", {"prompt": [1], "session_id": MEGABYTE}, "session_id"),
    ("/v1/completions", {"prompt": [1], "user": 5}, "user"),
    ("/v1/completions", {"prompt": [1], "stop": ["x"] * 65}, "stop"),
    ("/v1/completions", {"prompt": [1], "logit_bias": {"\u00b2": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": [1], "logit_bias": {"65": "x"}}, "logit_bias"),
    ("/v1/completions", {"prompt": [1], "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": [[1]] * 16_385}, "prompt"),
    ("/v1/completions", {"prompt": [[1]] * 17, "n": 1024}, "prompt"),
    ("/v1/completions", b'{"prompt": [1', None),
    ("/v1/completions", b'{"prompt": ' + b"[" * 200_000, None),
    ("/v1/completions", b'{"prompt": [1], "metadata": ' + b'{"a":' * 200_000, None),
    ("/v1/chat/completions", b'{"messages": ' + b"[" * 200_000, None),
    ("/inference/v1/generate", b'{"sampling_params": {"extra_args": ' + b'{"a":' * 200_000, None),
    ("/v1/completions", b"[1]", None),
    ("/v1/completions", b"\xff", None),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": "hi"}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "messages"),
    ("/v1/chat/completions", {"messages": [{}], "temprature": 1}, "temprature"),
]


def test_bad_input_is_refused_by_the_fields_name(bus: Bus) -> None:
    """Whether the answer was to be streamed or not."""
    bus.sidecar("e0")

    async def main() -> None:
        async with RolloutClient(bus.address) as client, serve(client, "127.0.0.1", 0) as url:
            await refuses(url)

    async def refuses(url: str) -> None:
        for path, body, field in BAD:
            for stream in (False, True):
                asked = {"stream": stream, **body} if isinstance(body, dict) else body
                status, answer = await post(url + path, asked)
                error = answer["error"]
                told = (status, error["param"], error["type"], error["code"])
                assert told == (400, field, "BadRequestError", 400), (path, str(body)[:99], answer)
                assert (field or "") in error["message"]
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{url}/v1/completions") as response:
                assert (response.status, (await response.json())["error"]["code"]) == (405, 405)
            async with http.post(f"{url}/v1/nothing") as response:
                assert (response.status, (await response.json())["error"]["code"]) == (404, 404)
            async with http.post(f"{url}/v1/responses") as response:
                error = (await response.json())["error"]
                assert (response.status, error["type"]) == (404, "NotFoundError")
                assert "use /v1/chat/completions" in error["message"]
            async with http.get(f"{url}/v1/models") as response:
                assert [each["object"] for each in (await response.json())["data"]] == ["model"]
            async with http.get(f"{url}/health") as response:
                assert response.status == 200
        header = {"X-Session-ID": "s" * 300}
        status, answer = await post(f"{url}/v1/completions", {"prompt": [1], "user": "u"}, **header)
        assert (status, answer["error"]["param"]) == (400, "X-Session-ID")
        body = {"prompt": [1], "max_tokens": 2, "model": "other"}
        for stream in (False, True):
            status, answer = await post(f"{url}/v1/completions", body | {"stream": stream})
            error = answer["error"]
            assert (status, error["param"], error["type"]) == (404, "model", "NotFoundError")

    run(main())


# In the test's own process, before engines that answer as a test has it


@contextlib.asynccontextmanager
async def fronts_of(*answers: Any, api_key: str = "", **options: Any) -> AsyncIterator[str]:
    """A front, and an engine of each answer."""
    async with (
        clients_of(*answers, **options) as client,
        serve(client, "127.0.0.1", 0, tokenizer=options.get("tokenizer"), api_key=api_key) as url,
    ):
        yield url


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Letters:
    """A tokenizer: one character for each token."""

    def encode(self, text: str) -> list[int]:
        return [ord(each) for each in text]

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(token) for token in token_ids)

    def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
        assert options.pop("tools") in (None, [TOOL])
        assert options == {"add_generation_prompt": True, "return_dict": False}
        return self.encode("".join(each["content"] for each in messages))


def test_what_no_engine_can_do_is_said_so_that_no_client_asks_again() -> None:
    async def main() -> None:
        body = {"prompt": PROMPT}
        async with fronts_of(unavailable_s=0.2) as url:
            status, answer = await post(f"{url}/v1/completions", body)
            assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
            async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as response:
                assert response.status == 503
        dies = then(cut=True)
        async with (
            fronts_of(dies, dies, honest) as url,
            aiohttp.ClientSession() as http,
            http.post(f"{url}/v1/completions", json=body) as response,
        ):
            assert (response.status, response.headers["x-should-retry"]) == (500, "false")
            assert "e0, e1 failed" in (await response.json())["error"]["message"]
        begins = then(event(78), cut=True)
        async with fronts_of(begins, begins) as url:
            *pieces, last = await events(f"{url}/v1/completions", body)
            assert [each["choices"][0]["token_ids"] for each in pieces] == [[78], [78]]
            assert "e0, e1 failed" in last["error"]["message"]

    run(main())


def test_the_field_that_an_engine_names_is_the_clients() -> None:
    """vLLM names fields of a malformed body as fields of ``body``, beside its text."""
    error = {"message": "Field required", "param": "body.tools.0.function", "code": 400}

    async def render(_: web.Request) -> web.Response:
        return web.json_response({"error": error}, status=400)

    async def main() -> None:
        routes = {"/inference/v1/generate": honest, "/v1/chat/completions/render": render}
        async with fronts_of(routes) as url:
            status, answer = await post(f"{url}/v1/chat/completions", {"messages": [{}]})
            assert (status, answer["error"]["param"]) == (400, "tools.0.function")
            assert "Field required" in answer["error"]["message"]

    run(main())


def test_adapters_that_some_engines_have_are_models_of_the_group() -> None:
    """An engine that does not tell its own hides none of the others'."""

    async def broken(_: web.Request) -> web.Response:
        return web.Response(status=500)

    def lists(*adapters: str) -> dict[str, Any]:
        cards = [{"id": "base", "parent": None}, *({"id": a, "parent": "base"} for a in adapters)]

        async def models(_: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": cards})

        return {"/inference/v1/generate": honest, "/v1/models": models}

    async def main() -> None:
        engines = (lists("a"), lists(), {"/v1/models": broken}, lists("b", "a"))
        async with fronts_of(*engines) as url, aiohttp.ClientSession() as http:
            async with http.get(f"{url}/v1/models") as response:
                shown = await response.json()
            assert [card["id"] for card in shown["data"]] == ["base", "a", "b"]
            async with http.get(f"{url}/v1/models/b") as response:
                assert (response.status, await response.json()) == (200, shown["data"][2])
            async with http.get(f"{url}/v1/models/c") as response:
                assert response.status == 404

    run(main())


def test_a_text_ends_before_its_stop_string_streamed_or_not() -> None:
    """Also if that begins on an engine that dies, and ends on another."""

    async def main() -> None:
        cuts = then(event(78), event(79), cut=True)  # "N", "O"
        for prompt in ("M", [77]):
            async with fronts_of(cuts, honest, tokenizer=Letters()) as url:
                body = {"prompt": prompt, "stop": "OPQ"}
                streamed = await events(f"{url}/v1/completions", body)
                texts = [each["choices"][0]["text"] for each in streamed]
                _, answer = await post(f"{url}/v1/completions", body)
                whole = answer["choices"][0]
                assert (whole["text"], whole["token_ids"]) == ("N", [78, 79, 80, 81])
                assert whole["stop_reason"] == "OPQ"
                assert joined(streamed)["text"] == "N"
                assert joined(streamed)["token_ids"] == whole["token_ids"]
                assert "N" in texts[:-1], "the text waits for its end"

    run(main())


def test_tools_are_refused_where_nobody_looks_for_calls() -> None:
    """Unless none is to be called: then the template alone gets them."""

    async def main() -> None:
        async with fronts_of(honest, tokenizer=Letters()) as url:
            messages = [{"role": "user", "content": "AB"}]
            body = {"messages": messages, "max_completion_tokens": 3, "tools": [TOOL]}
            for chosen in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}):
                status, answer = await post(f"{url}/v1/chat/completions", body | chosen)
                assert (status, answer["error"]["param"]) == (400, "tool_choice")
            chosen = {"tool_choice": "none"}
            assert (await post(f"{url}/v1/chat/completions", body | chosen))[0] == 200

    run(main())


def test_chat_is_rendered_by_the_tokenizer_where_engines_do_not() -> None:
    async def main() -> None:
        async with fronts_of(honest, tokenizer=Letters()) as url:
            messages = [{"role": "user", "content": "AB"}]
            body = {"messages": messages, "max_completion_tokens": 3, "logprobs": True}
            status, answer = await post(f"{url}/v1/chat/completions", body)
            assert status == 200, answer
            (choice,) = answer["choices"]
            assert choice["message"] == {"role": "assistant", "content": "CDE"}
            named = [(each["token"], each["bytes"]) for each in choice["logprobs"]["content"]]
            assert named == [("C", [67]), ("D", [68]), ("E", [69])]
            usage = {"stream_options": {"include_usage": True}}
            *streamed, last = await events(f"{url}/v1/chat/completions", body | usage)
            deltas = [each["choices"][0]["delta"] for each in streamed]
            assert deltas[0]["role"] == "assistant"
            assert all("role" not in each for each in deltas[1:])
            assert "".join(each["content"] for each in deltas) == "CDE"
            assert last["choices"] == []
            assert last["usage"]["total_tokens"] == 5
            refused = await post(f"{url}/v1/chat/completions", body | {"tool_choice": "required"})
            assert refused[1]["error"]["param"] == "tool_choice"

    run(main())


def test_vllm_s_own_route_answers_in_its_own_form() -> None:
    """Also with more log-probabilities than OpenAI's API has; the engine knows how many."""
    refused: list[int] = []

    async def likely(request: web.Request) -> web.StreamResponse:
        wanted = (await request.json())["sampling_params"]["logprobs"]
        if wanted > 100:
            refused.append(wanted)
            told = {"error": {"message": f"Requested {wanted}, at most 100", "code": 400}}
            return web.json_response(told, status=400)
        top = [{"token_id": each, "logprob": -each / 10} for each in range(1, 5)]
        content = [{"logprob": -0.2, "top_logprobs": top}, {"logprob": -0.4, "top_logprobs": top}]
        piece = {"index": 0, "token_ids": [2, 4], "finish_reason": "length"}
        return await streamed(request, {"choices": [{**piece, "logprobs": {"content": content}}]})

    async def main() -> None:
        async with fronts_of(likely) as url:
            body: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": {"logprobs": 100}}
            status, answer = await post(f"{url}/inference/v1/generate", body)
            assert (status, answer["output_mode"]) == (200, "tokens")
            content = answer["choices"][0]["logprobs"]["content"]
            assert [(each["token_id"], each["rank"]) for each in content] == [(2, 2), (4, None)]
            body["sampling_params"]["logprobs"] = 101
            status, answer = await post(f"{url}/inference/v1/generate", body)
            assert (status, refused) == (400, [101])
            assert "at most 100" in answer["error"]["message"]

    run(main())


def test_the_key_is_asked_for() -> None:
    async def main() -> None:
        async with fronts_of(honest, api_key="secret") as url, aiohttp.ClientSession() as http:
            for key, status in ((None, 401), ("Bearer other", 401), ("Bearer secret", 200)):
                headers = {"Authorization": key} if key else {}
                done = await post(f"{url}/v1/completions", {"prompt": PROMPT}, **headers)
                assert done[0] == status
            async with http.get(f"{url}/health") as response:
                assert response.status == 200

    run(main())


def test_a_client_with_too_many_requests_gets_429() -> None:
    """In OpenAI's form. Routes that ask engines for no tokens are not bounded."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def late(request: web.Request) -> web.StreamResponse:
        begun.set()
        await go_on.wait()
        return await honest(request)

    async def main() -> None:
        async with (
            clients_of(late) as client,
            serve(client, "127.0.0.1", 0, client_requests=1) as url,
            aiohttp.ClientSession() as http,
        ):
            body = {"prompt": PROMPT, "max_tokens": 3}
            first = asyncio.create_task(post(f"{url}/v1/completions", body))
            await begun.wait()
            for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"):
                async with http.post(url + path, json={}) as response:
                    error = (await response.json())["error"]
                    assert (response.status, response.headers["Retry-After"]) == (429, "1")
                    assert (error["type"], error["code"]) == ("RateLimitError", 429)
            async with http.post(f"{url}/finish_session?session_id=s") as response:
                assert response.status == 200
            go_on.set()
            assert (await first)[0] == 200
            assert (await post(f"{url}/v1/completions", body))[0] == 200

    run(main())


FLOOD_BYTES = 24 << 20  # of which sockets hold a third


class Flood:
    """An engine whose answer has no end, and is sent as fast as it is read."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.transport: asyncio.Transport | None = None
        self.ended = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.transport = request.transport
        tokens = {"choices": [{"index": 0, "token_ids": [5] * 1000}]}
        raw = b"data: " + json.dumps(tokens).encode() + b"\n\n"
        try:
            while self.sent_bytes < FLOOD_BYTES:
                await response.write(raw)
                self.sent_bytes += len(raw)
                await asyncio.sleep(0)
        finally:
            self.ended.set()
        return response

    @property
    def waits(self) -> bool:
        """Whether its client does not read."""
        return self.transport is not None and self.transport.get_write_buffer_size() > 0


@pytest.mark.parametrize("unread_s", [1e6, 0.2])
def test_a_client_that_reads_nothing_stops_its_engine_and_is_cut_off(
    unread_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens wait in the engine, for as long as a client may be slow."""
    monkeypatch.setattr(front, "_UNREAD_S", unread_s)
    engine = Flood()

    async def main() -> None:
        limits = RequestLimits(max_model_len=10**9, slots=4)
        async with (
            clients_of(engine.answer, limits=limits, stall_s=0.5) as client,
            serve(client, "127.0.0.1", 0) as url,
            aiohttp.ClientSession() as http,
        ):
            with socket.socket() as slow:
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                slow.connect(("127.0.0.1", int(url.rpartition(":")[2])))
                sampling = {"max_tokens": 10**8, "ignore_eos": True}
                body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": True}
                raw = json.dumps(body).encode()
                head = "POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
                slow.sendall(head.encode() + raw)
                if unread_s > 1:
                    # For longer than ``stall_s``: it is not the engine that gives no tokens.
                    stuck_s = time.monotonic()
                    while time.monotonic() - stuck_s < 1.5:
                        await asyncio.sleep(0)
                        if not (engine.waits and all(a.is_delivering for a in attempts(client))):
                            stuck_s = time.monotonic()
                        assert engine.sent_bytes < FLOOD_BYTES
                    assert len(attempts(client)) == 1
                    assert not engine.ended.is_set()
                    slow.close()
                await engine.ended.wait()
                assert engine.sent_bytes < FLOOD_BYTES
                while attempts(client):  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0)
            async with http.get(f"{url}/health") as response:
                assert (await response.json())["slow"] == (unread_s < 1)

    run(main())


def attempts(client: RolloutClient) -> set[AttemptWatch]:
    return client._pool.attempts


def test_control_routes_have_a_key_of_their_own() -> None:
    """Which opens the other routes, too, also as the password of a URL."""

    async def pause(_: web.Request) -> web.Response:
        return web.json_response({"status": "paused"})

    async def main() -> None:
        keys: Any = {"api_key": "data", "control_key": "control"}
        routes = [web.post("/pause", pause)]
        async with (
            clients_of(honest) as client,
            serve(client, "127.0.0.1", 0, control_routes=routes, **keys) as url,
            aiohttp.ClientSession() as http,
        ):
            for user, control in (("x:data@", 401), ("x:control@", 200), ("x:other@", 401)):
                base = url.replace("//", f"//{user}")
                async with http.post(f"{base}/pause") as response:
                    assert response.status == control
                async with http.post(f"{url}/%70ause") as response:
                    assert response.status == 401
                body = {"prompt": PROMPT, "max_tokens": 1}
                async with http.post(f"{base}/v1/completions", json=body) as response:
                    assert response.status == (401 if "other" in user else 200)

    run(main())


def test_a_session_is_kept_on_its_engine() -> None:
    """By the header before the body's own fields."""
    asked: list[str] = []

    def names(name: str) -> Any:
        async def answer(request: web.Request) -> web.StreamResponse:
            asked.append(name)
            return await honest(request)

        return answer

    async def main() -> None:
        async with fronts_of(names("e0"), names("e1")) as url:
            for fields, headers in (
                ({"session_id": "u1", "user": "other"}, {}),
                ({"session_id": "other"}, {"X-Session-ID": "u1"}),
            ):
                done = [
                    post(f"{url}/v1/completions", {"prompt": PROMPT, **fields}, **headers)
                    for _ in range(4)
                ]
                assert {status for status, _ in await asyncio.gather(*done)} == {200}
            assert len(set(asked)) == 1

    run(main())


def test_a_user_is_no_session_and_users_take_turns() -> None:
    """One user's prompts run on all engines; another user waits for a turn, not for all of them."""
    asked: list[int] = []
    slots, many = 16, 60
    may_end = asyncio.Semaphore(0)

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(json.loads(await request.read())["token_ids"][0])
        await may_end.acquire()
        return await streamed(request, event(78, finish="stop"))

    async def main() -> None:
        async with (
            clients_of(answer, answer) as client,
            serve(client, "127.0.0.1", 0) as url,
        ):
            while len(client.engines) < 2:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
            bodies = [{"prompt": [[1]] * many, "user": "many"}, {"prompt": [2], "user": "one"}]
            tasks = []
            for each, waiting in zip(bodies, (many - slots, many - slots + 1), strict=True):
                tasks.append(asyncio.create_task(post(f"{url}/v1/completions", each)))
                while len(client._pool._waiting) < waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            for _ in range(2):
                may_end.release()
            while len(asked) < slots + 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert sorted(asked[slots:]) == [1, 2]
            for _ in range(many):
                may_end.release()
            assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]

    run(main())


def test_chat_goes_on_elsewhere_when_an_engine_dies_in_any_of_its_steps() -> None:
    """One engine fails whatever it is asked; what it has generated is kept."""
    asked: list[str] = []
    chat = "/v1/chat/completions"

    async def fails(request: web.Request) -> web.StreamResponse:
        asked.append(f"e0 {request.path.rpartition('/')[2]}")
        if request.path.endswith("generate"):
            response: web.StreamResponse = await then(event(78), cut=True)(request)
            return response
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def render(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body == {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}
        sampling = {"max_tokens": 5, "structured_outputs": {"json": "{}", "_backend": None}}
        return web.json_response({"token_ids": PROMPT, "sampling_params": sampling})

    async def derender(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["generate_response"]["prompt_token_ids"] == PROMPT
        asked.append("e1 derender")
        message = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
        choices = body["generate_response"]["choices"]
        assert [each["token_ids"] for each in choices] == [[78, 79, 80, 81, 82]]
        return web.json_response({"choices": [{"index": 0, "message": message}]})

    async def sound(request: web.Request) -> web.StreamResponse:
        sampling = (await request.json())["sampling_params"]
        assert sampling["structured_outputs"] == {"json": "{}"}
        return await honest(request)

    routes = ("/inference/v1/generate", f"{chat}/render", f"{chat}/derender")
    e0 = dict.fromkeys(routes, fails)
    e1 = dict(zip(routes, (sound, render, derender), strict=True))
    body = {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}

    async def main() -> None:
        for stream in (False, True):
            async with fronts_of(e0, e1) as url:
                if stream:
                    choice = (await events(f"{url}{chat}", body))[-1]["choices"][0]
                    assert choice["delta"]["tool_calls"] == [{"index": 0, "id": "c"}]
                else:
                    status, answer = await post(f"{url}{chat}", body)
                    assert status == 200, answer
                    (choice,) = answer["choices"]
                    assert choice["message"]["tool_calls"] == [{"id": "c"}]
                assert choice["finish_reason"] == "length"
                assert choice["inexact"] == ["structured_outputs"] * stream
        assert asked == ["e0 render", "e0 generate", "e1 derender"] * 2

    run(main())


class Slow(Letters):
    """A tokenizer that takes its time, until it is told to go on."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.longest = 0

    def encode(self, text: str) -> list[int]:
        self.longest = max(self.longest, len(text))
        self.begun.set()
        assert self.go_on.wait(TIMEOUT_S)
        return super().encode(text)

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return self.encode("".join(each["content"] for each in messages))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_text_that_is_being_tokenized_keeps_nobody_waiting(path: str) -> None:
    """Nor is it tokenized to its end if it has more tokens than the model takes."""
    tokenizer = Slow()

    def asking(text: str) -> dict[str, Any]:
        if "chat" in path:
            return {"max_tokens": 2, "messages": [{"role": "user", "content": text}]}
        return {"max_tokens": 2, "prompt": text}

    async def main() -> None:
        async with fronts_of(honest, tokenizer=tokenizer) as url, aiohttp.ClientSession() as http:
            asks = asyncio.create_task(post(url + path, asking("AB")))
            await asyncio.to_thread(tokenizer.begun.wait, TIMEOUT_S)
            async with http.get(f"{url}/health") as response:
                assert response.status == 200
            tokenizer.go_on.set()
            status, answer = await asks
            assert (status, answer["usage"]["prompt_tokens"]) == (200, 2)
            status, answer = await post(url + path, asking("A" * (1 << 19)))
            field = "messages" if "chat" in path else "prompt"
            assert (status, answer["error"]["param"]) == (400, field)
            assert tokenizer.longest <= 1 << 16

    run(main())


BYTES = RequestLimits(vocab_size=256, max_model_len=10_000, slots=8, exact_seeds=True)


class Bytes(Letters):
    """A tokenizer of bytes, which counts the tokens that it decodes."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, token_ids: Any) -> str:
        self.decoded += len(token_ids)
        return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize("at_once", [False, True])
def test_an_answer_of_invalid_bytes_costs_no_more_than_another(at_once: bool) -> None:
    """Its text ends in a replacement character after each token."""
    count = 5_000
    tokens = [0xFF] * count
    pieces = [{"index": 0, "token_ids": [token]} for token in tokens]
    if at_once:
        pieces = [{"index": 0, "token_ids": tokens}]
    pieces[-1]["finish_reason"] = "length"
    answer = then(*({"choices": [each]} for each in pieces))
    tokenizer = Bytes()

    async def main() -> None:
        async with fronts_of(answer, limits=BYTES, tokenizer=tokenizer) as url:
            body = {"prompt": PROMPT, "max_tokens": count, "stop": ["never"]}
            streamed = joined(await events(f"{url}/v1/completions", body))
            assert streamed["token_ids"] == tokens
            assert streamed["text"] == "\N{REPLACEMENT CHARACTER}" * count
            assert tokenizer.decoded < 200 * count

    run(main())


def test_an_engine_can_not_send_a_prompt_elsewhere() -> None:
    """Redirects are not followed; the request goes to an engine that answers it."""
    got: list[str] = []

    async def other(request: web.Request) -> web.StreamResponse:
        got.append(await request.text())
        return await honest(request)

    async def main() -> None:
        routes = ("/inference/v1/generate", "/v1/chat/completions/render")
        async with generating(dict.fromkeys(routes, other)) as elsewhere:

            async def redirect(request: web.Request) -> web.StreamResponse:
                return web.Response(status=307, headers={"Location": elsewhere + request.path})

            e0 = dict.fromkeys(routes, redirect)
            async with fronts_of(e0, honest, tokenizer=Letters()) as url:
                asked: dict[str, Any] = {"max_tokens": 2}
                for _ in range(2):
                    done = await post(f"{url}/v1/completions", {"prompt": PROMPT, **asked})
                    assert done[0] == 200
                asked["messages"] = [{"role": "user", "content": "AB"}]
                assert (await post(f"{url}/v1/chat/completions", asked))[0] == 200
        assert not got

    run(main())


@pytest.mark.parametrize("status", [400, 500])
def test_an_engine_s_error_may_have_no_end(status: int) -> None:
    """A part of it is read; if the request is not to blame, another engine is asked."""
    ended = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 65536)
        finally:
            ended.set()

    async def main() -> None:
        async with fronts_of(endless, honest) as url:
            body = {"prompt": PROMPT, "max_tokens": 2}
            done = await post(f"{url}/v1/completions", body)
            assert done[0] == (400 if status == 400 else 200)
            assert len(str(done[1])) < 1 << 17
            await ended.wait()

    run(main())


CHAT = "/v1/chat/completions"
EOS = 2


def renders(reasons: bool = False, parts: bool = True) -> dict[str, Any]:
    """An engine that renders and decodes messages as vLLM does, before its chat: a letter for each
    token. What comes before ``|`` is reasoning if it ``reasons``; it may know no ``parts``."""
    asked: list[tuple[str, dict[str, Any]]] = []

    async def render(request: web.Request) -> web.StreamResponse:
        asked.append(("render", await request.json()))
        sampling: dict[str, Any] = {"max_tokens": 5, "skip_special_tokens": True}
        if asked[-1][1].get("response_format"):
            sampling["structured_outputs"] = {"json_object": True, "_backend": None}
        kwargs: Any = {"chat_template_kwargs": {}} if reasons else None
        rendered = {"token_ids": PROMPT, "sampling_params": sampling}
        return web.json_response({**rendered, "reasoning_parser_kwargs": kwargs})

    def split(text: str) -> dict[str, str]:
        thought, _, content = text.partition("|")
        return {"reasoning": thought, "content": content} if reasons else {"content": text}

    def message(text: str, before: str = "") -> dict[str, Any]:
        old, new = split(before), split(before + text)
        return {"role": "assistant", **{n: new[n][len(old[n]) :] or None for n in new}}

    def text_of(choice: dict[str, Any]) -> str:
        assert EOS not in choice["token_ids"], "the token that ended the answer"
        return "".join(map(chr, choice["token_ids"]))

    def names(choice: dict[str, Any]) -> Any:
        given = choice.get("logprobs")
        if given is None:
            return None
        tokens = [f"<{each['token_id']}>" for each in given["content"]]
        values = [each["logprob"] for each in given["content"]]
        if not reasons:
            return {
                "tokens": tokens,
                "token_logprobs": values,
                "top_logprobs": [None] * len(tokens),
            }
        pairs = zip(tokens, values, strict=True)
        return {"content": [{"token": t, "logprob": v, "bytes": [1]} for t, v in pairs]}

    async def derender(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append(("derender", body))
        assert ("chat_request" in body) == reasons
        if body.get("stream"):
            if not parts:
                return web.json_response({"error": {"message": "no"}}, status=400)
            (choice,) = body["generate_chunk"]["choices"]
            before, text = body["stream_state"] or "", text_of(choice)
            made = {"delta": message(text, before)} if reasons else {"text": text}
            chunk = {"choices": [{**made, "logprobs": names(choice)}]}
            return web.json_response({"chunk": chunk, "stream_state": before + text})
        given = body["generate_response"] if reasons else body["generate_responses"][0]
        whole = [
            {
                "index": at,
                **({"message": message(text_of(c))} if reasons else {"text": text_of(c)}),
                "logprobs": names(c),
            }
            for at, c in enumerate(given["choices"])
        ]
        return web.json_response({"choices": whole})

    routes: dict[str, Any] = {f"{CHAT}/render": render, "asked": asked}
    return routes | {f"{CHAT if reasons else '/v1/completions'}/derender": derender}


def saying(text: str, finish: str = "stop") -> Any:
    """An answer of these letters, and of the end of the sequence."""
    tokens = [*map(ord, text), *([EOS] if finish == "stop" else [])]
    content = [{"token_id": t, "logprob": -1.0, "top_logprobs": []} for t in tokens]
    pieces = [
        {"index": 0, "token_ids": [t], "logprobs": {"content": [c]}}
        for t, c in zip(tokens, content, strict=True)
    ]
    pieces[-1]["finish_reason"] = finish
    return then(*({"choices": [each]} for each in pieces))


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("parts", [True, False])
def test_chat_comes_in_parts_and_ends_before_its_last_token(reasons: bool, parts: bool) -> None:
    """If an engine knows no parts, what is left of the message comes at the end."""
    text = "because|it is so" if reasons else "it is so"
    engine = renders(reasons, parts)
    engine["/inference/v1/generate"] = saying(text)
    asked = engine.pop("asked")
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "logprobs": True}

    async def main() -> None:
        async with fronts_of(engine, limits=BYTES) as url:
            status, answer = await post(url + CHAT, body)
            assert status == 200, answer
            (choice,) = answer["choices"]
            assert choice["message"]["content"] == "it is so"
            assert choice["message"].get("reasoning") == ("because" if reasons else None)
            assert choice["token_ids"] == [*map(ord, text), EOS]
            named = [each["token"] for each in choice["logprobs"]["content"]]
            assert named == [f"<{token}>" for token in choice["token_ids"]]
            asked.clear()
            streamed = await events(url + CHAT, body)
            deltas = [c["delta"] for event in streamed for c in event["choices"]]
            said = {
                name: "".join(each.get(name) or "" for each in deltas)
                for name in ("content", "reasoning")
            }
            assert said == {"content": "it is so", "reasoning": "because" * reasons}
            assert joined(streamed)["token_ids"] == choice["token_ids"]
            whole = [kind for kind, sent in asked if kind == "derender" and "stream" not in sent]
            assert len(whole) == (not parts), "a message that came in parts is made again"

    run(main())


def test_a_stream_of_chat_waits_for_no_end() -> None:
    """Its first words come while the answer goes on."""
    go_on = asyncio.Event()

    async def halting(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token, finish in ((65, None), (66, "length")):
            piece = {"index": 0, "token_ids": [token], "finish_reason": finish}
            await response.write(f"data: {json.dumps({'choices': [piece]})}\n\n".encode())
            await go_on.wait()
        return response

    async def main() -> None:
        for reasons in (False, True):
            go_on.clear()
            engine = renders(reasons)
            engine["/inference/v1/generate"] = halting
            del engine["asked"]
            body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
            async with (
                fronts_of(engine) as url,
                aiohttp.ClientSession() as http,
                http.post(url + CHAT, json=body) as response,
            ):
                first = json.loads((await response.content.readline())[6:])
                (choice,) = first["choices"]
                assert "A" in (choice["delta"].get("content"), choice["delta"].get("reasoning"))
                go_on.set()
                assert (await response.content.read()).endswith(b"data: [DONE]\n\n")

    run(main())


def test_an_adapter_that_one_engine_lacks_is_asked_of_another() -> None:
    """As after that engine's restart. 404 is for what no engine has; routes that change are new."""
    asked_of: list[str] = []

    def serving(name: str, models: set[str]) -> dict[str, Any]:
        async def serve(request: web.Request) -> web.StreamResponse:
            asked_of.append(name)
            model = json.loads(await request.read()).get("model")
            if model in models:
                if request.path == "/inference/v1/generate":
                    return await honest(request)
                rendered = {"token_ids": PROMPT, "sampling_params": {}, "model": model}
                return web.json_response(rendered | {"reasoning_parser_kwargs": None})
            error = {"message": f"The model `{model}` does not exist.", "code": 404}
            return web.json_response({"error": error}, status=404)

        return dict.fromkeys(("/inference/v1/generate", CHAT + "/render"), serve)

    engines = serving("e0", {"base"}), serving("e1", {"base", "tuned"})

    async def main() -> None:
        async with clients_of(*engines, unavailable_s=60.0, tokenizer=Letters()) as client:
            for _ in range(6):
                done = await client.generate(PROMPT, {"max_tokens": 2}, model="tuned")
                assert done.choices[0].token_ids == (78, 79)
            assert asked_of.count("e0") <= 1
            assert set(asked_of[1:]) == {"e1"}
            client._pool.refused_models.clear()
            messages = [{"role": "user", "content": "AB"}]
            for _ in range(6):
                chat = await client.chat(messages, sampling_params={"max_tokens": 2}, model="tuned")
                assert chat.choices[0].token_ids == (78, 79)
            asked_of.clear()
            with pytest.raises(UnknownModel, match="does not exist"):
                await client.generate(PROMPT, {"max_tokens": 2}, model="nobody's")
            assert sorted(asked_of) == ["e0", "e1"]
            await client.generate(PROMPT, {"max_tokens": 2}, model="base")

    run(main())


def test_an_adapter_is_not_given_up_while_the_engine_that_has_it_fails() -> None:
    async def lacks(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no such model"}}, status=404)

    deaths: list[int] = []

    async def fails_once(request: web.Request) -> web.StreamResponse:
        if not deaths:
            deaths.append(1)
            return web.json_response({"error": {"message": "died"}}, status=500)
        return await honest(request)

    async def main() -> None:
        async with clients_of(lacks, fails_once) as client:
            for _ in range(3):
                done = await client.generate(PROMPT, {"max_tokens": 2}, model="tuned")
                assert done.choices[0].token_ids == (78, 79)
        assert deaths

    run(main())


def test_content_parts_reach_a_template_as_text() -> None:
    """What is no text, and what would choose another template, is refused."""

    async def main() -> None:
        async with fronts_of(honest, tokenizer=Letters()) as url:
            texts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
            body = {"max_tokens": 2, "messages": [{"role": "user", "content": texts}]}
            status, answer = await post(url + CHAT, body | {"return_token_ids": True})
            assert (status, answer["prompt_token_ids"]) == (200, [65, 10, 66])
            body["messages"] = [{"role": "user", "content": [*texts, image]}]
            status, answer = await post(url + CHAT, body)
            assert (status, answer["error"]["param"]) == (400, "messages")
            assert "image_url" in answer["error"]["message"]
            body["messages"] = [{"role": "user", "content": "A"}]
            for options in ({"chat_template": "{{ 1 }}"}, {"tokenize": False}):
                fields = {"chat_template_kwargs": options}
                status, answer = await post(url + CHAT, body | fields)
                name = f"chat_template_kwargs.{min(options)}"
                assert (status, answer["error"]["param"]) == (400, name)

    run(main())
