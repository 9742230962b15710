"""Keys and values under staged updates on one GPU: offloaded ones, and ones that are handed over.

Engines of one float32 model, tiny or of half a billion parameters: ``plain``; ``offload``, with
vLLM's own offload to the host's memory and so few blocks that requests are preempted; and a prefill
and a decode engine with NIXL between them. Clients send requests while each is updated. Every token
must have the highest logit, within a thousandth, of the weights that its label names, after all
tokens before it, as transformers computes it.

    python -m tests.gpu.kv --updates 20 --logs FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import aiohttp
import torch

from bus.errors import UsageError, WavebusError
from sidecar._vllm.core_state import parse_version
from tests.gpu.checkpoints import dense_config, make
from tests.gpu.serving import EngineSpec, Serving
from trainer_agent import SyncTrainerAgent
from trainer_agent._rollouts.attempt import Cut, PieceSpan, pieces, prefill

TOKENS: Final = 160
CLIENTS: Final = 8
_NEAR: Final = 1e-3
_BLOCKS: Final = ("--num-gpu-blocks-override", "80")


def nixl(buffers: str) -> tuple[str, ...]:
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": buffers}
    return ("--kv-transfer-config", json.dumps(config))


class Clients(threading.Thread):
    """Who asks one engine, or a pair, until told to stop: every answer, and when pieces came."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__(daemon=True)
        self.urls = urls
        self.ended = threading.Event()
        self.answers: list[tuple[list[int], list[int], list[PieceSpan]]] = []
        self.failures: list[str] = []
        self.times: list[list[float]] = [[] for _ in range(CLIENTS)]

    def run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        timeout = aiohttp.ClientTimeout(total=90)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            await asyncio.gather(*(self._client(http, each) for each in range(CLIENTS)))

    async def _client(self, http: aiohttp.ClientSession, number: int) -> None:
        draw = random.Random(number)
        shared = random.Random(7)
        heads = [[shared.randrange(256) for _ in range(96)] for _ in range(4)]
        while not self.ended.is_set():
            prompt = [*draw.choice(heads), *(draw.randrange(256) for _ in range(8))]
            try:
                await self._ask(http, prompt, self.times[number])
            except (Cut, UsageError) as error:
                self.failures.append(repr(error)[:300])
                await asyncio.sleep(0.2)

    async def _ask(
        self, http: aiohttp.ClientSession, prompt: list[int], times: list[float]
    ) -> None:
        sampling = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
        body: dict[str, Any] = {"token_ids": prompt, "sampling_params": sampling, "stream": True}
        *before, url = self.urls
        for prefills in before:
            body["kv_transfer_params"] = await prefill(http, prefills, body)
        tokens: list[int] = []
        spans: list[PieceSpan] = []
        async for batch in pieces(http, url, body):
            for piece in batch:
                tokens += piece.token_ids or ()
                spans = piece.weight_versions or spans
                if piece.token_ids:
                    times.append(time.monotonic())
                if piece.finish_reason is not None:
                    self.answers.append((prompt, tokens, spans))
                    return


class Judge:
    """Holds tokens against the weights of their versions, with transformers' model.

    Weights are not kept but made anew, from the seed of their version.
    """

    def __init__(self, model: Any, base: dict[str, torch.Tensor], device: str) -> None:
        self._model, self._base, self._device = model, base, device
        self.seeds: dict[int, int] = {0: 0}

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        """The base for seed 0; else with noise on every tensor."""
        if not seed:
            return self._base
        draw = torch.Generator(self._device).manual_seed(seed)
        noisy: dict[str, torch.Tensor] = {}
        for name, weight in self._base.items():
            noise = torch.randn(weight.shape, generator=draw, device=self._device)
            noisy[name] = weight + 0.2 * weight.std() * noise.to(weight.dtype)
        return noisy

    @torch.no_grad()
    def foreign(self, answers: list[Any], *, shift: int = 0) -> tuple[int, list[float]]:
        """Count the tokens, and those that the weights of their label do not give.

        Args:
            shift: is added to each label. With another value than 0 nearly all tokens must be
                foreign, else this judge proves nothing.

        Returns:
            How many tokens were judged; and for each foreign one, by how much its logit falls short
            of the highest, as a part of that.
        """
        seen = 0
        wrong: list[float] = []
        work: dict[int, list[Any]] = {}
        for prompt, tokens, spans in answers:
            for span in spans:
                version = parse_version(span.version) + shift
                work.setdefault(version, []).append((prompt, tokens, span.start, span.end))
        for version, asked in work.items():
            if version not in self.seeds:
                continue
            self._model.load_state_dict(self.weights(self.seeds[version]), strict=False)
            for prompt, tokens, start, end in asked:
                ids = torch.tensor([[*prompt, *tokens]], device=self._device)
                logits = self._model(ids).logits[0, len(prompt) - 1 : -1][start:end]
                taken = torch.tensor(tokens[start:end], device=self._device)
                chosen = logits.gather(1, taken[:, None])[:, 0]
                short = (logits.max(dim=1).values - chosen) / logits.abs().max()
                seen += end - start
                wrong += [round(float(each), 5) for each in short if each > _NEAR]
        return seen, wrong


def gaps(times: list[list[float]], around: list[tuple[float, float]]) -> float:
    """The median, over updates, of the longest wait between two pieces of a stream; in ms."""
    longest = []
    for begun, ended in around:
        found = [
            later - before
            for each in times
            for before, later in itertools.pairwise(each)
            if later >= begun and before <= ended
        ]
        longest.append(max(found, default=0.0))
    return round(1000 * statistics.median(longest), 1) if longest else 0.0


def rounds(
    options: argparse.Namespace, agent: SyncTrainerAgent, judge: Judge, urls: list[str]
) -> dict[str, Any]:
    clients = Clients(urls)
    clients.start()
    failed: list[str] = []
    around: list[tuple[float, float]] = []
    out: list[str] = []
    for update in range(options.updates):
        have = len(clients.answers)
        until = time.monotonic() + 20
        while len(clients.answers) < have + 6 and time.monotonic() < until:
            time.sleep(0.01)
        seed = 1 + update
        new = judge.weights(seed)
        begun = time.monotonic()
        try:
            version = agent.update_weights(new, how="staged")
        except WavebusError as error:
            failed.append(str(error)[:400])
        else:
            judge.seeds[version] = seed
            around.append((begun, time.monotonic()))
            report = agent.last_update
            out += list(report.excluded) if report is not None else []
    clients.ended.set()
    clients.join(120)
    seen, wrong = judge.foreign(clients.answers)
    shifted, shifted_wrong = judge.foreign(clients.answers, shift=-1)
    return {
        "updates": options.updates - len(failed),
        "failed": failed,
        "excluded": out,
        "requests": len(clients.answers),
        "over_an_update": sum(len(spans) > 1 for _, _, spans in clients.answers),
        "turned_away": clients.failures[:5],
        "turned_away_count": len(clients.failures),
        "tokens": seen,
        "foreign": len(wrong),
        "short_by": sorted(wrong)[-8:],
        "foreign_if_labelled_one_lower": f"{len(shifted_wrong)} of {shifted}",
        "longest_gap_ms": gaps(clients.times, around),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--device", default="cuda", help="on cpu, plain is all that runs")
    parser.add_argument("--buffers", default="cuda", help="NIXL's: cuda or cpu")
    parser.add_argument("--only", default="plain,offload,pair")
    parser.add_argument("--big", action="store_true", help="half a billion parameters")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    chosen = options.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        config = dense_config(small=not options.big)
        config.dtype = torch.float32
        model = make(config, Path(folder) / "a", 1, options.device)
        base = {name: each.detach().clone() for name, each in model.state_dict().items()}
        serving = Serving(options.device, Path(folder), options.logs)
        found: dict[str, Any] = {}
        try:
            serving.start_broker()
            few = () if options.device == "cpu" else _BLOCKS
            specs = {
                "plain": [EngineSpec("plain", "plain", (0,), args=("--dtype=float32", *few))],
                "offload": [
                    EngineSpec(
                        "offload",
                        "offload",
                        (0,),
                        args=("--dtype=float32", *few, "--kv-offloading-size", "2"),
                    )
                ],
                "pair": [
                    EngineSpec(name, "pair", (0,), args=("--dtype=float32", *nixl(options.buffers)))
                    for name in ("p", "d")
                ],
            }
            for number, spec in enumerate(each for which in chosen for each in specs[which]):
                serving._environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(27_500 + 8 * number)
                serving.start_engine(spec)
            for which in chosen:
                try:
                    with SyncTrainerAgent(serving.broker, group=which) as agent:
                        views = {
                            each.name: each.endpoint
                            for each in agent.wait_for_engines(len(specs[which]), timeout_s=240)
                        }
                        judge = Judge(model, base, options.device)
                        urls = [views[each.name] for each in specs[which]]
                        found[which] = rounds(options, agent, judge, urls)
                except Exception as error:  # noqa: BLE001 - the others are tried all the same
                    found[which] = {"error": repr(error)[:600]}
                print(which, json.dumps(found[which]), file=sys.stderr, flush=True)
        finally:
            serving.stop()
            if any("error" in each or each.get("failed") for each in found.values()):
                print(serving.tails(25), file=sys.stderr)
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
