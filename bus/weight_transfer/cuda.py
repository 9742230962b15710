"""What both ends need of CUDA: whether it is available, which GPU is which, and memory that two
processes share.

Sharing uses CUDA's driver (``libcuda.so.1``, a stable C interface). torch's own way counts
references in files, and never frees memory that was lent to a process which died.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import TYPE_CHECKING, Any, Final

import torch

from bus.errors import UsageError
from bus.weight_transfer.formats import HANDLE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator


def current_gpu() -> str:
    """The GPU that this thread has chosen, such as ``cuda:1``; empty, as long as there is none in
    use. New threads begin with the first, whatever others chose: so it is asked in the user's."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return f"cuda:{torch.cuda.current_device()}" if in_use else ""


def resolve_gpu(device: str) -> torch.device:
    """The GPU of that name, with its number; for an empty one, this thread's.

    Raises:
        UsageError: it is no GPU.
    """
    named = torch.device(device or "cuda")
    if named.type != "cuda":
        raise UsageError(f"device={device!r}: name a GPU, such as cuda:0")
    return torch.device("cuda", torch.cuda.current_device() if named.index is None else named.index)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what this thread's current stream was asked."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


_LIBRARY: Final = "libcuda.so.1"

_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag there is


class CudaError(RuntimeError):
    """A call of the driver failed."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


def unavailable_reason(torch: Any) -> str:
    """Why there is no CUDA here; empty, if there is. Doesn't initialise it: a process that has
    can't fork one that needs it."""
    if torch.version.cuda is None:
        return f"it needs CUDA, and torch {torch.__version__} is built without"
    if not torch.cuda.device_count():
        return "it needs CUDA, and no GPU is to be seen here"
    return ""


def nccl_unavailable_reason(torch: Any, dist: Any) -> str:
    """Why there is no NCCL here; empty, if there is."""
    if not dist.is_available() or not dist.is_nccl_available():
        return unavailable_reason(torch) or f"torch {torch.__version__} is built without NCCL"
    return unavailable_reason(torch)


def nccl_version(torch: Any) -> str:
    """Of the NCCL that torch has here, such as ``2.29.7``."""
    return ".".join(map(str, torch.cuda.nccl.version()))


def device_uuid(torch: Any, device: Any) -> str:
    """What tells this GPU from all others, in whatever order a process counts them."""
    return str(torch.cuda.get_device_properties(device).uuid)


@contextlib.contextmanager
def driver_on(torch: Any, device: Any) -> Iterator[Driver]:
    """The driver, with ``device`` current in this thread, and nothing running on it."""
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # also binds CUDA's context to a thread that is new
        yield driver()


@functools.cache
def driver() -> Driver:
    """The one of this process.

    Raises:
        CudaError: it can't be loaded.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise CudaError(f"can't load {_LIBRARY}: {error}") from error
    return Driver(library)


class Driver:
    """A few of its functions. A pointer is a number; sizes are in bytes.

    Every call raises :class:`CudaError` with CUDA's own name for what went wrong.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def allocate(self, size_bytes: int) -> int:
        """Memory on the current GPU, outside of torch's pool."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        return pointer.value

    def free(self, pointer: int) -> None:
        """Give that back to the GPU."""
        self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def extent(self, pointer: int) -> tuple[int, int]:
        """The allocation around a pointer: where it begins, and its size."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call(
            "cuMemGetAddressRange_v2",
            ctypes.byref(base),
            ctypes.byref(size),
            ctypes.c_uint64(pointer),
        )
        return base.value, size.value

    def export(self, base: int) -> bytes:
        """The handle by which another process of this host opens an allocation."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation: where it begins here."""
        pointer = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(pointer),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )
        return pointer.value

    def close(self, pointer: int) -> None:
        """Unmap it."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            raise CudaError(f"{name}: {self._name_of(code)}")

    def _name_of(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(text))
        return text.value.decode() if text.value else f"error {code}"


class _CudaArray:
    """Memory as others of Python's libraries describe it to each other."""

    def __init__(self, pointer: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 2,
        }


def as_tensor(torch: Any, pointer: int, size_bytes: int, device: Any) -> Any:
    """Memory of the current GPU as a tensor of bytes; who has it sees to it that it stays."""
    made = torch.as_tensor(_CudaArray(pointer, size_bytes), device=device)
    assert made.data_ptr() == pointer, "torch has copied what it should have looked at"
    return made
