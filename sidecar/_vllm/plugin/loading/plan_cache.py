"""Decides whether an update is loaded by vLLM's loader or by a copy plan.

::

    what is known    how the update is loaded                       and then
    no plan          by vLLM's loader
    a plan           by vLLM's loader, compared with the plan       the plan is proven, or dropped
    a proven plan    by the plan

ARM makes the plan of a new manifest, or records why there can be none. All workers of an engine
load in the same way: if one of them can't use its plan, all use vLLM's loader. A plan belongs to
the tensors of one manifest, however they are cut into chunks; other tensors replace the plan.

The plan of an open update grows with its parts, and only staging uses it: in a pause, vLLM's loader
loads them. When the update ends, the plan of all tensors is made. If some tensors have no plan, an
open update that begins with them has none either.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from sidecar._vllm.plugin import agreement
from sidecar._vllm.plugin.loading.copy_plan import CopyPlan, NoPlanError, extend_plan, make_plan
from sidecar._vllm.plugin.loading.parameter_map import reordering_kernel
from sidecar._vllm.plugin.loading.plan_runner import PlanComparison, PlannedUpdate

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus._manifest import Manifest
    from sidecar._vllm.plugin.loading.loader_trace import LoaderTrace

_log = logging.getLogger("vllm.wavebus")

# Layers of these methods keep their weights as loaded on GPUs; on CPUs vLLM repacks them.
PLAIN_METHODS: Final = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
)


@dataclass(slots=True)
class PlanEntry:
    """The copy plan of one manifest's tensors, or the reason why there is none.

    Attributes:
        tensors: names, dtypes and shapes of the tensors.
        plan: the copy plan; None without one.
        proven: whether a comparison has shown that the plan does the same as the loader.
        reason: why there is no plan; empty if there is one.
        is_open: whether more tensors may follow.
    """

    tensors: tuple[tuple[Any, ...], ...]
    plan: CopyPlan | None = None
    proven: bool = False
    reason: str = ""
    is_open: bool = False


class PlanCache:
    """Keeps one model's copy plan, and decides whether an update is loaded by the plan.

    Args:
        vllm_config: vLLM's configuration.
        model: the serving model.
        device: the device of its weights.
        tied_head: the parameter that the loader never fills; empty for none.
        any_rank: returns the elementwise maximum of flags over all workers of the engine.

    Attributes:
        update: loads the current update's chunks by the plan; None without an update, or if vLLM's
            loader loads the chunks.
    """

    def __init__(
        self,
        vllm_config: Any,
        model: torch.nn.Module,
        device: torch.device,
        tied_head: str,
        any_rank: Callable[[torch.Tensor], torch.Tensor] = agreement.any_rank,
    ) -> None:
        self._vllm_config = vllm_config
        self._model = model
        self._device = device
        self._tied_head = tied_head
        self._any_rank = any_rank
        self._entry: PlanEntry | None = None
        self._comparing: tuple[PlanEntry, PlanComparison] | None = None
        self.update: PlannedUpdate | None = None  # the open session, if it loads by the plan
        self._way = ""  # how the last update was loaded

    def on_armed(self, manifest: Manifest, trace: LoaderTrace) -> None:
        """Makes an armed manifest's copy plan, unless the previous manifest's plan fits.

        That plan fits if the names, dtypes and shapes are equal, in the same order. If no plan is
        possible, :attr:`entry` has the reason. An open update is armed again with each part, and as
        a whole when it ends.
        """
        tensors, is_open = (manifest.names, manifest.dtypes, manifest.shapes), manifest.is_open
        before = self._entry or PlanEntry(((), (), ()), is_open=True)
        if (before.tensors, before.is_open) == (tensors, is_open):
            return
        follows = before.is_open and _begins(tensors, before.tensors)
        if before.reason and (follows or (is_open and _begins(before.tensors, tensors))):
            if follows:
                before.tensors = tensors
            return
        self._entry = known = PlanEntry(tensors, is_open=is_open)
        try:
            parts = before.plan if follows else None
            if parts is None:
                self._check_methods()
            if is_open:
                known.plan = extend_plan(parts, trace, unloaded=self._tied_head)
            else:
                known.plan = make_plan(trace, unloaded=self._tied_head)
        except NoPlanError as error:
            self._discard(known, str(error))
        except Exception as error:  # noqa: BLE001 - the update goes well without a plan
            self._discard(known, f"{type(error).__name__}: {error}", level=logging.ERROR)

    def start(self, *, reloading: bool) -> bool:
        """Chooses how an update is loaded. A collective of the engine's workers.

        Args:
            reloading: whether an earlier update left layers that vLLM's reload has only partly
                loaded. Only vLLM's loader can complete them.

        Returns:
            True if the update is loaded by the plan (:attr:`update`); False if by vLLM's loader.
        """
        self.close()
        known = None if self._entry is None or self._entry.is_open else self._entry
        update: PlannedUpdate | None = None
        if known is not None and known.plan is not None and known.proven and not reloading:
            try:
                update = PlannedUpdate(known.plan, self._model, self._device)
            except Exception as error:  # noqa: BLE001 - the peers wait in what comes next
                _log.warning("wavebus: vLLM's loader loads this update, not a plan: %s", error)
        stays_out = torch.tensor([update is None], dtype=torch.uint8)
        self.update = None if self._any_rank(stays_out)[0] else update
        self._way = "loader" if self.update is None else "plan"
        if known is not None and known.plan is not None and not known.proven and not reloading:
            self._compare(known, known.plan)
        return self.update is not None

    def on_load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Keeps a chunk for the comparison, before vLLM's loader loads the chunk."""
        self._observe(lambda comparison: comparison.on_load(tensors))

    def on_loaded(self) -> None:
        """Compares the parameters that vLLM's loader has filled so far with the plan."""
        self._observe(PlanComparison.compare_loaded)

    def on_finished(self) -> None:
        """Ends the comparison with vLLM's loader, which has finished the update.

        If all elements match, the plan is proven; after a difference it is dropped. If elements are
        missing, the plan stays unproven.
        """
        if self._comparing is None:
            return
        known, comparison = self._comparing
        self._observe(PlanComparison.finish)
        known.proven = known.plan is not None and comparison.is_equal
        self.close_comparison()
        if known.proven:
            _log.info(
                "wavebus: from now on a copy plan loads updates of these %d tensors; it has made "
                "the same copies as vLLM's loader",
                len(known.tensors[0]),
            )
        elif known.plan is not None and comparison.difference:
            self._discard(known, comparison.difference, level=logging.ERROR)

    def on_staged(self, *, proven: bool) -> None:
        """Records whether a staged update has proven the plan.

        Args:
            proven: True if the loader made the same copies as the plan; False drops the plan.
        """
        known = self.entry
        self._way = "staged"
        if not proven:
            self._discard(
                known, "the copy plan and vLLM's loader give other weights", level=logging.ERROR
            )
        known.proven = known.plan is not None

    def close(self) -> None:
        """Ends the current update, and its comparison; keeps the plan."""
        self.close_comparison()
        self.update = None

    def close_comparison(self) -> None:
        """Stops comparing the loader with the plan: an incomplete update proves nothing."""
        if self._comparing is not None:
            self._comparing[1].close()
            self._comparing = None

    @property
    def entry(self) -> PlanEntry:
        """The entry of the last armed tensors; without a plan before the first ARM."""
        return self._entry or PlanEntry((), reason="nothing was armed")

    def account(self) -> dict[str, Any]:
        """Returns how updates of this model are loaded, as fields for JSON.

        Returns:
            ``way``: how the last update was loaded: ``plan``, ``staged`` or ``loader``; empty
                before the first. ``proven``: whether the next update of the armed tensors can use
                the plan. ``reason``: why there is no plan; empty if there is one.
        """
        known = self.entry
        return {"way": self._way, "proven": known.proven, "reason": known.reason}

    def _compare(self, known: PlanEntry, plan: CopyPlan) -> None:
        try:
            self._comparing = known, PlanComparison(plan, self._model, self._device)
        except NoPlanError as error:
            self._discard(known, str(error))

    def _observe(self, step: Callable[[PlanComparison], None]) -> None:
        """Runs a step of the comparison, if any; a failure only drops the plan."""
        if self._comparing is None:
            return
        known, comparison = self._comparing
        try:
            step(comparison)
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._discard(known, f"{type(error).__name__}: {error}", level=logging.ERROR)
            self.close_comparison()

    def _discard(self, known: PlanEntry, reason: str, level: int = logging.INFO) -> None:
        known.plan, known.reason = None, reason
        _log.log(
            level,
            "wavebus: vLLM's loader loads updates of these %d tensors, without a copy plan: %s",
            len(known.tensors[0]),
            reason,
        )

    def _check_methods(self) -> None:
        """Raises :class:`NoPlanError` if copies alone can't update the weights of some layer."""
        if self._vllm_config.parallel_config.enable_eplb:
            raise NoPlanError("experts move between workers (EPLB)")
        for name, module in self._model.named_modules():
            method = getattr(module, "quant_method", None)
            if method is not None and type(method).__name__ not in PLAIN_METHODS:
                raise NoPlanError(f"{name} is quantised by {type(method).__name__}")
            kernel = reordering_kernel(module)
            if kernel and self._device.type != "cpu":  # a CPU's plan repacks as vLLM does
                raise NoPlanError(f"vLLM changes the layout of {name} for its {kernel} kernel")


def _begins(tensors: tuple[tuple[Any, ...], ...], first: tuple[tuple[Any, ...], ...]) -> bool:
    """Returns whether a manifest's tensors begin with those of another manifest."""
    return all(column[: len(part)] == part for column, part in zip(tensors, first, strict=True))
