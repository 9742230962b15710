"""Encodes the dicts that vLLM's own trainer and worker engines exchange, for the bus.

vLLM calls the two ends of a weight transfer trainer engine and worker engine. A transfer backend
with a name such as ``vllm:nccl`` uses these. The bus carries the dicts that the two exchange,
without reading them: an ``init_info`` as ``TransferInit.params``, an ``update_info`` as
``WeightChunkMeta.handle``.

The dicts may contain what MessagePack can encode (None, booleans, numbers, strings, bytes, lists,
and dicts with string keys), and :class:`IpcTensor`. Nothing is pickled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from bus.messages.types import MAX_BLOB_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bus._manifest import TensorMeta

PREFIX: Final = "vllm:"
MAX_DEPTH: Final = 8
# Worker engines that receive patches: new values of some elements of the served weights.
PATCHING: Final = frozenset({"sparse_nccl"})
# Worker engines to which every rank of the trainer sends its own shards. In the communicator, the
# workers of all engines follow the trainer's ranks as one mesh, from ``rank_offset`` on.
SHARDING: Final = frozenset({"nccl_m2n"})
# Worker engines of vLLM's that the bus can't drive, and why.
UNSUPPORTED: Final = {
    "sharded_rdt": "its workers pull shards from every rank of its trainer, by plans of their own",
    "modelexpress": "vLLM has no trainer engine for it",
}
_IPC_TENSOR: Final = 1  # the extension type of MessagePack

Size = Annotated[int, Meta(ge=0)]
Sizes = Annotated[tuple[Size, ...], Meta(max_length=16)]
Handle = Annotated[bytes, Meta(max_length=65_536)]  # handles of expandable segments are long


class IpcTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in another process's memory on the same GPU.

    The fields are the arguments of PyTorch's ``rebuild_cuda_tensor``, in the same order, without
    the classes of tensor and storage. Sizes count elements, unless their names end in ``_bytes``.
    """

    size: Sizes
    stride: Sizes
    offset: Size
    dtype: Annotated[str, Meta(max_length=32, pattern=r"^[a-z0-9_]+\Z")]
    device: Size
    handle: Handle
    storage_bytes: Size
    storage_offset_bytes: Size
    requires_grad: bool
    counter: Handle
    counter_offset: Size
    event: Handle
    event_sync: bool


class _ChunkPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    columns: Annotated[tuple[str, ...], Meta(max_length=4)]
    rest: bytes


def native_name(engine: str) -> str:
    """Returns the name on the bus of vLLM's worker engine ``engine``, such as ``vllm:nccl``."""
    return PREFIX + engine


def engine_of(backend: str) -> str:
    """Returns vLLM's own name of a backend such as ``vllm:nccl``; empty for other backends."""
    return backend.removeprefix(PREFIX) if backend.startswith(PREFIX) else ""


def is_patching(backend: str) -> bool:
    """Returns whether a backend carries patches and no whole tensors. Others carry no patches."""
    return engine_of(backend) in PATCHING


def is_sharding(backend: str) -> bool:
    """Returns whether each rank of the trainer sends its own shards over this backend."""
    return engine_of(backend) in SHARDING


def is_loaded_on_receipt(backend: str) -> bool:
    """Returns whether engines load a chunk of this backend as soon as they receive it.

    vLLM's worker engines have one call for both, so nothing can be verified in between.
    """
    return backend.startswith(PREFIX)


def encode_info(info: Mapping[str, Any]) -> bytes:
    """Encodes a dict of plain values as bytes.

    Raises:
        ValueError: a value can't be encoded, and its key is named; or the result is too large.
    """
    blob = msgspec.msgpack.encode(_plain(info, "", 0))
    if len(blob) > MAX_BLOB_BYTES:
        raise ValueError(f"has {len(blob)} bytes; the bus carries at most {MAX_BLOB_BYTES}")
    return blob


def decode_info(blob: bytes) -> dict[str, Any]:
    """Decodes a dict from bytes.

    Raises:
        ValueError: the bytes are no dict of plain values.
    """
    try:
        found = msgspec.msgpack.decode(blob, ext_hook=_extension)
    except msgspec.DecodeError as error:
        raise ValueError(f"info: {error}") from error
    plain = _plain(found, "", 0)
    if type(plain) is not dict:
        raise ValueError(f"info: a {type(found).__name__}, not a dict")
    return found  # type: ignore[no-any-return]  # as decoded: extensions are objects there


def columns_of(metas: Sequence[TensorMeta], counts: Sequence[int]) -> dict[str, list[Any]]:
    """Returns a chunk's tensors as vLLM's update info names them; only a patch has ``counts``."""
    return {
        "names": [meta.name for meta in metas],
        "dtype_names": [meta.dtype for meta in metas],
        "shapes": [list(meta.shape) for meta in metas],
        "num_updates_list": list(counts),
    }


def encode_chunk(columns: Sequence[str], rest: Mapping[str, Any]) -> bytes:
    """Encodes an ``update_info`` without the values that the armed manifest has.

    Args:
        columns: keys whose values the manifest has, such as the names of tensors.
        rest: all other items of the dict.

    Raises:
        ValueError: as :func:`encode_info` does.
    """
    return msgspec.msgpack.encode(_ChunkPayload(tuple(columns), encode_info(rest)))


def decode_chunk(blob: bytes, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Decodes an ``update_info``, and takes its missing values from ``columns``.

    Args:
        blob: what :func:`encode_chunk` returned.
        columns: the values that the armed manifest has, by their keys in the dict.

    Raises:
        ValueError: the bytes are no ``update_info``.
    """
    try:
        chunk = msgspec.msgpack.decode(blob, type=_ChunkPayload)
    except msgspec.DecodeError as error:
        raise ValueError(f"update_info: {error}") from error
    unknown = sorted(set(chunk.columns) - set(columns))
    if unknown:
        raise ValueError(f"update_info: unknown columns {', '.join(unknown)}")
    return {name: columns[name] for name in chunk.columns} | decode_info(chunk.rest)


def _plain(value: Any, path: str, depth: int) -> Any:
    """Returns the value with MessagePack extensions in place of :class:`IpcTensor`.

    Raises:
        ValueError: a value can't be encoded; the text names its path.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"{path}: nested deeper than {MAX_DEPTH}")
    # Not by isinstance: what a subclass adds would be lost on the way.
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, IpcTensor):
        return msgspec.msgpack.Ext(_IPC_TENSOR, msgspec.msgpack.encode(value))
    if type(value) in (list, tuple):
        return [_plain(each, f"{path}[{at}]", depth + 1) for at, each in enumerate(value)]
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                raise ValueError(f"{path or 'info'}: a key is {type(key).__name__}, not text")
        return {
            key: _plain(each, f"{path}.{key}" if path else key, depth + 1)
            for key, each in value.items()
        }
    raise ValueError(f"{path or 'info'}: a {type(value).__name__} has no plain form")


def _extension(code: int, data: memoryview) -> IpcTensor:
    if code != _IPC_TENSOR:
        raise ValueError(f"unknown extension {code}")
    return msgspec.msgpack.decode(data, type=IpcTensor)
