"""Receive through POSIX shared memory on one host.

The segments are mapped once, when the transport opens; the trainer then removes
their names, so that nothing is left behind when anyone is killed. A chunk's
tensors are views of the mapping, without a copy.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import torch

from bus.transfer import SHM_FOLDER, ShmChunk, ShmInit
from sidecar.transfer.base import Receiver, decoded, transfer_failed, views_of

if TYPE_CHECKING:
    from bus.manifest import TensorMeta
    from bus.transfer import Place


class ShmReceiver(Receiver):
    """Maps the trainer's ring of segments, read-only by convention."""

    waits = False

    def __init__(self) -> None:
        self._segments: list[torch.Tensor] = []

    def open(self, params: bytes, place: Place) -> None:  # noqa: ARG002 - all are equal
        init = decoded(params, ShmInit)
        self._segments = [_map(name, init.segment_bytes) for name in init.segments]
        self.room_bytes = init.segment_bytes

    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        chunk = decoded(handle, ShmChunk)
        if chunk.segment >= len(self._segments):
            raise transfer_failed(
                f"segment {chunk.segment} of {len(self._segments)}: open the ring first"
            )
        return views_of(self._segments[chunk.segment], chunk.offsets_bytes, tensors)

    def close(self) -> None:
        self._segments = []


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
