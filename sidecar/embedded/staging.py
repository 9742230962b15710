"""The next weights, beside those that are served."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sidecar.embedded.weights import load_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sidecar.embedded.model import Qwen3


class StagingMemory:
    """Of one model: as much again as its parameters, while it is there.

    :meth:`load` runs in any one thread; the others, in the core's, between steps.
    """

    def __init__(self, model: Qwen3) -> None:
        self._layout = model.layout
        self._parameters = model.parameters
        self._staged: dict[str, torch.Tensor] = {}

    @property
    def needed_bytes(self) -> int:
        """What it takes."""
        return sum(each.nbytes for each in self._parameters.values())

    @property
    def held_bytes(self) -> int:
        """What it takes now."""
        return sum(each.nbytes for each in self._staged.values())

    def take(self) -> None:
        """Take the memory, if it is not there."""
        if not self._staged:
            self._staged = {n: torch.empty_like(p) for n, p in self._parameters.items()}

    def let_go(self) -> None:
        """Give it back."""
        self._staged = {}

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put tensors, by their Hugging Face names, where they will go."""
        load_tensors(self._layout, self._staged, tensors)

    def swap(self) -> None:
        """Copy all of it into the parameters."""
        for name, staged in self._staged.items():
            self._parameters[name].copy_(staged)
