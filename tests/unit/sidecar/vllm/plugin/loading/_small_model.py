"""A model with loaders of its own, which do what vLLM's do: cut, fuse, shard, pad, turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from bus._manifest import Manifest, TensorMeta
from sidecar._vllm.plugin.loading.loader_trace import LoaderTrace, TargetNames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    Loader = Callable[["Small", Tensor], object]

HIDDEN, EXPERTS, INNER, ROWS, PADDED_ROWS = 8, 3, 4, 10, 16


class Small(nn.Module):
    """One of two tensor parallel workers' shards, of the rank ``rank``."""

    def __init__(self, rank: int = 0, device: str = "cpu") -> None:
        super().__init__()
        self.rank = rank

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, -1.0, device=device), requires_grad=False)

        self.embed = parameter(PADDED_ROWS, HIDDEN)
        self.qkv = parameter(2 * HIDDEN, HIDDEN)
        self.out = parameter(HIDDEN, HIDDEN // 2)
        self.turned = parameter(HIDDEN, INNER)
        self.gate_up = parameter(EXPERTS, 2 * INNER, HIDDEN)
        self.norm = parameter(HIDDEN)
        self.register_buffer("mean", torch.full((HIDDEN,), -1.0, device=device))
        self.head = self.embed
        self.loaders: dict[str, Loader] = {
            "embed": _embed,
            "q": lambda model, tensor: _rows(model.qkv, tensor, 0, model.rank, HIDDEN),
            "k": lambda model, tensor: _rows(model.qkv, tensor, HIDDEN, model.rank, HIDDEN // 2),
            "v": lambda m, tensor: _rows(m.qkv, tensor, HIDDEN * 3 // 2, m.rank, HIDDEN // 2),
            "out": lambda model, tensor: _copy(model.out, tensor.chunk(2, dim=1)[model.rank]),
            "turned": lambda model, tensor: _copy(model.turned.data.t(), tensor),
            "norm": lambda model, tensor: _copy(model.norm, tensor),
            "mean": lambda model, tensor: _copy(model.get_buffer("mean"), tensor),
        }
        for expert in range(EXPERTS):
            for place, projection in enumerate(("gate", "up")):
                self.loaders[f"experts.{expert}.{projection}"] = _expert(expert, place)

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in pairs:
                self.loaders[name](self, tensor)


def weights(seed: int) -> dict[str, Tensor]:
    """All that a loader of :class:`Small` takes, whole."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (ROWS, HIDDEN),
        "q": (2 * HIDDEN, HIDDEN),
        "k": (HIDDEN, HIDDEN),
        "v": (HIDDEN, HIDDEN),
        "out": (HIDDEN, HIDDEN),
        "turned": (INNER, HIDDEN),
        "norm": (HIDDEN,),
        "mean": (HIDDEN,),
    }
    for expert in range(EXPERTS):
        for projection in ("gate", "up"):
            shapes[f"experts.{expert}.{projection}"] = (INNER, HIDDEN)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def manifest_of(tensors: Mapping[str, Tensor], chunks: int = 1) -> Manifest:
    count = len(tensors)
    return Manifest(
        tuple(tensors),
        tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()),
        tuple(tuple(tensor.shape) for tensor in tensors.values()),
        tuple(count * (chunk + 1) // chunks for chunk in range(chunks)),
    )


def trace_of(model: Small, tensors: Mapping[str, Tensor]) -> LoaderTrace:
    """What the loader of a model on the meta device does with these."""
    trace = LoaderTrace(
        tuple(TensorMeta(*column) for column in _columns(manifest_of(tensors))),
        TargetNames(model),
        exact_dtype=False,
    )
    with trace:
        model.load_weights(trace.feed(0, len(tensors), ""))
    return trace


class Parts:
    """An update of which ever more tensors are known, on a model that is on the meta device."""

    def __init__(self, model: Small, tensors: Mapping[str, Tensor]) -> None:
        self.trace = LoaderTrace((), TargetNames(model), exact_dtype=False)
        self._model = model
        self._whole = manifest_of(tensors)
        self._known = 0

    def next(self, count: int) -> Manifest:
        """Have its loader load so many more of them; the manifest of all so far, which is open."""
        begin, self._known = self._known, self._known + count
        self.trace.extend(self._whole.chunk(0)[begin : self._known])
        with self.trace:
            self._model.load_weights(self.trace.feed(begin, self._known, ""))
        whole, known = self._whole, slice(self._known)
        columns = whole.names[known], whole.dtypes[known], whole.shapes[known]
        return Manifest(*columns, (self._known,), is_open=True)


def _columns(manifest: Manifest) -> Iterable[tuple[str, str, tuple[int, ...]]]:
    return zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)


def _copy(target: Tensor, tensor: Tensor) -> None:
    target.data.copy_(tensor)


def _rows(parameter: Tensor, tensor: Tensor, offset: int, rank: int, count: int) -> None:
    parameter.data.narrow(0, offset, count).copy_(tensor.narrow(0, rank * count, count))


def _embed(model: Small, tensor: Tensor) -> None:
    model.embed[: len(tensor)].data.copy_(tensor)
    model.embed[len(tensor) :].data.fill_(0)


def _expert(expert: int, place: int) -> Loader:
    def load(model: Small, tensor: Tensor) -> None:
        model.gate_up.data[expert].chunk(2)[place].copy_(tensor)

    return load
