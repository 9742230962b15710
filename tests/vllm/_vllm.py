"""What the tests against real vLLM share: tiny models, how to boot, the oracle, updates.

The oracle: in float32 on the CPU, greedy tokens of vLLM equal those of Hugging Face
transformers with the same weights, token for token.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bus.messages import Staging
from tests.support.push import Push, plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    import torch

    from bus.messages import Target
    from sidecar._vllm.inprocess_engine import VllmEngine
    from sidecar.engine import Engine

PROMPT = [5, 17, 99, 3, 42, 7]
MAX_POSITIONS = 4096
# Of engines whose requests a test stops in the middle: see _tuned.
REST_MS = 2.0
# A client sends again what a pause has rejected, after so long.
AGAIN_S = 0.02


def require_vllm(*others: str) -> None:
    """Skip, with the reason, where vLLM or another package is missing; fail if it was asked for.

    pytest runs each call at the import of a test module, before anything is booted.
    """
    needed = ("vllm", "transformers", *others)
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    if not missing:
        return
    reason = f"needs {' and '.join(missing)}: `.ci/setup vllm` installs all of them"
    if os.environ.get("WAVEBUS_REQUIRE_VLLM") == "1":
        pytest.fail(f"WAVEBUS_REQUIRE_VLLM=1, and {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def boot_environment(folder: Path, *, rest_ms: float = 0) -> dict[str, str]:
    """Environment variables under which vLLM boots here, and finds the plugin.

    The plugin comes by its entry point: the installed one, or else one written to
    ``folder`` (a checkout that nobody installed). The same folder brings the plugins
    of :mod:`_faulty`, whose transport fails on purpose inside the workers, of :mod:`_tuned`,
    which lets the core rest for ``rest_ms`` after each step, of :mod:`_ways`, which lets a script
    choose how updates are loaded, of :mod:`_sleepy`, which brings sleep to CPUs, of
    :mod:`tests.support.pair`, which is a worker engine such as vLLM's own, of :mod:`_reader`,
    which reads what a worker's models hold, and of :mod:`tests.support.swap_hold`.
    """
    root = Path(__file__).resolve().parents[2]
    info = folder / "wavebus_vllm_tests-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wavebus-vllm-tests\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\n"
        "wavebus_forked = _forked:register\n"
        "wavebus_here = sidecar._vllm.plugin:register\n"
        "wavebus_faulty = _faulty:register\n"
        "wavebus_tuned = _tuned:register\n"
        "wavebus_sleepy = _sleepy:register\n"
        "wavebus_ways = _ways:register\n"
        "wavebus_twist = _twist:register\n"
        "wavebus_pair = tests.support.pair_plugin:register\n"
        "wavebus_reader = _reader:register\n"
        "wavebus_piped = _piped:register\n"
        "wavebus_swap_hold = tests.support.swap_hold:hold_vllm\n"
        "[wavebus.receivers]\n"
        "files = examples.own_backend:FileReceiver\n"
    )
    path = [str(folder), str(root), str(Path(__file__).parent)]
    return {
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # vLLM 0.33 gives each core of a client a memory node of its own, and boots no second one
        # where there is one node. With this set, each may take any; "0" simulates no others.
        "VLLM_CPU_SIM_MULTI_NUMA": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WAVEBUS_TESTS_REST_MS": str(rest_ms),
        "WAVEBUS_TESTS_START": "fork",
    }


class Oracle:
    """Hugging Face transformers, with any weights of one checkpoint's shape."""

    def __init__(self, folder: Path) -> None:
        import transformers  # noqa: PLC0415 - after require_vllm

        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()

    def names(self) -> dict[str, torch.Tensor]:
        """Parameters as transformers names them (fused experts, no tied head)."""
        return {name: p.detach().clone() for name, p in self._model.named_parameters()}

    def greedy(
        self, weights: Mapping[str, torch.Tensor], count: int, prompt: Sequence[int] = PROMPT
    ) -> list[int]:
        """So many greedy tokens after ``prompt``; ``weights`` by names of :meth:`names`."""
        import torch  # noqa: PLC0415

        self._model.load_state_dict(dict(weights), strict=False)
        with torch.no_grad():
            out = self._model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [int(token) for token in out[0, len(prompt) :]]

    def score(
        self, weights: Mapping[str, torch.Tensor], prompt: Sequence[int], tokens: Sequence[int]
    ) -> list[float]:
        """The log-probability of each token, given the prompt and those before it."""
        import torch  # noqa: PLC0415

        self._model.load_state_dict(dict(weights), strict=False)
        with torch.no_grad():
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0]
        scored = logits[len(prompt) - 1 : -1].log_softmax(-1)
        return [float(scored[place, token]) for place, token in enumerate(tokens)]


def make_moe(folder: Path, seed: int) -> Path:
    """A checkpoint of two Qwen3-MoE layers with four experts, its head tied to the embeddings."""
    import torch  # noqa: PLC0415 - after require_vllm
    import transformers  # noqa: PLC0415

    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    transformers.Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


def engine_args(model: Path, **extra: Any) -> dict[str, Any]:
    """Arguments of ``AsyncEngineArgs`` for a small float32 engine."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "enable_sleep_mode": True,
        "max_num_seqs": 8,
        "max_model_len": MAX_POSITIONS,
        "weight_transfer_config": {"backend": "wavebus"},
        "disable_log_stats": True,
        **extra,
    }


def server_argv(model: Path, *extra: str) -> list[str]:
    """The command of the same engine, served. What the RL routes need is not in it."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "tiny"),
        *("--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager"),
        "--enable-sleep-mode",
        *("--max-num-seqs", "8", "--max-model-len", str(MAX_POSITIONS)),
        *extra,
    ]


@asynccontextmanager
async def async_llm(environment: dict[str, str], args: dict[str, Any]) -> AsyncIterator[Any]:
    """An ``AsyncLLM`` of this process, shut down at the end."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment, "WAVEBUS_TESTS_START": "server"}.items():
            patch.setenv(name, value)
        for folder in reversed(environment["PYTHONPATH"].split(os.pathsep)):
            patch.syspath_prepend(folder)
        from vllm.config import WeightTransferConfig  # noqa: PLC0415 - after the environment
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        transfer = args.get("weight_transfer_config")
        if transfer is not None:
            args = {**args, "weight_transfer_config": WeightTransferConfig(**transfer)}
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
        try:
            yield llm
        finally:
            llm.shutdown()
            await asyncio.sleep(0)  # tasks that it has cancelled end
            llm.engine_core.resources.ctx.destroy(linger=0)


def rejects_in_pauses() -> bool:
    """Whether this vLLM rejects requests in a pause that keeps none (0.33), or queues them (0.32).

    Its API server pauses by that method of the core's, where there is one.
    """
    from vllm.v1.engine.core import EngineCoreProc  # noqa: PLC0415 - after require_vllm

    return hasattr(EngineCoreProc, "pause_generation")


async def generate(
    llm: Any,
    name: str,
    tokens: int,
    prompt: Sequence[int] = PROMPT,
    note: Callable[[int], Awaitable[None]] | None = None,
    lora: Any = None,
    rejected: Callable[[], Awaitable[None]] | None = None,
) -> Any:
    """A greedy request to an ``AsyncLLM``: vLLM's last output, with all tokens; ``note`` is
    told how many are new, as they arrive. What a pause rejects is sent again; ``rejected`` is told
    of it."""
    from vllm.exceptions import RetryableRequestError  # noqa: PLC0415 - after require_vllm

    while True:
        try:
            return await _generate(llm, name, tokens, prompt, note, lora)
        except RetryableRequestError:
            if rejected is not None:
                await rejected()
            await asyncio.sleep(AGAIN_S)


async def _generate(
    llm: Any,
    name: str,
    tokens: int,
    prompt: Sequence[int],
    note: Callable[[int], Awaitable[None]] | None,
    lora: Any,
) -> Any:
    from vllm import SamplingParams  # noqa: PLC0415 - after require_vllm

    # Not min_tokens, which forbids the end-of-sequence token instead of going past it.
    params = SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=False, ignore_eos=True)
    had, last = 0, None
    asked = {"prompt_token_ids": list(prompt)}
    async for output in llm.generate(asked, params, name, lora_request=lora):
        last = output.outputs[0]
        if note is not None:
            await note(len(last.token_ids) - had)
        had = len(last.token_ids)
    return last


async def paused_update(
    engine: Engine, weights: Mapping[str, torch.Tensor], version: int, target: Target = "model"
) -> None:
    """A whole update, between a pause (keep) and its resume."""
    await engine.pause("keep", clear_cache=True)
    await Push(engine, weights, plan(weights), target=target).whole(version)
    await engine.resume()


async def staged_update(
    engine: VllmEngine,
    weights: Mapping[str, torch.Tensor],
    version: int,
    *,
    workers: int = 1,
    backend: str = "shm",
    keep: bool = False,
) -> list[str]:
    """A whole one, beside the weights that are served. Returns what the core was asked for."""
    how = Staging(required=True, budget_bytes=0, keep=keep, clear_cache=False)
    manifest = plan(weights)
    push = Push(engine, weights, manifest, backend=backend, workers=workers, staging=how)
    asked: list[str] = []
    connection: Any = engine._vllm
    ask = connection.ask

    async def noted(method: str, kwargs: dict[str, Any]) -> Any:
        asked.append(method)
        return await ask(method, kwargs)

    connection.ask = noted
    try:
        await push.whole(version)
    finally:
        connection.ask = ask
    return asked


async def ways(llm: Any) -> set[str]:
    """How the last update of an ``AsyncLLM`` went into its workers' models, by their account; and
    why there is no plan, where there is none."""
    accounts = await llm.collective_rpc("wavebus_loading")
    return {f"{each['way']} {each['reason']}".rstrip() for each in accounts}


def in_another_order(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of another manifest, for which nobody has a plan yet."""
    return dict(reversed(list(weights.items())))
