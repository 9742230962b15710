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
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar.transfer.base import Delivered
from sidecar.vllm_plugin.copy_plan import Copies, part
from sidecar.vllm_plugin.loader_trace import storage_of
from sidecar.vllm_plugin.planned import (
    are_there,
    copies,
    equal_bits,
    find_places,
    pad,
    put,
    repacks,
)
from sidecar.vllm_plugin.staging_memory import StagingMemory

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
        self._memory = StagingMemory(device)
        self._places: tuple[CopyPlan, dict[str, Place]] | None = None
        # Of chunks that will come again as they did.
        self._planned: WeakKeyDictionary[Delivered, Copies] = WeakKeyDictionary()
        self._planned_for: tuple[CopyPlan, dict[str, torch.Tensor]] | None = None
        self._missing = 0
        self._sealed = False

    @property
    def begun(self) -> bool:
        """Whether an update is staged, or is about to be."""
        return self._plan is not None

    @property
    def held_bytes(self) -> int:
        """What the memory takes."""
        return self._memory.held_bytes

    def begin(self, plan: CopyPlan) -> None:
        """Have memory for all that the plan fills; what an update before has left, is used again.

        Raises:
            NoPlanError: the model's weights are not where the plan wants them.
            EngineError: code ``staging_refused``: there is no room.
        """
        self._find_places(plan)
        self._memory.have(plan)
        tensors = self._memory.tensors
        if self._planned_for is None or not (
            self._planned_for[0] is plan and self._planned_for[1] is tensors
        ):
            self._planned.clear()
            self._planned_for = plan, tensors
        self._plan = plan
        self._missing = sum(each.numel() for each in tensors.values())
        self._missing -= sum(pad(plan, name, tensors[name]) for name in plan.fills)
        self._sealed = False

    def stage(self, tensors: Received) -> None:
        """Copy a chunk into the memory.

        Raises:
            KeyError: a tensor that the manifest doesn't have.
        """
        plan = self._need_plan()
        again = tensors if isinstance(tensors, Delivered) else None
        planned = None if again is None else self._planned.get(again)
        if planned is None:
            planned, _ = copies(plan, tensors, self._memory.tensors.__getitem__)
            if again is not None:
                self._planned[again] = planned
        planned.run()
        self._missing -= planned.numel

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
        proof = _Proof(self._memory.tensors, names)
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
        return self._find_places(self._plan)

    def swap(self, places: dict[str, Place]) -> None:
        """Copy all of it to these places of the serving model. No step runs."""
        repacked: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for name, place in places.items():
            if repacks(place.module, self._device):
                repacked.setdefault(place.module, {})[place.key] = self._memory.tensors[name]
            else:
                targets.append(place.tensor.data)
                sources.append(self._memory.tensors[name])
        with torch.no_grad():
            Copies(targets, sources).run()
            for module, filled in repacked.items():
                put(module, filled)

    def let_go(self, *, keep: bool) -> None:
        """The update is over. ``keep``: its memory stays."""
        self._plan = None
        self._sealed = False
        if not keep:
            self._memory.let_go()
            if not self._memory.tensors:
                self._planned.clear()
                self._planned_for = None

    def _find_places(self, plan: CopyPlan) -> dict[str, Place]:
        """Where the targets are; where they were, if they still are."""
        if self._places is not None:
            known, places = self._places
            if known is plan and are_there(plan, places):
                return places
        places = find_places(plan, self._model, self._device)
        self._places = plan, places
        return places

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
