"""Asynchronous GRPO: engines generate while the trainer trains, and no sample is too old.

python examples/async_grpo.py                       # on two embedded engines, which it starts
python examples/async_grpo.py --engine vllm         # the same on two served vLLMs
python examples/async_grpo.py --broker ADDRESS      # on engines that run, with this policy's shape
                                                    # (python -m lab.demo.policy FOLDER 0)

A rollout may see several versions of the weights, since updates are staged: engines swap between
two tokens. Each span of tokens of one version is corrected by its own importance ratio, how much
likelier today's policy makes it than the weights that sampled it, truncated at `MOST`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lab.demo.policy import Policy, make_policy, save_checkpoint
from lab.demo.processes import Processes
from lab.network import PolicyConfig
from trainer_agent import RolloutBuffer, RolloutClient, TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer_agent import Completion

BOS, SEP, LETTERS = 1, 3, range(4, 12)
LENGTH = 6  # tokens of an answer
GROUPS, GROUP = 8, 8  # prompts of a step, and answers to each
MAX_AGE = 2  # commits
MOST = 2.0
SAMPLING = {
    "n": GROUP,
    "max_tokens": LENGTH,
    "temperature": 1.0,
    "logprobs": 0,
    "ignore_eos": True,
}


def rewards_of(done: Completion) -> torch.Tensor:
    """The task is to repeat the prompt's letter: the share of places that have it."""
    letter = done.prompt_token_ids[1]
    return torch.tensor([choice.token_ids.count(letter) / LENGTH for choice in done.choices])


def learn(policy: Policy, adam: torch.optim.Optimizer, groups: Sequence[Completion]) -> float:
    """One step of GRPO; returns the mean reward."""
    rewards = torch.stack([rewards_of(done) for done in groups])
    spread = rewards.std(1, correction=0, keepdim=True)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-3)).flatten()
    choices = [choice for done in groups for choice in done.choices]
    ids = torch.tensor([[*d.prompt_token_ids, *c.token_ids] for d in groups for c in d.choices])
    logs = policy(ids[:, :-1]).logits.log_softmax(-1)
    now = logs.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, -LENGTH:]
    with torch.no_grad():
        gap = now - torch.tensor([choice.logprobs for choice in choices])
        weight = torch.empty_like(gap)
        for row, choice in enumerate(choices):
            for span in choice.spans:
                tokens = slice(span.start, span.end)
                weight[row, tokens] = gap[row, tokens].sum().exp().clamp(max=MOST)
    adam.zero_grad()
    loss = -(weight * advantages[:, None] * now).mean()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    adam.step()
    return float(rewards.mean())


async def roll(client: RolloutClient, buffer: RolloutBuffer[Completion], seed: int) -> None:
    """Generate for one prompt after the other, as long as the samples would be young enough."""
    prompts = random.Random(seed)  # noqa: S311 - no secret
    while True:
        async with buffer.rollout() as rollout:
            done = await client.generate([BOS, prompts.choice(LETTERS), SEP], SAMPLING)
            rollout.add(done, done)


async def train(address: str, group: str, steps: int, policy: Policy) -> None:
    """The trainer's loop, beside those that generate."""
    adam = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    buffer: RolloutBuffer[Completion] = RolloutBuffer(MAX_AGE, samples_per_step=GROUPS)
    means: list[float] = []
    ages: list[int] = []
    mixed = 0
    async with (
        TrainerAgent(address, group=group) as agent,
        RolloutClient(address, group=group) as client,
        asyncio.TaskGroup() as tasks,
    ):
        await agent.wait_for_engines(1, timeout_s=300)
        buffer.on_commit(await agent.update_weights(policy))
        rolling = [tasks.create_task(roll(client, buffer, seed)) for seed in range(2 * GROUPS)]
        for step in range(steps):
            batch = await buffer.take()
            means.append(await asyncio.to_thread(learn, policy, adam, batch.samples))
            buffer.on_commit(await agent.update_weights(policy, label=f"step {step}"))
            assert agent.last_update is not None
            assert agent.last_update.how == "staged", agent.last_update.why_paused
            ages += batch.ages
            mixed += sum(len(c.spans) > 1 for done in batch.samples for c in done.choices)
            if step % 10 == 0:
                print(f"step {step}: reward {means[-1]:.2f}, {batch.metrics}")
        for task in rolling:
            task.cancel()
    first, last = sum(means[:5]) / 5, sum(means[-5:]) / 5
    print(f"reward: {first:.2f} in the first 5 steps, {last:.2f} in the last 5")
    print(f"ages: {[ages.count(age) for age in range(MAX_AGE + 1)]}; {mixed} answers of 2 versions")
    assert max(ages) <= MAX_AGE
    assert last > first + 0.2, "the reward has not risen"


def main() -> None:
    """Start what is asked for; train."""
    parser = argparse.ArgumentParser(description="Asynchronous GRPO on wavebus engines")
    parser.add_argument("--engine", choices=["embedded", "vllm"], default="embedded")
    parser.add_argument("--broker", help="of engines that run: none are started")
    parser.add_argument("--group", default="policy")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy = make_policy(PolicyConfig())
    with contextlib.ExitStack() as stack:
        address = options.broker
        if not address:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            save_checkpoint(policy, folder)
            processes = stack.enter_context(Processes(folder))
            address = processes.broker()
            for index in range(2):
                pace = ("--step-ms", "30") if options.engine == "embedded" else ()
                name = f"engine-{index}"
                processes.sidecar(name, options.engine, address, folder, options=pace)
        asyncio.run(train(address, options.group, options.steps, policy))


if __name__ == "__main__":
    main()
