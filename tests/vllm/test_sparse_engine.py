"""vLLM's own ``sparse_nccl`` over the bus, on CPUs: patches onto what engines serve, and no others.

The communicator is gloo's, and vLLM packs no weights, as it does for CPUs otherwise
(:mod:`tests.support.sparse_pair`); the rest is vLLM's, both ends of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bus import operations as ops
from bus._manifest import Manifest
from bus.errors import EngineError, ManifestRefused, UpdateFailed, UsageError
from bus.messages import NackCode
from tests.support import pair_plugin
from tests.support.checkpoints import perturbed
from tests.vllm._two import Two, booted_two
from tests.vllm._vllm import require_vllm
from trainer_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

# Fused and sharded both ways, in layers of which others stay as they are.
PATCHED = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.1.mlp.gate_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "lm_head.weight",
)
K_PROJ = PATCHED[1]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("sparse")
    with booted_two(folder, "sparse_nccl", pair_plugin.SPARSE) as tested:
        pair_plugin.register_on_cpu("sparse_nccl")
        yield tested


def changed(
    weights: Mapping[str, Tensor], seed: int, names: Sequence[str] = PATCHED
) -> dict[str, Tensor]:
    """A full set of weights, of which a third of some tensors is other."""
    source = torch.Generator().manual_seed(seed)
    other = perturbed(weights, seed)
    return {
        name: torch.where(torch.rand(weight.shape, generator=source) < 1 / 3, other[name], weight)
        if name in names
        else weight
        for name, weight in weights.items()
    }


def patch(name: str, indices: Tensor, values: Tensor, shape: Sequence[int]) -> Any:
    """vLLM's own."""
    from vllm.distributed.weight_transfer.sparse_nccl_engine import (  # noqa: PLC0415
        SparseWeightPatch,
    )

    return SparseWeightPatch(name, indices.to(torch.int32), values, tuple(shape))


def difference(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Iterator[Any]:
    """What a user computes: where and what is other by now, of each tensor."""
    for name, weight in new.items():
        [at] = torch.nonzero((weight != old[name]).flatten(), as_tuple=True)
        if at.numel():
            yield patch(name, at, weight.flatten()[at], weight.shape)


def trainer_of(agent: SyncTrainerAgent) -> Any:
    """What a user writes."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

    return WeightTransferTrainerFactory.trainer_init(
        agent.init_info("sparse_nccl"), client=agent.client()
    )


async def based(two: Two, agent: SyncTrainerAgent, weights: Mapping[str, Tensor]) -> Any:
    """A trainer engine, for engines that serve a version of this agent's."""
    await asyncio.to_thread(agent.update_weights, weights)
    return await asyncio.to_thread(trainer_of, agent)


def test_patches_bring_two_engines_where_a_whole_set_would(two: Two) -> None:
    """One after the other, each onto the one before, in the place of every worker."""
    base = perturbed(two.weights, 1)
    first = changed(base, 2)
    second = changed(first, 3)

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            trainer = await based(two, agent, base)
            await two.assert_serve(base)
            before = 0
            for old, new in ((base, first), (first, second)):
                patches = agent.patches(difference(old, new))
                await asyncio.to_thread(trainer.send_weights, patches)
                report = agent.last_update
                assert report is not None
                assert (report.engines, report.excluded, report.chunks) == (2, (), 1)
                assert report.verified == "unsupported"
                assert 0 < report.size_bytes < sum(w.nbytes for w in new.values()) / 2
                assert report.version > before
                before = report.version
                await two.assert_serve(new)
            status = await asyncio.to_thread(agent.status)
            assert {view.version for view in status.groups[0].engines} == {before}
            await asyncio.to_thread(trainer.send_weights, agent.patches([]))
            assert agent.last_update is report
            await asyncio.to_thread(trainer.shutdown)

    two.run(scenario())


def spoiled(kind: str, good: list[Any]) -> list[Any]:
    """Patches of which the last one is wrong."""
    [one] = [each for each in good if each.name == K_PROJ]
    rows, columns = one.full_shape
    wrong = {
        "unknown": ("model.layers.7.odd.weight", one.indices, one.values, one.full_shape),
        "shape": (K_PROJ, one.indices, one.values, (rows + 1, columns)),
        "a part": (K_PROJ, one.indices[:1], one.values[:1], (rows // 2, columns)),
        "dtype": (K_PROJ, one.indices, one.values.bfloat16(), one.full_shape),
        "head": ("lm_head.weight", one.indices, one.values, one.full_shape),
    }
    return [
        *(each for each in good if each.name not in (K_PROJ, wrong[kind][0])),
        patch(*wrong[kind]),
    ]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("unknown", "odd.*unknown"),
        ("shape", "k_proj.*misshapen"),
        ("a part", "k_proj.*misshapen"),
        ("dtype", "k_proj.*dtype bfloat16"),
        ("head", "lm_head.*misshapen"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused_and_nothing_is_touched(
    two: Two, kind: str, text: str
) -> None:
    """By every worker, before a pause; the same trainer engine then sends one that does."""
    base = perturbed(two.weights, 4)
    new = changed(base, 5)

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            trainer = await based(two, agent, base)
            good = list(difference(base, new))
            with pytest.raises(ManifestRefused, match=text):
                await asyncio.to_thread(trainer.send_weights, agent.patches(spoiled(kind, good)))
            await two.assert_serve(base)
            await asyncio.to_thread(trainer.send_weights, agent.patches(good))
            await two.assert_serve(new)

    two.run(scenario())


def test_a_patch_onto_other_weights_is_refused(two: Two) -> None:
    """By the engines, who know what they serve: newer weights came in between."""
    base, between = perturbed(two.weights, 6), perturbed(two.weights, 7)
    new = changed(base, 8)

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            version = await asyncio.to_thread(agent.update_weights, base)
            trainer = await based(two, agent, between)
            late = agent.patches(difference(base, new), base=version)
            with pytest.raises(UpdateFailed, match=rf"version {version}, .*whole set") as refused:
                await asyncio.to_thread(trainer.send_weights, late)
            assert refused.value.code is NackCode.OTHER_BASE
            await two.assert_serve(between)

    two.run(scenario())


def test_what_says_not_what_it_is_does_not_start(two: Two) -> None:
    """Patches that nobody wrapped, and a trainer that has committed nothing to patch."""
    weights = two.weights

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            trainer = await asyncio.to_thread(trainer_of, agent)
            with pytest.raises(UsageError, match="has committed none"):
                await asyncio.to_thread(trainer.send_weights, agent.patches([]))
            bare = list(difference(weights, changed(weights, 9)))
            with pytest.raises(UsageError, match=r"send_weights\(agent.patches\(patches\)\)"):
                await asyncio.to_thread(trainer.send_weights, bare)
            await two.assert_serve(weights)

    two.run(scenario())


def test_a_worker_in_which_an_update_broke_off_takes_no_patch() -> None:
    """Whatever its sidecar remembers: that may be another one by now."""
    from sidecar._vllm.plugin.worker.engine import WavebusWeightTransferEngine  # noqa: PLC0415 - same
    from sidecar._vllm.plugin.worker.session import UpdateSession  # noqa: PLC0415 - same

    worker = WavebusWeightTransferEngine.__new__(WavebusWeightTransferEngine)
    worker.session = UpdateSession()
    worker.session.open = True
    patch = Manifest(("a",), ("float32",), ((2,),), (1,), (1,))
    with pytest.raises(EngineError, match="a patch can't repair") as refused:
        worker._arm(ops.ArmManifest(patch), patch)
    assert refused.value.code is NackCode.OTHER_BASE


def test_the_other_ranks_of_a_trainer_have_no_part_in_a_patch(two: Two) -> None:
    """They call what rank 0 calls; and have it in the next whole set."""
    base, last = perturbed(two.weights, 13), perturbed(two.weights, 14)
    new = changed(base, 15)

    async def scenario() -> None:
        async with two.on_the_bus(ranks=2) as agent:
            other = SyncTrainerAgent(two.broker, name="other", rank=1, ranks=2, timeout_s=60.0)
            both = (agent, other)

            async def whole(weights: Mapping[str, Tensor]) -> list[int]:
                calls = (asyncio.to_thread(each.update_weights, weights) for each in both)
                return await asyncio.gather(*calls)

            def patched(each: SyncTrainerAgent) -> None:
                trainer_of(each).send_weights(each.patches(difference(base, new)))

            await asyncio.to_thread(other.connect)
            try:
                await whole(base)
                await asyncio.gather(*(asyncio.to_thread(patched, each) for each in both))
                await two.assert_serve(new)
                first, second = await whole(last)
                assert first == second
                await two.assert_serve(last)
            finally:
                await asyncio.to_thread(other.close)

    two.run(scenario())


async def until_quarantined(agent: SyncTrainerAgent, names: list[str]) -> None:
    """Until these engines, and no others, say that they are: an engine that fell out may still
    undo what it can when the others go on."""
    found = None
    while found != names:
        [group] = (await asyncio.to_thread(agent.status)).groups
        found = [view.name for view in group.engines if view.phase == "quarantined"]


@pytest.mark.parametrize(
    ("ranks", "broken"),
    [([1], ["here"]), ([2], ["here"]), ([3], ["served"]), ([2, 3], ["here", "served"])],
)
def test_a_patch_that_broke_off_is_mended_by_a_whole_set_and_by_no_patch(
    two: Two, ranks: list[int], broken: list[str]
) -> None:
    """A worker failed that had written some of it: its engine serves no version until then. One
    that has all of it goes on."""
    from tests.support.sparse_pair import BREAKS  # noqa: PLC0415 - it needs vLLM

    base = perturbed(two.weights, 10)
    new, after = changed(base, 11), changed(base, 12)
    poisoned = {name: weight.clone() for name, weight in new.items()}
    for place, rank in enumerate(ranks):
        poisoned[K_PROJ][0, place] = BREAKS + rank

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            trainer = await based(two, agent, base)
            send = asyncio.to_thread(
                trainer.send_weights, agent.patches(difference(base, poisoned))
            )
            if len(broken) == 1:
                await send
                assert agent.last_update is not None
                assert agent.last_update.excluded == tuple(broken)
            else:
                with pytest.raises(UpdateFailed, match="broken on purpose"):
                    await send
            await until_quarantined(agent, broken)
            trainer = await asyncio.to_thread(trainer_of, agent)
            with pytest.raises(UpdateFailed, match="has no complete weights") as refused:
                await asyncio.to_thread(trainer.send_weights, agent.patches(difference(base, new)))
            assert refused.value.code is NackCode.OTHER_BASE
            assert refused.value.nack.peer in broken
            trainer = await based(two, agent, base)
            await asyncio.to_thread(trainer.send_weights, agent.patches(difference(base, after)))
            await two.assert_serve(after)

    two.run(scenario())
