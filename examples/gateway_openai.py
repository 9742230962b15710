"""OpenAI's client generates through the gateway while weights are updated and an engine is killed.

python examples/gateway_openai.py                   # a minute, two embedded engines
python examples/gateway_openai.py --seconds 600 --engines 4

It needs no GPU, but `wavebus[openai]`. It starts a broker, engines and `wavebus gateway`. The
client calls chat and completions, streamed and whole, and repeats no failed call. Meanwhile a
trainer sends new weights again and again, and one engine gets SIGKILL and is started again.

At the end every token is checked. Each answer must have exactly the tokens that were asked for, and
the text of these tokens. An engine reports the log-probability of each token and the version of the
weights that sampled it; the policy of that version must compute the same value from the tokens
before it. So a token that came twice, or was left out, shows as well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from bus.errors import WavebusError
from lab.demo.learner import Rollout
from lab.demo.oracle import judge
from lab.demo.policy import Policy, copy_of, make_policy, save_checkpoint
from lab.demo.processes import BROKER_TIMES, GROUP, Processes
from lab.network import PolicyConfig
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torch import Tensor

CHARACTERS = "\n abcdefghijklmno"[: PolicyConfig().vocab_size]  # one for each token
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
STEP_MS = "10"  # of an engine: an answer takes about half a second
STREAMS = 3  # of each kind of call
TOKENS = range(20, 60)  # of an answer
AGAIN_S = 0.2


class Calls:
    """Calls the gateway in four ways, and keeps what comes.

    Attributes:
        counts: how many calls of each kind have ended well.
        lost: the other ones, by their error.
        wrong: answers that are not whole, with the reason.
        rollouts: all answers, for the check of their tokens.
        open: how many calls are under way.
    """

    def __init__(self, url: str, seed: int) -> None:
        # A call that fails is lost: the client does not repeat it.
        self._model = ""
        self._client: Any = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
        self._chance = random.Random(seed)  # noqa: S311 - no secret
        self.counts: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.rollouts: list[Rollout] = []
        self.open = 0

    async def make(self, until: asyncio.Event) -> None:
        """Keep calls of all kinds under way, until they are to stop; none is given up."""
        kinds = itertools.product(("chat", "completions"), (True, False))
        works = [self._repeat(*kind, until) for kind in kinds for _ in range(STREAMS)]
        async with self._client:
            (model,) = (await self._client.models.list()).data
            self._model = model.id
            await asyncio.gather(*works)

    async def _repeat(self, kind: str, stream: bool, until: asyncio.Event) -> None:
        while not until.is_set():
            text = "".join(self._chance.choices(CHARACTERS[2:], k=8))
            count = self._chance.choice(TOKENS)
            self.open += 1
            try:
                answer = await self._call(kind, text, count, stream=stream)
                self._check(answer, count)
            except (openai.OpenAIError, WavebusError) as error:
                self.lost[f"{type(error).__name__}: {error}"] += 1
                await asyncio.sleep(AGAIN_S)
            else:
                self.counts[f"{kind}, {'streamed' if stream else 'whole'}"] += 1
            self.open -= 1

    async def _call(self, kind: str, text: str, count: int, *, stream: bool) -> dict[str, Any]:
        """The answer's only choice, and what is known of its prompt."""
        fields: dict[str, Any] = {"model": self._model, "max_tokens": count, "temperature": 1.0}
        fields["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
        create: Callable[..., Awaitable[Any]]
        if kind == "chat":
            create = partial(self._client.chat.completions.create, logprobs=True)
            fields["messages"] = [{"role": "user", "content": text}]
        else:
            create = partial(self._client.completions.create, logprobs=0)
            fields["prompt"] = text
        if not stream:
            answer = await create(**fields)
            (choice,) = answer.choices
            prompt = answer.prompt_token_ids if kind == "chat" else choice.prompt_token_ids
            said = choice.message.content if kind == "chat" else choice.text
            return self._found(kind, prompt, [choice], said, answer.usage)
        parts: list[Any] = []
        said, prompt, usage = "", [], None
        events = await create(**fields, stream=True, stream_options={"include_usage": True})
        async for event in events:
            usage = event.usage or usage
            prompt = getattr(event, "prompt_token_ids", None) or prompt
            for choice in event.choices:
                prompt = getattr(choice, "prompt_token_ids", None) or prompt
                said += (choice.delta.content if kind == "chat" else choice.text) or ""
                parts.append(choice)
        return self._found(kind, prompt, parts, said, usage)

    def _found(
        self, kind: str, prompt: list[int], parts: list[Any], said: str, usage: Any
    ) -> dict[str, Any]:
        logs: list[float] = []
        for part in parts:
            if part.logprobs and kind == "chat":
                logs += [each.logprob for each in part.logprobs.content]
            elif part.logprobs:
                logs += part.logprobs.token_logprobs
        spans = getattr(parts[-1], "weight_versions", ())
        return {
            "prompt": tuple(prompt),
            "tokens": tuple(token for part in parts for token in part.token_ids),
            "logprobs": tuple(logs),
            "said": said,
            "ends": [part.finish_reason for part in parts if part.finish_reason],
            "counted": usage.completion_tokens if usage else 0,
            "versions": tuple(s["version"] for s in spans for _ in range(s["start"], s["end"])),
        }

    def _check(self, answer: dict[str, Any], count: int) -> None:
        """Note what is not as it was asked for; the tokens themselves are checked at the end."""
        tokens = answer["tokens"]
        wrong = {
            "tokens": len(tokens) != count,
            "usage": answer["counted"] != count,
            "log-probabilities": len(answer["logprobs"]) != count,
            "versions": len(answer["versions"]) != count or None in answer["versions"],
            "text": answer["said"] != "".join(CHARACTERS[token] for token in tokens),
            "end": answer["ends"] != ["length"],
        }
        self.wrong.update(name for name, is_wrong in wrong.items() if is_wrong)
        if not any(wrong.values()):
            versions = tuple(map(int, answer["versions"]))
            given = answer["prompt"], tokens, answer["logprobs"], 0.0, versions
            self.rollouts.append(Rollout(*given))


class Trainer:
    """Sends new weights again and again.

    Attributes:
        weights: those of each version.
        updates: how many updates were committed, by how they were done.
        failed: the errors of the others; each was repeated with the same weights.
    """

    def __init__(self, agent: TrainerAgent, policy: Policy) -> None:
        self._agent = agent
        self._policy = policy
        self.weights: dict[int, dict[str, Tensor]] = {0: copy_of(policy)}
        self.updates: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    async def train(self, until: asyncio.Event) -> None:
        """Update the engines, until that is to stop."""
        while not until.is_set():
            with torch.no_grad():
                for weight in self._policy.parameters():
                    weight.add_(torch.randn_like(weight), alpha=0.02)
            await self.update()
            await asyncio.sleep(AGAIN_S)

    async def update(self) -> None:
        """Send the weights, until an update succeeds."""
        new = copy_of(self._policy)
        while True:
            last = max(self.weights)
            try:
                version = await self._agent.update_weights(new)
            except WavebusError as error:
                self.failed[type(error).__name__] += 1
                await asyncio.sleep(AGAIN_S)
                continue
            # A failed update may have taken a version, with these weights.
            self.weights |= dict.fromkeys(range(last + 1, version + 1), new)
            assert self._agent.last_update is not None
            self.updates[self._agent.last_update.how] += 1
            return


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one character for each token, with a chat template."""
    tokenizer = Tokenizer(WordLevel({each: i for i, each in enumerate(CHARACTERS)}))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
    fast.save_pretrained(folder)


async def run(processes: Processes, address: str, url: str, options: argparse.Namespace) -> bool:
    """Call, train, kill; return whether all is as it should be."""
    policy = make_policy(PolicyConfig())
    calls = Calls(url, options.seed)
    stop_calls, stop_training = asyncio.Event(), asyncio.Event()
    victim = "engine-0"
    async with TrainerAgent(address, group=GROUP, timeout_s=20.0) as agent:
        await agent.wait_for_engines(options.engines, timeout_s=120)
        trainer = Trainer(agent, policy)
        await trainer.update()
        calling = asyncio.create_task(calls.make(stop_calls))
        training = asyncio.create_task(trainer.train(stop_training))
        await asyncio.sleep(options.seconds / 3)
        print(f"SIGKILL {victim}, with {calls.open} calls under way")
        await asyncio.to_thread(processes.restart, victim)
        await asyncio.sleep(options.seconds * 2 / 3)
        stop_training.set()
        await training
        await agent.wait_for_engines(options.engines, timeout_s=120)
        await trainer.update()
        assert agent.last_update is not None
        is_back = agent.last_update.engines == options.engines
        stop_calls.set()
        await calling
    verdict = judge(PolicyConfig(), trainer.weights, calls.rollouts)
    versions = [len(set(each.versions)) for each in calls.rollouts]
    print(f"updates: {dict(trainer.updates)}, repeated: {dict(trainer.failed)}")
    print(f"{victim} serves again: {is_back}")
    print(f"calls: {dict(calls.counts)}")
    print(f"answers of several versions: {sum(each > 1 for each in versions)}")
    print(f"lost: {dict(calls.lost)}; not whole: {dict(calls.wrong)}")
    print(
        f"{verdict.mixed} of {verdict.tokens} tokens differ from those of their version "
        f"(log-probabilities agree within {verdict.worst:.1e})"
    )
    is_enough = len(calls.counts) == 4 and verdict.tokens > 0  # noqa: PLR2004 - all kinds
    return is_enough and is_back and not (calls.lost or calls.wrong or verdict.mixed)


def main() -> None:
    """Start everything; exit code 1 if a request was lost or a token is wrong."""
    parser = argparse.ArgumentParser(description="OpenAI's client over wavebus gateway")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_checkpoint(make_policy(PolicyConfig()), folder)
        save_tokenizer(folder)
        processes = stack.enter_context(Processes(folder))
        address = processes.broker(*BROKER_TIMES)
        for index in range(options.engines):
            pace = ("--step-ms", STEP_MS)
            processes.sidecar(f"engine-{index}", "embedded", address, folder, options=pace)
        url = processes.gateway(address, "--tokenizer", str(folder))
        is_clean = asyncio.run(run(processes, address, url, options))
    print("no request was lost" if is_clean else "FAILED")
    sys.exit(not is_clean)


if __name__ == "__main__":
    main()
