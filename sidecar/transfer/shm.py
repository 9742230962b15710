"""Receive through POSIX shared memory on one host.

The segments are mapped once, when the transport opens; the trainer then removes
their names, so that nothing is left behind when anyone is killed. A chunk's
tensors are views of the mapping, without a copy.

Unpacked, there is no ring: chunks tell where in the trainer's own memory their tensors
lie. It is mapped when the first chunk needs it, so that nothing of it that was written
here would reach the trainer, and stays mapped while chunks lie there: to map it costs as
much as to copy it.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import torch

from bus.transfer import SHM_FOLDER, ShmChunk, ShmInit, ShmTensors
from sidecar.transfer.base import (
    Receiver,
    Views,
    check_lent,
    decoded,
    lent_views,
    transfer_failed,
)

if TYPE_CHECKING:
    from bus.errors import EngineError
    from bus.manifest import TensorMeta
    from bus.transfer import Place, ShmMemory


class ShmReceiver(Receiver):
    """Maps the trainer's ring of segments, read-only by convention; or its own memory."""

    waits = False

    def __init__(self) -> None:
        self._segments: list[torch.Tensor] = []
        self._views = Views()
        self._lends = False
        self._lent: dict[ShmMemory, torch.Tensor] = {}

    def open(self, params: bytes, place: Place) -> None:  # noqa: ARG002 - all are equal
        init = decoded(params, ShmInit)
        if bool(init.segments) != bool(init.segment_bytes):
            raise transfer_failed(
                f"segment_bytes: {init.segment_bytes} of {len(init.segments)} segments"
            )
        self._lent = {}
        self._views.clear()
        self._segments = [_map(name, init.segment_bytes) for name in init.segments]
        self._lends = not init.segments
        self.room_bytes = init.segment_bytes or None

    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        if self._lends:
            return self._receive_lent(tensors, decoded(handle, ShmTensors))
        chunk = decoded(handle, ShmChunk)
        if chunk.segment >= len(self._segments):
            raise transfer_failed(
                f"segment {chunk.segment} of {len(self._segments)}: open the ring first"
            )
        return self._views.of(self._segments[chunk.segment], chunk.offsets_bytes, tensors)

    def close(self) -> None:
        self._segments = []
        self._views.clear()
        self._lends = False
        self._lent = {}

    def _receive_lent(
        self, tensors: tuple[TensorMeta, ...], lent: ShmTensors
    ) -> list[tuple[str, torch.Tensor]]:
        check_lent(lent, tensors)
        if lent.memories:
            known = self._lent
            self._lent = {}
            for memory in lent.memories:
                mapped = known.get(memory)
                self._lent[memory] = _map_lent(memory) if mapped is None else mapped
        memories = [self._lent[memory] for memory in lent.memories]
        return lent_views(memories, lent, tensors, self.device)


def _map(name: str, size_bytes: int) -> torch.Tensor:
    """The whole segment as a tensor of bytes; unmapped when the last view is gone."""
    try:
        descriptor = os.open(os.path.join(SHM_FOLDER, name), os.O_RDWR | os.O_CLOEXEC)  # noqa: PTH118
    except OSError as error:
        raise transfer_failed(
            f"can't open shared memory {name}: {error.strerror}; "
            "trainer and engine must run on one host, as one user"
        ) from error
    try:
        actual_bytes = os.fstat(descriptor).st_size
        if actual_bytes != size_bytes:
            raise transfer_failed(f"{name} has {actual_bytes} bytes, expected {size_bytes}")
        mapping = mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _map_lent(memory: ShmMemory) -> torch.Tensor:
    """The trainer's memory as a tensor of bytes, as it is there at any time; what is written to
    it stays here."""
    path = f"/proc/{memory.pid}/fd/{memory.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _can_not_map(f"can't open {path}: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        expected = (memory.device, memory.inode, memory.size_bytes)
        if (found.st_dev, found.st_ino, found.st_size) != expected:
            raise _can_not_map(f"{path} is not the memory that the trainer lends")
        mapping = mmap.mmap(descriptor, memory.size_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _can_not_map(why: str) -> EngineError:
    return transfer_failed(
        f"{why}; trainer and engine must run on one host, as one user, and see each other's "
        "processes (containers: one PID namespace), or the trainer sends with packed=True"
    )
