"""A vision-language engine for text alone, which vLLM has built without its tower: an update of the
whole model is refused with what to leave out, and one without the tower is served."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest

from bus.errors import ManifestRefused
from sidecar import Sidecar
from sidecar._vllm.inprocess_engine import VllmEngine
from tests.support.broker import a_broker
from tests.vllm._vllm import async_llm, boot_environment, engine_args, require_vllm
from tests.vllm._vllm import generate as generated
from trainer_agent import TrainerAgent
from trainer_agent._weights.saved_form import SavedForm

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from trainer_agent._options import How

require_vllm()
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]

TOKENS = 12
POSITIONS = 256
PARTS = ("vision_tower.", "multi_modal_projector.")


def a_model(seed: int) -> Any:
    """A tiny PaliGemma, which vLLM loads without torchvision."""
    import torch  # noqa: PLC0415 - after require_vllm
    import transformers  # noqa: PLC0415

    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    sight = {"hidden_size": 32, "intermediate_size": 64, "image_size": 28, "patch_size": 14}
    config = transformers.PaliGemmaConfig(
        text_config={
            "model_type": "gemma",
            "num_key_value_heads": 1,
            "max_position_embeddings": POSITIONS,
            **layers,
            **text,
            **ids,
        },
        vision_config={"model_type": "siglip_vision_model", **layers, **sight},
        projection_dim=64,
        image_token_index=250,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = transformers.PaliGemmaForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


async def greedy(llm: Any, name: str) -> list[int]:
    return list((await generated(llm, name, TOKENS)).token_ids)


def test_the_tower_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    """The first update brings the weights of another checkpoint, and the second one the first
    weights again; each gives the tokens of an engine that was booted from them."""
    models = [a_model(seed) for seed in range(2)]
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path / str(number))

    def engine(number: int) -> AbstractAsyncContextManager[Any]:
        args = engine_args(
            tmp_path / str(number), max_model_len=POSITIONS, limit_mm_per_prompt={"image": 0}
        )
        return async_llm(boot_environment(tmp_path), args)

    async def scenario() -> None:
        async with engine(1) as llm:
            other = await greedy(llm, "booted")
        async with (
            engine(0) as llm,
            a_broker() as (_, broker),
            TrainerAgent(broker, group="policy", verify="full") as agent,
            Sidecar(VllmEngine(llm), broker=broker, group="policy", name="e0"),
        ):
            await agent.wait_for_engines(1)
            first = await greedy(llm, "first")
            assert first != other, "the weights make a difference"
            ways: list[tuple[How, Any, list[int]]] = [
                ("paused", models[1], other),
                ("staged", models[0], first),
            ]
            for how, model, expected in ways:
                with pytest.raises(ManifestRefused) as refused:
                    await agent.update_weights(model, how=how)
                said = re.search(
                    r"without its image_tower, as with --limit-mm-per-prompt of 0: leave out the "
                    r"(\d+) tensors whose names begin with (.*), or start",
                    str(refused.value),
                )
                assert said, refused.value
                prefixes = tuple(said[2].split(" or "))
                assert sorted(prefixes) == sorted(PARTS)
                assert await greedy(llm, f"before-{how}") != expected

                whole = dict(SavedForm(model, dict(model.named_parameters())))
                text = {n: t for n, t in whole.items() if not n.startswith(prefixes)}
                assert len(whole) - len(text) == int(said[1])
                await agent.update_weights(text, how=how)
                assert await greedy(llm, f"after-{how}") == expected

    asyncio.run(scenario())
