"""LoRA adapters alone, over the whole bus: broker, sidecars, a trainer, a real vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bus._weight_transfer.shm import ShmSender
from bus.errors import ManifestRefused, Refused, UsageError, WavebusError
from bus.messages import NackCode
from sidecar import Sidecar
from sidecar._vllm.core_state import parse_version
from sidecar._vllm.inprocess_engine import VllmEngine
from sidecar._vllm.plugin import operations
from sidecar.embedded import EmbeddedEngine
from tests.contract.engine_suite import Watch
from tests.support.adapters import ATTENTION, MadeAdapter, make_adapter
from tests.support.broker import a_broker
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.vllm._vllm import (
    MAX_POSITIONS,
    PROMPT,
    REST_MS,
    async_llm,
    boot_environment,
    engine_args,
    generate,
    require_vllm,
)
from trainer_agent import TrainerAgent
from trainer_agent._update.update import Update

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

NAME = "policy-lora"
MAX_RANK = 8
# On CPUs a request without an adapter, beside one with, gets what lies in the last slot: it stays
# empty until a test fills both.
LORA_ARGS = {"enable_lora": True, "max_lora_rank": MAX_RANK, "max_loras": 2, "max_cpu_loras": 2}
CHUNK_BYTES = 8192  # an adapter has several
LAYER = "base_model.model.model.layers.1."
WAIT_S = 600.0


class WithLora:
    """An ``AsyncLLM`` that takes adapters, the bus's engine around it, and what it serves."""

    def __init__(self, llm: Any, checkpoint: Checkpoint, runner: asyncio.Runner) -> None:
        self.llm = llm
        self.engine = VllmEngine(llm)
        self.checkpoint = checkpoint
        self.base = dict(checkpoint.weights)
        self._runner = runner
        self._names = itertools.count()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(asyncio.wait_for(work, WAIT_S))

    def made(self, seed: int, **how: Any) -> MadeAdapter:
        return make_adapter(self.base, seed, **how)

    def reference(self, weights: dict[str, Tensor], count: int, prompt: Sequence[int]) -> list[int]:
        return self.checkpoint.greedy(weights, prompt, count)

    async def generate(
        self, count: int, lora: Any = None, *, watch: Watch | None = None
    ) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Greedy tokens, and which version each is of."""
        note = watch.note if watch is not None else None
        last = await generate(self.llm, f"l{next(self._names)}", count, note=note, lora=lora)
        spans = [(parse_version(s.version), s.start, s.end) for s in last.weight_versions]
        return list(last.token_ids), spans

    @contextlib.asynccontextmanager
    async def on_the_bus(self, backend: str = "shm") -> AsyncIterator[TrainerAgent]:
        """Its sidecar has joined, and a trainer has waited for it."""
        async with (
            a_broker() as (_, address),
            Sidecar(self.engine, broker=address, name="e0"),
            TrainerAgent(
                address, name="trainer", backend=backend, chunk_bytes=CHUNK_BYTES
            ) as agent,
        ):
            await agent.wait_for_engines(1)
            yield agent

    async def assert_serves(self, made: MadeAdapter, version: int) -> None:
        """The adapter by its name; the model without it as before."""
        lora = self.engine.lora_request(NAME)
        expected = self.reference(made.merged, 24, PROMPT)
        assert await self.generate(24, lora) == (expected, [(version, 0, 24)])
        plain = self.reference(self.base, 24, PROMPT)
        assert plain != expected
        assert (await self.generate(24))[0] == plain


@pytest.fixture(scope="module")
def with_lora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WithLora]:
    """One engine for the module."""
    folder = tmp_path_factory.mktemp("lora")
    checkpoint = make_checkpoint(folder / "model", seed=1, max_positions=MAX_POSITIONS)
    with asyncio.Runner() as runner:
        environment = boot_environment(folder, rest_ms=REST_MS)
        booted = async_llm(environment, engine_args(checkpoint.folder, **LORA_ARGS))
        llm = runner.run(booted.__aenter__())
        tested = WithLora(llm, checkpoint, runner)
        try:
            yield tested
        finally:
            runner.run(booted.__aexit__(None, None, None))
            del tested.llm, tested.engine, llm
            gc.collect()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_an_adapter_alone(with_lora: WithLora, backend: str) -> None:
    """Twice: the second in place of the first, over the same transport."""

    async def scenario() -> None:
        async with with_lora.on_the_bus(backend) as agent:
            for seed in (11, 12):
                made = with_lora.made(seed)
                version = await agent.update_adapter(
                    NAME, made.tensors, config=made.config, label=f"step {seed}"
                )
                report = agent.last_update
                assert report is not None
                assert (report.version, report.label) == (version, f"step {seed}")
                assert report.chunks > 1
                assert report.verified == "sample"
                await with_lora.assert_serves(made, version)

    with_lora.run(scenario())


def test_in_the_middle_of_a_request(with_lora: WithLora) -> None:
    """Kept, it goes on with the new adapter, as if all before had been said with it: its KV cache
    is computed anew. A request without adapter beside it says what it would have said."""
    first, second = with_lora.made(21), with_lora.made(22)
    count = 300

    async def scenario() -> None:
        async with with_lora.on_the_bus() as agent:
            before = await agent.update_adapter(NAME, first.tensors, config=first.config)
            watch = Watch()
            lora = with_lora.engine.lora_request(NAME)
            request = asyncio.create_task(with_lora.generate(count, lora, watch=watch))
            plain = asyncio.create_task(with_lora.generate(count))
            await watch.reached(20)
            after = await agent.update_adapter(NAME, second.tensors, config=second.config)
            tokens, spans = await request
            assert [version for version, _, _ in spans] == [before, after]
            cut = spans[0][2]
            assert tokens[:cut] == with_lora.reference(first.merged, cut, PROMPT)
            so_far = (*PROMPT, *tokens[:cut])
            assert tokens[cut:] == with_lora.reference(second.merged, count - cut, so_far)
            assert (await plain)[0] == with_lora.reference(with_lora.base, count, PROMPT)
            # A request that still names the path of the first gets what there is.
            assert (await with_lora.generate(24, lora))[0] == with_lora.reference(
                second.merged, 24, PROMPT
            )

    with_lora.run(scenario())


def test_after_an_update_of_the_model(with_lora: WithLora) -> None:
    """vLLM drops all adapters with it: the one of the bus is on the new weights at once."""
    made, new = with_lora.made(31, targets=ATTENTION), perturbed(with_lora.base, 32)

    async def scenario() -> None:
        async with with_lora.on_the_bus() as agent:
            await agent.update_adapter(NAME, made.tensors, config=made.config)
            version = await agent.update_weights(new)
            merged = {
                name: new[name] + made.merged[name] - with_lora.base[name]
                for name in with_lora.base
            }
            with_lora.base = new
            await with_lora.assert_serves(MadeAdapter(made.tensors, made.config, merged), version)
            other = with_lora.made(33)
            version = await agent.update_adapter(NAME, other.tensors, config=other.config)
            await with_lora.assert_serves(other, version)

    with_lora.run(scenario())


def test_more_adapters_than_there_is_room_for(with_lora: WithLora) -> None:
    """One that was evicted comes back, from no file."""
    made = {name: with_lora.made(40 + n) for n, name in enumerate(("one", "two", "three"))}

    async def scenario() -> None:
        async with with_lora.on_the_bus() as agent:
            for name, each in made.items():
                await agent.update_adapter(name, each.tensors, config=each.config)
            for name, each in made.items():
                lora = with_lora.engine.lora_request(name)
                expected = with_lora.reference(each.merged, 16, PROMPT)
                assert (await with_lora.generate(16, lora))[0] == expected

    with_lora.run(scenario())


def test_a_removed_adapter_serves_its_requests_and_takes_no_new_ones(with_lora: WithLora) -> None:
    """One under way goes on with it, and its memory is then free. A request that comes late, with
    the path that it had, is ended by the core, whose workers would fail at it. Another adapter of
    its name is another one: nothing of the first is found in the prefix cache."""
    first, second = with_lora.made(51), with_lora.made(52)
    count = 300

    async def held() -> set[str]:
        encoded = operations.encode(operations.UndoAdapter(settled=False))
        [done] = await with_lora.llm.collective_rpc(
            operations.PERFORM, kwargs={"operation": encoded}
        )
        return set(done["adapters"])

    async def scenario() -> None:
        async with with_lora.on_the_bus() as agent:
            await agent.update_adapter(NAME, first.tensors, config=first.config)
            others = await held() - {NAME}
            watch = Watch()
            lora = with_lora.engine.lora_request(NAME)
            request = asyncio.create_task(with_lora.generate(count, lora, watch=watch))
            await watch.reached(20)
            version = await agent.remove_adapter(NAME, label="gone")
            assert agent.last_update is not None
            assert (agent.last_update.version, agent.last_update.chunks) == (version, 0)
            assert NAME in await held()
            with pytest.raises(UsageError, match="no update of this adapter"):
                with_lora.engine.lora_request(NAME)
            tokens, _ = await request
            assert tokens == with_lora.reference(first.merged, count, PROMPT)
            await agent.remove_adapter(NAME)  # again: there is none, and its memory is free
            assert await held() == others
            late = await generate(with_lora.llm, "late", 24, lora=lora)
            assert (list(late.token_ids), late.finish_reason) == ([], "abort")
            again = await agent.update_adapter(NAME, second.tensors, config=second.config)
            await with_lora.assert_serves(second, again)

    with_lora.run(scenario())


def test_a_removal_that_is_not_committed_is_undone(
    with_lora: WithLora, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though vLLM's front end has forgotten the adapter already."""
    made = with_lora.made(53)

    async def fails(*_: Any) -> None:
        raise RuntimeError("not now")

    async def scenario() -> None:
        async with with_lora.on_the_bus() as agent:
            await agent.update_adapter(NAME, made.tensors, config=made.config)
            with monkeypatch.context() as patched:
                patched.setattr(with_lora.engine._vllm, "set_weight_version", fails)
                with pytest.raises(WavebusError, match="not now"):
                    await agent.remove_adapter(NAME)
            await with_lora.generate(1)  # which waits until the undo has ended
            lora = with_lora.engine.lora_request(NAME)
            expected = with_lora.reference(made.merged, 24, PROMPT)
            assert (await with_lora.generate(24, lora))[0] == expected

    with_lora.run(scenario())


def _renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


Q_PROJ, DOWN_PROJ = f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.down_proj"
K_B = f"{LAYER}self_attn.k_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("spoil", "tensor", "reason"),
    [
        (lambda t: _renamed(t, Q_PROJ, f"{LAYER}x_proj"), f"{LAYER}x_proj.lora_A", "unknown"),
        (
            lambda t: _renamed(t, f"{DOWN_PROJ}.lora_A.weight", f"{DOWN_PROJ}.bias"),
            f"{DOWN_PROJ}.bias",
            "end in .lora_A.weight or .lora_B.weight",
        ),
        (lambda t: {n: v for n, v in t.items() if n != K_B}, K_B, "missing: the other half"),
        (lambda t: {**t, K_B: t[K_B][:-1]}, K_B, "misshapen"),
        (
            lambda t: {**t, f"{DOWN_PROJ}.lora_A.weight": t[f"{DOWN_PROJ}.lora_A.weight"][:, 1:]},
            f"{DOWN_PROJ}.lora_A.weight",
            "misshapen",
        ),
        (lambda t: {**t, K_B: t[K_B][:, :3]}, K_B, "misshapen"),
        (lambda t: {**t, K_B: t[K_B].int()}, K_B, "dtype int32"),
    ],
)
def test_refused_when_armed(
    with_lora: WithLora, spoil: Callable[..., dict[str, Tensor]], tensor: str, reason: str
) -> None:
    """By name of tensor and engine; nothing was paused."""
    made = with_lora.made(51)
    _assert_refused(with_lora, spoil(made.tensors), made.config, tensor, reason)


def test_a_rank_that_is_too_high(with_lora: WithLora) -> None:
    made = with_lora.made(52, rank=2 * MAX_RANK)
    first = next(iter(made.tensors))
    _assert_refused(
        with_lora, made.tensors, made.config, first, "over the engine's --max-lora-rank"
    )


def test_a_config_that_vllm_cannot_have(with_lora: WithLora) -> None:
    made = with_lora.made(53)
    config = {**made.config, "use_dora": True}
    _assert_refused(with_lora, made.tensors, config, "", "DoRA")


def _assert_refused(
    with_lora: WithLora,
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    tensor: str,
    reason: str,
) -> None:
    async def scenario() -> None:
        async with with_lora.on_the_bus() as agent:
            with pytest.raises(ManifestRefused, match=reason) as refused:
                await agent.update_adapter("other", tensors, config=config)
            assert refused.value.nack.peer == "e0"
            assert refused.value.nack.tensor.startswith(tensor)
            assert refused.value.nack.step == "arm"
            with pytest.raises(UsageError, match="no update of this adapter"):
                with_lora.engine.lora_request("other")

    with_lora.run(scenario())


def test_a_byte_that_flips_is_named(with_lora: WithLora, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a chunk that is not the first: nothing is loaded, and the adapter before serves on."""
    good, lost = with_lora.made(61), with_lora.made(62)
    put = ShmSender.put

    def put_another(sender: ShmSender, seq: int, tensors: Sequence[Tensor]) -> bytes:
        flipped = [tensor.clone() for tensor in tensors]
        if seq:
            flipped[-1].view(torch.uint8).view(-1)[-3] ^= 1
        return put(sender, seq, flipped)

    async def scenario() -> None:
        async with with_lora.on_the_bus() as agent:
            version = await agent.update_adapter(NAME, good.tensors, config=good.config)
            with monkeypatch.context() as patch:
                patch.setattr(ShmSender, "put", put_another)
                with pytest.raises(Refused) as refused:
                    await agent.update_adapter(NAME, lost.tensors, config=lost.config)
            assert refused.value.code is NackCode.CHECKSUM_MISMATCH
            assert refused.value.nack.peer == "e0"
            assert refused.value.nack.tensor in lost.tensors
            await with_lora.assert_serves(good, version)

    with_lora.run(scenario())


def test_an_update_that_was_loaded_and_not_committed(
    with_lora: WithLora, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer gives it up in the last moment: the adapter before is there again, and nobody
    is quarantined. One that is the first of its name is gone."""
    good, lost = with_lora.made(71), with_lora.made(72)

    async def fails(*_: Any) -> None:
        raise RuntimeError("given up")

    async def scenario() -> None:
        async with with_lora.on_the_bus() as agent:
            version = await agent.update_adapter(NAME, good.tensors, config=good.config)
            with monkeypatch.context() as patch:
                patch.setattr(Update, "commit", fails)
                for name in (NAME, "never"):
                    with pytest.raises(RuntimeError, match="given up"):
                        await agent.update_adapter(name, lost.tensors, config=lost.config)
                    await with_lora.assert_serves(good, version)
            with pytest.raises(UsageError, match="no update of this adapter"):
                with_lora.engine.lora_request("never")

    with_lora.run(scenario())


def test_engines_without_lora(with_lora: WithLora) -> None:
    """An embedded engine beside it has no adapters: named, before anything happens."""
    made = with_lora.made(81)

    async def scenario() -> None:
        async with (
            a_broker() as (_, address),
            Sidecar(with_lora.engine, broker=address, name="e0"),
            Sidecar(
                EmbeddedEngine(with_lora.checkpoint.folder, host=None), broker=address, name="small"
            ),
            TrainerAgent(address, name="trainer") as agent,
        ):
            await agent.wait_for_engines(2)
            with pytest.raises(Refused, match="small") as refused:
                await agent.update_adapter(NAME, made.tensors, config=made.config)
            assert refused.value.code is NackCode.BACKEND_MISSING

    with_lora.run(scenario())


@pytest.mark.slow
def test_a_fresh_engine_says_the_same(with_lora: WithLora, tmp_path: Path) -> None:
    """One that is started with the adapter, loaded by vLLM alone."""
    with_lora.base = dict(with_lora.checkpoint.weights)
    made = with_lora.made(91)

    async def scenario() -> None:
        async with with_lora.on_the_bus() as agent:
            await agent.update_weights(with_lora.base)
            await agent.update_adapter(NAME, made.tensors, config=made.config)
        updated, _ = await with_lora.generate(48, with_lora.engine.lora_request(NAME))
        fresh = WithLora.__new__(WithLora)
        fresh._names = itertools.count()
        args = engine_args(with_lora.checkpoint.folder, **LORA_ARGS)
        async with async_llm(boot_environment(tmp_path), args) as llm:
            from vllm.lora.request import LoRARequest  # noqa: PLC0415 - after the boot

            fresh.llm = llm
            folder = made.save(tmp_path / "adapter")
            assert await fresh.generate(48, LoRARequest("it", 1, str(folder))) == (
                updated,
                [(0, 0, 48)],
            )

    with_lora.run(scenario())
