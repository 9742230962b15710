"""Clients of OpenAI's API use the gateway as they use one vLLM: its own client, and an agent."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from bus._cli.options import Keys
from sidecar import Sidecar
from sidecar._supervision.server import SupervisedServer
from sidecar._vllm.connection_http import HttpConnection
from sidecar._vllm.engine import VllmAdapter
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.letters import letters, write_letters
from tests.vllm._vllm import boot_environment, require_vllm
from trainer_agent import TrainerAgent
from trainer_agent._gateway.server import serve
from trainer_agent._rollouts.text import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

require_vllm()
openai = pytest.importorskip("openai")
smolagents = pytest.importorskip("smolagents")
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]

LIMIT_S = 600.0
MAX_POSITIONS = 16_384  # an agent's instructions have thousands of characters
PROMPT = letters("hello")
MESSAGES = [{"role": "user", "content": "hi"}]
PLAIN: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "max_tokens": 8}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
# What JSON is made of comes before anything else that a grammar allows, so that it ends soon.
ENDS_SOON = {str(ord(each)): bias for each, bias in zip('}]{":', range(100, 50, -10), strict=True)}
ENDS_SOON["2"] = 110  # the end, where the grammar allows it
A_LOT = {"max_tokens": 120, "logit_bias": ENDS_SOON}

# Each is asked of the gateway and of an engine. Every parameter of the client is here.
CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2, "temperature": 1.0, "seed": 5},
    {"frequency_penalty": 1.0, "presence_penalty": -1.0, "top_p": 0.5},
    {"logit_bias": {"65": 100}},
    {"logit_bias": {"65": "x"}},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"logprobs": True, "top_logprobs": 0},
    {"logprobs": False, "top_logprobs": 0},
    {"logprobs": False},
    {"top_logprobs": 2},
    {"logprobs": True, "top_logprobs": -1},
    {"logprobs": True, "top_logprobs": 5000},
    {"max_completion_tokens": 3},
    {"max_tokens": None, "max_completion_tokens": 3},
    {"max_completion_tokens": 3, "max_tokens": 5},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 10**6},
    {"stop": "x"},
    {"stop": ["x", "y"]},
    {"stop": []},
    {"stop": [""]},
    {"stop": "".join(map(chr, range(32, 127)))},
    {"n": 0},
    {"n": -1},
    {"n": 10_000},
    {"temperature": -1.0},
    {"temperature": 3.0},
    {"top_p": None, "n": None, "stop": None, "seed": 3},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"frequency_penalty": 3.0},
    {"seed": "x"},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}, **A_LOT},
    {"response_format": FORMAT, **A_LOT},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "yaml"}},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "required", **A_LOT},
    {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        **A_LOT,
    },
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    {"tool_choice": "required"},
    {"tools": []},
    {"tools": [{"type": "function"}]},
    {"tools": [TOOL], "parallel_tool_calls": True},
    {"reasoning_effort": "low"},
    {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    {"safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
    {"modalities": ["text"]},
    {"prediction": {"type": "content", "content": "x"}},
    {"messages": []},
    {"messages": [{"role": "user"}]},
    {"messages": [{"content": "hi"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    {"messages": [{"role": "developer", "content": "x"}, *MESSAGES]},
    {"messages": "hi"},
    {"model": "other"},
]
# The parameters by which OpenAI asks for what no vLLM does: vLLM passes them over, the gateway
# names them.
REFUSED: list[dict[str, Any]] = [
    {"audio": {"format": "wav", "voice": "x"}},
    {"modalities": ["text", "audio"]},
    {"web_search_options": {}},
    {"functions": [{"name": "f"}]},
    {"moderation": {"model": "x"}},
    {"verbosity": "low"},
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"prompt": "hello"},
    {"prompt": ["hello", "you"]},
    {"prompt": [PROMPT, PROMPT[:2]]},
    {"prompt": ""},
    {"prompt": []},
    {"n": 2, "temperature": 1.0, "seed": 5},
    {"best_of": 1},
    {"echo": True},
    {"echo": False},
    {"echo": True, "logprobs": 2},
    {"logprobs": 0},
    {"logprobs": 3},
    {"logprobs": 5000},
    {"logprobs": -1},
    {"logit_bias": {"65": 100}},
    {"max_tokens": None},
    {"max_tokens": 0},
    {"max_tokens": 10**6},
    {"stop": "x"},
    {"suffix": "x"},
    {"frequency_penalty": 1.0, "presence_penalty": -1.0, "top_p": 0.5},
    {"user": "u"},
    {"temperature": -1.0},
    {"model": "other"},
]


# vLLM names another field than the client has sent.
RENAMED = {("logprobs", "top_logprobs")}


def comparable(got: Any, expected: Any) -> Any:
    """The gateway's answer as vLLM may say it: vLLM does not name each wrong field, and it finds
    some errors after a stream has begun."""
    if got[0] != "BadRequestError":
        return got
    if expected == ("in the stream", "APIError"):
        return expected
    if expected[0] == got[0] and got[1] is not None:
        named = expected[1] and expected[1].removeprefix("body.")
        is_same = named is None or named.partition(".")[0] == got[1].partition(".")[0]
        if is_same or (named, got[1]) in RENAMED:
            return expected
    return got


class Served:
    """Two engines and a gateway before them."""

    def __init__(self, runner: asyncio.Runner, weights: dict[str, Tensor]) -> None:
        self.runner = runner
        self.weights = weights
        self.broker = self.url = self.direct = ""

    def run(self, work: Any) -> Any:
        return self.runner.run(asyncio.wait_for(work, LIMIT_S))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("openai")
    checkpoint = make_checkpoint(folder / "model", seed=1, max_positions=MAX_POSITIONS)
    write_letters(checkpoint.folder)
    with asyncio.Runner() as runner:
        tested = Served(runner, dict(checkpoint.weights))
        stack = AsyncExitStack()
        try:
            tested.run(boot(tested, stack, folder))
            yield tested
        finally:
            tested.run(stack.aclose())


async def boot(tested: Served, stack: AsyncExitStack, folder: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415 - after require_vllm

    model = folder / "model"
    environment = os.environ | boot_environment(folder / "boot")
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"),
        *("--max-model-len", str(MAX_POSITIONS)),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]
    _, tested.broker = await stack.enter_async_context(a_broker())
    servers = [SupervisedServer(argv, env=environment) for _ in range(2)]
    sidecars = [
        Sidecar(
            VllmAdapter(HttpConnection(server=server)),
            broker=tested.broker,
            group="policy",
            name=f"e{index}",
        )
        for index, server in enumerate(servers)
    ]
    for sidecar in sidecars:
        await stack.enter_async_context(sidecar)
    await asyncio.gather(*(sidecar.joined() for sidecar in sidecars))
    tested.direct = servers[0].base_url
    tokenizer = HfTokenizer(AutoTokenizer.from_pretrained(model))
    tested.url = await stack.enter_async_context(
        serve(
            tested.broker,
            "policy",
            "127.0.0.1",
            0,
            keys=Keys(None, None, insecure=False),
            tokenizer=tokenizer,
            silence_s=60.0,
        )
    )


def shown(answer: Any) -> Any:
    """What the answers of a gateway and of an engine must have in common."""
    choices = []
    for each in sorted(answer.choices, key=lambda each: int(each.index)):
        message = getattr(each, "message", None)
        said = each.text if message is None else (message.role, message.content or "")
        calls = [c.function.model_dump() for c in getattr(message, "tool_calls", None) or ()]
        logprobs = each.logprobs.model_dump() if each.logprobs else {}
        if message is None:
            names = [logprobs.get(name) for name in ("tokens", "text_offset")]
        else:
            names = [
                (one["token"], one["bytes"], [top["token"] for top in one["top_logprobs"]])
                for one in logprobs.get("content") or ()
            ]
        choices.append((each.index, said, calls, each.finish_reason, names))
    used = answer.usage
    return answer.object, choices, (used.prompt_tokens, used.completion_tokens)


async def answered(create: Any, fields: dict[str, Any]) -> Any:
    """The answer, or the class of the error with the parameter that it names."""
    try:
        return shown(await create(**fields))
    except openai.APIStatusError as error:
        return type(error).__name__, error.param


async def streamed(create: Any, fields: dict[str, Any]) -> Any:
    """The texts and the ends of a stream, and its usage."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    calls: dict[int, str] = {}
    usage = None
    try:
        async for event in await create(
            **fields,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = event.usage or usage
            for each in event.choices:
                delta = getattr(each, "delta", None)
                text = each.text if delta is None else delta.content
                texts[each.index] = texts.get(each.index, "") + (text or "")
                for call in getattr(delta, "tool_calls", None) or ():
                    parts = (call.function.name or "") + (call.function.arguments or "")
                    calls[call.index] = calls.get(call.index, "") + parts
                if each.finish_reason:
                    ends[each.index] = each.finish_reason
    except openai.APIStatusError as error:
        return type(error).__name__, error.param
    except openai.APIError as error:
        return "in the stream", type(error).__name__
    assert usage is not None
    return dict(sorted(texts.items())), dict(sorted(ends.items())), calls, usage.completion_tokens


def test_each_parameter_does_what_it_does_in_one_vllm(served: Served) -> None:
    """Or it is refused, by its name. All of the client's parameters are asked for."""
    differ: list[Any] = []

    async def compare(mine: Any, theirs: Any, asked: dict[str, Any], only_whole: bool) -> None:
        for how in (answered, streamed):
            got, expected = await how(mine, asked), await how(theirs, asked)
            if only_whole and how is streamed:
                expected = "BadRequestError", "echo"
            if comparable(got, expected) != expected:
                differ.append((how.__name__, asked, got, expected))

    async def main() -> None:
        async with client(served.url) as ours, client(served.direct) as one:
            for fields in CHATS:
                pair = ours.chat.completions.create, one.chat.completions.create
                await compare(*pair, {**PLAIN, "messages": MESSAGES, **fields}, only_whole=False)
            for fields in COMPLETIONS:
                pair = ours.completions.create, one.completions.create
                only_whole = fields.get("echo", False)
                await compare(*pair, {**PLAIN, "prompt": PROMPT, **fields}, only_whole=only_whole)
            for fields in REFUSED:
                asked = {**PLAIN, "messages": MESSAGES, **fields}
                got = await answered(ours.chat.completions.create, asked)
                assert got == ("BadRequestError", min(fields))

    served.run(main())
    assert not differ, "\n".join(map(str, differ))


def client(url: str, **options: Any) -> Any:
    """OpenAI's client, which repeats nothing."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", **{"api_key": "-", "max_retries": 0, **options})


def test_models_errors_and_timeouts_are_those_of_the_client(served: Served) -> None:
    async def main() -> None:
        async with client(served.url) as ask, client(served.url, timeout=0.01) as hasty:
            assert [each.id async for each in ask.models.list()] == ["tiny"]
            assert (await ask.models.retrieve("tiny")).object == "model"
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await ask.models.retrieve("other")
            with pytest.raises(openai.NotFoundError, match="use /v1/chat/completions"):
                await ask.responses.create(model="tiny", input="hi")
            with pytest.raises(openai.NotFoundError, match="embedding model"):
                await ask.embeddings.create(model="tiny", input="hi")
            with pytest.raises(openai.APITimeoutError):
                await hasty.chat.completions.create(
                    model="tiny", messages=MESSAGES, max_tokens=4000
                )

    served.run(main())


TOOL_STEPS = 2
AGENTS = 3


def test_an_agent_calls_its_tools_while_weights_are_updated(served: Served) -> None:
    """smolagents as it is: its model class streams tool calls, and reads whole answers."""
    from smolagents import (  # noqa: PLC0415 - after importorskip
        ActionStep,
        OpenAIModel,
        Tool,
        ToolCallingAgent,
    )

    class Roll(Tool):  # type: ignore[misc]
        name = "roll"
        description = "Rolls a die."
        inputs: dict[str, Any] = {}  # noqa: RUF012 - as its base class has it
        output_type = "integer"
        rolled = 0

        def forward(self) -> int:
            type(self).rolled += 1
            return 6

    def work(number: int) -> list[Any]:
        """The steps of an agent: calls of a tool, and an answer after the last one."""
        model = OpenAIModel(
            "tiny",
            api_base=f"{served.url}/v1",
            api_key="-",
            client_kwargs={"max_retries": 0},
            max_tokens=120,
            # The name of the tool comes before that of the other one, which ends the run.
            logit_bias={**ENDS_SOON, str(ord("r")): 40},
        )
        agent = ToolCallingAgent(
            [Roll()], model, max_steps=TOOL_STEPS, stream_outputs=number % 2 == 0, verbosity_level=0
        )
        return [
            each for each in agent.run("Roll a die.", stream=True) if isinstance(each, ActionStep)
        ]

    async def main() -> None:
        updates = 0
        async with TrainerAgent(served.broker) as trainer:
            await trainer.wait_for_engines(2)
            under_way = asyncio.gather(*(asyncio.to_thread(work, each) for each in range(AGENTS)))
            while not under_way.done():
                updates += 1
                await trainer.update_weights(perturbed(served.weights, updates))
            await trainer.update_weights(served.weights)
        for steps in await under_way:
            errors = [each.error for each in steps if each.error]
            assert all("max steps" in str(each) for each in errors), errors
            calls = [call.name for each in steps for call in each.tool_calls or ()]
            assert calls.count("roll") >= TOOL_STEPS, calls
        assert updates > 1

    served.run(main())
    assert Roll.rolled >= AGENTS * TOOL_STEPS
