"""The manifest: cut into chunks in order, and refused when it contradicts itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus._manifest import DTYPE_BYTES, Manifest, TensorMeta
from bus._weight_transfer.formats import PackedChunk, ShmInit, decode, encode

METAS = [TensorMeta("a", "float32", (4,)), TensorMeta("b", "int8", (16,))]
RIGHT = Manifest(("a", "b"), ("float32", "int8"), ((4,), (16,)), (1, 2))

tensors = st.lists(
    st.builds(
        TensorMeta,
        st.text("abcdef", min_size=1, max_size=8),
        st.sampled_from(list(DTYPE_BYTES)),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda meta: meta.name,
)


@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(tensors, st.integers(1, 200))
def test_a_plan_keeps_the_order_and_the_bound(metas: list[TensorMeta], chunk_bytes: int) -> None:
    """Every tensor is in one chunk, in order; only a tensor that is larger alone exceeds it."""
    manifest = Manifest.plan(metas, chunk_bytes=chunk_bytes)
    chunks = [manifest.chunk(k) for k in range(manifest.chunks)]
    assert [meta for chunk in chunks for meta in chunk] == metas == list(manifest.tensors())
    for chunk in chunks:
        assert chunk
        filled = sum(meta.size_bytes for meta in chunk)
        assert filled <= chunk_bytes or len(chunk) == 1 or not any(m.size_bytes for m in chunk[1:])


@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(tensors, st.integers(1, 100))
def test_chunks_are_as_full_as_the_bound_allows(metas: list[TensorMeta], chunk_bytes: int) -> None:
    """The first tensor of the next chunk would not have fitted."""
    manifest = Manifest.plan(metas, chunk_bytes=chunk_bytes)
    for k in range(manifest.chunks - 1):
        filled = sum(meta.size_bytes for meta in manifest.chunk(k))
        assert filled + manifest.chunk(k + 1)[0].size_bytes > chunk_bytes


@pytest.mark.parametrize(
    ("change", "field", "told"),
    [
        ({"dtypes": ("float32",)}, "dtypes", "1 entries for 2"),
        ({"shapes": ((4,),) * 3}, "shapes", "3 entries for 2"),
        ({"names": ("a", "a")}, "names", "a appears twice"),
        ({"dtypes": ("float32", "float31")}, "dtypes", "b has unknown dtype 'float31'"),
        ({"chunk_ends": (1, 1, 2)}, "chunk_ends", "must grow"),
        ({"chunk_ends": (2, 1)}, "chunk_ends", "must grow"),
        ({"chunk_ends": (1,)}, "chunk_ends", "end at 2"),
        ({"chunk_ends": (1, 2, 3)}, "chunk_ends", "end at 2"),
        ({"chunk_ends": (0, 2)}, "chunk_ends", "must grow"),
        ({"chunk_ends": ()}, "chunk_ends", "end at 2"),
        ({"counts": (4,)}, "counts", "1 entries for 2"),
        ({"counts": (5, 16)}, "counts", "5 elements of a, which has 4"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused_by_field(
    change: dict[str, tuple[object, ...]], field: str, told: str
) -> None:
    """And by the tensor, where there is one."""
    fields: dict[str, tuple[object, ...]] = {
        "names": RIGHT.names,
        "dtypes": RIGHT.dtypes,
        "shapes": RIGHT.shapes,
        "chunk_ends": RIGHT.chunk_ends,
        **change,
    }
    with pytest.raises(ValueError, match=rf"^{field}: .*{told}"):
        Manifest(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("metas", [[], [METAS[0], METAS[0]]])
def test_no_tensors_or_doubled_ones_are_no_plan(metas: list[TensorMeta]) -> None:
    """An update needs something to send, and each of it once."""
    with pytest.raises(ValueError, match=r"^names: "):
        Manifest.plan(metas, chunk_bytes=10)


@pytest.mark.parametrize(
    "other",
    [
        Manifest(("a", "c"), RIGHT.dtypes, RIGHT.shapes, RIGHT.chunk_ends),
        Manifest(RIGHT.names, ("float32", "uint8"), RIGHT.shapes, RIGHT.chunk_ends),
        Manifest(RIGHT.names, RIGHT.dtypes, ((4,), (4, 4)), RIGHT.chunk_ends),
        Manifest(RIGHT.names, RIGHT.dtypes, RIGHT.shapes, (2,)),
        Manifest(("b", "a"), RIGHT.dtypes, RIGHT.shapes, RIGHT.chunk_ends),
        Manifest(RIGHT.names, RIGHT.dtypes, RIGHT.shapes, RIGHT.chunk_ends, (4, 16)),
    ],
)
def test_the_digest_tells_every_field(other: Manifest) -> None:
    """Names, dtypes, shapes, chunks, counts, and the order."""
    assert other.digest != RIGHT.digest
    assert Manifest.plan(METAS, chunk_bytes=16).digest == RIGHT.digest


def test_a_patch_is_one_chunk_of_values_with_their_indices() -> None:
    """So many elements of each tensor, all or none of them, too."""
    patch = Manifest.of_patch([*METAS, TensorMeta("c", "bfloat16", (3, 5))], (4, 0, 7))
    assert (patch.chunks, patch.counts) == (1, (4, 0, 7))
    assert patch.sizes_bytes(0) == (4 * (4 + 4), 0, 7 * (2 + 4))


def test_sizes_are_in_bytes() -> None:
    """A scalar has one element, an empty tensor none."""
    assert TensorMeta("a", "bfloat16", (3, 5)).size_bytes == 30
    assert TensorMeta("a", "float64", ()).size_bytes == 8
    assert TensorMeta("a", "float64", (0, 9)).size_bytes == 0


def test_a_backends_blob_survives_and_a_wrong_one_is_refused_by_field() -> None:
    """The bus does not read it; the backend does, strictly."""
    ring = ShmInit(("wavebus-1-a",), 4096)
    assert decode(encode(ring), ShmInit) == ring
    for wrong in (
        encode(ShmInit(("../etc/passwd",), 4096)),
        encode(ShmInit(("wavebus-1-a",) * 17, 4096)),
        encode(ShmInit(("wavebus-1-a",), -1)),
        encode(PackedChunk(0, (1,))),
        b"\xc1",
        b"",
    ):
        with pytest.raises(ValueError, match=r"^ShmInit: "):
            decode(wrong, ShmInit)
