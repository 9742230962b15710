"""Offloads keys and values on CPUs, for vLLM's ``OffloadingConnector``: in vLLM only GPUs can.

The scheduler's side is vLLM's: what is looked up, stored, evicted, and written to a disk. Only the
worker that copies between the engine's cache and the store is here. It copies late, some steps
after it was asked, as a GPU's stream may: so what frees or reuses memory too early is found out.

vLLM finds the classes by ``spec_module_path`` and ``spec_name`` of a connector's configuration.
"""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

# How often a worker is asked for what has ended, before a copy has.
LATE: Final = 2


class _Copy(NamedTuple):
    job: int
    due: int
    engine: Any  # vLLM's GPULoadStoreSpec: blocks of the engine's cache, group by group
    chunks: Sequence[int]
    stores: bool


class LateWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies in the order in which it is asked.

    Args:
        caches: vLLM's ``CanonicalKVCaches``.
        stored: of each of their tensors, [chunks, bytes of a chunk], int8.
        blocks_per_chunk: of the engine's cache.
    """

    def __init__(
        self,
        caches: Any,
        stored: list[Tensor],
        blocks_per_chunk: int,
        region: SharedOffloadRegion | None = None,
    ) -> None:
        self._served = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in caches.tensors
        ]
        self._stored = stored
        self._groups = caches.group_data_refs
        self._per_chunk = blocks_per_chunk
        self._region = region
        self._copies: deque[_Copy] = deque()
        self._ended: list[TransferResult] = []
        self._asked = 0

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, stores=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: Any,
        dst_spec: Any,
        expedited: bool = False,  # noqa: ARG002 - vLLM 0.33 says so, and then waits for it
    ) -> bool:
        return self._submit(job_id, dst_spec, src_spec, stores=False)

    def _submit(self, job: int, engine: Any, store: Any, *, stores: bool) -> bool:
        chunks = store.block_ids.tolist()
        self._copies.append(_Copy(job, self._asked + LATE, engine, chunks, stores))
        return True

    def get_finished(self) -> list[TransferResult]:
        self._asked += 1
        while self._copies and self._copies[0].due < self._asked:
            self._make(self._copies.popleft())
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        while any(copy.job in job_ids for copy in self._copies):
            self._make(self._copies.popleft())

    def shutdown(self) -> None:
        self._copies.clear()
        self._stored.clear()
        if self._region is not None:
            self._region.cleanup()

    def _make(self, copy: _Copy) -> None:
        size = 0
        for group, block, chunk, part in self._places(copy):
            for ref in self._groups[group]:
                count = ref.page_size_bytes
                served = self._served[ref.tensor_idx]
                stored = self._stored[ref.tensor_idx]
                begin = part * (stored.shape[1] // self._per_chunk)
                here, there = served[block, :count], stored[chunk, begin : begin + count]
                there.copy_(here) if copy.stores else here.copy_(there)
                size += count
        self._ended.append(
            TransferResult(copy.job, success=True, transfer_size=size, transfer_time=1e-6)
        )

    def _places(self, copy: _Copy) -> Iterator[tuple[int, int, int, int]]:
        """Each block's group and number, and where it is stored: the chunk, and the part of it."""
        blocks, chunks = iter(copy.engine.block_ids.tolist()), iter(copy.chunks)
        sizes = zip(copy.engine.group_sizes, copy.engine.block_indices, strict=True)
        for group, (count, first) in enumerate(sizes):
            for index in range(first, first + count):
                part = index % self._per_chunk
                if index == first or not part:
                    chunk = next(chunks)
                yield group, next(blocks), chunk, part


class LateCPUSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """Offloads to the memory of the worker's own process."""

    _late: LateWorker | None = None

    def get_worker(self, kv_caches: Any) -> LateWorker:
        if self._late is None:
            stored = [
                torch.zeros(
                    self.num_chunks, each.page_size_bytes * self.blocks_per_chunk, dtype=torch.int8
                )
                for each in kv_caches.tensors
            ]
            self._late = LateWorker(kv_caches, stored, self.blocks_per_chunk)
        return self._late


class LateTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Offloads to memory that the engine core shares, and from there to the other tiers."""

    _late: LateWorker | None = None

    def get_worker(self, kv_caches: Any) -> LateWorker:
        if self._late is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            stored = [
                region.create_next_worker_view(each.page_size_bytes * self.blocks_per_chunk)
                for each in kv_caches.tensors
            ]
            self._late = LateWorker(kv_caches, stored, self.blocks_per_chunk, region)
        return self._late

    def get_manager(self) -> Any:
        """The core maps the memory after all workers have: nobody needs its name any more, and a
        core that is killed leaves none behind."""
        manager = super().get_manager()
        with contextlib.suppress(FileNotFoundError):
            Path(self._scheduler_mmap.mmap_path).unlink()
        return manager
