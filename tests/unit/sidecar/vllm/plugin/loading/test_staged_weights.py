"""The next weights beside those that serve: on a small model, with its own loaders."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bus._weight_transfer.packing import ViewCache, packed_offsets
from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._vllm.plugin.loading.copy_plan import NoPlanError, extend_plan, make_plan
from sidecar._vllm.plugin.loading.loader_trace import TargetNames
from sidecar._vllm.plugin.loading.staged_weights import StagedWeights
from sidecar._vllm.plugin.loading.staging_layouts import AsSent, ByTarget
from tests.unit.sidecar.vllm.plugin.loading._small_model import (
    HIDDEN,
    ROWS,
    Parts,
    Small,
    manifest_of,
    trace_of,
    weights,
)
from tests.unit.sidecar.vllm.plugin.loading.test_plan_cache import (
    CPU,
    Choosing,
    Serving,
    all_weights,
    packed_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from sidecar._vllm.plugin.loading.staged_weights import Chunks


class Whole(Small):
    """Of a worker that takes all of each tensor, and has its weights as they are loaded."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device=device)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, -1.0, device=device), requires_grad=False)

        self.qkv = parameter(4 * HIDDEN, HIDDEN)
        self.out = parameter(HIDDEN, HIDDEN)
        for name, first, last in (("q", 0, 2), ("k", 2, 3), ("v", 3, 4)):
            rows = slice(first * HIDDEN, last * HIDDEN)
            self.loaders[name] = functools.partial(_load_rows, rows=rows)
        self.loaders["out"] = lambda model, tensor: model.out.data.copy_(tensor)


def _load_rows(model: Small, tensor: Tensor, *, rows: slice) -> None:
    model.qkv.data[rows].copy_(tensor)


class Staging:
    """What a worker does with them, without vLLM."""

    def __init__(self, made: type[Serving | Whole] = Serving) -> None:
        self.made = made
        self.model = made()
        self.model.load_weights(self.new(0).items())
        if isinstance(self.model, Serving):
            linear = self.model.linear
            linear.quant_method.process_weights_after_loading(linear)
        self.meta = made("meta")
        self.plan = make_plan(trace_of(self.meta, self.new(0)), unloaded="")
        self.weights = StagedWeights(self.model, CPU)
        self.chunks = self.cut(3)

    def new(self, seed: int) -> dict[str, Tensor]:
        """All that its loader takes."""
        return all_weights(seed) if self.made is Serving else weights(seed)

    def cut(self, chunks: int) -> Chunks:
        manifest = manifest_of(self.new(0), chunks)
        return tuple(manifest.chunk(seq) for seq in range(manifest.chunks))

    def begin(self) -> None:
        self.weights.begin(self.plan, self.chunks)

    def stage(self, new: Mapping[str, Tensor]) -> None:
        for seq, chunk in enumerate(self.chunks):
            self.weights.stage(seq, [(m.name, new[m.name]) for m in chunk if m.name in new])

    def update(self, seed: int, *, keep: bool = False) -> None:
        """A whole one."""
        self.begin()
        self.stage(self.new(seed))
        self.swap(keep=keep)

    def swap(self, *, keep: bool = False) -> None:
        """What is staged is served."""
        self.weights.seal()
        self.weights.require_sealed()
        self.weights.swap()
        self.weights.release(keep=keep)

    def serves(self, seed: int) -> bool:
        """Whether it has what a model has that has loaded these."""
        model = self.made()
        model.load_weights(self.new(seed).items())
        packed = {"linear.weight"}  # in another form
        return all(
            torch.equal(now, self.model.state_dict()[name])
            for name, now in model.state_dict().items()
            if name not in packed
        )

    def prove(self, new: Mapping[str, Tensor], meta: Serving | Whole | None = None) -> None:
        """By the loaders of a model on meta."""
        meta = meta or self.meta
        self.weights.prove(list(new.items()), meta.load_weights, TargetNames(meta))

    def snapshot(self) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in self.model.state_dict().items()}


def test_buffers_of_a_layer_that_repacks_are_staged() -> None:
    model, meta = Choosing(), Choosing("meta")
    model.linear.quant_method.process_weights_after_loading(model.linear)
    new = {**all_weights(1), "correction": torch.ones(HIDDEN), "offset": torch.full((HIDDEN,), 2.0)}
    plan, staged = make_plan(trace_of(meta, new), unloaded=""), StagedWeights(model, CPU)
    staged.begin(plan, (manifest_of(new).chunk(0),))
    staged.stage(0, list(new.items()))
    staged.seal()
    staged.require_sealed()
    staged.swap()
    assert torch.equal(model.linear.packed, packed_of(1))
    for name in ("correction", "offset"):
        assert torch.equal(model.state_dict()[f"linear.{name}"], new[name])


@pytest.fixture(params=[Serving, Whole], ids=["by target", "as sent"])
def tested(request: pytest.FixtureRequest) -> Staging:
    """By target: fused, sharded, turned, padded, of experts, a buffer, and a layer that repacks."""
    return Staging(request.param)


def test_nothing_changes_before_the_swap_and_then_all_does(tested: Staging) -> None:
    before = tested.snapshot()
    places = {name: each.data_ptr() for name, each in tested.model.named_parameters()}
    tested.begin()
    tested.stage(tested.new(5))
    tested.weights.seal()
    tested.weights.require_sealed()
    assert all(torch.equal(before[name], now) for name, now in tested.snapshot().items())
    if isinstance(tested.model, Serving):
        assert torch.equal(tested.model.linear.packed, packed_of(0))
    tested.swap()
    assert tested.serves(5)
    if isinstance(tested.model, Serving):
        assert torch.equal(tested.model.linear.packed, packed_of(5))
    assert {name: each.data_ptr() for name, each in tested.model.named_parameters()} == places


def test_memory_is_kept_or_not(tested: Staging) -> None:
    """As much as all that is filled; or that is sent, where it lies as it is sent."""
    assert tested.weights.memory.held_bytes == 0
    tested.begin()
    if tested.made is Serving:
        needed = sum(torch.Size(t.shape).numel() * 4 for t in tested.plan.targets.values())
    else:
        needed = sum(packed_offsets(chunk)[-1] for chunk in tested.chunks)
    assert tested.weights.memory.held_bytes == needed
    memory = {each.data_ptr() for each in tested.weights.memory.tensors.values()}
    tested.weights.release(keep=True)
    assert (tested.weights._begun, tested.weights.memory.held_bytes) == (False, needed)
    tested.begin()
    assert {each.data_ptr() for each in tested.weights.memory.tensors.values()} == memory
    tested.weights.release(keep=False)
    assert tested.weights.memory.held_bytes == 0


@pytest.mark.parametrize("keep", [False, True])
def test_one_update_after_the_other(tested: Staging, keep: bool) -> None:
    """Also where chunks lie where those of the update before did, and come as views of that."""
    memory = {meta: torch.empty(1 << 16, dtype=torch.uint8) for meta in tested.chunks}
    views = ViewCache()
    for seed in (5, 6, 7):
        tested.begin()
        for seq, chunk in enumerate(tested.chunks):
            came = views.get(memory[chunk], packed_offsets(chunk)[:-1], chunk)
            for name, tensor in came:
                tensor.copy_(tested.new(seed)[name])
            tested.weights.stage(seq, came)
        tested.swap(keep=keep)
        assert tested.serves(seed)


@pytest.mark.parametrize("keep", [False, True])
def test_a_chunk_that_was_received_into_its_room_is_staged(keep: bool) -> None:
    """There is room for each; and nothing is copied before the swap."""
    tested = Staging(Whole)
    for seed in (5, 6):
        tested.begin()
        for seq, chunk in enumerate(tested.chunks):
            came = tested.weights.buffer_for(seq)
            assert came is not None
            assert came.metas is chunk
            for name, tensor in came:
                tensor.copy_(tested.new(seed)[name])
            with _NoCopies():  # type: ignore[no-untyped-call]
                tested.weights.stage(seq, came)
        tested.swap(keep=keep)
        assert tested.serves(seed)


def test_a_swap_finds_its_copies_prepared(tested: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all was sealed, and as they were, as long as the memory stays: steps wait for a swap."""
    prepared: list[object] = []

    def noted(into: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(layout: object, targets: object) -> Any:
            prepared.append(layout)
            return into(layout, targets)

        return wrapped

    for kind in (AsSent, ByTarget):
        monkeypatch.setattr(kind, "into", noted(kind.into))
    for seed in (5, 6, 7):
        tested.begin()
        tested.stage(tested.new(seed))
        tested.weights.seal()
        assert len(prepared) == 1
        tested.weights.require_sealed()
        tested.weights.swap()
        tested.weights.release(keep=True)
        assert len(prepared) == 1
        assert tested.serves(seed)


class _NoCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "copy" not in str(func)
        return func(*args, **(kwargs or {}))


def test_there_is_no_room_for_chunks_of_which_shards_are_taken() -> None:
    tested = Staging(Serving)
    tested.begin()
    assert tested.weights.buffer_for(0) is None


def test_the_same_tensors_may_be_cut_otherwise(tested: Staging) -> None:
    """Into as many chunks as before, or others."""
    tested.update(5, keep=True)
    for seed, chunks in ((6, 3), (7, 2), (8, 5)):
        tested.chunks = tested.cut(chunks)
        tested.update(seed, keep=True)
        assert tested.serves(seed)


def test_what_is_not_all_there_is_not_swapped_in(tested: Staging) -> None:
    """Nor what an update before has left in the memory; nor is a chunk that comes twice another."""
    with pytest.raises(EngineError) as none:
        tested.weights.require_sealed()
    assert none.value.code is NackCode.CALLED_OFF
    tested.begin()
    tested.stage(tested.new(5))
    tested.weights.release(keep=True)
    tested.begin()
    new = tested.new(6)
    for seq, chunk in enumerate(tested.chunks[:-1]):
        tested.weights.stage(seq, [(meta.name, new[meta.name]) for meta in chunk])
    with pytest.raises(EngineError, match="elements are not staged"):
        tested.weights.seal()
    with pytest.raises(EngineError, match="no whole update"):
        tested.weights.require_sealed()
    last = [(meta.name, new[meta.name]) for meta in tested.chunks[-1]]
    tested.weights.stage(len(tested.chunks) - 1, last)
    tested.swap()
    assert tested.serves(6)


def test_a_chunk_that_comes_twice_is_staged_once(tested: Staging) -> None:
    tested.begin()
    new = tested.new(6)
    first = [(meta.name, new[meta.name]) for meta in tested.chunks[0]]
    for _ in range(2):
        tested.weights.stage(0, first)
    with pytest.raises(EngineError, match="elements are not staged"):
        tested.weights.seal()


@pytest.mark.parametrize("keep", [False, True])
def test_a_chunk_may_come_one_tensor_after_the_other(tested: Staging, keep: bool) -> None:
    """As vLLM's own receivers bring it. The loader proves each of them."""
    for seed in (6, 7):
        tested.begin()
        new = tested.new(seed)
        for seq, chunk in enumerate(tested.chunks):
            for meta in chunk:
                with pytest.raises(EngineError, match="elements are not staged"):
                    tested.weights.seal()
                part = {meta.name: new[meta.name]}
                tested.weights.stage_part(seq, list(part.items()))
                tested.prove(part)
        tested.swap(keep=keep)
        assert tested.serves(seed)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_an_open_update_is_staged_part_by_part(tested: Staging, keep: bool, count: int) -> None:
    """Parts end in the middle of fused tensors. Until the swap the served weights stay."""
    for seed in (5, 6):
        before, new = tested.snapshot(), list(tested.new(seed).items())
        parts = Parts(tested.made("meta"), dict(new))
        parts.next(count)
        plan = extend_plan(None, parts.trace, unloaded="")
        tested.weights.begin(plan, tested.chunks[:1], is_open=True)
        for seq, begin in enumerate(range(0, len(new), count)):
            part = dict(new[begin : begin + count])
            if begin:
                with pytest.raises(EngineError, match="elements are not staged"):
                    tested.weights.seal()
                parts.next(len(part))
                plan = extend_plan(plan, parts.trace, unloaded="")
                tested.weights.extend(plan)
            tested.weights.stage(seq, list(part.items()))
            tested.prove(part)
        assert all(torch.equal(before[name], now) for name, now in tested.snapshot().items())
        tested.weights.extend(make_plan(parts.trace, unloaded=""))
        tested.swap(keep=keep)
        assert tested.serves(seed)
        tested.update(seed + 10, keep=keep)
        assert tested.serves(seed + 10)


@pytest.mark.parametrize("lost", ["v", "experts.1.up"])
def test_an_open_update_that_lacks_a_tensor_is_not_sealed(tested: Staging, lost: str) -> None:
    """Half of a fused one, say. The plan of all can't be made either."""
    before = tested.snapshot()
    new = {name: tensor for name, tensor in tested.new(5).items() if name != lost}
    parts = Parts(tested.made("meta"), new)
    parts.next(2)
    plan = extend_plan(None, parts.trace, unloaded="")
    tested.weights.begin(plan, tested.chunks[:1], is_open=True)
    tested.weights.stage(0, list(new.items())[:2])
    parts.next(len(new) - 2)
    tested.weights.extend(extend_plan(plan, parts.trace, unloaded=""))
    tested.weights.stage(1, list(new.items())[2:])
    with pytest.raises(EngineError, match="elements are not staged"):
        tested.weights.seal()
    with pytest.raises(EngineError, match="no whole update"):
        tested.weights.require_sealed()
    with pytest.raises(NoPlanError, match=r"are filled|not filled"):
        make_plan(parts.trace, unloaded="")
    tested.weights.release(keep=False)
    assert all(torch.equal(before[name], now) for name, now in tested.snapshot().items())


def test_memory_for_a_buffer_of_a_later_part_may_be_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update fails then, and not the engine."""
    tested = Staging(Whole)
    new = {"mean": tested.new(5)["mean"], **tested.new(5)}
    order = {name: new[name] for name in sorted(new, key="mean".__eq__)}
    parts = Parts(Whole("meta"), order)
    parts.next(len(order) - 1)
    plan = extend_plan(None, parts.trace, unloaded="")
    assert "mean" not in plan.targets
    tested.weights.begin(plan, tested.chunks[:1], is_open=True)
    parts.next(1)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as short:
        short.setattr(torch, "empty", full)
        with pytest.raises(EngineError, match="not enough free memory") as refused:
            tested.weights.extend(extend_plan(plan, parts.trace, unloaded=""))
    assert refused.value.code is NackCode.STAGING_REFUSED


def test_a_model_that_is_not_where_the_plan_wants_it_is_refused(tested: Staging) -> None:
    """When it begins, and once more before the swap."""
    tested.begin()
    tested.stage(tested.new(5))
    tested.weights.seal()
    tested.model.norm = nn.Parameter(torch.zeros(3), requires_grad=False)
    with pytest.raises(EngineError, match="norm") as swapped:
        tested.weights.require_sealed()
    assert swapped.value.code is NackCode.CALLED_OFF
    with pytest.raises(NoPlanError, match="norm"):
        tested.weights.find_parameters(tested.plan)
    with pytest.raises(EngineError, match="norm") as begun:
        tested.begin()
    assert begun.value.code is NackCode.STAGING_REFUSED


@pytest.mark.parametrize("keep", [False, True])
def test_weights_are_where_their_parameters_have_them_now(tested: Staging, keep: bool) -> None:
    """The same parameter may have got other memory."""
    tested.update(5, keep=keep)
    tested.model.norm.data = tested.model.norm.data.clone()
    tested.update(6, keep=keep)
    assert tested.serves(6)


def test_padding_that_was_something_else_is_as_the_loader_makes_it(tested: Staging) -> None:
    """Of weights that were made up when vLLM was booted, say."""
    tested.model.embed.data[ROWS:] = 0.001
    tested.update(5)
    assert tested.serves(5)


def test_the_first_update_is_proven_by_the_loader(tested: Staging) -> None:
    """Which is run over what has arrived, and touches no model that serves."""
    before = tested.snapshot()
    new = tested.new(5)
    tested.begin()
    tested.stage(new)
    tested.prove(new)
    assert all(torch.equal(before[name], now) for name, now in tested.snapshot().items())


@pytest.mark.parametrize("fault", ["another place", "another value", "left out", "more"])
def test_a_plan_that_is_not_what_the_loader_does_is_found(tested: Staging, fault: str) -> None:
    """A loader that goes by values, for one: the plan was made without any."""
    new = tested.new(5)
    tested.begin()
    tested.stage(new)
    meta: Any = tested.meta
    right = meta.loaders["norm"]
    match fault:
        case "another place":
            meta.loaders["k"] = meta.loaders["v"]
        case "another value":
            meta.loaders["norm"] = lambda m, tensor: right(m, tensor + 1)
        case "left out":
            meta.loaders["norm"] = lambda _m, _tensor: None
        case _:
            meta.extra = nn.Parameter(torch.empty(8, device="meta"), requires_grad=False)
            meta.loaders["norm"] = lambda m, tensor: (
                right(m, tensor),
                m.extra.data.copy_(tensor),
            )
    with pytest.raises(EngineError, match="give other weights"):
        tested.prove(new)


class _Asked(nn.Parameter):
    """As vLLM's are: whatever is asked of one, a function in Python answers."""

    count = 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        _Asked.count += 1
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_steps_wait_for_no_parameter_that_is_asked_in_python() -> None:
    tested = Staging(Whole)
    for name, parameter in list(tested.model.named_parameters()):
        setattr(tested.model, name, _Asked(parameter.data, requires_grad=False))
    tested.update(5)
    _Asked.count = 0
    tested.begin()
    tested.stage(tested.new(6))
    tested.weights.seal()
    tested.weights.require_sealed()
    assert _Asked.count == 0
    tested.swap()
    assert tested.serves(6)
    assert _Asked.count > 0, "nobody has asked in Python: is it still as vLLM's?"
