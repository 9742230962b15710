"""Allocates the memory that an update is staged in.

On a GPU the tensors stay when their memory is released, and get it back when it is needed again: so
whatever was made of them, views and lists of copies, is valid from one update to the next. On a CPU
they are made anew, since a layer that repacks may keep what it was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from bus.errors import EngineError
from bus.messages import NackCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    Shapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class StagingBuffers:
    """Holds the staging memory of one model.

    Attributes:
        tensors: by name; another dict, where they are made anew.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._device = device
        self._shapes: Shapes = {}
        self._held = False

    @property
    def held_bytes(self) -> int:
        """How many bytes it takes now."""
        return sum(each.nbytes for each in self.tensors.values()) if self._held else 0

    @property
    def released_bytes(self) -> int:
        """How many bytes it took before it was released, if it is to take them again."""
        return 0 if self._held else sum(each.nbytes for each in self.tensors.values())

    def allocate(self, shapes: Shapes) -> None:
        """Allocate tensors of these names, shapes and dtypes; those that fit stay as they are.

        Raises:
            EngineError: code ``staging_refused``: there is no room.
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
                self.tensors = {
                    name: torch.empty(shape, dtype=dtype, device=self._device)
                    for name, (shape, dtype) in shapes.items()
                }
        except torch.OutOfMemoryError as error:
            self._discard()
            raise EngineError(
                f"{self._device} has no room to stage the update", code=NackCode.STAGING_REFUSED
            ) from error
        self._held = True

    def release(self) -> None:
        """Release the memory; nothing of it may be read."""
        self._held = False
        if self._device.type == "cpu":
            self.tensors = {}
            return
        for each in self.tensors.values():
            each.untyped_storage().resize_(0)

    def _discard(self) -> None:
        """Release it for good: views that somebody still has keep no memory."""
        self.release()
        self.tensors = {}
