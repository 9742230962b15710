"""Wraps the patches of vLLM's ``sparse_nccl`` trainer engine, to announce them on the bus.

That trainer engine takes no source: it reads all patches first, and then calls
``start_weight_update``, which says nothing about them. The wrapper in this module records the
patches' metadata while they are read.

vLLM's workers refuse some patches only after they have arrived, when engines are paused and count
as half-loaded. This module refuses such patches before the pause: those with an index that occurs
twice or lies outside of its tensor, or with NaN, which means "unchanged" inside vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from bus._manifest import TensorMeta
from bus.errors import UsageError
from trainer_agent._update.plan import UpdatePlan
from trainer_agent._weights.source import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class AnyPatch(Protocol):
    """vLLM's ``SparseWeightPatch``: new values of some elements of one tensor."""

    @property
    def name(self) -> str:
        """The tensor's name in the checkpoint."""

    @property
    def indices(self) -> torch.Tensor:
        """The indices of the new values in the flattened tensor: one dimension, int32."""

    @property
    def values(self) -> torch.Tensor:
        """The new values, one per index: one dimension, in the tensor's dtype."""

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""


class NextPatch:
    """Holds the plan of the patches that were read, until the next update takes it."""

    def __init__(self) -> None:
        self._plan: UpdatePlan | None = None

    def put(self, plan: UpdatePlan | None) -> None:
        """Stores the plan; None while the patches are being read."""
        self._plan = plan

    def take(self) -> UpdatePlan:
        """Returns the plan for the update that begins, and removes it.

        Raises:
            UsageError: no patches were read for this update.
        """
        plan, self._plan = self._plan, None
        if plan is None:
            raise UsageError(
                "no patches were read, so that engines can't be armed with them: send them as "
                "trainer.send_weights(agent.patches(patches)), all of an update at once"
            )
        return plan


class BusPatches:
    """The patches of one update, which :meth:`TrainerAgent.patches` makes.

    Args:
        patches: the patches, at most one per tensor.
        base: the version to which they are applied.
        following: receives the patches' plan when the last patch was read.
    """

    def __init__(self, patches: Iterable[AnyPatch], base: int, following: NextPatch) -> None:
        self._patches = patches
        self._base = base
        self._following = following

    def __iter__(self) -> Iterator[AnyPatch]:
        """Yields the patches unchanged, and records their metadata.

        Raises:
            UsageError: ``base`` is no version; or, after the last patch, one of them is invalid,
                and its tensor is named.
        """
        self._following.put(None)
        if self._base <= 0:
            raise UsageError(
                f"base={self._base}: a patch is a difference from a version that engines serve, "
                "and this agent has committed none: update_weights() first, with a whole set of "
                "weights, or give base="
            )
        metas: list[TensorMeta] = []
        counts: list[int] = []
        flaws: list[torch.Tensor] = []
        for patch in self._patches:
            shape = tuple(patch.full_shape)
            metas.append(TensorMeta(patch.name, dtype_name(patch.values.dtype), shape))
            counts.append(patch.indices.numel())
            flaws.append(_flaws(patch))
            yield patch
        if metas:
            plan = UpdatePlan.of_patch(metas, counts, base=self._base)
            _refuse_flaws(metas, flaws)
            self._following.put(plan)


_FLAWS = (
    "NaN among the values, which stands for what is unchanged",
    "an index outside of the tensor",
    "an index that appears twice",
)


@torch.no_grad()
def _flaws(patch: AnyPatch) -> torch.Tensor:
    """Returns which :data:`_FLAWS` a patch has, as booleans on its GPU; does not wait."""
    indices = torch.sort(patch.indices.flatten()).values
    numel = torch.Size(patch.full_shape).numel()
    return torch.stack(
        [
            torch.isnan(patch.values).any(),
            ((indices < 0) | (indices >= numel)).any().to(patch.values.device),
            (indices[1:] == indices[:-1]).any().to(patch.values.device),
        ]
    )


def _refuse_flaws(metas: list[TensorMeta], flaws: list[torch.Tensor]) -> None:
    found = torch.stack([each.to(flaws[0].device) for each in flaws]).tolist()
    for meta, row in zip(metas, found, strict=True):
        for text, is_so in zip(_FLAWS, row, strict=True):
            if is_so:
                raise UsageError(f"patches: {meta.name}: {text}")
