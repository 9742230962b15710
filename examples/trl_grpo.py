"""TRL's GRPO trainer generates on wavebus engines, and sends them its weights after each step.

python examples/trl_grpo.py --steps 60

It starts a broker and two embedded engines, and needs no GPU, but `wavebus[demo,trl]`. The policy
is a tiny Qwen3 with random weights; the task is to repeat the letter of the prompt.

Two hooks of TRL are all that it takes: `rollout_func` asks the engines for tokens, and a callback
at the end of each optimizer step sends the weights.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from trl import GRPOConfig, GRPOTrainer

from lab.demo.processes import Processes
from trainer_agent import SyncRolloutClient, SyncTrainerAgent

LETTERS = "abcdefgh"
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>"}
LENGTH = 6  # tokens of an answer
GROUP = 8  # answers to a prompt


def make_model() -> tuple[Any, Any]:
    """A policy that has learned nothing, and its tokenizer, with a token for each letter."""
    words = {word: token for token, word in enumerate([*SPECIAL.values(), *LETTERS])}
    tokenizer = Tokenizer(WordLevel(words))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    config = transformers.Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        dtype="float32",
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    return transformers.Qwen3ForCausalLM(config), fast


def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of an answer's places that have the letter of its prompt."""
    wanted = [len(SPECIAL) + LETTERS.index(prompt) for prompt in prompts]
    return [ids.count(token) / LENGTH for token, ids in zip(wanted, completion_ids, strict=True)]


class SendWeights(transformers.TrainerCallback):  # type: ignore[misc]
    """After each optimizer step, all engines get the weights, and serve them between two tokens."""

    def __init__(self, agent: SyncTrainerAgent) -> None:
        self._agent = agent

    def on_step_end(self, _args: Any, state: Any, _control: Any, *, model: Any, **_: Any) -> None:
        """TRL calls it."""
        self._agent.update_weights(model, label=f"step {state.global_step}")


def train(address: str, model: Any, tokenizer: Any, steps: int, folder: str) -> None:
    """Train, and compare the engines' greedy tokens with the trainer's own."""
    with SyncTrainerAgent(address) as agent, SyncRolloutClient(address) as client:
        agent.wait_for_engines(2, timeout_s=120)

        def rollout_func(prompts: list[str], _: GRPOTrainer) -> dict[str, list[Any]]:
            """TRL repeats a prompt for each answer that it wants."""
            ids = tokenizer(prompts).input_ids
            sampling = {"max_tokens": LENGTH, "temperature": 1.0, "logprobs": 0}
            choices = [done.choices[0] for _, done in client.generate_many(ids, sampling)]
            return {
                "prompt_ids": ids,
                "completion_ids": [list(choice.token_ids) for choice in choices],
                "logprobs": [list(choice.logprobs or ()) for choice in choices],
            }

        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=len(LETTERS) * GROUP,
                num_generations=GROUP,
                max_completion_length=LENGTH,
                learning_rate=3e-3,
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                gradient_checkpointing=False,
                use_cpu=True,
                bf16=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": list(LETTERS)}),
            processing_class=tokenizer,
            callbacks=[SendWeights(agent)],
            rollout_func=rollout_func,
        )
        trainer.remove_callback(transformers.ProgressCallback)
        trainer.train()
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        few = max(1, min(5, len(rewards) // 2))
        first, last = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
        print(f"mean reward: {first:.2f} in the first {few} steps, {last:.2f} in the last {few}")

        same = 0
        for letter in LETTERS:
            prompt = tokenizer(letter, return_tensors="pt")
            whole = model.generate(**prompt, max_new_tokens=LENGTH, do_sample=False)[0].tolist()
            ids = prompt.input_ids[0].tolist()
            greedy = client.generate(ids, {"max_tokens": LENGTH, "temperature": 0.0})
            same += [*ids, *greedy.choices[0].token_ids] == whole
        print(f"greedy answers of the engines that are the trainer's: {same} of {len(LETTERS)}")
        assert last > first, "the reward has not risen"
        assert same == len(LETTERS), "the engines do not have the trainer's weights"


def main() -> None:
    """Start the broker and the engines; train."""
    parser = argparse.ArgumentParser(description="TRL's GRPO trainer on wavebus engines")
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model, tokenizer = make_model()
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        model.save_pretrained(folder)
        address = processes.broker()
        for index in range(2):
            processes.sidecar(f"engine-{index}", "embedded", address, Path(folder))
        train(address, model, tokenizer, steps, folder)


if __name__ == "__main__":
    main()
