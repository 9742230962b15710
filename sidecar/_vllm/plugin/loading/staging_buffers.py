"""Allocates and frees the memory in which an update is staged.

On a GPU, a release frees the memory but keeps the tensor objects, which get memory again for the
next update. So views of the tensors, and prepared copies, stay valid from one update to the next.
On a CPU new tensors are created each time, because a layer that repacks may keep the tensor
that it was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._transfer.memory_budget import spare_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    Shapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class StagingBuffers:
    """Allocates and releases the staging memory of one model.

    Attributes:
        tensors: the staging tensors by name; a new dict whenever new tensors are created.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._device = device
        self._shapes: Shapes = {}
        self._held = False

    @property
    def held_bytes(self) -> int:
        """Size of the memory that is allocated now, in bytes."""
        return sum(each.nbytes for each in self.tensors.values()) if self._held else 0

    @property
    def released_bytes(self) -> int:
        """Memory that the existing tensors will take at the next :meth:`allocate`, in bytes.

        It is 0 while the memory is allocated.
        """
        return 0 if self._held else sum(each.nbytes for each in self.tensors.values())

    def reusable_bytes(self, needed: int) -> int:
        """Returns how many of the needed bytes an earlier update left in this process.

        The memory is still allocated, or was released and is still cached by this process.
        """
        if self.released_bytes >= needed and spare_memory(self._device) >= needed:
            return needed
        return self.held_bytes

    def allocate(self, shapes: Shapes) -> None:
        """Allocates the staging tensors, unless they are allocated already.

        Args:
            shapes: by name, the shape and the dtype of each tensor.

        Raises:
            EngineError: code ``staging_refused``: the device is out of memory.
        """
        if shapes != self._shapes:
            self._discard()
        self._shapes = shapes
        if self._held:
            return
        try:
            if self.tensors:
                for each in self.tensors.values():
                    each.untyped_storage().resize_(each.nbytes)
            else:
                self.tensors = self._made(shapes)
        except torch.OutOfMemoryError as error:
            self._discard()
            raise self._refusal() from error
        self._held = True

    def extend(self, shapes: Shapes) -> None:
        """Allocates further staging tensors beside those that are allocated.

        Args:
            shapes: as in :meth:`allocate`, of all of them.

        Raises:
            EngineError: as :meth:`allocate`.
        """
        further = {name: shape for name, shape in shapes.items() if name not in self.tensors}
        try:
            self.tensors |= self._made(further)
        except torch.OutOfMemoryError as error:
            raise self._refusal() from error
        self._shapes = shapes

    def _made(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(shape, dtype=dtype, device=self._device)
            for name, (shape, dtype) in shapes.items()
        }

    def _refusal(self) -> EngineError:
        text = f"{self._device} has not enough free memory to stage the update"
        return EngineError(text, code=NackCode.STAGING_REFUSED)

    def release(self) -> None:
        """Releases the memory; the tensors must not be read until the next :meth:`allocate`."""
        self._held = False
        if self._device.type == "cpu":
            self.tensors = {}
            return
        for each in self.tensors.values():
            each.untyped_storage().resize_(0)

    def _discard(self) -> None:
        """Releases the memory and drops the tensors; remaining views keep no memory."""
        self.release()
        self.tensors = {}
