"""Lets the workers of one engine agree on one outcome.

vLLM's multiprocess executor reads the answers of its workers in rank order and stops at the first
failure. The answers behind it stay in their queues, and the next call takes them for its own (seen
on vLLM 0.32 with two tensor parallel workers, ``MultiprocExecutor.collective_rpc``). So only the
last worker may raise: then every queue is empty. Before that the workers exchange their outcomes as
plain bytes, over the CPU groups (gloo) that vLLM has anyway. Engine cores behind one client
(internal data parallelism) share no such group: vLLM's client raises the error of any core, and
otherwise returns the first core's answer.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import torch
import torch.distributed as dist

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._vllm.plugin.operations import WorkerFailure, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_log = logging.getLogger("vllm.wavebus")

_SLOT_BYTES: Final = 12 * 1024  # holds a clipped WorkerFailure even of four-byte characters


class WorkerRefusal(Exception):
    """An operation's failure in some worker, raised in the last worker for all of them.

    Its text contains the :class:`WorkerFailure`, because vLLM passes only texts on to the sidecar.
    """


def run_before_any_continues(action: Callable[[], object]) -> None:
    """Runs an action in every worker, and returns when all have run it. A collective.

    Use this function for an action that may fail in one worker alone, if a collective follows: the
    failed worker would not enter the collective, and all others would wait for it.

    Args:
        action: runs in this worker, and may raise.

    Raises:
        EngineError: in every worker, if the action failed in any.
    """
    mine = attempt(action)
    failure = agree(mine if isinstance(mine, WorkerFailure) else None)
    if failure is not None:
        raise failure.to_error()


def refuse(failure: WorkerFailure) -> None:
    """Raises an agreed failure in the last worker, and returns in the others.

    vLLM reads the workers' answers in the order of ranks, and stops at the first error. It would
    take the unread answers for those of the next call. So in all other workers this function
    returns, and its caller returns an answer that nobody uses.

    Args:
        failure: the failure; the same in all workers.

    Raises:
        WorkerRefusal: in the worker of the last rank.
    """
    if is_last_worker():
        raise WorkerRefusal(failure.to_text())


def attempt(action: Callable[[], T]) -> T | WorkerFailure:
    """Runs an action; returns its result or, instead of raising, its failure.

    So the workers can compare their failures before any of them raises.
    """
    try:
        return action()
    except EngineError as error:
        return WorkerFailure(error.code, error.detail, error.tensor).clipped()
    except Exception as error:  # noqa: BLE001 - the caller gets it; peer ranks must not be left alone
        # The caller gets only the text; the traceback is in this log.
        _log.warning("wavebus: an operation failed in this worker", exc_info=True)
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        return WorkerFailure(NackCode.ENGINE_FAILED, text).clipped()


def _groups() -> Iterator[Any]:
    """Yields vLLM's groups that contain one engine's workers: tensor, context, pipeline."""
    from vllm.distributed import parallel_state  # noqa: PLC0415 - only inside a worker

    for getter in ("get_tp_group", "get_pcp_group", "get_pp_group"):
        get = getattr(parallel_state, getter, None)
        group = get() if get is not None else None
        if group is not None and group.world_size > 1:
            yield group


def is_last_worker() -> bool:
    """Returns whether vLLM reads this worker's answer as the last one of its engine."""
    return all(group.rank_in_group == group.world_size - 1 for group in _groups())


def agree(mine: WorkerFailure | None) -> WorkerFailure | None:
    """Returns the failure of the lowest rank that has failed, else None. A collective.

    All workers get the same result. A lone worker sends nothing.

    Args:
        mine: this worker's failure; None without one.
    """
    outcome = mine
    for group in _groups():
        slot = torch.zeros(_SLOT_BYTES, dtype=torch.uint8)
        blob = pack(outcome.clipped()) if outcome else b""
        framed = bytearray(len(blob).to_bytes(4, "big") + blob)
        slot[: len(framed)] = torch.frombuffer(framed, dtype=torch.uint8)
        slots = [torch.empty_like(slot) for _ in range(group.world_size)]
        dist.all_gather(slots, slot, group=group.cpu_group)
        outcome = next((found for found in map(_read, slots) if found), None)
    return outcome


def any_rank(flags: torch.Tensor) -> torch.Tensor:
    """Returns the elementwise maximum of all workers' flags. A collective.

    Args:
        flags: this worker's flags, as a uint8 tensor on the CPU.
    """
    merged = flags.clone()
    for group in _groups():
        dist.all_reduce(merged, op=dist.ReduceOp.MAX, group=group.cpu_group)
    return merged


def _read(slot: torch.Tensor) -> WorkerFailure | None:
    size_bytes = int.from_bytes(bytes(slot[:4].tolist()), "big")
    if not size_bytes:
        return None
    return msgspec.msgpack.decode(bytes(slot[4 : 4 + size_bytes].tolist()), type=WorkerFailure)
