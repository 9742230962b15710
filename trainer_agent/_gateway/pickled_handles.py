"""Reads the pickled CUDA IPC handles of HTTP clients without running their code.

vLLM's ``ipc`` trainer engine sends its handles over HTTP as a pickle, and a pickle is a program
that may call anything. Here, two rules hold for all input:

- The only instructions allowed are those that build lists, dicts, tuples, numbers, strings and
  bytes, and the call instruction REDUCE.
- The only function that REDUCE can call is :func:`_size`, for ``torch.Size``. All other names of
  classes become strings, which can't be called.

The result must have the exact form of handles: it becomes
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
# Instructions of pickle protocols 4 and 5, as Python's pickler writes them.
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
# PyTorch's arguments to rebuild a tensor, in order. The classes ("") are not kept.
_FIELDS: Final = (
    *("", "size", "stride", "offset", "", "dtype", "device", "handle", "storage_bytes"),
    *("storage_offset_bytes", "requires_grad", "counter", "counter_offset", "event", "event_sync"),
)

Handles = dict[str, IpcTensor]


class _HandleUnpickler(pickle.Unpickler):
    """Resolves the names in a handle; the only callable among them is :func:`_size`."""

    def find_class(self, module: str, name: str) -> Any:
        found = f"{module}.{name}"
        if found == "torch.Size":
            return _size
        if found in _NAMES:
            return found
        raise ValueError(f"the name {found!r:.99} does not belong in a handle")


def read_info(info: Mapping[str, Any], *, allowed: bool) -> dict[str, Any]:
    """Replaces the pickled handles in a client's ``update_info``, if any, by the handles.

    Args:
        allowed: whether pickled handles may be read.

    Raises:
        UsageError: pickled handles are not allowed, or the pickle is malformed. None of its code
            was run.
    """
    read = dict(info)
    text = read.pop(_PICKLED, None)
    if text is None:
        return read
    if not allowed:
        raise UsageError(
            f"update_info: {_PICKLED}: pickles are refused, because they come over HTTP; start "
            "`wavebus gateway --allow-pickled-handles`, on loopback, to read handles from them"
        )
    if read.get("ipc_handles") is not None:
        raise UsageError(f"update_info: send either {_PICKLED} or ipc_handles, not both")
    return read | {"ipc_handles": read_handles(text)}


def read_handles(text: object) -> Handles | list[Handles]:
    """Returns the handles in a client's ``ipc_handles_pickled``.

    Args:
        text: a pickle in base64: a dict from the UUID of a GPU to a handle, for a packed buffer;
            or a list of such dicts, one for each tensor.

    Raises:
        UsageError: the text is malformed. None of its code was run.
    """
    try:
        if not isinstance(text, str):
            raise TypeError("must be a string")
        raw = base64.b64decode(text, validate=True)
        for instruction, *_ in pickletools.genops(raw):
            if instruction.name not in _INSTRUCTIONS:
                raise ValueError(f"the instruction {instruction.name} does not belong in a handle")
        return _handles(_HandleUnpickler(io.BytesIO(raw)).load())
    except Exception as error:  # unpicklers raise many kinds
        raise UsageError(f"update_info: {_PICKLED}: {error}") from error


def _handles(found: Any) -> Handles | list[Handles]:
    rows = found if type(found) is list else [found]
    if not all(type(each) is dict for each in rows):
        raise TypeError("the pickle is neither a dict of handles nor a list of such dicts")
    if sum(map(len, rows)) > _MAX_HANDLES:
        raise ValueError(f"the pickle has more than {_MAX_HANDLES} handles")
    read = [{_uuid(gpu): _tensor(args) for gpu, args in each.items()} for each in rows]
    return read if type(found) is list else read[0]


def _size(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > _MAX_DIMS:
        raise TypeError(f"torch.Size must have a tuple of at most {_MAX_DIMS} numbers")
    return values


def _uuid(gpu: Any) -> str:
    if type(gpu) is not str:
        raise TypeError("the UUID of a GPU must be a string")
    return gpu


def _tensor(args: Any) -> IpcTensor:
    if type(args) is not tuple or len(args) != len(_FIELDS):
        raise TypeError(f"a handle must be a tuple of {len(_FIELDS)} fields")
    if args[0] not in _TENSORS or args[4] not in _STORAGES:
        raise TypeError("a handle must name the classes of a tensor and of its storage")
    fields = {name: value for name, value in zip(_FIELDS, args, strict=True) if name}
    for name in ("handle", "counter", "event"):
        fields[name] = fields[name] or b""
    fields["dtype"] = str(fields["dtype"]).removeprefix("torch.")
    if fields["dtype"] not in _DTYPES:
        raise ValueError(f"the dtype {fields['dtype']!r:.99} is not supported")
    handle = msgspec.convert(fields, IpcTensor)
    msgspec.msgpack.encode(handle)  # raises for a number of more than 64 bits
    return handle
