"""Records the operations of a model's own loader on the tensors that it gets.

A torch dispatch mode observes every write into a parameter or buffer, and which tensor the written
elements came from. A view shares the storage of its tensor, so a copy shows which elements went
where, however the loader sliced and transposed both sides. On the meta device this needs no memory.
The module works for any ``nn.Module`` with any loaders, and does not depend on vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sidecar._transfer.unloaded import refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bus._manifest import TensorMeta
    from bus.errors import EngineError

# The part of a storage that a view covers: offset, sizes, strides (in elements).
Region: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TracedCopy:
    """Record of one copy that the model's loader made from a given tensor.

    Later updates repeat the copy without the loader
    (:mod:`sidecar._vllm.plugin.loading.copy_plan`).

    Attributes:
        source: the copied elements of the given tensor: offset, sizes and strides, in elements.
        target: the name of the parameter or buffer that was filled.
        region: the filled elements of the target, in the same form.
    """

    source: Region
    target: str
    region: Region


@dataclass(frozen=True, slots=True)
class TracedFill:
    """Record of a constant that the model's loader wrote, such as the zeros of padding.

    Attributes:
        target: the name of the parameter or buffer that was filled.
        region: the filled elements: offset, sizes and strides, in elements.
        value: the constant.
    """

    target: str
    region: Region
    value: float


class TargetNames:
    """Finds the parameter or buffer of a model that shares a tensor's storage.

    A lookup may search the model again, because some loaders create a parameter only when they
    reach its tensor: vLLM's do so for the bias of an output head.

    Attributes:
        parameters: the model's parameters, by name.
        buffers: the model's buffers, by name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._look()

    def find(self, tensor: torch.Tensor, *, again: bool = False) -> str:
        """Returns the name of a parameter, buffer or view of one; empty for other tensors.

        Args:
            tensor: the tensor to look up.
            again: True searches the model for new parameters if the tensor is unknown.
        """
        name = self._names.get(storage_of(tensor), "")
        if not name and again:
            self._look()
            return self.find(tensor)
        return name

    def _look(self) -> None:
        self.parameters = dict(self._model.named_parameters())
        self.buffers = dict(self._model.named_buffers())
        self._names = {storage_of(b): name for name, b in self.buffers.items()}
        self._names |= {storage_of(p): name for name, p in self.parameters.items()}


class LoaderTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the copies that a model's loader makes, while it is entered around the load.

    Args:
        metas: the tensors that the loader will be given.
        targets: the model's parameters and buffers.
        shared: parameters that belong to another model, which must not be filled.
        exact_dtype: True refuses a tensor whose dtype is not that of the filled parameter.
        model_dtype: the model's dtype, by torch's name. A tensor of this dtype may also fill a
            float32 parameter.

    Attributes:
        sources: by index, meta tensors as the ``metas`` added last describe them, to be passed to
            the loader.
        used: indices of the tensors that filled something.
        copies: by index of a tensor, the copies that were made from it.
        fills: the constants that the loader wrote.
        widened: indices of the tensors that fill a float32 parameter in a narrower dtype.
        derived: indices of the tensors with which the loader computed, so that its reads of them
            can't be counted.
        beyond_copies: the first operation that a copy plan can't repeat, and its tensor; empty if
            there was none.
    """

    def __init__(
        self,
        metas: tuple[TensorMeta, ...],
        targets: TargetNames,
        *,
        exact_dtype: bool,
        model_dtype: str = "",
        shared: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.metas: tuple[TensorMeta, ...] = ()
        self.targets = targets
        self.shared = shared
        self.exact_dtype = exact_dtype
        self.model_dtype = model_dtype
        self.sources: dict[int, torch.Tensor] = {}
        self.used: set[int] = set()
        self.widened: set[int] = set()
        self.copies: dict[int, list[TracedCopy]] = {}
        self.fills: list[TracedFill] = []
        self.beyond_copies = ""
        self._index_of: dict[int, int] = {}
        self._at = 0
        self._writes: dict[str, dict[Region, int]] = {}
        self._reads: dict[int, set[Region]] = {}
        self.derived: set[int] = set()
        self.extend(metas)

    def extend(self, metas: tuple[TensorMeta, ...]) -> None:
        """Adds tensors that the loader will be given after those before."""
        begin = len(self.metas)
        self.metas = (*self.metas, *metas)
        self.sources = {
            index: torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")
            for index, meta in enumerate(metas, begin)
        }
        self._index_of = {storage_of(source): index for index, source in self.sources.items()}

    @property
    def current(self) -> TensorMeta:
        """The tensor that the loader got last; an error of the loader concerns this tensor."""
        return self.metas[self._at]

    def feed(self, start: int, end: int, without: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the names and tensors of one chunk, for the loader.

        Args:
            start: index of the chunk's first tensor in the manifest.
            end: index after the chunk's last tensor.
            without: name of a tensor that the loader must not get, such as a tied output head.
        """
        for index in range(start, end):
            self._at = index
            if self.metas[index].name != without:
                yield self.metas[index].name, self.sources[index]

    def tensor(self, name: str) -> torch.Tensor:
        """Returns the model's parameter or buffer of that name."""
        parameters, buffers = self.targets.parameters, self.targets.buffers
        return parameters[name] if name in parameters else buffers[name]

    def written(self, parameter: str) -> int:
        """Returns how many elements of a parameter the loader has written."""
        return sum(map(_numel, self._writes.get(parameter, ())))

    def origins(self) -> dict[str, str]:
        """Returns, for each written parameter or buffer, the name of a tensor that filled it."""
        return {
            name: self.metas[next(iter(regions.values()))].name
            for name, regions in self._writes.items()
        }

    def read(self, index: int) -> int:
        """Returns how many elements of a tensor the loader has copied, by the tensor's index."""
        return sum(map(_numel, self._reads.get(index, ())))

    def read_to_end(self, index: int) -> bool:
        """Returns whether the loader has used a tensor's last element, by the tensor's index.

        If not, the tensor has more rows than the model.
        """
        last = torch.Size(self.metas[index].shape).numel() - 1
        return index in self.derived or any(_last(r) == last for r in self._reads.get(index, ()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ_SCALAR and args[0].is_meta:
            # A loader reads the value of a scalar parameter; a meta tensor has no value.
            self.derived.add(self._at)
            self._is_no_copy(f"the loader reads the value of {self.current.name}")
            return torch.zeros((), dtype=args[0].dtype).item()
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            self._note_copy(args[0], args[1])
        elif func in _FILLS:
            self._note_fill(args[0], args[1] if len(args) > 1 else 0)
        elif func._schema.is_mutable:  # noqa: SLF001 - there is no other way in
            for changed in _changed(func, args, kwargs):
                self._note_change(changed, str(func))
        elif not _returns_view(func):
            for used in _tensors((*args, *kwargs.values())):
                name = self._known_name(used)
                if name:
                    self._is_no_copy(f"the loader computes with {name} by {func}")
        return result

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        index = self._index_of.get(storage_of(source))
        name = self.targets.find(target, again=index is not None)
        if not name:
            if index is not None:
                self._is_no_copy(f"{self.metas[index].name} is copied into no parameter or buffer")
            self._note_change(target, "a copy")
            return
        if index is None:
            self.derived.add(self._at)
            self._is_no_copy(f"{name} is filled with a value computed from {self.current.name}")
            self._note_write(target, name, self._at)
            return
        self._reads.setdefault(index, set()).add(_region(source))
        self._note_write(target, name, index)
        if source.dtype != self.sources[index].dtype or target.dtype != self.tensor(name).dtype:
            self._is_no_copy(f"{self.metas[index].name} is viewed as another dtype for {name}")
        if source.shape != target.shape:
            self._is_no_copy(f"{self.metas[index].name} is broadcast into {name}")
        copy = TracedCopy(_region(source), name, _region(target))
        self.copies.setdefault(index, []).append(copy)

    def _note_fill(self, target: torch.Tensor, value: Any) -> None:
        name = self.targets.find(target)
        if not name:
            self._note_change(target, "a fill")
            return
        self._note_write(target, name, self._at, of_tensor=False)
        if isinstance(value, torch.Tensor):
            self._is_no_copy(f"{name} is filled with a computed value")
        else:
            self.fills.append(TracedFill(name, _region(target), value))

    def _note_change(self, changed: torch.Tensor, how: str) -> None:
        """Records an operation that a copy plan can't repeat."""
        index = self._index_of.get(storage_of(changed))
        if index is not None:
            self.derived.add(index)
        name = self._known_name(changed)
        if name:
            self._is_no_copy(f"{name} is changed by {how}")

    def _known_name(self, tensor: torch.Tensor) -> str:
        """Returns the name of the source, parameter or buffer behind this tensor or view."""
        storage = storage_of(tensor)
        if storage in self._index_of:
            return self.metas[self._index_of[storage]].name
        return self.targets.find(tensor)

    def _note_write(
        self, target: torch.Tensor, name: str, index: int, *, of_tensor: bool = True
    ) -> None:
        meta = self.metas[index]
        if name in self.shared:
            raise shared_refusal(meta, name)
        dtype = str(target.dtype).removeprefix("torch.")
        # A checkpoint in the model's dtype also fills parameters of float32, without loss.
        widened = meta.dtype == self.model_dtype and dtype == "float32"
        if of_tensor and self.exact_dtype and meta.dtype != dtype and not widened:
            raise refused(
                meta.name,
                f"dtype {meta.dtype}, but the model's {name} is {dtype}, and vLLM would cast it "
                'silently: use update_weights(..., dtype="engine"), which casts in the trainer',
            )
        if of_tensor and dtype == "float32" and meta.dtype in _NARROW:
            self.widened.add(index)
        self.used.add(index)
        regions = self._writes.setdefault(name, {})
        owner = regions.setdefault(_region(target), index)
        if owner != index:
            raise refused(meta.name, f"fills the same part of {name} as {self.metas[owner].name}")

    def _is_no_copy(self, reason: str) -> None:
        self.beyond_copies = self.beyond_copies or reason


_READ_SCALAR = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001 - what .item() becomes
_NARROW = frozenset({"bfloat16", "float16"})
_FILLS = frozenset(
    {
        torch.ops.aten.fill_.Scalar,
        torch.ops.aten.fill_.Tensor,
        torch.ops.aten.zero_.default,
    }
)


def shared_refusal(meta: TensorMeta, parameter: str) -> EngineError:
    """Returns the error that refuses a draft's tensor because the main model owns its parameter."""
    return refused(
        meta.name,
        f"fills {parameter}, which this draft shares with the main model: leave the tensor out, "
        "because the main model's updates bring it",
    )


@cache
def _returns_view(func: Any) -> bool:
    """Returns whether a torch operator returns a view of an argument, and no new tensor."""
    return any(each.alias_info is not None for each in func._schema.returns)  # noqa: SLF001


def _changed(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors that an operator writes to."""
    for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - see above
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        yield from _tensors((given,))


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a value that identifies a tensor's storage, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch has no public one


def _region(tensor: torch.Tensor) -> Region:
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _numel(region: Region) -> int:
    return torch.Size(region[1]).numel()


def _last(region: Region) -> int:
    offset, sizes, strides = region
    return offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
