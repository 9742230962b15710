"""What is recorded of a loader, and what a plan made of it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sidecar._vllm.plugin.loading.copy_plan import CopyBatch, CopyPlan, NoPlanError, make_plan, part
from sidecar._vllm.plugin.loading.copy_plan import _runs as runs_of
from sidecar._vllm.plugin.loading.plan_runner import PlannedUpdate
from tests.unit.sidecar.vllm.plugin.loading._small_model import EXPERTS, Small, trace_of, weights

if TYPE_CHECKING:
    from torch import Tensor

CPU = torch.device("cpu")


def planned(model: Small, rank: int = 0) -> CopyPlan:
    """The plan of a model of that kind."""
    meta = Small(rank, device="meta")
    meta.loaders = model.loaders
    return make_plan(trace_of(meta, weights(0)), unloaded="")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("chunks", [1, 3, 100])
def test_a_plan_does_what_the_loader_does(rank: int, chunks: int) -> None:
    """Fused, sharded, turned, padded, experts, a buffer and a tied head; in chunks of any size."""
    new = weights(5)
    by_loader, by_plan = Small(rank), Small(rank)
    by_loader.load_weights(new.items())
    update = PlannedUpdate(planned(by_plan, rank), by_plan, CPU)
    pairs = list(new.items())
    for start in range(0, len(pairs), -(-len(pairs) // chunks)):
        update.load(pairs[start : start + -(-len(pairs) // chunks)])
    mine, theirs = by_plan.state_dict(), by_loader.state_dict()
    assert set(mine) >= {"embed", "qkv", "out", "turned", "gate_up", "norm", "mean", "head"}
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name
    assert not bool((mine["embed"][-1] != 0).any())


def test_what_arrives_may_lie_anyhow() -> None:
    """A receiver's tensors need not be contiguous, nor begin where their memory does."""
    new = weights(6)
    by_loader, by_plan = Small(), Small()
    by_loader.load_weights(new.items())
    odd: list[tuple[str, Tensor]] = []
    for number, (name, tensor) in enumerate(new.items()):
        if number % 2 and tensor.dim() == 2:
            odd.append((name, tensor.t().contiguous().t()))
        else:
            odd.append((name, torch.cat([torch.zeros(3), tensor.flatten()])[3:].view(tensor.shape)))
    PlannedUpdate(planned(by_plan), by_plan, CPU).load(odd)
    for name, tensor in by_loader.state_dict().items():
        assert torch.equal(by_plan.state_dict()[name], tensor), name


def test_a_plan_can_be_made_again_and_names_every_tensor() -> None:
    plan = planned(Small())
    assert list(plan.copies) == list(weights(0))
    assert all(plan.copies.values())
    assert plan == planned(Small())
    assert "head" not in plan.targets


def _changed_in_place(model: Small, tensor: Tensor) -> None:
    tensor.add_(1)
    model.norm.data.copy_(tensor)


def _kept_beside(model: Small, tensor: Tensor) -> None:
    model.norm.data.copy_(tensor)
    model.doubled = tensor * 2


def _derived_from_parameters(model: Small, tensor: Tensor) -> None:
    model.norm.data.copy_(tensor)
    model.product = model.qkv.data @ model.qkv.data.t()


def _through_memory_of_its_own(model: Small, tensor: Tensor) -> None:
    memory = torch.empty(tensor.shape, device=tensor.device)
    model.norm.data.copy_(memory.copy_(tensor))


def _composed(model: Small, tensor: Tensor) -> None:
    model.norm.data.copy_(tensor)
    model.norm.data.copy_(-torch.exp(model.norm.data))


def _added_later(model: Small, tensor: Tensor) -> None:
    model.norm.data.copy_(tensor)
    model.norm.data.add_(1)


def _added_by_foreach(model: Small, tensor: Tensor) -> None:
    model.norm.data.copy_(tensor)
    torch._foreach_add_([model.norm.data], 1.0)


def _twice(model: Small, tensor: Tensor) -> None:
    model.norm.data.copy_(tensor)
    model.norm.data[2:].copy_(tensor[:-2])


def _filled_over(model: Small, tensor: Tensor) -> None:
    model.norm.data.copy_(tensor)
    model.norm.data[:2].zero_()


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda m, t: m.norm.data.copy_(t + 1), "computes with norm by aten.add"),
        (lambda m, t: m.norm.data.copy_(t.to(torch.float64)), "computes with norm"),
        (lambda m, t: m.norm.data.copy_(torch.cat([t[4:], t[:4]])), "computes with norm"),
        (lambda m, t: m.norm.data.copy_(t.flip(0)), "computes with norm"),
        (lambda m, t: m.norm.data.fill_(t[0].item()), "the loader reads the value of norm"),
        (lambda m, t: m.norm.data.fill_(t[0]), "computed"),
        (lambda m, t: m.norm.data.copy_(t[:1]), "broadcast into"),
        (lambda m, t: m.norm.data.view(torch.int32).copy_(t.view(torch.int32)), "another dtype"),
        (lambda m, t: m.norm.data.add_(t), "norm is changed by aten.add_"),
        (lambda m, t: torch.neg(t, out=m.norm.data), "norm is changed by aten.neg.out"),
        (lambda m, t: m.norm.data[1:].copy_(t[1:]), "elements 0 to 1 of norm are not filled"),
        (lambda m, t: m.norm.data[:-1].copy_(t[1:]), "7 of 8 elements"),
        (lambda m, _: m.norm.data.zero_(), "no tensor of the update fills norm"),
        (_kept_beside, "computes with norm by aten.mul"),
        (_derived_from_parameters, "computes with qkv by aten.mm"),
        (_through_memory_of_its_own, "norm is copied into no parameter"),
        (_changed_in_place, "norm is changed by aten.add_"),
        (_composed, "computes with norm"),
        (_added_later, "norm is changed by aten.add_"),
        (_added_by_foreach, "norm is changed by aten._foreach_add_"),
        (_twice, "filled twice"),
        (_filled_over, "filled twice"),
    ],
)
def test_a_loader_that_does_more_than_copy_gets_no_plan(loader: Any, reason: str) -> None:
    model = Small()
    model.loaders["norm"] = loader
    with pytest.raises(NoPlanError, match=reason):
        planned(model)


def test_half_of_the_experts_are_no_plan() -> None:
    """Nothing is left as it is by chance."""
    model = Small(device="meta")
    tensors = {n: t for n, t in weights(0).items() if n != f"experts.{EXPERTS - 1}.up"}
    with pytest.raises(NoPlanError, match="gate_up"):
        make_plan(trace_of(model, tensors), unloaded="")


def test_only_the_tied_head_may_be_left_out() -> None:
    model = Small(device="meta")
    model.extra = torch.nn.Parameter(torch.empty(2, device="meta"))
    trace = trace_of(model, weights(0))
    assert "extra" not in make_plan(trace, unloaded="extra").targets
    with pytest.raises(NoPlanError, match="only 0 of 2 elements of extra"):
        make_plan(trace, unloaded="norm")


@st.composite
def regions(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """A view of some dimensions, in any order; strides at random, or as a dense tensor's."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=4))
    strides: list[int] = []
    reach = 1
    for size in sizes:
        strides.append(draw(st.sampled_from([reach, reach, reach + 1, 1, 3])))
        reach = max(reach, strides[-1] * max(size, 1))
    order = draw(st.permutations(range(len(sizes))))
    offset = draw(st.integers(0, 3))
    return offset, tuple(sizes[i] for i in order), tuple(strides[i] for i in order)


@given(regions())
def test_runs_are_the_elements_of_the_view(
    region: tuple[int, tuple[int, ...], tuple[int, ...]],
) -> None:
    """Each of them once; a view that covers one twice, or might, is refused."""
    memory = torch.arange(2000)
    elements = part(memory, region).flatten().tolist()
    try:
        runs = runs_of("x", [region])
    except NoPlanError:
        _, sizes, strides = region
        dense = all(a * n <= b for (a, n), b in _pairs(sizes, strides))
        assert not dense or len(set(elements)) < len(elements)
        return
    covered = [i for begin, length in runs for i in range(begin, begin + length)]
    assert covered == sorted(elements)
    assert len(set(covered)) == len(covered)


def _pairs(sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[tuple[int, int], int]]:
    dims = sorted((step, n) for step, n in zip(strides, sizes, strict=True) if n > 1)
    return [(dims[i], dims[i + 1][0]) for i in range(len(dims) - 1)]


def test_too_many_pieces_are_no_plan() -> None:
    with pytest.raises(NoPlanError, match="too many pieces"):
        runs_of("x", [(0, (1 << 21,), (2,))])


@pytest.mark.parametrize("other", [torch.float32, torch.float64])
def test_copies_of_all_kinds_at_once(other: torch.dtype) -> None:
    """Alike and contiguous ones in one go, the others one by one, and cast where they must be."""
    source = torch.randn(6, 4, dtype=other)
    plain, cut = torch.zeros(6, 4), torch.zeros(6, 2)
    CopyBatch([plain, cut], [source, source[:, 1:3]]).run()
    assert torch.equal(plain, source.to(torch.float32))
    assert torch.equal(cut, source[:, 1:3].to(torch.float32))
