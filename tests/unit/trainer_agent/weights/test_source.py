"""Where weights come from, and how they are cut into chunks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from bus._manifest import Manifest, TensorMeta
from bus.errors import UsageError
from trainer_agent._weights.any_source import as_source
from trainer_agent._weights.source import PairSource, as_described, copy_source, meta_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class Tied(nn.Module):
    """Input and output embeddings are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def test_a_module_is_its_parameters_in_order() -> None:
    """Tied ones once, under the name that comes first."""
    source = as_source(Tied())
    assert source.metadata() == [TensorMeta("embed.weight", "float32", (4, 3))]
    assert [name for name, _ in source] == ["embed.weight"]


def test_a_state_dict_and_pairs_are_sources() -> None:
    """Pairs that can be read only once are kept, since a source is read twice."""
    tensors = {"a": torch.zeros(2), "b": torch.ones(3, dtype=torch.bfloat16)}
    for weights in (tensors, list(tensors.items()), iter(tensors.items())):
        source = as_source(weights)
        assert [meta.name for meta in source.metadata()] == ["a", "b"]
        assert [name for name, _ in source] == ["a", "b"]
        assert [name for name, _ in source] == ["a", "b"]


@pytest.mark.parametrize("path", ["folder", b"folder", Path("folder")])
def test_a_path_is_no_source(path: Any) -> None:
    with pytest.raises(UsageError, match=r"folder.*: a path; load the weights"):
        as_source(path)


@pytest.mark.parametrize("other", [[torch.zeros(1)], [("a",)], 3])
def test_what_has_no_names_is_no_source(other: Any) -> None:
    with pytest.raises(UsageError, match=r"source=\w+: must be a torch\.nn\.Module"):
        as_source(other)


def test_a_source_of_the_users_own_is_taken_as_it_is() -> None:
    """It needs metadata and a pass over the tensors."""

    class Own:
        def metadata(self) -> list[TensorMeta]:
            return [meta_of("x", torch.zeros(1))]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter([("x", torch.zeros(1))])

    own = Own()
    assert as_source(own) is own


class PropertySource:
    """A source of the form that vLLM has from 0.33 on."""

    def __init__(self, *, whole: bool = True) -> None:
        self.whole = whole
        self.reads = 0

    @property
    def metadata(self) -> list[TensorMeta]:
        self.reads += 1
        return [meta_of("x", torch.zeros(1))]

    def implements_iter_full(self) -> bool:
        return self.whole

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter([("x", torch.zeros(1))])


def test_a_source_of_vllms_newer_form_is_taken() -> None:
    """Its metadata is not read to know it, which may be a collective. One that has shards alone
    is no source of whole tensors."""
    own = PropertySource()
    source = as_source(own)  # type: ignore[arg-type]
    assert own.reads == 0
    assert source.metadata() == [meta_of("x", torch.zeros(1))]
    assert [name for name, _ in source] == [name for name, _ in source] == ["x"]
    with pytest.raises(UsageError, match=r"implement iter_full\(\)"):
        as_source(PropertySource(whole=False)).metadata()  # type: ignore[arg-type]


def test_what_is_no_source_is_refused() -> None:
    """With the types there are."""
    with pytest.raises(UsageError, match="a mapping of names"):
        as_source(42)  # type: ignore[arg-type]


def test_chunks_keep_the_order_and_the_budget() -> None:
    """A tensor larger than the budget gets a chunk of its own; nothing is split or lost."""
    sizes = [10, 10, 100, 1, 1, 30]
    metas = [TensorMeta(f"t{i}", "uint8", (size,)) for i, size in enumerate(sizes)]
    manifest = Manifest.plan(metas, chunk_bytes=32)
    chunks = [[t.shape[0] for t in manifest.chunk(k)] for k in range(manifest.chunks)]
    assert chunks == [[10, 10], [100], [1, 1, 30]]


def test_metadata_reads_no_gradient_graph() -> None:
    """Sending does not grow a graph: tensors are taken as they are."""
    weight = torch.ones(2, requires_grad=True)
    assert PairSource({"w": weight}).metadata() == [TensorMeta("w", "float32", (2,))]


class OnGpu:
    """As far as a source looks at a tensor of several ranks."""

    is_cuda = True
    device = torch.device("cuda:0")

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def full_tensor(self) -> torch.Tensor:
        self._told.append("gathered")
        return torch.zeros(2)


def test_a_gpu_is_waited_for_before_anything_is_read_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An optimizer's last step may be on its way yet, in a stream of its own."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: told.append(f"waited {device}"))
    pairs: Any = {"a": OnGpu(told), "b": OnGpu(told)}
    assert [name for name, _ in as_source(pairs)] == ["a", "b"]
    assert told == ["waited cuda:0", "gathered", "gathered"]


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (torch.empty(2, 2, device="meta"), "is on the meta device and has no values"),
        (None, "is a NoneType, not a torch.Tensor"),
        (torch.ones(2, 2).numpy(), r"is a ndarray, not a torch.Tensor: torch.from_numpy"),
        (torch.ones(2, 2).to_sparse(), r"is sparse .*: send its to_dense\(\)"),
    ],
)
def test_what_is_no_tensor_with_values_is_named(odd: Any, said: str) -> None:
    """Whether it is described, copied, or comes from a source of the user's own."""
    pairs = {"a.weight": torch.ones(2), "b.weight": odd}
    source = PairSource(pairs)
    metas = [TensorMeta("a.weight", "float32", (2,)), TensorMeta("b.weight", "float32", (2, 2))]
    for read in (
        source.metadata,
        lambda: copy_source(source),
        lambda: list(as_described(metas, iter(pairs.items()))),
    ):
        with pytest.raises(UsageError, match=rf"^source: b\.weight {said}"):
            read()
