"""The memory that an update is staged in: room for every target of a copy plan.

On a GPU the tensors stay when their memory is let go, and get it back when it is needed again: so
whatever was made of them, views and lists of copies, holds from one update to the next. On a CPU
they are made anew, since a layer that repacks may keep what it was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bus.errors import EngineError
from bus.messages import NackCode

if TYPE_CHECKING:
    from sidecar.vllm_plugin.copy_plan import CopyPlan


class StagingMemory:
    """Of one model.

    Attributes:
        tensors: of each target its own; other objects, where they are made anew.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._device = device
        self._plan: CopyPlan | None = None
        self._held = False

    @property
    def held_bytes(self) -> int:
        """What it takes now."""
        return sum(each.nbytes for each in self.tensors.values()) if self._held else 0

    def have(self, plan: CopyPlan) -> None:
        """Have it for a plan's targets; what is held for the same ones, stays as it is.

        Raises:
            EngineError: code ``staging_refused``: there is no room.
        """
        if self._plan is None or plan.targets != self._plan.targets:
            self.tensors, self._held = {}, False
        self._plan = plan
        if self._held:
            return
        try:
            if self.tensors:
                for each in self.tensors.values():
                    each.untyped_storage().resize_(each.nbytes)
            else:
                self.tensors = {
                    name: torch.empty(target.shape, dtype=target.dtype, device=self._device)
                    for name, target in plan.targets.items()
                }
        except torch.OutOfMemoryError as error:
            self.tensors, self._held = {}, False
            raise EngineError(
                f"{self._device} has no room to stage the update", code=NackCode.STAGING_REFUSED
            ) from error
        self._held = True

    def let_go(self) -> None:
        """It is free for others; nothing of it may be looked at."""
        self._held = False
        if self._device.type == "cpu":
            self.tensors = {}
            return
        for each in self.tensors.values():
            each.untyped_storage().resize_(0)
