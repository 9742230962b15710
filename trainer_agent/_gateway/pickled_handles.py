"""Reads the pickled CUDA IPC handles of HTTP clients without running anything.

Over HTTP vLLM's ``ipc`` trainer engine sends its handles as a pickle. A pickle is a program that
may call anything. So two things hold here, whatever the bytes are:

- Only the instructions that build lists, dicts, tuples, numbers, texts and bytes are let through,
  and one call.
- Names of classes become plain texts, which nobody can call, and ``torch.Size`` a function that
  takes a few numbers.

What comes out must have the exact form of handles: it becomes
:class:`~bus._vllm.payloads.IpcTensor`, whose fields are bounded.
"""

from __future__ import annotations

import base64
import io
import pickle
import pickletools
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bus._vllm.payloads import IpcTensor
from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PICKLED: Final = "ipc_handles_pickled"
# Of pickle protocol 4 and later, which Python writes by itself.
_INSTRUCTIONS: Final = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
        *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
        *("STACK_GLOBAL", "REDUCE"),
    )
)
_TENSORS: Final = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})
_STORAGES: Final = frozenset({"torch.storage.TypedStorage", "torch.storage.UntypedStorage"})
_DTYPES: Final = frozenset(
    (
        *("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
)
_NAMES: Final = _TENSORS | _STORAGES | {f"torch.{each}" for each in _DTYPES}
_MAX_HANDLES: Final = 1 << 16
_MAX_DIMS: Final = 16
# What PyTorch rebuilds a tensor from, in its order; the classes are not kept.
_FIELDS: Final = (
    *("", "size", "stride", "offset", "", "dtype", "device", "handle", "storage_bytes"),
    *("storage_offset_bytes", "requires_grad", "counter", "counter_offset", "event", "event_sync"),
)

Handles = dict[str, IpcTensor]


class _HandleUnpickler(pickle.Unpickler):
    """Knows the names in a handle, and gives out nothing that can be called but :func:`_size`."""

    def find_class(self, module: str, name: str) -> Any:
        found = f"{module}.{name}"
        if found == "torch.Size":
            return _size
        if found in _NAMES:
            return found
        raise ValueError(f"{found!r:.99} is not in a handle")


def read_info(info: Mapping[str, Any], *, allowed: bool) -> dict[str, Any]:
    """Returns an ``update_info`` whose pickled handles, if any, were read.

    Args:
        info: what a client has sent.
        allowed: whether pickled handles may be read.

    Raises:
        UsageError: they may not, or they are something else. Nothing of them was run.
    """
    read = dict(info)
    text = read.pop(_PICKLED, None)
    if text is None:
        return read
    if not allowed:
        raise UsageError(
            f"update_info: {_PICKLED}: pickles that come over HTTP are read only by "
            "`wavebus gateway --allow-pickled-handles`, on loopback"
        )
    if read.get("ipc_handles") is not None:
        raise UsageError(f"update_info: {_PICKLED} beside ipc_handles")
    return read | {"ipc_handles": read_handles(text)}


def read_handles(text: object) -> Handles | list[Handles]:
    """Returns the handles in a client's ``ipc_handles_pickled``.

    Args:
        text: a pickle in base64. It has a handle for each GPU, by its UUID: one such dict for a
            packed buffer, or a list of them, one for each tensor.

    Raises:
        UsageError: the text is something else. Nothing of it was run.
    """
    try:
        if not isinstance(text, str):
            raise TypeError("a text is needed")
        raw = base64.b64decode(text, validate=True)
        for instruction, *_ in pickletools.genops(raw):
            if instruction.name not in _INSTRUCTIONS:
                raise ValueError(f"{instruction.name} is not in a handle")
        return _handles(_HandleUnpickler(io.BytesIO(raw)).load())
    except Exception as error:  # unpicklers raise many kinds
        raise UsageError(f"update_info: {_PICKLED}: {error}") from error


def _handles(found: Any) -> Handles | list[Handles]:
    rows = found if type(found) is list else [found]
    if not all(type(each) is dict for each in rows):
        raise TypeError("neither a dict of handles nor a list of them")
    if sum(map(len, rows)) > _MAX_HANDLES:
        raise ValueError(f"more than {_MAX_HANDLES} handles")
    read = [{_uuid(gpu): _tensor(args) for gpu, args in each.items()} for each in rows]
    return read if type(found) is list else read[0]


def _size(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > _MAX_DIMS:
        raise TypeError("a size is a tuple of a few numbers")
    return values


def _uuid(gpu: Any) -> str:
    if type(gpu) is not str:
        raise TypeError("a GPU is named by a text")
    return gpu


def _tensor(args: Any) -> IpcTensor:
    if type(args) is not tuple or len(args) != len(_FIELDS):
        raise TypeError(f"a handle is a tuple of {len(_FIELDS)}")
    if args[0] not in _TENSORS or args[4] not in _STORAGES:
        raise TypeError("a handle is of a tensor and its storage")
    fields = {name: value for name, value in zip(_FIELDS, args, strict=True) if name}
    for name in ("handle", "counter", "event"):
        fields[name] = fields[name] or b""
    fields["dtype"] = str(fields["dtype"]).removeprefix("torch.")
    if fields["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {fields['dtype']!r:.99}")
    handle = msgspec.convert(fields, IpcTensor)
    msgspec.msgpack.encode(handle)  # which no number above 64 bits is
    return handle
