"""Chat by a served vLLM's render and derender routes, also for OpenAI's own client."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from bus.errors import UsageError
from sidecar import Sidecar
from sidecar._supervision.server import SupervisedServer
from sidecar._vllm.connection_http import HttpConnection
from sidecar._vllm.engine import VllmAdapter
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint
from tests.support.letters import letters, write_letters
from tests.vllm._vllm import boot_environment, require_vllm
from trainer_agent._rollouts.client import RolloutClient
from trainer_agent._rollouts.front import serve

if TYPE_CHECKING:
    from pathlib import Path

require_vllm()
openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]

LIMIT_S = 600.0
MAX_POSITIONS = 256
MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = letters("u:hi\na:")
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
THINK_END = chr(4)  # the parser takes what comes before it as reasoning, or all without it
GREEDY = {"temperature": 0.0, "max_tokens": 8}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# Of vLLM's own chat, the front's messages are the same; those that end do so by the token 2.
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.0, "tools": [TOOL]},
    {"temperature": 0.0, "response_format": {"type": "json_object"}},
    {
        "temperature": 0.0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    {
        "temperature": 0.0,
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "user": "u",
    },
    {"extra_body": {"allowed_token_ids": [2]}},
    {"extra_body": {"allowed_token_ids": [2]}, "tools": [TOOL]},
    {"extra_body": {"allowed_token_ids": [65], "stop_token_ids": [65]}},
    *({"seed": seed, "logit_bias": {"65": 50, "66": 50, "4": 49, "2": 49}} for seed in range(4)),
]


@pytest.mark.parametrize("reasons", [True, False])
def test_chat_by_the_routes_of_a_server(reasons: bool, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", seed=1)
    write_letters(checkpoint.folder)
    environment = os.environ | boot_environment(tmp_path / "boot")
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(checkpoint.folder), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"),
        *("--max-model-len", str(MAX_POSITIONS)),
        *(("--reasoning-parser", "deepseek_r1") if reasons else ()),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]

    async def main() -> None:
        async with a_broker() as (_, address):
            server = SupervisedServer(argv, env=environment)
            sidecar = Sidecar(
                VllmAdapter(HttpConnection(server=server)),
                broker=address,
                group="policy",
                name="e0",
            )
            async with sidecar:
                await sidecar.joined()
                async with RolloutClient(address) as client:
                    if reasons:
                        await of_the_client(client)
                    async with (
                        serve(client, "127.0.0.1", 0) as url,
                        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as ask,
                        openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="-") as direct,
                    ):
                        await of_openai(ask, reasons)
                        for fields in ASKED:
                            await as_vllm(ask, direct, fields)
                        if not reasons:
                            await as_vllm_s_routes(url, server.base_url)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


# Requests that the front answers as the server itself.
POSTS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "hi"}),
    ("/tokenize", {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": PROMPT}),
    ("/v1/completions", {"prompt": "hi", **GREEDY}),
    ("/v1/completions", {"prompt": [PROMPT, PROMPT[:3]], **GREEDY, "n": 2, "prompt_logprobs": 3}),
    ("/v1/completions", {"prompt": "hi", **GREEDY, "echo": True}),
    ("/v1/completions", {"prompt": PROMPT, **GREEDY, "echo": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}),
    (
        "/inference/v1/generate",
        {
            "token_ids": PROMPT,
            "features": None,
            "sampling_params": {
                "temperature": 0.0,
                "max_tokens": 3,
                "prompt_logprobs": 2,
                "logprobs": 0,
                "skip_special_tokens": True,
                "output_kind": 2,
                "stop": None,
                "top_k": -1,
            },
        },
    ),
    ("/v1/completions", {"prompt": PROMPT, "logprobs": 5000}),
    ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 5000}),
    ("/tokenize", {"prompt": "hi", "model": "other"}),
]


def compared(value: Any) -> Any:
    """What the answers of the front and of the server must have in common."""
    if "error" in value:
        return value["error"]["code"]
    fields = ("tokens", "count", "token_strs", "prompt", "prompt_logprobs", "max_model_len")
    shown = {name: value.get(name) for name in fields}
    for at, choice in enumerate(value.get("choices", ())):
        for name in ("token_ids", "finish_reason", "prompt_token_ids", "prompt_logprobs", "text"):
            shown[f"{at}.{name}"] = choice.get(name)
        logprobs = choice.get("logprobs") or {}
        for name in ("token_logprobs", "tokens", "top_logprobs", "text_offset"):
            shown[f"{at}.{name}"] = logprobs.get(name)
    return {name: each for name, each in shown.items() if each is not None}


async def as_vllm_s_routes(url: str, direct: str) -> None:
    """The front has no tokenizer: engines make tokens and texts."""
    async with aiohttp.ClientSession() as http:
        for path, body in POSTS:
            told = []
            for base in (url, direct):
                async with http.post(base + path, json=body) as response:
                    told.append((response.status, compared(await response.json())))
            (status, mine), (expected, other) = told
            assert status == expected, (path, body)
            if isinstance(other, dict):  # what the server says, the front says, too
                mine = {name: mine[name] for name in other}
            assert mine == other, (path, body)
        for path in ("/version", "/server_info?config_format=json"):
            async with http.get(url + path) as ours, http.get(direct + path) as theirs:
                mine, other = await ours.json(), await theirs.json()
                assert mine.keys() == other.keys()
                if "vllm_config" in mine:
                    dtype = mine["vllm_config"]["model_config"]["dtype"]
                    assert dtype == other["vllm_config"]["model_config"]["dtype"]
                else:
                    assert mine == other
        async with http.get(f"{url}/load") as response:
            assert (await response.json()).keys() == {"server_load"}
        async with http.get(f"{url}/metrics") as ours, http.get(f"{direct}/metrics") as theirs:
            mine, other = await ours.text(), await theirs.text()
        name = "vllm:generation_tokens_total{"
        summed, own = (
            [x for x in text.splitlines() if x.startswith(name)] for text in (mine, other)
        )
        assert [each.split()[-1] for each in summed] == [each.split()[-1] for each in own] != []
        assert 'wavebus_engine="e0"' in mine


async def of_the_client(client: RolloutClient) -> None:
    drawn = GREEDY | {"n": 2, "temperature": 1.0, "seed": 7}
    done = await client.chat(MESSAGES, sampling_params=drawn)
    twin = await client.generate(PROMPT, drawn)
    assert list(done.prompt_token_ids) == PROMPT
    assert [c.token_ids for c in done.choices] == [c.token_ids for c in twin.choices]
    for choice, message in zip(done.choices, done.messages, strict=True):
        reasoning, _, content = "".join(map(chr, choice.token_ids)).partition(THINK_END)
        assert (message["reasoning"], message["content"]) == (reasoning, content or None)
    with_tool = await client.chat(MESSAGES, [TOOL], GREEDY)
    assert list(with_tool.prompt_token_ids) == letters("u:hi\nt:1\na:")
    long = await client.chat(MESSAGES, sampling_params={"temperature": 0.0, "ignore_eos": True})
    assert len(long.choices[0].token_ids) == MAX_POSITIONS - len(PROMPT)
    with pytest.raises(UsageError, match="maximum context length"):
        await client.chat([{"role": "user", "content": "x" * MAX_POSITIONS}])
    with pytest.raises(UsageError, match="does not exist"):
        await client.chat(MESSAGES, model="other")


def said(message: Any) -> tuple[str, str, list[Any]]:
    calls = [each.function for each in message.tool_calls or ()]
    return message.content or "", getattr(message, "reasoning", None) or "", calls


async def as_vllm(ask: Any, direct: Any, fields: dict[str, Any]) -> None:
    """The front's message, whole or in parts, is that of vLLM's own chat."""
    fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, **fields}
    (own,) = (await direct.chat.completions.create(**fields)).choices
    (got,) = (await ask.chat.completions.create(**fields)).choices
    assert said(got.message) == said(own.message), fields
    assert got.finish_reason == own.finish_reason
    if own.logprobs is not None:
        for mine, theirs in zip(got.logprobs.content, own.logprobs.content, strict=True):
            assert (mine.token, mine.bytes) == (theirs.token, theirs.bytes)
            assert mine.top_logprobs == theirs.top_logprobs
    parts = [
        choice.delta
        async for piece in await ask.chat.completions.create(stream=True, **fields)
        for choice in piece.choices
    ]
    for name in ("content", "reasoning"):
        streamed = [text for part in parts if (text := getattr(part, name, None))]
        whole = getattr(own.message, name, None) or ""
        assert "".join(streamed) == whole, fields


async def of_openai(ask: Any, reasons: bool) -> None:
    assert [each.id async for each in ask.models.list()] == ["tiny"]
    assert (await ask.models.retrieve("tiny")).max_model_len == MAX_POSITIONS
    plain = {"model": "tiny", "temperature": 0.0, "max_tokens": 8}
    ids = {"return_token_ids": True}
    done = await ask.chat.completions.create(
        messages=MESSAGES, logprobs=True, extra_body=ids, **plain
    )
    (choice,) = done.choices
    assert choice.message.role == "assistant"
    assert len(choice.message.reasoning if reasons else choice.message.content) == 8
    assert [each.bytes for each in choice.logprobs.content] == [[t] for t in choice.token_ids]
    assert choice.weight_versions[-1]["end"] == 8
    assert (choice.finish_reason, done.usage.total_tokens) == ("length", len(PROMPT) + 8)
    assert done.prompt_token_ids == PROMPT
    pieces = [
        each
        async for each in await ask.chat.completions.create(
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=ids,
            **plain,
        )
    ]
    assert [t for p in pieces for c in p.choices for t in c.token_ids] == choice.token_ids
    assert pieces[0].prompt_token_ids == PROMPT
    assert pieces[-1].usage == done.usage
    text = await ask.completions.create(prompt=PROMPT, logprobs=0, extra_body=ids, **plain)
    assert text.choices[0].token_ids == choice.token_ids
    assert text.choices[0].prompt_token_ids == PROMPT
    assert len(text.choices[0].logprobs.token_logprobs) == 8
    streamed = await ask.completions.create(prompt=PROMPT, stream=True, **plain)
    assert [t async for p in streamed for t in p.choices[0].token_ids] == choice.token_ids
    shape = {"response_format": {"type": "json_object"}}
    written = await ask.completions.create(prompt=PROMPT, extra_body=shape, **plain)
    # With a parser of reasoning, vLLM applies the grammar to what comes after it.
    assert reasons or written.choices[0].token_ids[0] in letters("{ \t\n")
    for unknown in (
        ask.completions.create(prompt=PROMPT, **plain | {"model": "other"}),
        ask.chat.completions.create(messages=MESSAGES, **plain | {"model": "other"}),
        ask.models.retrieve("some/other"),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            await unknown
        assert "does not exist" in refused.value.message
    with pytest.raises(openai.BadRequestError) as wrong:
        await ask.chat.completions.create(
            messages=MESSAGES, top_logprobs=21, logprobs=True, **plain
        )
    assert wrong.value.param == "top_logprobs"
