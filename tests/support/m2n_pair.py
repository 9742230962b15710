"""vLLM's own ``nccl_m2n``, both ends, on a CPU: over gloo, and otherwise as it is.

What vLLM plans, checks, agrees on, publishes, sends, receives and loads, is vLLM's. Not vLLM's are
the communicator, the library ``nccl.m2n`` behind it (NVIDIA's, which needs GPUs), and that vLLM
waits for a GPU. :mod:`tests.support.pair_plugin` registers both ends under vLLM's own name.

From 0.33 on all ranks first meet without NCCL, and agree on the plan there: that is vLLM's, too.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer import m2n_common, m2n_engine, m2n_trainer

from tests.support.gloo_group import broadcast, join, joined
from tests.support.pair import no_stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# As vLLM hands it on up to 0.32, a communicator is a number: its handle.
_made: dict[int, Gloo] = {}
_numbers = itertools.count(1)


class Gloo:
    """What vLLM's engines use of a ``PyNcclCommunicator``, or of NVIDIA's (from 0.33 on)."""

    device = torch.device("cpu")

    def __init__(self, group: Any, rank: int) -> None:
        self.rank = rank
        self.group = group
        self.comm = next(_numbers)
        _made[self.comm] = self

    def broadcast(
        self,
        tensor: Tensor,
        src: object = 0,
        *,
        root: int | None = None,
        stream: object = None,  # noqa: ARG002 - a GPU's
    ) -> None:
        """From rank ``src``; or, as NVIDIA's, from ``root`` into the same tensor."""
        assert root is None or src is tensor
        broadcast(self.group, tensor, src if root is None else root)  # type: ignore[arg-type]

    def destroy(self) -> None:
        del _made[self.comm]
        self.group = None

    abort = destroy


@dataclass(frozen=True)
class Mesh:
    """Ranks in two axes, from ``start_rank`` on."""

    dims: tuple[int, int]
    start_rank: int

    def places(self) -> list[tuple[int, tuple[int, int]]]:
        """Each rank, with its place on both axes."""
        rows = itertools.product(range(self.dims[0]), range(self.dims[1]))
        return [(self.start_rank + number, place) for number, place in enumerate(rows)]


@dataclass(frozen=True)
class Shard:
    """An axis of a mesh over which this dimension is cut."""

    dim: int


class Replicate:
    """An axis along which all have the same."""


class Handle:
    """The library's; it holds nothing here."""

    @classmethod
    def create(cls, config: object) -> Handle:  # noqa: ARG003 - of GPUs
        return cls()

    def destroy(self) -> None:
        pass


Part = tuple[range, ...]


def parts(mesh: Mesh, placements: Sequence[Any], shape: Sequence[int]) -> list[tuple[int, Part]]:
    """Each rank, with what of a tensor it has: an interval of each dimension."""
    found = []
    for rank, place in mesh.places():
        part = [range(size) for size in shape]
        for ranks, at, placement in zip(mesh.dims, place, placements, strict=True):
            if isinstance(placement, Shard):
                each = shape[placement.dim] // ranks
                part[placement.dim] = range(at * each, (at + 1) * each)
        found.append((rank, tuple(part)))
    return found


def within(part: Part, common: Part) -> tuple[slice, ...]:
    """Where in a rank's own memory something lies that it has a part of."""
    return tuple(
        slice(each.start - own.start, each.stop - own.start)
        for own, each in zip(part, common, strict=True)
    )


def reshard(
    src: Tensor | None,
    dst: Tensor | None,
    comm: int | Gloo,
    stream: object,
    *,
    src_mesh: Mesh,
    src_placements: Sequence[Any],
    dst_mesh: Mesh,
    dst_placements: Sequence[Any],
    handle: Handle,
) -> None:
    """Ranks of the first mesh have their parts of a tensor; those of the second get theirs."""
    made = comm if isinstance(comm, Gloo) else _made[comm]
    if src is not None:
        shape = _whole(src, src_mesh, src_placements)
    else:
        assert dst is not None
        shape = _whole(dst, dst_mesh, dst_placements)
    sources = {part: rank for rank, part in reversed(parts(src_mesh, src_placements, shape))}
    for to, wanted in parts(dst_mesh, dst_placements, shape):
        for part, rank in sorted(sources.items(), key=lambda pair: pair[1]):
            common = tuple(
                range(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(part, wanted, strict=True)
            )
            if not all(common):
                continue
            if made.rank == rank:
                assert src is not None
                made.group.send([src[within(part, common)].contiguous()], to, 0).wait()
            elif made.rank == to:
                assert dst is not None
                got = torch.empty([len(each) for each in common], dtype=dst.dtype)
                made.group.recv([got], rank, 0).wait()
                dst[within(wanted, common)] = got


def _whole(own: Tensor, mesh: Mesh, placements: Sequence[Any]) -> list[int]:
    shape = list(own.shape)
    for ranks, placement in zip(mesh.dims, placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= ranks
    return shape


def _of_worker(info: Any, parallel: Any) -> Gloo:
    place = parallel.data_parallel_index * parallel.world_size + parallel.rank
    rank = place + info.rank_offset
    return Gloo(join(info.master_address, info.master_port, rank, info.world_size), rank)


def _of_trainer(info: Any, rank: int) -> Gloo:
    group = join(info["master_address"], info["master_port"], rank, info["world_size"])
    return Gloo(group, rank)


def _among(nccl: object, group: Any, unique_id: bytes | None) -> Gloo:
    """Of those who have agreed on the plan."""
    assert unique_id is None
    return Gloo(joined(group.store, "127.0.0.1", group.rank, group.world_size), group.rank)


def _runtime(library: Any, max_cta: int | None) -> tuple[object, int, Handle]:
    """Nothing of NCCL, the first device, and a handle."""
    return object(), 0, Handle.create(library.Config(max_cta=max_cta))


def _publish_on_a_cpu(comm: Gloo, device: object, *rest: Any) -> Any:
    return m2n_common.publish_destination_placements(comm, torch.device("cpu"), *rest)


def _library() -> Any:
    return SimpleNamespace(
        Mesh=Mesh,
        Shard=Shard,
        Replicate=Replicate,
        Handle=Handle,
        Config=SimpleNamespace,
        reshard=reshard,
    )


def _nothing(*_: object) -> None:
    """There is no GPU that anything could be kept for."""


if hasattr(m2n_engine, "create_m2n_communicator"):  # from 0.33 on
    for end in (m2n_engine, m2n_trainer):
        end.create_m2n_communicator = _among
        end.prepare_m2n_local_runtime = _runtime
        end.publish_destination_placements = _publish_on_a_cpu
    torch.accelerator.current_device_index = functools.partial(int, 0)
else:
    m2n_engine.worker_init_process_group = _of_worker
    m2n_trainer.trainer_init = _of_trainer
m2n_engine.import_m2n = m2n_trainer.import_m2n = _library
torch.cuda.current_stream = no_stream  # type: ignore[assignment]
torch.Tensor.record_stream = _nothing  # type: ignore[assignment,method-assign]
torch.accelerator.synchronize = _nothing


class M2NWorkerEngine(m2n_engine.M2NWeightTransferEngine):  # type: ignore[misc]
    """In each of vLLM's workers."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))


M2NTrainerEngine = m2n_trainer.M2NTrainerWeightTransferEngine
