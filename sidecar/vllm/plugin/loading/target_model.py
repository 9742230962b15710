"""The state that a worker keeps per model, and the armed update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar.transfer import check_room
from sidecar.vllm.plugin.compat import deferred_layers, reloading_layers
from sidecar.vllm.plugin.loading.cpu import CpuRepacking
from sidecar.vllm.plugin.loading.manifest_check import ManifestChecker, tied_head
from sidecar.vllm.plugin.loading.plan_cache import PlanCache
from sidecar.vllm.plugin.loading.staged_weights import StagedWeights

if TYPE_CHECKING:
    import torch

    from bus.manifest import Manifest
    from bus.messages import Staging, Target
    from bus.weight_transfer.base import Receiver
    from bus.weight_transfer.packing import Tensors
    from sidecar.vllm.plugin.loading.manifest_check import Blueprint


class TargetModel:
    """Holds everything that is needed to load one model of the worker (served model or draft)."""

    def __init__(self, model: torch.nn.Module, built: Blueprint, device: torch.device) -> None:
        self.model = model
        self.tied_head = tied_head(built.model_config, model)
        self.checker = ManifestChecker(built, model, self.tied_head)
        self.plans = PlanCache(built.vllm_config, model, device, self.tied_head)
        self.staged = StagedWeights(model, device)
        self.repacking = CpuRepacking(model, device)

    def without_tied_head(self, received: Tensors) -> Tensors:
        """Returns the received tensors without a tied head, which is loaded with the embeddings."""
        if not self.tied_head or all(name != self.tied_head for name, _ in received):
            return received
        return [(name, tensor) for name, tensor in received if name != self.tied_head]

    @property
    def is_reloading(self) -> bool:
        """Whether some layers are in the middle of vLLM's layerwise reload."""
        return bool(reloading_layers(self.model))

    def discard(self) -> None:
        """Drops the tensors that vLLM's reload has buffered for incomplete layers.

        Otherwise every later finish would try to load them again, and fail again.
        """
        self.plans.close_comparison()
        for info in reloading_layers(self.model):
            info.loaded_weights = []
            info.load_numel = 0

    def process_deferred(self, dtype: torch.dtype) -> None:
        """Post-processes the layers that vLLM leaves for the end of a load."""
        for layer in deferred_layers(self.model):
            layer.process_weights_after_loading(dtype)


class ArmedManifest:
    """A manifest with its chunks, which stay the same objects in all its updates.

    So the next update can reuse everything that was derived from these chunks.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.digest = manifest.digest()
        self.chunks = tuple(manifest.chunk(seq) for seq in range(manifest.chunks))
        self._fits: tuple[Receiver, int | None] | None = None

    def check_room(self, backend: str, receiver: Receiver | None) -> None:
        """Runs :func:`sidecar.transfer.check_room`, once per transport."""
        fits = None if receiver is None else (receiver, receiver.room_bytes)
        if fits is None or fits != self._fits:
            check_room(backend, receiver, self.manifest)
            self._fits = fits


@dataclass(frozen=True, slots=True)
class ArmedUpdate:
    """An update whose manifest was checked. ``staging`` is as in the message ARM."""

    announced: ArmedManifest
    target: Target
    staging: Staging | None

    @property
    def manifest(self) -> Manifest:
        """The manifest of the update."""
        return self.announced.manifest

    def counts(self, seq: int) -> tuple[int, ...]:
        """Returns how many elements of each tensor a patch's chunk carries."""
        return self.manifest.counts[self.manifest.part(seq)]


def require_armed(armed: ArmedUpdate | None) -> ArmedUpdate:
    """Returns the armed update.

    Raises:
        EngineError: code ``wrong_state``: no update was armed.
    """
    if armed is None:
        raise EngineError("receive before a manifest was armed", code=NackCode.WRONG_STATE)
    return armed
