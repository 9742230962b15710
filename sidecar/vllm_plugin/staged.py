"""The next weights of a worker's model, beside those that serve, and the swap.

::

    state    call       next     what happens
    EMPTY    begin      FILLING  memory for every target of the copy plan is there
    FILLING  stage      FILLING  a chunk is copied to where the plan says, in that memory
    FILLING  seal       SEALED   every element of every target was filled, once
    SEALED   swap       EMPTY    all of it is copied to where the model serves from
    any      let_go     EMPTY    nothing has changed

A plan that no update has proven yet is proven as it is used: the model's own loader is run over the
chunk as it has arrived, with its parameters on the meta device, and each copy that it makes is
compared with what was staged. So the serving model is not touched for it.

Weights that a CPU serves in another form than it loads (:mod:`sidecar.vllm_plugin.planned`), get
that form in the swap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar.vllm_plugin.copy_plan import copy_all, part
from sidecar.vllm_plugin.loader_trace import storage_of
from sidecar.vllm_plugin.planned import equal_bits, fill, find_places, put, repacks

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.vllm_plugin.copy_plan import CopyPlan
    from sidecar.vllm_plugin.planned import Place, Received


class StagedWeights:
    """Of one model, from one update to the next.

    Args:
        model: the serving model.
        device: where its weights are.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._plan: CopyPlan | None = None
        self._memory: dict[str, torch.Tensor] = {}
        self._begun: set[str] = set()
        self._missing = 0
        self._sealed = False

    @property
    def begun(self) -> bool:
        """Whether an update is staged, or is about to be."""
        return self._plan is not None

    @property
    def held_bytes(self) -> int:
        """What the memory takes."""
        return sum(each.nbytes for each in self._memory.values())

    def begin(self, plan: CopyPlan) -> None:
        """Have memory for all that the plan fills; what an update before has left, is used again.

        Raises:
            NoPlanError: the model's weights are not where the plan wants them.
            EngineError: code ``staging_refused``: there is no room.
        """
        find_places(plan, self._model, self._device)
        wanted = {name: (target.shape, target.dtype) for name, target in plan.targets.items()}
        there = {name: (tuple(each.shape), each.dtype) for name, each in self._memory.items()}
        if wanted != there:
            self._memory = {}
            try:
                self._memory = {
                    name: torch.empty(shape, dtype=dtype, device=self._device)
                    for name, (shape, dtype) in wanted.items()
                }
            except torch.OutOfMemoryError as error:
                self._memory = {}
                raise EngineError(
                    f"{self._device} has no room to stage the update",
                    code=NackCode.STAGING_REFUSED,
                ) from error
        self._plan = plan
        self._begun = set()
        self._missing = sum(each.numel() for each in self._memory.values())
        self._sealed = False

    def stage(self, tensors: Received) -> None:
        """Copy a chunk into the memory.

        Raises:
            KeyError: a tensor that the manifest doesn't have.
        """
        filled = fill(self._need_plan(), tensors, self._memory.__getitem__, self._begun)
        self._missing -= sum(numel for _, numel in filled)

    def prove(
        self, tensors: Received, load: Callable[[Received], None], names: dict[int, str]
    ) -> None:
        """Compare what was staged of a chunk with what the model's own loader does with it.

        Args:
            tensors: as they have arrived.
            load: runs the loader of a model on the meta device over them.
            names: that model's parameters and buffers, by the identity of their storage.

        Raises:
            EngineError: code ``engine_failed``: it does something else.
        """
        proof = _Proof(self._memory, names)
        with torch.no_grad(), proof:
            load(tensors)
        expected = sum(
            torch.Size(copy.region[1]).numel()
            for name, _ in tensors
            for copy in self._need_plan().copies[name]
        )
        if not proof.difference and proof.compared != expected:
            proof.difference = f"of {expected} elements the loader copies {proof.compared}"
        if proof.difference:
            raise EngineError(f"the copy plan is not what the loader does: {proof.difference}")

    def seal(self) -> None:
        """All of it was staged.

        Raises:
            EngineError: it was not.
        """
        self._need_plan()
        if self._missing:
            raise EngineError(f"{self._missing} elements are not staged", code=NackCode.WRONG_STATE)
        self._sealed = True

    def need_sealed(self) -> dict[str, Place]:
        """For a swap: where the plan's targets are.

        Raises:
            EngineError: code ``called_off``: not all is staged.
            NoPlanError: the model's weights are not where the plan wants them.
        """
        if self._plan is None or not self._sealed:
            raise EngineError("nothing is staged, or not all", code=NackCode.CALLED_OFF)
        return find_places(self._plan, self._model, self._device)

    def swap(self, places: dict[str, Place]) -> None:
        """Copy all of it to these places of the serving model. No step runs."""
        repacked: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for name, place in places.items():
            if repacks(place.module, self._device):
                repacked.setdefault(place.module, {})[place.key] = self._memory[name]
            else:
                targets.append(place.tensor.data)
                sources.append(self._memory[name])
        with torch.no_grad():
            copy_all(targets, sources)
            for module, filled in repacked.items():
                put(module, filled)

    def let_go(self, *, keep: bool) -> None:
        """The update is over. ``keep``: its memory stays."""
        self._plan = None
        self._sealed = False
        if not keep:
            self._memory = {}

    def _need_plan(self) -> CopyPlan:
        if self._plan is None:
            raise EngineError("no update is staged", code=NackCode.WRONG_STATE)
        return self._plan


class _Proof(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Entered around a loader whose parameters are on meta, and whose tensors are real.

    Attributes:
        compared: so many elements are where the plan has put them.
        difference: the first thing that is not; empty: all is.
    """

    def __init__(self, staged: dict[str, torch.Tensor], names: dict[int, str]) -> None:
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
        name = self._names.get(storage_of(target), "")
        staged = self._staged.get(name)
        if staged is None or self.difference:
            self.difference = self.difference or f"{name or 'something'} is not in the plan"
            return
        region = (int(target.storage_offset()), tuple(target.shape), target.stride())
        if not equal_bits(part(staged, region), loaded.expand(target.shape)):
            self.difference = f"{name} is not what the loader would have put there"
        self.compared += target.numel()
