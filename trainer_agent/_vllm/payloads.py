"""Translates the dicts of wavebus's own trainer engine into bus messages, and makes these dicts.

For vLLM's own trainer engines (such as ``nccl``) see :mod:`trainer_agent._vllm.native_payloads`. A
dict's keys show for which worker engine it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from bus._manifest import TensorMeta
from bus.errors import UsageError
from bus.messages import ChunkSent, TransferInit, Verify, WeightChunkMeta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer_agent._update.plan import UpdatePlan


class _InitInfo(msgspec.Struct, forbid_unknown_fields=True):
    transport: str
    params: bytes
    communicator: int


class _ChunkInfo(msgspec.Struct, forbid_unknown_fields=True):
    chunk: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[tuple[int, ...]]
    handle: bytes
    verify: Verify
    sums: tuple[int, ...]


def init_info(transport: str, params: bytes, communicator: int) -> dict[str, Any]:
    """Returns the dict for ``init_weight_transfer_engine``, which opens the engines' ends.

    Args:
        transport: the backend of the trainer agent.
        params: what :meth:`Sender.open` returned.
        communicator: the number of the transport's communicator; 0: it has none.
    """
    return msgspec.structs.asdict(_InitInfo(transport, params, communicator))


def chunk_info(
    plan: UpdatePlan, seq: int, handle: bytes, verify: Verify, sums: Sequence[int]
) -> dict[str, Any]:
    """Returns the dict for ``update_weights``, which announces one chunk.

    Args:
        plan: the tensors of the update.
        seq: the number of the chunk.
        handle: what :meth:`Sender.put` returned.
        verify: how much of each tensor is verified by checksum.
        sums: the checksums.
    """
    part, manifest = plan.manifest.part(seq), plan.manifest
    return msgspec.structs.asdict(
        _ChunkInfo(
            seq,
            list(manifest.names[part]),
            list(manifest.dtypes[part]),
            list(manifest.shapes[part]),
            handle,
            verify,
            tuple(sums),
        )
    )


def is_ours(info: object) -> bool:
    """Returns whether an ``init_info`` is for the worker engine ``wavebus``."""
    return isinstance(info, dict) and set(info) == set(_InitInfo.__struct_fields__)


def transfer_init(info: object, update_id: str) -> TransferInit:
    """Returns the TRANSFER_INIT message that has the content of an ``init_info``.

    Raises:
        UsageError: the ``init_info`` is not of worker engine ``wavebus``.
    """
    try:
        ours = msgspec.convert(info, _InitInfo)
    except msgspec.ValidationError as error:
        raise _foreign("init_info", info, error) from error
    return TransferInit(update_id, ours.transport, ours.params, ours.communicator, 0, {})


def chunk_messages(
    info: object, plan: UpdatePlan, update_id: str
) -> tuple[WeightChunkMeta, ChunkSent]:
    """Returns the messages to engines before and after a chunk.

    Args:
        info: the dict, from :func:`chunk_info`.
        plan: the armed tensors.
        update_id: the update.

    Raises:
        UsageError: ``info`` is for another worker engine, or has other tensors than were armed.
    """
    try:
        ours = msgspec.convert(info, _ChunkInfo)
    except msgspec.ValidationError as error:
        raise _foreign("update_info", info, error) from error
    if not 0 <= ours.chunk < plan.chunks:
        raise UsageError(f"update_info: chunk={ours.chunk}, and {plan.chunks} were armed")
    described = map(TensorMeta, ours.names, ours.dtype_names, ours.shapes)
    if tuple(described) != plan.manifest.chunk(ours.chunk):
        raise UsageError(f"update_info: chunk {ours.chunk} has other tensors than were armed")
    meta = plan.chunk_meta(update_id, ours.chunk, ours.handle)
    return meta, ChunkSent(update_id, ours.chunk, ours.verify, ours.sums)


def _foreign(what: str, info: object, error: msgspec.ValidationError) -> UsageError:
    if isinstance(info, dict):
        found = f"with {', '.join(sorted(map(str, info))) or 'nothing in it'}"
    else:
        found = f"a {type(info).__name__}"
    return UsageError(
        f"{what} {found}: over the bus go those of worker engine 'wavebus', which "
        f"agent.init_info() leads to ({error})"
    )
