"""Wraps CUDA for both ends: availability, GPU identity, memory shared between processes.

Memory is shared by CUDA's driver (``libcuda.so.1``, a stable C interface). torch's own way counts
references in files, and never frees memory that was lent to a process that died.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from bus._weight_transfer.formats import HANDLE_BYTES
from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


def current_gpu() -> str:
    """Returns this thread's current GPU, such as ``cuda:1``; empty if CUDA is unused.

    Call it in the user's thread: a new thread begins with the first GPU.
    """
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return f"cuda:{torch.cuda.current_device()}" if in_use else ""


def resolve_gpu(device: str) -> torch.device:
    """Returns the named GPU with its number.

    Args:
        device: such as ``cuda:0`` or ``cuda``; empty or without number: this thread's current GPU.

    Raises:
        UsageError: the device is no GPU.
    """
    named = torch.device(device or "cuda")
    if named.type != "cuda":
        raise UsageError(f"device={device!r}: name a GPU, such as cuda:0")
    return torch.device("cuda", torch.cuda.current_device() if named.index is None else named.index)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done the work queued in this thread's current stream.

    Args:
        device: any device; a CPU needs no wait.
    """
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


_LIBRARY: Final = "libcuda.so.1"

_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag there is


class CudaError(RuntimeError):
    """A failed call of CUDA's driver."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


def unavailable_reason() -> str:
    """Returns why CUDA is not available on this machine; empty if it is.

    Does not initialise CUDA, because a process that is forked after that can't use CUDA.
    """
    if torch.version.cuda is None:
        return f"it needs CUDA, and torch {torch.__version__} is built without"
    if not torch.cuda.device_count():
        return "it needs CUDA, and no GPU is visible here"
    return ""


def nccl_unavailable_reason() -> str:
    """Returns why this machine has no NCCL; empty if it has."""
    if not dist.is_available() or not dist.is_nccl_available():
        return unavailable_reason() or f"torch {torch.__version__} is built without NCCL"
    return unavailable_reason()


def nccl_version() -> str:
    """Returns the version of torch's NCCL, such as ``2.29.7``."""
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def device_uuid(device: torch.device) -> str:
    """Returns the GPU's UUID, which is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


@contextlib.contextmanager
def driver_on(device: torch.device) -> Iterator[Driver]:
    """Makes a GPU current in this thread, waits until it idles, and yields the driver.

    Raises:
        CudaError: the driver can't be loaded.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # also binds CUDA's context to a thread that is new
        yield driver()


@functools.cache
def driver() -> Driver:
    """Returns the interface to CUDA's driver, loaded once per process.

    Raises:
        CudaError: the driver can't be loaded.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise CudaError(f"can't load {_LIBRARY}: {error}") from error
    return Driver(library)


class Driver:
    """Calls a few functions of CUDA's driver. Pointers are numbers; sizes are in bytes.

    A call that fails raises :class:`CudaError` with CUDA's own name of the error.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def allocate(self, size_bytes: int) -> int:
        """Allocates memory on the current GPU, outside torch's pool, and returns its address."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        return pointer.value

    def free(self, pointer: int) -> None:
        """Frees memory from :meth:`allocate`."""
        self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def extent(self, pointer: int) -> tuple[int, int]:
        """Returns the address and size of the allocation around a pointer."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call(
            "cuMemGetAddressRange_v2",
            ctypes.byref(base),
            ctypes.byref(size),
            ctypes.c_uint64(pointer),
        )
        return base.value, size.value

    def export(self, base: int) -> bytes:
        """Returns the handle by which another process of this host opens an allocation."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Maps another process's allocation, and returns its address here."""
        pointer = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(pointer),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )
        return pointer.value

    def close(self, pointer: int) -> None:
        """Unmaps an allocation from :meth:`open`."""
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
    """Describes memory by the CUDA array interface, which torch reads."""

    def __init__(self, pointer: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 2,
        }


def as_tensor(pointer: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Returns memory of the current GPU as a tensor of bytes. The caller keeps the memory alive.

    Args:
        size_bytes: its size in bytes.

    Returns:
        A uint8 tensor of one dimension.
    """
    made = torch.as_tensor(_CudaArray(pointer, size_bytes), device=device)
    assert made.data_ptr() == pointer, "torch made a copy where a view was expected"
    return made
