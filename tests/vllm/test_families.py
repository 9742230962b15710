"""Model families that vLLM and transformers have in common: two updates each, and the oracle.

Each is a tiny checkpoint with random weights. The engine boots from one set of weights; a paused
update brings the second, a staged one the third where the model can be staged (a paused one
elsewhere). After each, greedy tokens are those that transformers computes with the same weights;
where vLLM's differ from them before any update, those of an engine that was booted from these
weights. What is sent is what transformers' ``save_pretrained`` writes. docs/vllm.md has the list.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.vllm.inprocess_engine import VllmEngine
from tests.vllm._vllm import (
    PROMPT,
    async_llm,
    boot_environment,
    engine_args,
    generate,
    paused_update,
    require_vllm,
    staged_update,
)

if TYPE_CHECKING:
    import torch

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

TOKENS = 12
POSITIONS = 256
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Family:
    """A model type of transformers.

    Attributes:
        sizes: beside :data:`SIZES`, by the names of its configuration.
        staged: its updates can be staged.
        differs: booted from the same checkpoint, vLLM's tokens are not those of transformers.
    """

    model_type: str
    sizes: dict[str, Any] = field(default_factory=dict)
    staged: bool = True
    differs: bool = False

    def model(self, seed: int) -> Any:
        """One of it, its weights from a seed."""
        import torch  # noqa: PLC0415 - after require_vllm
        import transformers  # noqa: PLC0415

        torch.manual_seed(seed)
        sizes = {**SIZES, **self.sizes}
        config = transformers.AutoConfig.for_model(self.model_type, dtype="float32", **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        # Biases and norms begin as zeros and ones, of which one can't be told from another.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        return model


FAMILIES = [
    Family("arcee"),
    Family("gpt_neox", differs=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_families_serve_what_two_updates_bring(family: Family, tmp_path: Path) -> None:
    sent = [_saved(family.model(seed), tmp_path / str(seed)) for seed in range(3)]
    if family.differs:
        expected = [asyncio.run(_booted(tmp_path, seed)) for seed in range(3)]
        assert expected[0] != _greedy(family.model(0)), "transformers is as good an oracle"
    else:
        expected = [_greedy(family.model(seed)) for seed in range(3)]
    assert len(set(map(tuple, expected))) == 3, "the weights make a difference"
    asyncio.run(_two_updates(family, tmp_path, sent, expected))


async def _two_updates(
    family: Family, folder: Path, sent: list[dict[str, torch.Tensor]], expected: list[list[int]]
) -> None:
    args = engine_args(folder / "0", max_model_len=POSITIONS)
    async with async_llm(boot_environment(folder), args) as llm:
        engine = VllmEngine(llm)
        await engine.start()
        try:
            assert await _served(llm) == expected[0]
            await paused_update(engine, sent[1], 1)
            assert await _served(llm) == expected[1]
            await (staged_update if family.staged else paused_update)(engine, sent[2], 2)
            assert await _served(llm) == expected[2]
        finally:
            await engine.close()


async def _booted(folder: Path, seed: int) -> list[int]:
    """The tokens of an engine that loaded this checkpoint from its files."""
    args = engine_args(folder / str(seed), max_model_len=POSITIONS)
    async with async_llm(boot_environment(folder), args) as llm:
        return await _served(llm)


async def _served(llm: Any) -> list[int]:
    last = await generate(llm, secrets.token_hex(4), TOKENS)
    return list(last.token_ids)


def _saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` writes, read back: the names and shapes of checkpoints."""
    from safetensors.torch import load_file  # noqa: PLC0415

    model.save_pretrained(folder)
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def _greedy(model: Any) -> list[int]:
    import torch  # noqa: PLC0415

    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def test_the_page_lists_the_families_that_are_tested() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \|.*\| (staged|paused) \|$", page, re.MULTILINE))
    assert listed == {f.model_type: "staged" if f.staged else "paused" for f in FAMILIES}
