"""Keeps everything that a worker needs to update one of its models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from bus._kept_dtypes import kept_refusal
from bus.errors import EngineError, wrong_state
from bus.messages import NackCode
from sidecar._transfer.unloaded import UnloadedTensors
from sidecar._transfer.verification import check_room
from sidecar._vllm.plugin import agreement
from sidecar._vllm.plugin.compat import deferred_layers, reloading_layers
from sidecar._vllm.plugin.loading.cpu import CpuRepacking
from sidecar._vllm.plugin.loading.manifest_check import ManifestChecker, tied_head
from sidecar._vllm.plugin.loading.plan_cache import PlanCache
from sidecar._vllm.plugin.loading.staged_weights import StagedWeights

if TYPE_CHECKING:
    from bus._manifest import Manifest
    from bus._weight_transfer.base import Receiver
    from bus._weight_transfer.packing import Tensors
    from bus.messages import Staging, Target
    from sidecar._vllm.plugin.loading.loader_trace import LoaderTrace
    from sidecar._vllm.plugin.loading.manifest_check import Blueprint


class TargetModel:
    """Everything that a worker needs to update one model: the served model or its draft.

    Args:
        model: the model.
        built: the arguments from which vLLM built the model.
        device: the device of its weights.
    """

    def __init__(self, model: torch.nn.Module, built: Blueprint, device: torch.device) -> None:
        self.model = model
        self.tied_head = tied_head(built.model_config, model)
        self.checker = ManifestChecker(built, model, self.tied_head)
        self.plans = PlanCache(built.vllm_config, model, device, self.tied_head)
        self.staged = StagedWeights(model, device)
        self.repacking = CpuRepacking(model, device)
        self.unloaded = UnloadedTensors(self.tied_head, self._rotary_frequencies)

    def _rotary_frequencies(self, name: str) -> torch.Tensor | None:
        """Returns the frequencies of a rotary embedding, in the precision of its cache.

        Row 1 of the cache has the cosines, then the sines, of the angles of one position.
        """
        found = {
            path: module
            for path, module in self.model.named_modules(remove_duplicate=False)
            if path.endswith("rotary_emb")
        }
        module = found.get(name.removesuffix(".inv_freq"))
        if module is None and len({id(each) for each in found.values()}) == 1:
            module = next(iter(found.values()))
        cache = getattr(module, "cos_sin_cache", None)
        if not isinstance(cache, torch.Tensor) or len(cache) <= 1:
            return None
        cosines, sines = cache[1].float().chunk(2)
        return torch.atan2(sines, cosines).to(cache.dtype)

    def check(self, manifest: Manifest, known: Manifest | None = None) -> LoaderTrace:
        """Checks a manifest; as :meth:`ManifestChecker.check`.

        Raises:
            EngineError: also code ``dtype_kept``: the model keeps a tensor in float32 that the
                trainer has cast.
        """
        trace = self.checker.check(manifest, known)
        if manifest.is_cast and trace.widened:
            raise kept_refusal([trace.metas[index].name for index in sorted(trace.widened)])
        return trace

    def extend(self, armed: ArmedUpdate, part: Manifest, *, is_staged: bool) -> ArmedManifest:
        """Returns an open manifest with further tensors. A collective of the engine's workers.

        If the update is being staged, there is room for them afterwards.

        Raises:
            EngineError: as :meth:`check`; or a tensor came before; code ``staging_refused``: there
                is no memory, or no copy plan for them.
        """
        try:
            manifest = armed.manifest.join(part)
        except ValueError as error:
            raise EngineError(str(error), code=NackCode.MANIFEST_REFUSED) from error
        self.plans.on_armed(manifest, self.check(manifest, armed.manifest))
        if is_staged:
            self._extend_staged()
        return ArmedManifest(manifest)

    def complete(self, manifest: Manifest) -> None:
        """Checks that a staged open update has all tensors that this worker needs.

        The call is no collective, so it may be made while the worker runs steps.

        Raises:
            EngineError: as :meth:`check`: a tensor is missing; as :meth:`extend`.
        """
        trace = self.checker.check_whole(manifest)
        self.plans.on_armed(replace(manifest, is_open=False), trace)
        self._extend_staged()

    def _extend_staged(self) -> None:
        known = self.plans.entry
        if known.plan is None:
            text = (
                f"the update needs the model's own loader ({known.reason}), so it can't be staged; "
                "the next update uses a pause"
            )
            raise EngineError(text, code=NackCode.STAGING_REFUSED)
        self.staged.extend(known.plan)

    def require_whole(self, manifest: Manifest) -> None:
        """Refuses an open manifest if tensors are missing. A collective of the workers.

        Raises:
            EngineError: as :meth:`check`, in all workers.
        """
        agreement.run_before_any_continues(lambda: self.checker.check_whole(manifest))

    def begin(self, armed: ArmedUpdate | None) -> None:
        """Begins to check tensors of an update that have no parameter of their own."""
        names = () if armed is None else armed.manifest.names
        self.unloaded.begin(names, is_open=armed is not None and armed.manifest.is_open)

    def without_tied_head(self, received: Tensors) -> Tensors:
        """Returns the received tensors, except a tied output head.

        The head shares the embeddings' memory, so it is loaded with them. :attr:`unloaded` has
        found both equal.
        """
        if not self.tied_head or all(name != self.tied_head for name, _ in received):
            return received
        return [(name, tensor) for name, tensor in received if name != self.tied_head]

    @property
    def is_reloading(self) -> bool:
        """Whether vLLM's reload has loaded some layers only in part."""
        return bool(reloading_layers(self.model))

    def discard(self) -> None:
        """Drops the tensors that vLLM's reload keeps for incomplete layers, after an abort.

        Otherwise every later update would try to load them at its end, and fail.
        """
        self.plans.close_comparison()
        for info in reloading_layers(self.model):
            info.loaded_weights = []
            info.load_numel = 0

    def process_deferred(self, dtype: torch.dtype) -> None:
        """Makes vLLM post-process the layers that are due at the end of a load."""
        for layer in deferred_layers(self.model):
            layer.process_weights_after_loading(dtype)


class ArmedManifest:
    """A checked manifest, kept with its chunks for all updates that use it.

    The chunks stay the same objects from update to update, so that values derived from them, such
    as views, can be reused.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.chunks = tuple(manifest.chunk(seq) for seq in range(manifest.chunks))
        self._fits: tuple[Receiver, int | None] | None = None

    def check_room(self, backend: str, receiver: Receiver | None) -> None:
        """Checks that every chunk fits the transport; repeats the check only for a new transport.

        Args:
            backend: the backend's name, for the error.
            receiver: the open transport's receiver, or None.

        Raises:
            EngineError: code ``transfer_failed``: a chunk does not fit.
        """
        fits = None if receiver is None else (receiver, receiver.room_bytes)
        if fits is None or fits != self._fits:
            check_room(backend, receiver, self.manifest)
            self._fits = fits


@dataclass(eq=False, slots=True)
class ArmedUpdate:
    """An update that is ready to load, because its manifest was checked.

    Attributes:
        announced: the manifest, with its chunks; that of an open update grows part by part.
        target: what the update replaces: the model, or its draft model.
        staging: the options of a staged update; None if it is loaded in a pause.
    """

    announced: ArmedManifest
    target: Target
    staging: Staging | None

    @property
    def manifest(self) -> Manifest:
        return self.announced.manifest

    def counts(self, seq: int) -> tuple[int, ...]:
        """Returns how many elements of each tensor a chunk of a patch brings.

        The result is empty if the update is no patch.
        """
        return self.manifest.counts[self.manifest.part(seq)]


def require_armed(armed: ArmedUpdate | None) -> ArmedUpdate:
    """Returns the armed update, for a step that needs one.

    Raises:
        EngineError: code ``wrong_state``: no update was armed.
    """
    if armed is None:
        raise wrong_state("no manifest is armed")
    return armed
