"""LoRA adapters of two real ranks in lockstep, over gloo: as to engines of other hosts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from bus.errors import ManifestRefused
from tests.support.adapters import ATTENTION, MadeAdapter, make_adapter
from tests.support.checkpoints import certain_experts
from tests.support.procs import PATIENT, wavebus
from tests.vllm._dp import Pair, RankProcess, boot_pair, shut_down
from tests.vllm._tuned import PLAIN_EXPERTS
from tests.vllm._vllm import MAX_POSITIONS, PROMPT, REST_MS, require_vllm
from trainer_agent import TrainerAgent
from trainer_agent._update.update import Update

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.checkpoints import Checkpoint

require_vllm()
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]

LIMIT_S = 600.0
NAME = "policy-lora"
DP_GROUP = "moe"
CHUNK_BYTES = 4096  # an adapter has several
# Experts have none: vLLM has no kernels for that on CPUs.
LORA = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras": 2,
    "max_cpu_loras": 2,
    "lora_target_modules": list(ATTENTION),
}
Q_B = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


class Adapted:
    """Two ranks that take adapters, and what each must say with one."""

    def __init__(self, pair: Pair, checkpoint: Checkpoint) -> None:
        self.pair = pair
        self._checkpoint = checkpoint

    def made(self, seed: int) -> MadeAdapter:
        return make_adapter(self._checkpoint.weights, seed, targets=ATTENTION)

    def expected(self, made: MadeAdapter | None, count: int, *said: int) -> list[int]:
        weights = self._checkpoint.weights if made is None else made.merged
        return self._checkpoint.greedy(weights, (*PROMPT, *said), count)

    async def begin(self, count: int, adapter: str = NAME) -> list[tuple[RankProcess, str]]:
        """A request to each rank."""
        ranks = enumerate(self.pair.ranks)
        return [(at, await self.pair.begin(n, count, adapter=adapter)) for n, at in ranks]

    async def assert_serves(self, made: MadeAdapter) -> None:
        """Each rank has the adapter by its name, and the model without it as before."""
        for adapter, of in ((NAME, made), ("", None)):
            for rank, name in await self.begin(24, adapter):
                assert await rank.do("tokens", name=name) == self.expected(of, 24)


@contextlib.asynccontextmanager
async def adapted(folder: Path) -> AsyncIterator[tuple[Adapted, TrainerAgent]]:
    """The ranks on a bus of their own, and a trainer that reaches other hosts."""
    checkpoint = certain_experts(folder / "moe", max_positions=MAX_POSITIONS)
    with wavebus("broker", "--listen", "tcp://127.0.0.1:*", *PATIENT) as broker:
        address = await asyncio.to_thread(broker.first_line)
        env = {"WAVEBUS_DP_GROUP": DP_GROUP, "WAVEBUS_BROKER": address}
        env |= {"WAVEBUS_TESTS_REST_MS": str(REST_MS), PLAIN_EXPERTS: "1"}
        pair = await boot_pair(folder, checkpoint.folder, "bus", env, **LORA)
        try:
            for each in pair.ranks:
                await each.do("join", broker=address, dp_group=DP_GROUP, name=f"moe-{each.rank}")
            async with TrainerAgent(
                address, name="trainer", backend="gloo", chunk_bytes=CHUNK_BYTES
            ) as agent:
                await agent.wait_for_engines(2)
                yield Adapted(pair, checkpoint), agent
        finally:
            await shut_down(pair)


def test_adapters_over_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One boot, one story: a first adapter for both ranks, one that they refuse, one that is given
    up, and a second one in the middle of requests on both."""

    async def fails(*_: object) -> None:
        raise RuntimeError("given up")

    async def in_the_middle(tested: Adapted, agent: TrainerAgent) -> None:
        first, second = tested.made(1), tested.made(2)
        count = 200
        begun = await tested.begin(count)
        plain = await tested.pair.begin(1, count)
        for rank, name in begun:
            await tested.pair.until(rank.rank, name, 20)
        version = await agent.update_adapter(NAME, second.tensors, config=second.config)
        for rank, name in begun:
            said = await rank.do("tokens", name=name)
            (_, _, cut), after = await rank.do("spans", name=name)
            assert after == [version, cut, count]
            assert said[:cut] == tested.expected(first, cut)
            assert said[cut:] == tested.expected(second, count - cut, *said[:cut])
        said = await tested.pair.ranks[1].do("tokens", name=plain)
        assert said == tested.expected(None, count)
        await tested.assert_serves(second)

    async def scenario() -> None:
        async with adapted(tmp_path) as (tested, agent):
            first, second = tested.made(1), tested.made(2)
            await agent.update_adapter(NAME, first.tensors, config=first.config)
            report = agent.last_update
            assert report is not None
            assert report.chunks > 1
            await tested.assert_serves(first)
            falsified = {**second.tensors, Q_B: second.tensors[Q_B][:-1]}
            with pytest.raises(ManifestRefused, match="misshapen") as refused:
                await agent.update_adapter(NAME, falsified, config=second.config)
            assert refused.value.nack.tensor == Q_B
            with monkeypatch.context() as patch:
                patch.setattr(Update, "commit", fails)
                with pytest.raises(RuntimeError, match="given up"):
                    await agent.update_adapter(NAME, second.tensors, config=second.config)
            await tested.assert_serves(first)
            await in_the_middle(tested, agent)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
