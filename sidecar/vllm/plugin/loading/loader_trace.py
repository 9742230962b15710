"""What a model's own loader does with the tensors that it is given, seen from outside.

A dispatch mode watches a loader at work: each write into a parameter or buffer, and which tensor
it came from. A view keeps its storage, so a copy tells which elements went where, however the
loader cut and turned both sides. On the meta device that costs no memory. It works for any
``nn.Module`` with any loaders; nothing here knows vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bus.errors import EngineError
from bus.messages import NackCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bus.manifest import TensorMeta

# What part of a storage a view covers: offset, sizes, strides (in elements).
Region: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TracedCopy:
    """Elements of a received tensor, and the elements of a parameter or buffer that they fill."""

    source: Region
    target: str
    region: Region


@dataclass(frozen=True, slots=True)
class TracedFill:
    """Elements of a parameter or buffer that a loader sets to one value, padding for instance."""

    target: str
    region: Region
    value: float


class TargetNames:
    """Names the parameters and buffers of a model by the memory behind them.

    Some loaders make a parameter when they come to its tensor: vLLM's do so with the bias of an
    output head.

    Attributes:
        parameters: by name.
        buffers: by name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._look()

    def find(self, tensor: torch.Tensor, *, again: bool = False) -> str:
        """Return the name of a tensor, or of the tensor that it is a view of; empty for none.

        Args:
            tensor: a parameter, a buffer, or a view of one.
            again: look at the model again if nothing is known of the tensor.
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
    """Entered around a loader, chunk by chunk.

    Args:
        metas: the tensors that it will be given.
        targets: the model's parameters and buffers.
        shared: parameters that are another model's, which must not be filled.
        exact_dtype: a tensor of another dtype than what it fills is refused.
        model_dtype: the model's; a tensor of this dtype may fill a float32 parameter as well.

    Attributes:
        sources: tensors as ``metas`` say, on the meta device, for the loader.
        used: indices of those that filled something.
        copies: for each of them, what it filled.
        fills: what was filled with nothing but a value.
        beyond_copies: the first thing that was more than a copy, with what it was done to; empty
            if there was none.
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
        self.metas = metas
        self.targets = targets
        self.shared = shared
        self.exact_dtype = exact_dtype
        self.model_dtype = model_dtype
        self.sources = [
            torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")
            for meta in metas
        ]
        self.used: set[int] = set()
        self.copies: dict[int, list[TracedCopy]] = {}
        self.fills: list[TracedFill] = []
        self.beyond_copies = ""
        self._index_of = {storage_of(source): index for index, source in enumerate(self.sources)}
        self._at = 0
        self._writes: dict[str, dict[Region, int]] = {}
        self._reads: dict[int, set[Region]] = {}
        self._derived: set[int] = set()

    @property
    def current(self) -> TensorMeta:
        """The tensor that was handed out last."""
        return self.metas[self._at]

    def feed(self, start: int, end: int, without: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield one chunk for the loader, except for the tensor named ``without``."""
        for index in range(start, end):
            self._at = index
            if self.metas[index].name != without:
                yield self.metas[index].name, self.sources[index]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer of the model."""
        parameters, buffers = self.targets.parameters, self.targets.buffers
        return parameters[name] if name in parameters else buffers[name]

    def written(self, parameter: str) -> int:
        """Return how many elements of a parameter were written."""
        return sum(map(_numel, self._writes.get(parameter, ())))

    def origins(self) -> dict[str, str]:
        """Return the written parameters and buffers, each with a tensor that filled it."""
        return {
            name: self.metas[next(iter(regions.values()))].name
            for name, regions in self._writes.items()
        }

    def read(self, index: int) -> int:
        """Return how many elements of a tensor were read."""
        return sum(map(_numel, self._reads.get(index, ())))

    def read_to_end(self, index: int) -> bool:
        """Return whether a tensor's last element was read."""
        last = torch.Size(self.metas[index].shape).numel() - 1
        return self.derived(index) or any(_last(r) == last for r in self._reads.get(index, ()))

    def derived(self, index: int) -> bool:
        """Return whether the loader computed from a tensor, so that reads can't be counted."""
        return index in self._derived

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ_SCALAR and args[0].is_meta:
            # A loader reads a scalar parameter by its value, which meta has none of.
            self._derived.add(self._at)
            self._is_no_copy(f"{self.current.name} is read by its value")
            return torch.zeros((), dtype=args[0].dtype).item()
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            self._note_copy(args[0], args[1])
        elif func in _FILLS:
            self._note_fill(args[0], args[1] if len(args) > 1 else 0)
        elif (kind := _kind_of(func)) is Kind.CHANGES:
            for changed in _changed(func, args, kwargs):
                self._note_change(changed, str(func))
        elif kind is Kind.MAKES:
            for used in _tensors((*args, *kwargs.values())):
                name = self._known_name(used)
                if name:
                    self._is_no_copy(f"something is made of {name} by {func}")
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
            self._derived.add(self._at)
            self._is_no_copy(f"{name} is filled with something made of {self.current.name}")
            self._note_write(target, name, self._at)
            return
        self._reads.setdefault(index, set()).add(_region(source))
        self._note_write(target, name, index)
        if source.dtype != self.sources[index].dtype or target.dtype != self.tensor(name).dtype:
            self._is_no_copy(f"{self.metas[index].name} is read by another dtype for {name}")
        if source.shape != target.shape:
            self._is_no_copy(f"{self.metas[index].name} is repeated in {name}")
        copy = TracedCopy(_region(source), name, _region(target))
        self.copies.setdefault(index, []).append(copy)

    def _note_fill(self, target: torch.Tensor, value: Any) -> None:
        name = self.targets.find(target)
        if not name:
            self._note_change(target, "a fill")
            return
        self._note_write(target, name, self._at, of_tensor=False)
        if isinstance(value, torch.Tensor):
            self._is_no_copy(f"{name} is filled with a value that is computed")
        else:
            self.fills.append(TracedFill(name, _region(target), value))

    def _note_change(self, changed: torch.Tensor, how: str) -> None:
        """Note that something was done that a plan can't repeat."""
        index = self._index_of.get(storage_of(changed))
        if index is not None:
            self._derived.add(index)
        name = self._known_name(changed)
        if name:
            self._is_no_copy(f"{name} is changed by {how}")

    def _known_name(self, tensor: torch.Tensor) -> str:
        """Return the name of the source, parameter or buffer that this is, or is a view of."""
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
                f"dtype {meta.dtype}, but the model's {name} is {dtype}; vLLM would "
                'cast it silently: update_weights(..., dtype="engine") casts it in the trainer',
            )
        self.used.add(index)
        regions = self._writes.setdefault(name, {})
        owner = regions.setdefault(_region(target), index)
        if owner != index:
            raise refused(meta.name, f"fills the same part of {name} as {self.metas[owner].name}")

    def _is_no_copy(self, reason: str) -> None:
        self.beyond_copies = self.beyond_copies or reason


_READ_SCALAR = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001 - what .item() becomes
_FILLS = frozenset(
    {
        torch.ops.aten.fill_.Scalar,
        torch.ops.aten.fill_.Tensor,
        torch.ops.aten.zero_.default,
    }
)


def refused(tensor: str, reason: str) -> EngineError:
    """Return ``reason`` as an error that names the tensor, in its text as well."""
    return EngineError(f"{tensor}: {reason}", code=NackCode.MANIFEST_REFUSED, tensor=tensor)


def shared_refusal(meta: TensorMeta, parameter: str) -> EngineError:
    """Return the error of a tensor that fills what a draft shares with its model."""
    return refused(
        meta.name,
        f"fills {parameter}, which this draft shares with the model that it drafts for: leave it "
        "out, it comes with that model's updates",
    )


class Kind(Enum):
    """What an operator does to its arguments."""

    VIEWS = auto()  # returns some of the same memory
    CHANGES = auto()  # writes to it
    MAKES = auto()  # makes something of it


@cache
def _kind_of(func: Any) -> Kind:
    schema = func._schema  # noqa: SLF001 - there is no other way in
    if schema.is_mutable:
        return Kind.CHANGES
    views = any(returned.alias_info is not None for returned in schema.returns)
    return Kind.VIEWS if views else Kind.MAKES


def _changed(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes to."""
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
    """Return the identity of the memory behind a tensor; meta tensors have no address."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch has no public one


def _region(tensor: torch.Tensor) -> Region:
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _numel(region: Region) -> int:
    return torch.Size(region[1]).numel()


def _last(region: Region) -> int:
    offset, sizes, strides = region
    return offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
