"""Holds the next weights of a worker's model beside the served ones, and swaps them.

::

    state    call       next     what happens
    EMPTY    begin      FILLING  memory for everything that the copy plan fills is allocated
    FILLING  stage      FILLING  a chunk is put into that memory (:mod:`staging_layouts`)
    FILLING  extend     FILLING  the update is open: more tensors will be staged
    FILLING  seal       SEALED   checked: every element was staged exactly once
    SEALED   swap       EMPTY    everything is copied to the parameters that the model serves
    any      release    EMPTY    the served weights have not changed

A copy plan is *proven* when it has been seen to do the same as the model's own loader. A plan that
no update has proven yet is proven while it is used: the loader of the meta model runs over the
arrived chunk, and each copy that the loader makes is compared with the staged elements. The serving
model is not touched.

On a CPU, vLLM serves some weights in another form than it loads them in
(:mod:`sidecar._vllm.plugin.loading.plan_runner`). The swap converts them.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bus._weight_transfer.cuda import synchronize
from bus.errors import EngineError, wrong_state
from bus.messages import NackCode
from sidecar._vllm.plugin.loading.copy_plan import NoPlanError
from sidecar._vllm.plugin.loading.parameter_map import (
    ParameterFingerprint,
    as_tensors,
    find_parameters,
    repacked_by_module,
    repacks,
)
from sidecar._vllm.plugin.loading.plan_runner import equal_bits, put
from sidecar._vllm.plugin.loading.staging_buffers import StagingBuffers
from sidecar._vllm.plugin.loading.staging_layouts import AsSent, ByTarget, shapes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus._manifest import TensorMeta
    from bus._weight_transfer.packing import ReceivedChunk
    from sidecar._vllm.plugin.loading.copy_plan import CopyBatch, CopyPlan
    from sidecar._vllm.plugin.loading.loader_trace import TargetNames
    from sidecar._vllm.plugin.loading.parameter_map import ParameterRef
    from sidecar._vllm.plugin.loading.plan_runner import Received
    from sidecar._vllm.plugin.loading.staging_layouts import StagingLayout

    Chunks: TypeAlias = tuple[tuple[TensorMeta, ...], ...]


class StagedWeights:
    """Holds the next weights of one model beside the served ones, until the swap.

    Args:
        model: the serving model.
        device: the device of its weights.

    Attributes:
        memory: the memory in which updates are staged, which the next update can reuse.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self.memory = StagingBuffers(device)
        self._parameters: tuple[CopyPlan, dict[str, ParameterRef], ParameterFingerprint] | None = (
            None
        )
        # The layout used last, with its chunks; and whether an update is being staged.
        self._layout: tuple[StagingLayout, Chunks] | None = None
        self._begun = self._sealed = False
        # The copies of the last swap, with the layout, memory and parameters that they belong to.
        self._swap: tuple[tuple[object, ...], CopyBatch] | None = None

    def begin(self, plan: CopyPlan, chunks: Chunks, *, is_open: bool = False) -> None:
        """Begins to stage an update: allocates memory, or reuses an earlier update's.

        Args:
            plan: where each element goes in the model.
            chunks: the tensors of each chunk. Pass the same objects for the same manifest, so that
                earlier preparations are reused.
            is_open: whether more tensors may follow, by :meth:`extend`.

        Raises:
            EngineError: code ``staging_refused``: memory is short, or the model's parameters don't
                match the plan.
        """
        self._begun = self._sealed = False
        places = self._find_parameters_or(NackCode.STAGING_REFUSED, plan)
        if self._layout is None or not (self._layout[0].plan is plan and self._layout[1] is chunks):
            repacked = any(repacks(place, self._device) for place in places.values())
            as_sent = not (repacked or is_open) and plan.is_whole(chunks)
            self._layout = AsSent(plan, chunks) if as_sent else ByTarget(plan), chunks
        layout, _ = self._layout
        self.memory.allocate(layout.shapes)
        layout.begin(self.memory.tensors)
        self._begun = True

    def extend(self, plan: CopyPlan) -> None:
        """Continues an open update by a plan that also has further tensors.

        Raises:
            EngineError: code ``staging_refused``: memory is short.
        """
        layout = self._require_layout()
        assert isinstance(layout, ByTarget), "the update was begun as open"
        self.memory.extend({**layout.shapes, **shapes_of(plan)})
        layout.extend(plan)
        # Parts may be checked on the worker's stream, and staged on the staging channel's.
        synchronize(self._device)

    def buffer_for(self, seq: int) -> ReceivedChunk | None:
        """Returns the part of the staging memory into which a chunk can be received directly.

        Args:
            seq: number of the chunk.

        Returns:
            The chunk's tensors in staging memory; None if the chunk must be received elsewhere, and
                copied by :meth:`stage`.
        """
        return self._require_layout().buffer_for(seq)

    def stage(self, seq: int, tensors: Received) -> bool:
        """Stages a received chunk; returns False if it was received into staging memory."""
        return self._require_layout().stage(seq, tensors)

    def stage_part(self, seq: int, tensors: Received) -> None:
        """Stages some tensors of a chunk, each of them once."""
        self._require_layout().stage_part(seq, tensors)

    def prove(
        self, tensors: Received, load: Callable[[Received], None], names: TargetNames
    ) -> None:
        """Compares a chunk's staged elements with the copies that the model's loader makes.

        Args:
            tensors: the chunk's ``(name, tensor)`` pairs, as they arrived.
            load: gives tensors to the loader of the meta model, whose parameters have no memory.
            names: the parameters and buffers of the meta model.

        Raises:
            EngineError: code ``engine_failed``: the loader makes other copies than the plan.
        """
        layout = self._require_layout()
        proof = _Proof(layout, names)
        with torch.no_grad(), proof:
            load(tensors)
        expected = sum(
            torch.Size(copy.region[1]).numel()
            for name, _ in tensors
            for copy in layout.plan.copies[name]
        )
        if not proof.difference and proof.compared != expected:
            proof.difference = f"of {expected} elements the loader copies {proof.compared}"
        if proof.difference:
            raise EngineError(f"copy plan and vLLM's loader give other weights: {proof.difference}")

    def seal(self) -> None:
        """Checks that every element was staged, and prepares the swap.

        Raises:
            EngineError: code ``wrong_state``: some elements were not staged; ``staging_refused``:
                as :meth:`begin`.
        """
        layout = self._require_layout()
        if layout.missing:
            raise wrong_state(f"{layout.missing} elements are not staged")
        if self._parameters is None or self._parameters[0] is not layout.plan:
            self._find_parameters_or(NackCode.STAGING_REFUSED, layout.plan)
        assert self._parameters is not None, "they were found"
        self._prepare(self._parameters[1])
        self._sealed = True

    def require_sealed(self) -> None:
        """Checks that a swap would succeed.

        Raises:
            EngineError: code ``called_off``: not all is staged, or the model's parameters have
                changed and can't be filled any more.
        """
        if not self._sealed:
            raise EngineError("no whole update is staged", code=NackCode.CALLED_OFF)
        self._find_parameters_or(NackCode.CALLED_OFF, self._require_layout().plan)

    def swap(self) -> None:
        """Copies the staged weights into the served parameters.

        :meth:`require_sealed` must have returned before, and no step may run meanwhile.
        """
        assert self._parameters is not None, "it was asked whether they are there"
        _, places, _ = self._parameters
        staged = self.memory.tensors
        with torch.no_grad():
            self._prepare(places).run()
            layout = self._require_layout()
            layout.pad({name: places[name].tensor.data for name in layout.plan.fills})
            for module, names in repacked_by_module(places, self._device).items():
                put(module, {key: staged[name] for key, name in names.items()})

    def release(self, *, keep: bool) -> None:
        """Ends the staged update; the served weights stay as they are.

        Args:
            keep: True keeps the staging memory allocated for the next update; False frees it.
        """
        self._begun = self._sealed = False
        if not keep:
            self.memory.release()
            if not self.memory.tensors:
                self._swap = None
                if self._layout is not None:
                    self._layout[0].discard()

    def _prepare(self, places: dict[str, ParameterRef]) -> CopyBatch:
        """Returns the copies that a swap makes; reuses the last ones if nothing has moved."""
        layout, memory = self._require_layout(), self.memory.tensors
        if self._swap is not None:
            known, copies = self._swap
            if all(map(operator.is_, known, (layout, memory, places))):
                return copies
        with as_tensors():
            targets = {
                name: place.tensor.data
                for name, place in places.items()
                if not repacks(place, self._device)
            }
        copies = layout.into(targets)
        self._swap = (layout, memory, places), copies
        return copies

    def _find_parameters_or(self, code: NackCode, plan: CopyPlan) -> dict[str, ParameterRef]:
        try:
            return self.find_parameters(plan)
        except NoPlanError as error:
            raise EngineError(str(error), code=code) from error

    def find_parameters(self, plan: CopyPlan) -> dict[str, ParameterRef]:
        """Returns the model's parameters that the plan fills, by name.

        The model is searched again only if vLLM has replaced or moved parameters.

        Raises:
            NoPlanError: the model's parameters don't match the plan.
        """
        if self._parameters is not None:
            known, places, fingerprints = self._parameters
            if known is plan and fingerprints:
                return places
        places = find_parameters(plan, self._model, self._device)
        self._parameters = plan, places, ParameterFingerprint(places)
        return places

    def _require_layout(self) -> StagingLayout:
        if not self._begun or self._layout is None:
            raise wrong_state("no update is being staged")
        return self._layout[0]


class _Proof(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compares the copies of a loader on the meta device with the staged elements.

    Entered around a loader whose parameters are on the meta device, and whose inputs are real
    tensors.

    Attributes:
        compared: how many elements match the plan.
        difference: the first difference; empty if there is none.
    """

    def __init__(self, staged: StagingLayout, names: TargetNames) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.compared = 0
        self.difference = ""
        self._staged = staged
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta:
            self._compare(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _compare(self, target: torch.Tensor, loaded: torch.Tensor) -> None:
        name = self._names.find(target, again=True)
        region = (int(target.storage_offset()), tuple(target.shape), target.stride())
        staged = self._staged.find(name, region)
        if staged is None or self.difference:
            self.difference = self.difference or f"the plan lacks a copy into {name or 'a tensor'}"
            return
        if not equal_bits(staged, loaded.expand(target.shape)):
            self.difference = f"the staged {name} differs from the loader's"
        self.compared += target.numel()
