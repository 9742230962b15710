"""The workers of one engine agree on one outcome.

vLLM's multiprocess executor reads the answers of its workers in rank order and
stops at the first failure; the answers behind it stay in their queues, and the
next call takes them for its own (seen on vLLM 0.32 with two tensor parallel
workers, ``MultiprocExecutor.collective_rpc``). So only the last worker may raise:
then every queue is empty. For that the workers first tell each other how they
fared, over the CPU groups (gloo) that vLLM has anyway, as plain bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from sidecar.vllm_plugin.wire import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

_SLOT_BYTES: Final = 12 * 1024  # a clipped Failure of four-byte characters fits


def _groups() -> Iterator[Any]:
    """The groups that together span one engine's workers: pipeline, context, tensor."""
    from vllm.distributed import parallel_state  # noqa: PLC0415 - only inside a worker

    for getter in ("get_tp_group", "get_pcp_group", "get_pp_group"):
        get = getattr(parallel_state, getter, None)
        group = get() if get is not None else None
        if group is not None and group.world_size > 1:
            yield group


def speaks_for_all() -> bool:
    """Whether this worker is the last one of its engine, whose answer is read last."""
    return all(group.rank_in_group == group.world_size - 1 for group in _groups())


def agree(mine: Failure | None) -> Failure | None:
    """The failure of the lowest rank that has one, the same on every worker.

    A collective: every worker of the engine must call it. With one worker, nothing
    is sent.
    """
    outcome = mine
    for group in _groups():
        slot = torch.zeros(_SLOT_BYTES, dtype=torch.uint8)
        blob = outcome.to_bytes() if outcome else b""
        slot[:4] = torch.tensor(list(len(blob).to_bytes(4, "big")), dtype=torch.uint8)
        if blob:
            slot[4 : 4 + len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        slots = [torch.empty_like(slot) for _ in range(group.world_size)]
        dist.all_gather(slots, slot, group=group.cpu_group)
        outcome = next((found for found in map(_read, slots) if found), None)
    return outcome


def any_rank(flags: torch.Tensor) -> torch.Tensor:
    """Elementwise maximum of ``flags`` (uint8, on the CPU) over all workers of the engine."""
    merged = flags.clone()
    for group in _groups():
        dist.all_reduce(merged, op=dist.ReduceOp.MAX, group=group.cpu_group)
    return merged


def _read(slot: torch.Tensor) -> Failure | None:
    size_bytes = int.from_bytes(bytes(slot[:4].tolist()), "big")
    if not size_bytes:
        return None
    return Failure.from_bytes(bytes(slot[4 : 4 + size_bytes].tolist()))
