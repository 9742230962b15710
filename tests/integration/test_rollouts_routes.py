"""Routes of the front that generate nothing: answers of engines, alone and together."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from aiohttp import web

from tests.integration.test_rollouts import clients_of, honest
from tests.integration.test_rollouts_front import Letters, fronts_of, post, run
from trainer_agent._rollouts.front import serve

METRICS = "# TYPE made counter\nmade %d\n# TYPE free gauge\nfree %d\n"


def answers(value: Any) -> Any:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=value) if isinstance(value, str) else web.json_response(value)

    return answer


async def dies(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def get(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        is_json = response.content_type == "application/json"
        return response.status, await (response.json() if is_json else response.text())


def serving(**routes: Any) -> dict[str, Any]:
    paths = {"/" + name: answers(value) for name, value in routes.items()}
    return {"/inference/v1/generate": honest, **paths}


def test_loads_and_metrics_are_those_of_all_engines() -> None:
    """One that does not answer is left out."""

    async def main() -> None:
        e0 = serving(load={"server_load": 2}, metrics=METRICS % (5, 1))
        e1 = serving(load={"server_load": 3}, metrics=METRICS % (6, 2))
        e2 = {"/inference/v1/generate": honest, "/load": dies, "/metrics": dies}
        async with (
            clients_of(e0, e1, e2) as client,
            serve(client, "127.0.0.1", 0) as url,
        ):
            while len(client.engines) < 3:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
            assert await get(f"{url}/load") == (200, {"server_load": 5})
            status, text = await get(f"{url}/metrics")
            assert (status, text.splitlines()) == (
                200,
                [
                    *("# TYPE made counter", "made 11.0", "# TYPE free gauge"),
                    *('free{wavebus_engine="e0"} 1.0', 'free{wavebus_engine="e1"} 2.0'),
                ],
            )

    run(main())


def test_an_engine_answers_what_the_front_does_not_know() -> None:
    config: dict[str, Any] = {
        "model_config": {"dtype": "torch.bfloat16", "hf_token": "x"},
        "lora_config": None,
    }
    info = {"vllm_config": config, "vllm_env": {"VLLM_API_KEY": "x"}, "system_env": {"a": 1}}
    asked: list[Any] = []

    async def tokenize(request: web.Request) -> web.Response:
        asked.append(await request.json())
        text = asked[-1].get("prompt") or asked[-1]["messages"][0]["content"]
        tokens = [ord(each) for each in text]
        return web.json_response({"count": len(tokens), "tokens": tokens, "max_model_len": 9})

    async def main() -> None:
        e0 = serving(version={"version": "0.32.0"}, server_info=info, detokenize={"prompt": "AB"})
        e0 |= {"/tokenize": tokenize, "/v1/chat/completions/render": answers({"token_ids": [1]})}
        async with fronts_of(e0) as url:
            assert await get(f"{url}/version") == (200, {"version": "0.32.0"})
            status, told = await get(f"{url}/server_info?config_format=json")
            kept = {"model_config": {"dtype": "torch.bfloat16"}, "lora_config": None}
            assert (status, told["vllm_config"]) == (200, kept)
            assert told["vllm_env"] == told["system_env"] == {}
            assert (await get(f"{url}/server_info?config_format=x"))[0] == 400
            messages = [{"role": "user", "content": "C"}]
            asking: list[tuple[dict[str, Any], list[int]]]
            asking = [({"prompt": "AB"}, [65, 66]), ({"messages": messages}, [67])]
            for body, tokens in asking:
                status, told = await post(f"{url}/tokenize", body)
                assert (status, told["tokens"], asked[-1]) == (200, tokens, body)
            assert await post(f"{url}/detokenize", {"tokens": [65]}) == (200, {"prompt": "AB"})
            status, told = await post(f"{url}/v1/chat/completions/render", {"messages": messages})
            assert (status, told) == (200, {"token_ids": [1]})
            body = {"prompt": "AB", "max_tokens": 2, "return_token_ids": True}
            status, told = await post(f"{url}/v1/completions", body)
            (choice,) = told["choices"]
            assert (choice["prompt_token_ids"], choice["token_ids"]) == ([65, 66], [67, 68])

    run(main())


def test_the_fronts_tokenizer_comes_before_engines() -> None:
    async def main() -> None:
        async with fronts_of(honest, tokenizer=Letters()) as url:
            status, told = await post(f"{url}/tokenize", {"prompt": "AB", "model": "m"})
            assert (status, told["tokens"], told["count"]) == (200, [65, 66], 2)
            assert told["max_model_len"] > 0
            assert await post(f"{url}/detokenize", {"tokens": [65]}) == (200, {"prompt": "A"})
            for path, body, field in (
                ("tokenize", {"prompt": 5}, "prompt"),
                ("detokenize", {"tokens": "x"}, "tokens"),
                ("detokenize", {"tokens": [-1]}, "tokens"),
                ("detokenize", {"tokens": [1], "x": 1}, "x"),
            ):
                status, told = await post(f"{url}/{path}", body)
                assert (status, told["error"]["param"]) == (400, field), told

    run(main())


def test_a_route_that_no_engine_has_is_not_found() -> None:
    async def main() -> None:
        async with fronts_of(honest) as url:
            for path in ("version", "server_info"):
                assert (await get(f"{url}/{path}"))[0] == 404
            for path in ("tokenize", "detokenize", "v1/chat/completions/render"):
                assert (await post(f"{url}/{path}", {}))[0] == 404

    run(main())


def test_a_session_ends_when_its_client_says_so() -> None:
    async def main() -> None:
        async with (
            clients_of(honest) as client,
            serve(client, "127.0.0.1", 0) as url,
            aiohttp.ClientSession() as http,
        ):
            body = {"token_ids": [5], "sampling_params": {"max_tokens": 1}, "session_id": "s"}
            assert (await post(f"{url}/inference/v1/generate", body))[0] == 200
            ended: list[str] = []
            client._pool.router.finish_session = ended.append  # type: ignore[assignment,method-assign]
            async with http.post(f"{url}/finish_session?session_id=s") as response:
                assert (response.status, ended) == (200, ["s"])
            async with http.post(f"{url}/finish_session") as response:
                assert response.status == 400

    run(main())
