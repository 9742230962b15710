"""Views of packed chunks."""

from __future__ import annotations

import torch

from bus._manifest import TensorMeta
from bus._weight_transfer.packing import ReceivedChunk, ViewCache, packed_offsets


def metas(chunk: int, size: int = 4) -> tuple[TensorMeta, ...]:
    """New objects each time, as they come with each update."""
    return tuple(TensorMeta(f"{chunk}.{place}", "float32", (size,)) for place in range(3))


def test_updates_without_end_keep_the_views_of_one() -> None:
    """Of each chunk and buffer; the same chunk finds what was kept with them."""
    cache = ViewCache()
    buffers = [torch.zeros(packed_offsets(metas(0, 8))[-1], dtype=torch.uint8) for _ in range(2)]
    first: dict[int, ReceivedChunk] = {}
    for update in range(3):
        for chunk in range(4):
            asked = metas(chunk)
            got = cache.get(buffers[chunk % 2], packed_offsets(asked)[:-1], asked)
            assert got is first.setdefault(chunk, got), update
    assert len(cache._made) == 4


def test_another_chunk_in_its_place_gets_views_of_its_own() -> None:
    cache = ViewCache()
    buffer = torch.zeros(packed_offsets(metas(0, 8))[-1], dtype=torch.uint8)
    before = cache.get(buffer, packed_offsets(metas(0))[:-1], metas(0))
    after = cache.get(buffer, packed_offsets(metas(0, 8))[:-1], metas(0, 8))
    assert [tuple(view.shape) for _, view in before] == [(4,)] * 3
    assert [tuple(view.shape) for _, view in after] == [(8,)] * 3
    assert len(cache._made) == 1
