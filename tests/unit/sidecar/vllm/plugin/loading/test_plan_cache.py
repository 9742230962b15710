"""By the loader first, compared; then by the plan: on a small model, with its own loaders."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from sidecar._vllm.plugin.loading import plan_cache as plans_module
from sidecar._vllm.plugin.loading.copy_plan import CopyPlan, make_plan
from sidecar._vllm.plugin.loading.plan_cache import PlanCache
from tests.unit.sidecar.vllm.plugin.loading._small_model import (
    HIDDEN,
    Parts,
    Small,
    manifest_of,
    trace_of,
    weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

CPU = torch.device("cpu")


class Packing:
    """As vLLM's methods for linear layers on a CPU: the kernel has the weight in its own form."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.data.t().clone()
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class UnquantizedLinearMethod(Packing):
    """Of the name by which it is known."""


class Linear(nn.Module):
    """Unpacked, as it is loaded, until it is first post-processed."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        empty = torch.empty(HIDDEN, HIDDEN, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.quant_method: Any = UnquantizedLinearMethod()
        self.packed = torch.empty(0)


class Serving(Small):
    """With a layer that repacks."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device=device)
        self.linear = Linear(device)
        self.loaders["linear.upper"] = lambda model, tensor: _half(model, 0).copy_(tensor)
        self.loaders["linear.lower"] = lambda model, tensor: _half(model, 1).copy_(tensor)


class Choosing(Serving):
    """As a router: its layer repacks, and has more that is loaded where it serves."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        correction = nn.Parameter(torch.zeros(HIDDEN, device=device), requires_grad=False)
        self.linear.register_parameter("correction", correction)
        self.linear.register_buffer("offset", torch.zeros(HIDDEN, device=device))
        self.loaders["correction"] = lambda model, tensor: _own(model, "correction").copy_(tensor)
        self.loaders["offset"] = lambda model, tensor: _own(model, "offset").copy_(tensor)


def _own(model: Small, name: str) -> Tensor:
    found: Tensor = model.state_dict()[f"linear.{name}"]
    return found


def _half(model: Small, place: int) -> Tensor:
    return model.get_parameter("linear.weight").data.chunk(2)[place]


def all_weights(seed: int) -> dict[str, Tensor]:
    linear = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    upper, lower = linear.chunk(2)
    return {**weights(seed), "linear.upper": upper, "linear.lower": lower}


def packed_of(seed: int) -> Tensor:
    """What the layer that repacks is to have."""
    new = all_weights(seed)
    return torch.cat([new["linear.upper"], new["linear.lower"]]).t()


class Worker:
    """What a worker does with its plans, without vLLM; its loader is the model's own."""

    def __init__(self, made: type[Serving] = Serving, **config: Any) -> None:
        self.model = made()
        linear = self.model.linear
        linear.quant_method.process_weights_after_loading(linear)
        self.others_stay_out = False
        self.plans = PlanCache(
            SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=False, **config)),
            self.model,
            CPU,
            "",
            any_rank=lambda flags: flags | self.others_stay_out,
        )
        self.arm()

    def arm(self, chunks: int = 1, *, names: list[str] | None = None) -> None:
        new = all_weights(0)
        if isinstance(self.model, Choosing):
            new |= {"correction": torch.zeros(HIDDEN), "offset": torch.zeros(HIDDEN)}
        if names is not None:
            new = {name: new[name] for name in names}
        meta = type(self.model)("meta")
        meta.loaders = self.model.loaders
        self.plans.on_armed(manifest_of(new, chunks), trace_of(meta, new))

    def update(
        self,
        seed: int,
        *,
        chunks: int = 3,
        stop_after: int = 99,
        weights: dict[str, Tensor] | None = None,
        afterwards: Callable[[Small], object] = id,
    ) -> str:
        """One update; how it went. ``afterwards``: what the loader does when all is loaded."""
        pairs = list((weights or all_weights(seed)).items())
        planned = self.plans.start(reloading=False)
        linear = self.model.linear
        kept = linear.weight
        if not planned:
            linear.weight = nn.Parameter(torch.empty(HIDDEN, HIDDEN), requires_grad=False)
        step = -(-len(pairs) // chunks)
        for number, start in enumerate(range(0, len(pairs), step)):
            if number < stop_after:
                last = start + step >= len(pairs)
                self._load(pairs[start : start + step], afterwards if last else None)
        if stop_after < chunks:
            self.plans.close()
        elif not planned:
            linear.quant_method.process_weights_after_loading(linear)
        if not planned:
            linear.weight = kept
        self.plans.on_finished()
        self.plans.close()
        return str(self.plans.account()["way"])

    def _load(
        self, pairs: list[tuple[str, Tensor]], afterwards: Callable[[Small], object] | None
    ) -> None:
        if self.plans.update is not None:
            self.plans.update.load(pairs)
            return
        self.plans.on_load(pairs)
        self.model.load_weights(pairs)
        if afterwards is not None:
            afterwards(self.model)
        self.plans.on_loaded()

    def assert_serves(self, seed: int) -> None:
        new = all_weights(seed)
        loaded = Small()
        loaded.load_weights((n, t) for n, t in new.items() if not n.startswith("linear"))
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(self.model.state_dict()[name], tensor), name
        assert torch.equal(self.model.linear.packed, packed_of(seed))


def test_the_second_update_goes_by_the_plan() -> None:
    """And so do all that follow, however they are cut."""
    worker = Worker()
    assert worker.plans.account() == {"way": "", "proven": False, "reason": ""}
    assert worker.update(1) == "loader"
    assert worker.plans.account()["proven"]
    for seed, chunks in ((2, 1), (3, 4)):
        worker.arm(chunks)
        assert worker.update(seed, chunks=chunks) == "plan"
        worker.assert_serves(seed)


@pytest.mark.parametrize("wrong", [False, True])
def test_what_is_loaded_where_it_serves_is_compared_when_it_has_come(wrong: bool) -> None:
    """Its layer may have been post-processed by then."""
    worker = Worker(Choosing)
    linear, loaders = worker.model.linear, worker.model.loaders
    if wrong:
        loaders["correction"] = lambda model, tensor: _own(model, "correction").copy_(-tensor)
    assert not worker.plans.start(reloading=False)
    kept, linear.weight = linear.weight, nn.Parameter(torch.empty(HIDDEN, HIDDEN))
    worker._load(list(all_weights(1).items()), None)
    linear.quant_method.process_weights_after_loading(linear)
    linear.weight = kept
    late = {"correction": torch.ones(HIDDEN), "offset": torch.ones(HIDDEN)}
    worker._load(list(late.items()), None)
    worker.plans.on_finished()
    worker.plans.close()
    assert worker.plans.account()["proven"] is not wrong
    assert ("correction differs from" in worker.plans.account()["reason"]) is wrong


def test_the_serving_parameters_stay_the_objects_that_they_were() -> None:
    """A kernel, or a captured graph, may know them by their address."""
    worker = Worker()
    worker.update(1)
    before = {n: (id(p), p.data_ptr()) for n, p in worker.model.named_parameters()}
    worker.update(2)
    assert {n: (id(p), p.data_ptr()) for n, p in worker.model.named_parameters()} == before


def test_weights_are_found_again_where_they_are_now() -> None:
    """Other parameters, other memory, and a layer that LoRA has wrapped."""
    worker = Worker()
    worker.update(1)
    worker.model.norm = nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)
    worker.model.qkv.data = torch.zeros_like(worker.model.qkv.data)
    assert worker.update(2) == "plan"
    worker.assert_serves(2)

    inner = worker.model.linear
    wrapper: Any = nn.Module()
    wrapper.base_layer = inner
    del worker.model.linear
    worker.model.linear = wrapper
    assert worker.plans.start(reloading=False)
    assert worker.plans.update is not None
    worker.plans.update.load(list(all_weights(3).items()))
    assert torch.equal(inner.packed, packed_of(3))


def test_an_update_that_broke_off_proves_nothing() -> None:
    """The next one is compared as well; and the hooks are gone."""
    worker = Worker()
    assert worker.update(1, stop_after=1) == "loader"
    assert worker.plans.account() == {"way": "loader", "proven": False, "reason": ""}
    assert "process_weights_after_loading" not in vars(worker.model.linear.quant_method)
    assert worker.update(2) == "loader"
    assert worker.plans.account()["proven"]
    assert "process_weights_after_loading" not in vars(worker.model.linear.quant_method)


def test_half_of_an_update_proves_nothing() -> None:
    """However it ends: what did not come, was not compared."""
    worker = Worker()
    assert not worker.plans.start(reloading=False)
    half = [(n, t) for n, t in all_weights(1).items() if n.startswith("experts")]
    worker._load(half, None)
    worker.plans.on_finished()
    assert worker.plans.account() == {"way": "loader", "proven": False, "reason": ""}
    assert worker.update(2) == "loader"
    assert worker.update(3) == "plan"


def test_a_planned_update_that_broke_off_is_mended_by_either_way() -> None:
    worker = Worker()
    worker.update(1)
    assert worker.update(2, stop_after=2) == "plan"
    assert worker.update(3) == "plan"
    worker.assert_serves(3)
    assert worker.update(4, stop_after=2) == "plan"
    worker.others_stay_out = True
    assert worker.update(5) == "loader"
    worker.assert_serves(5)


def test_a_layer_that_repacks_keeps_its_old_weights_until_it_is_whole() -> None:
    worker = Worker()
    worker.update(1)
    packed = worker.model.linear.packed.clone()
    worker.update(2, chunks=len(all_weights(0)), stop_after=len(all_weights(0)) - 1)
    assert torch.equal(worker.model.linear.packed, packed)


def test_workers_go_the_same_way() -> None:
    worker = Worker()
    worker.update(1)
    worker.others_stay_out = True
    assert worker.update(2) == "loader"
    worker.assert_serves(2)
    worker.others_stay_out = False
    assert worker.update(3) == "plan"


def test_layers_that_are_still_being_reloaded_are_the_loaders() -> None:
    worker = Worker()
    worker.update(1)
    assert not worker.plans.start(reloading=True)
    worker.plans.close()
    assert worker.plans.start(reloading=False)


def test_weights_that_are_not_where_they_were_are_the_loaders() -> None:
    worker = Worker()
    worker.update(1)
    kept, worker.model.norm = worker.model.norm, nn.Parameter(torch.empty(HIDDEN, device="meta"))
    assert not worker.plans.start(reloading=False)
    worker.model.norm = kept
    assert worker.plans.start(reloading=False)


def test_other_tensors_are_another_plan() -> None:
    """The same in another order, for instance: it is proven by its own first update."""
    worker = Worker()
    worker.update(1)
    worker.arm(names=[*reversed(all_weights(0))])
    assert not worker.plans.account()["proven"]
    assert worker.update(2) == "loader"


def test_weights_that_are_not_a_number_equal_themselves() -> None:
    worker = Worker()
    nan = {n: torch.full_like(t, float("nan")) for n, t in all_weights(1).items()}
    assert worker.update(1, weights=nan) == "loader"
    assert worker.plans.account() == {"way": "loader", "proven": True, "reason": ""}


def _swapped(plan: CopyPlan, one: str, other: str) -> CopyPlan:
    """Each of two tensors goes where the other should."""
    copies = {**plan.copies, one: plan.copies[other], other: plan.copies[one]}
    return replace(plan, copies=copies)


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ("k", "v", "qkv differs from the received"),
        ("experts.0.gate", "experts.2.up", "gate_up differs from the received"),
        ("norm", "mean", "differs from the received"),
    ],
)
def test_a_wrong_plan_is_found_out_and_dropped(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    one: str,
    other: str,
    named: str,
) -> None:
    """By the update that it is compared with: nothing was ever copied by it."""
    monkeypatch.setattr(
        plans_module,
        "make_plan",
        lambda trace, unloaded: _swapped(make_plan(trace, unloaded=unloaded), one, other),
    )
    worker = Worker()
    with caplog.at_level(logging.INFO, logger="vllm.wavebus"):
        assert worker.update(1) == "loader"
        [record] = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert named in record.getMessage()
        worker.arm(2)
        assert worker.update(2) == "loader"
    worker.assert_serves(2)
    assert named in worker.plans.account()["reason"]
    assert len([r for r in caplog.records if r.levelno >= logging.INFO]) == 1


def test_a_layer_that_repacks_is_compared_before_it_does() -> None:
    """Afterwards there is nothing to compare with."""
    worker = Worker()
    worker.model.loaders["linear.lower"] = lambda m, tensor: _half(m, 1).copy_(tensor * 2)
    assert worker.update(1) == "loader"
    assert (
        "linear.weight differs from the received linear.lower" in worker.plans.account()["reason"]
    )
    assert worker.update(2) == "loader"


def test_weights_that_are_rearranged_after_loading_are_no_copies() -> None:
    """As kernels of experts do on some GPUs: the plan is right, and of no use."""
    worker = Worker()
    worker.update(1, chunks=1, afterwards=lambda m: m.gate_up.data.copy_(m.gate_up.data.flip(1)))
    assert "gate_up differs from the received" in worker.plans.account()["reason"]


def test_padding_is_compared_too() -> None:
    worker = Worker()
    worker.update(1, chunks=1, afterwards=lambda model: model.embed.data[-1].fill_(7))
    assert "padding of embed" in worker.plans.account()["reason"]


def test_a_loader_that_computes_gets_no_plan_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker()
    worker.model.loaders["norm"] = lambda model, tensor: model.norm.data.copy_(1 + tensor)
    with caplog.at_level(logging.INFO, logger="vllm.wavebus"):
        for seed in (1, 2, 3):
            worker.arm(names=[*reversed(all_weights(0))])
            assert worker.update(seed) == "loader"
    [record] = caplog.records
    assert "the loader computes with norm by aten.add" in record.getMessage()
    assert worker.plans.account()["reason"] in record.getMessage()


def test_layers_that_are_quantised_get_no_plan() -> None:
    worker = Worker()
    worker.model.linear.quant_method = Packing()
    worker.arm(names=[*reversed(all_weights(0))])
    assert worker.plans.account()["reason"] == "linear is quantised by Packing"


@pytest.mark.parametrize(
    ("kernel", "device", "has_plan"),
    [
        ("TRITON", "cuda", True),
        ("FLASHINFER_TRTLLM", "cuda", False),
        ("FLASHINFER_CUTLASS", "cuda", False),
        ("CPU", "cpu", True),
    ],
)
def test_experts_in_another_order_get_no_plan(kernel: str, device: str, has_plan: bool) -> None:
    """It does not show in their shape; on a CPU vLLM's own method makes it, when they are there."""
    model = Serving()
    method = UnquantizedLinearMethod()
    method.unquantized_backend = SimpleNamespace(name=kernel)  # type: ignore[attr-defined]
    model.linear.quant_method = method
    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=False))
    plans = PlanCache(config, model, torch.device(device), "", any_rank=lambda flags: flags)
    meta = Serving("meta")
    plans.on_armed(manifest_of(all_weights(0)), trace_of(meta, all_weights(0)))
    assert (plans.entry.plan is not None) is has_plan
    assert has_plan or kernel in plans.entry.reason


def test_the_plan_of_an_open_update_grows_and_is_of_use_when_all_was_staged() -> None:
    """The same tensors, armed as a whole, have the same plan."""
    worker, new = Worker(), all_weights(0)
    plans, parts = worker.plans, Parts(Serving("meta"), new)
    for known in (5, len(new)):
        manifest = parts.next(known - len(parts.trace.metas))
        plans.on_armed(manifest, parts.trace)
        plan = plans.entry.plan
        assert plan is not None
        assert list(plan.copies) == list(new)[:known]
        assert set(plan.targets) >= set(dict(worker.model.named_parameters()))
        assert ("mean" in plan.targets) is (known == len(new))  # a buffer
    plans.on_armed(replace(manifest, is_open=False), parts.trace)
    assert (plans.entry.is_open, plans.entry.proven) == (False, False)
    plans.on_staged(proven=True)
    before = plans.entry
    worker.arm(3)
    assert plans.entry is before
    assert worker.update(1) == "plan"
    worker.assert_serves(1)


def test_an_open_update_in_a_pause_is_the_loaders() -> None:
    """Its plan lacks tensors."""
    worker = Worker()
    worker.update(1)
    parts = Parts(Serving("meta"), all_weights(0))
    worker.plans.on_armed(parts.next(5), parts.trace)
    worker.plans.entry.proven = True
    assert worker.update(2) == "loader"
    worker.assert_serves(2)
    assert worker.plans.account() == {"way": "loader", "proven": True, "reason": ""}


def test_what_has_no_plan_in_parts_has_none_the_next_time(caplog: pytest.LogCaptureFixture) -> None:
    """It shows with a later part; from then on, with the first. Other tensors may have one."""
    worker, new = Worker(), all_weights(0)
    plans = worker.plans
    meta = Serving("meta")
    meta.loaders = {**meta.loaders, "norm": lambda model, tensor: model.norm.copy_(1 + tensor)}
    with caplog.at_level(logging.INFO, logger="vllm.wavebus"):
        for turn in range(2):
            parts = Parts(meta, new)
            first = parts.next(5)
            plans.on_armed(first, parts.trace)
            assert (plans.entry.plan is None) is bool(turn)
            plans.on_armed(parts.next(len(new) - 5), parts.trace)
            assert plans.entry.plan is None
            assert "norm" in plans.entry.reason
            plans.on_armed(replace(first, is_open=False), parts.trace)  # another one meanwhile
            plans.on_armed(parts.next(0), parts.trace)
    assert len(caplog.records) >= 1
    others = Parts(Serving("meta"), dict(reversed(new.items())))
    plans.on_armed(others.next(5), others.trace)
    assert plans.entry.plan is not None


def composed_weight_loader() -> Callable[[Tensor, Tensor], None]:
    """Of vLLM's name."""

    def composed_loader(parameter: Tensor, loaded: Tensor) -> None:
        parameter.copy_(-loaded.exp())

    return composed_loader


@pytest.mark.parametrize("why", ["filled", "computed"])
def test_what_no_copies_ever_load_is_known_with_the_first_tensor(why: str) -> None:
    """Of experts whose rows a kernel pads, say; or of a state that decays."""
    worker = Worker()
    meta, gate_up = Serving("meta"), "gate_up"
    parameter: Any = meta.get_parameter(gate_up)
    if why == "filled":
        parameter.weight_loader_numel = parameter.numel() - 1
    else:
        parameter.weight_loader = composed_weight_loader()
    parts = Parts(meta, all_weights(0))
    worker.plans.on_armed(parts.next(1), parts.trace)
    assert gate_up in worker.plans.entry.reason
    assert why in worker.plans.entry.reason


def test_layers_that_are_quantised_are_known_with_the_first_tensor() -> None:
    worker = Worker()
    worker.model.linear.quant_method = Packing()
    parts = Parts(Serving("meta"), all_weights(0))
    worker.plans.on_armed(parts.next(1), parts.trace)
    assert worker.plans.entry.reason == "linear is quantised by Packing"


def test_experts_that_move_get_no_plan() -> None:
    worker = Worker()
    worker.plans._vllm_config.parallel_config.enable_eplb = True
    worker.arm(names=[*reversed(all_weights(0))])
    assert "EPLB" in worker.plans.account()["reason"]
