"""Send through POSIX shared memory on one host.

The trainer creates a ring of segments, the engines map them, and then the names
are removed at once: the memory lives as long as somebody maps it and no longer,
whoever is killed. In the short time before that, a segment whose owner died is
recognised by the advisory lock it no longer holds, and swept by the next trainer.

Unpacked, there is no ring. Tensors that lie in shared memory already
(:mod:`trainer_agent.shared`) are read by the engines where they are; so they must stay
as they are until the chunk is applied. Others are copied into shared memory that is
made for the chunk.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from bus.errors import WavebusError
from bus.lora import FOLDER_PREFIX
from bus.runtime import locked_paths
from bus.transfer import SHM_FOLDER, SHM_PREFIX, ShmChunk, ShmInit, ShmTensors, aligned, encode
from trainer_agent import shared
from trainer_agent.transfer.base import Sender, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.transfer import ShmMemory, World


class ShmSender(Sender):
    """One chunk is written while the engines load the one before."""

    sends_unpacked: ClassVar[bool] = True

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._lent: dict[int, list[torch.Tensor]] = {}

    def open(self, chunk_bytes: int, world: World) -> bytes:  # noqa: ARG002 - no collective
        self.close()
        sweep()
        if not self.packed:
            return encode(ShmInit((), 0))
        size_bytes = aligned(max(chunk_bytes, 1))
        try:
            for _ in range(self.depth):
                self._segments.append(_Segment(size_bytes))
        except OSError as error:
            self.close()
            raise WavebusError(
                f"can't create {self.depth} shared memory segments of {size_bytes} bytes: "
                f"{error.strerror}; lower chunk_bytes or enlarge {SHM_FOLDER}"
            ) from error
        return encode(ShmInit(tuple(s.name for s in self._segments), size_bytes))

    def opened(self) -> None:
        for segment in self._segments:
            segment.unlink()

    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        if not self.packed:
            return self._lend(seq, tensors)
        index = seq % self.depth
        offsets = pack(self._segments[index].memory, tensors)
        return encode(ShmChunk(index, tuple(offsets[:-1])))

    def taken(self, seq: int) -> None:
        self._lent.pop(seq, None)

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments = []
        self._lent = {}

    def _lend(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        if not seq:  # what an update that broke off has left
            self._lent = {}
        lent = self._lent[seq] = _all_shared(tensors)
        places: dict[ShmMemory, int] = {}
        memory_of: list[int] = []
        offsets: list[int] = []
        for tensor in lent:
            memory_index = offset = 0
            if tensor.numel():
                memory, offset = shared.place_of(tensor)
                memory_index = places.setdefault(memory, len(places))
            memory_of.append(memory_index)
            offsets.append(offset)
        return encode(ShmTensors(tuple(places), tuple(memory_of), tuple(offsets)))


def _all_shared(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, in shared memory and contiguous; those that are not are copied there."""
    lent = list(tensors)
    others = [
        place
        for place, tensor in enumerate(tensors)
        if tensor.numel() and not (tensor.is_contiguous() and shared.is_shared(tensor))
    ]
    if others:
        sizes_bytes = [lent[place].numel() * lent[place].element_size() for place in others]
        memory = shared.allocate(sum(map(aligned, sizes_bytes)))
        starts = pack(memory, [lent[place] for place in others])
        for place, start, size_bytes in zip(others, starts, sizes_bytes, strict=False):
            whole = memory[start : start + size_bytes]
            lent[place] = whole.view(lent[place].dtype).view(lent[place].shape)
    return lent


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
    """Remove segments and adapters whose owner is gone; return their names."""
    # Other folders of that prefix are others', with pages of engine cores.
    segments = (path for path in folder.glob(f"{SHM_PREFIX}*") if path.is_file())
    adapters = folder.glob(f"{FOLDER_PREFIX}*/")
    return [
        *locked_paths.sweep(segments, lambda left: left.unlink(missing_ok=True)),
        *locked_paths.sweep(adapters, lambda left: shutil.rmtree(left, ignore_errors=True)),
    ]
