"""Send through POSIX shared memory on one host.

The trainer creates a ring of segments, the engines map them, and then the names
are removed at once: the memory lives as long as somebody maps it and no longer,
whoever is killed. In the short time before that, a segment whose owner died is
recognised by the advisory lock it no longer holds, and swept by the next trainer.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bus.errors import UsageError, WavebusError
from bus.transfer import SHM_ALIGN_BYTES, SHM_FOLDER, SHM_PREFIX, ShmChunk, ShmInit, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

RING_SEGMENTS = 2


class ShmSender:
    """Double-buffered: one chunk is written while the engines load the one before."""

    depth = RING_SEGMENTS

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._chunk_bytes = 0

    def open(self, chunk_bytes: int) -> bytes:
        self.close()
        sweep()
        size_bytes = _align(max(chunk_bytes, 1))
        try:
            for _ in range(RING_SEGMENTS):
                self._segments.append(_Segment(size_bytes))
        except OSError as error:
            self.close()
            raise WavebusError(
                f"can't create {RING_SEGMENTS} shared memory segments of {size_bytes} bytes: "
                f"{error.strerror}; lower chunk_bytes or enlarge {SHM_FOLDER}"
            ) from error
        self._chunk_bytes = size_bytes
        return pack(ShmInit(tuple(s.name for s in self._segments), size_bytes))

    def opened(self) -> None:
        for segment in self._segments:
            segment.unlink()

    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        index = seq % RING_SEGMENTS
        memory = self._segments[index].memory
        offsets: list[int] = []
        filled = 0
        for tensor in tensors:
            size_bytes = tensor.numel() * tensor.element_size()
            room = memory[filled : filled + size_bytes].view(tensor.dtype).view(tensor.shape)
            room.copy_(tensor)
            offsets.append(filled)
            filled = _align(filled + size_bytes)
        return pack(ShmChunk(index, tuple(offsets)))

    def taken(self, seq: int) -> None:
        """Nothing to do: the agent's window keeps a segment until it is taken."""

    def packed_bytes(self, sizes_bytes: Sequence[int]) -> int:
        return sum(_align(size_bytes) for size_bytes in sizes_bytes)

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments = []


class _Segment:
    """One segment: created exclusively, locked by its owner, mapped whole."""

    def __init__(self, size_bytes: int) -> None:
        while True:
            self.name = f"{SHM_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
            self._path = Path(SHM_FOLDER) / self.name
            self._descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if os.fstat(self._descriptor).st_nlink:
                break
            os.close(self._descriptor)  # another trainer swept it before it was locked
        self._linked = True
        try:
            # Reserve now: writing to a sparse segment of a full file system is a SIGBUS.
            os.posix_fallocate(self._descriptor, 0, size_bytes)
            self.memory = torch.frombuffer(
                mmap.mmap(self._descriptor, size_bytes), dtype=torch.uint8
            )
        except BaseException:
            self.close()
            raise

    def unlink(self) -> None:
        if self._linked:
            self._path.unlink(missing_ok=True)
            self._linked = False

    def close(self) -> None:
        self.unlink()
        os.close(self._descriptor)


def sweep(folder: Path = Path(SHM_FOLDER)) -> list[str]:
    """Remove segments whose owner is gone; return their names."""
    removed: list[str] = []
    for path in folder.glob(f"{SHM_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or gone meanwhile: not ours to sweep
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(descriptor)
    return removed


def _align(size_bytes: int) -> int:
    if size_bytes < 0:
        raise UsageError(f"chunk_bytes={size_bytes}: must not be negative")
    return -(-size_bytes // SHM_ALIGN_BYTES) * SHM_ALIGN_BYTES
