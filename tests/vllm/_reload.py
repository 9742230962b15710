"""One vLLM, with no plugin of anybody's, into which its own weights are loaded again.

    python -m tests.vllm._reload MODEL REPAIRED

By vLLM's layerwise reload, as its worker engines do it; with REPAIRED ``1`` inside of
:class:`sidecar._vllm.plugin.loading.cpu.CpuRepacking`. Says on its last line, in JSON, which
parameters are others by then (``changed``), and whether it answers as before (``same_tokens``).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "none"}

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from sidecar._vllm.plugin.loading.cpu import CpuRepacking
from tests.vllm._vllm import PROMPT

TOKENS = 16


def model_of(llm: LLM) -> Any:
    found: list[Any] = []
    llm.collective_rpc(lambda worker: found.append(worker.get_model()))
    return found[0]


def tokens(llm: LLM) -> list[int]:
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    [answer] = llm.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)
    return list(answer.outputs[0].token_ids)


@torch.no_grad()
def main(folder: Path, *, repaired: bool) -> None:
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=1,
    )
    model = model_of(llm)
    config = llm.llm_engine.vllm_config
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    answered = tokens(llm)
    # Of a model on another device it does nothing.
    repacking = CpuRepacking(model, torch.device("cpu" if repaired else "meta"))
    with set_current_vllm_config(config):
        repacking.before_start()
        initialize_layerwise_reload(model)
        model.load_weights(iter(load_file(folder / "model.safetensors").items()))
        finalize_layerwise_reload(model, config.model_config)
        repacking.after_finish()
    after = dict(model.named_parameters())
    changed = [name for name, weight in before.items() if not torch.equal(weight, after[name])]
    told = {"changed": changed, "same_tokens": tokens(llm) == answered}
    sys.stdout.write(f"\n{json.dumps(told)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), repaired=sys.argv[2] == "1")
