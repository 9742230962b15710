"""Chat by a served vLLM's render and derender routes, also for OpenAI's own client."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from bus.errors import UsageError
from sidecar import Sidecar
from sidecar.supervision.server import SupervisedServer
from sidecar.vllm.connection_http import HttpConnection
from sidecar.vllm.engine import VllmAdapter
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint
from tests.support.letters import letters, write_letters
from tests.vllm._vllm import boot_environment, require_vllm
from trainer_agent.rollouts.client import RolloutClient
from trainer_agent.rollouts.front import serve

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


def test_chat_by_the_routes_of_a_server(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", seed=1)
    write_letters(checkpoint.folder)
    environment = os.environ | boot_environment(tmp_path / "boot")
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(checkpoint.folder), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"),
        *("--max-model-len", str(MAX_POSITIONS), "--reasoning-parser", "deepseek_r1"),
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
                    await of_the_client(client)
                    async with serve(client, "127.0.0.1", 0) as url:
                        await of_openai(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-"))

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


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


async def of_openai(ask: Any) -> None:
    async with ask:
        assert [each.id async for each in ask.models.list()] == ["tiny"]
        plain = {"model": "tiny", "temperature": 0.0, "max_tokens": 8}
        done = await ask.chat.completions.create(messages=MESSAGES, logprobs=True, **plain)
        (choice,) = done.choices
        assert choice.message.role == "assistant"
        assert len(choice.message.reasoning) == 8
        assert len(choice.logprobs.content) == 8
        assert choice.weight_versions[-1]["end"] == 8
        assert (choice.finish_reason, done.usage.total_tokens) == ("length", len(PROMPT) + 8)
        pieces = [
            each
            async for each in await ask.chat.completions.create(
                messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **plain
            )
        ]
        assert [t for p in pieces for c in p.choices for t in c.token_ids] == choice.token_ids
        assert pieces[-2].choices[0].delta.reasoning == choice.message.reasoning
        assert pieces[-1].usage == done.usage
        text = await ask.completions.create(prompt=PROMPT, logprobs=0, **plain)
        assert text.choices[0].token_ids == choice.token_ids
        assert len(text.choices[0].logprobs.token_logprobs) == 8
        streamed = await ask.completions.create(prompt=PROMPT, stream=True, **plain)
        assert [t async for p in streamed for t in p.choices[0].token_ids] == choice.token_ids
        with pytest.raises(openai.BadRequestError) as refused:
            await ask.chat.completions.create(messages=MESSAGES, top_logprobs=3, **plain)
        assert refused.value.param == "top_logprobs"
        with pytest.raises(openai.BadRequestError) as refused:
            await ask.completions.create(prompt=PROMPT, **plain | {"model": "other"})
        assert "does not exist" in refused.value.message
