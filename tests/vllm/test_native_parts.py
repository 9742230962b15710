"""An update in parts in a worker with one of vLLM's own engines, without an engine around it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from bus import operations as ops
from bus._vllm import payloads as vllm_payloads
from bus.errors import EngineError
from bus.messages import NackCode, Staging
from sidecar._vllm.plugin import agreement, operations
from sidecar._vllm.plugin.loading import manifest_check
from tests.unit.sidecar.vllm.plugin.loading._small_model import manifest_of
from tests.unit.sidecar.vllm.plugin.loading.test_manifest_check_experts import (
    EXPERTS,
    Mixture,
    split,
)
from tests.vllm._vllm import require_vllm

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

BACKEND = "vllm:nccl"
HANDLE = vllm_payloads.encode_chunk(("names", "dtype_names", "shapes"), {})
WEIGHTS = {name: torch.full_like(tensor, 1.0) for name, tensor in split().items()}
FIRST = dict(list(WEIGHTS.items())[:3])  # half of an expert's fused tensor
SECOND = dict(list(WEIGHTS.items())[3:])
STAGED = Staging(required=True, budget_bytes=0, keep=False, clear_cache=False)


class Worker:
    """It receives what it is told of, and has the states of vLLM's own workers."""

    def __init__(self) -> None:
        from sidecar._vllm.plugin.worker.native_engine import (  # noqa: PLC0415 - after require_vllm
            NativeUpdates,
        )

        self.model = Mixture(range(EXPERTS))
        served = torch.zeros(self.model.gate_up.shape)
        self.model.gate_up = nn.Parameter(served, requires_grad=False)
        self.config = None
        self.device = torch.device("cpu")
        parallel = SimpleNamespace(
            world_size=1,
            rank=0,
            data_parallel_rank=0,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_external_lb=False,
            enable_expert_parallel=False,
            enable_eplb=False,
        )
        model: Any = SimpleNamespace(
            dtype=torch.float32,
            hf_text_config=SimpleNamespace(),
            get_num_experts=lambda: EXPERTS,
        )
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel, model_config=model, quant_config=None
        )
        self.parallel_config = parallel
        self.finished = 0
        self.unmapped = 0
        self._packed_importer = SimpleNamespace(close=self._unmap)
        self._weight_update_active = False
        self.updates = NativeUpdates("nccl", self, self)
        self.updates._loadable["model"].checker._model = Mixture(range(EXPERTS))

    supports_draft_weight_update = False

    # -- vLLM's engine, and its worker ------------------------------------------------

    def parse_init_info(self, info: dict[str, Any]) -> dict[str, Any]:
        return info

    def init_transfer_engine(self, info: dict[str, Any]) -> None:
        assert info == {}

    def update_weights(self, info: dict[str, Any]) -> None:
        self.model.load_weights([(name, WEIGHTS[name]) for name in info["names"]])

    def parse_update_info(self, info: dict[str, Any]) -> dict[str, Any]:
        return info

    def receive_weights(self, info: dict[str, Any]) -> None:
        for name in info["names"]:
            self.model.load_weights([(name, WEIGHTS[name])])

    def shutdown(self) -> None:
        pass

    def _unmap(self) -> None:
        self.unmapped += 1

    def start_weight_update(self) -> None:
        if not self._weight_update_active:
            self._weight_update_active = True
            self.updates.start_weight_update()

    def finish_weight_update(self) -> None:
        if self.updates.session.ours and self._weight_update_active:
            self._weight_update_active = False
            self.updates.finish_weight_update()
        self.finished += 1

    # -- the sidecar --------------------------------------------------------------------

    def perform(self, operation: operations.WorkerOperation) -> ops.Done:
        try:
            return self.updates.wavebus_perform(self, operations.encode(operation))
        except agreement.WorkerRefusal as refusal:
            failure = operations.find_failure(str(refusal))
            assert failure is not None
            raise failure.to_error() from None

    def channel(self, operation: operations.WorkerOperation) -> ops.Done:
        """Beside its steps."""
        with torch.no_grad():
            return self.updates._stager._execute(operation)

    def begin(self, tensors: dict[str, Tensor], staging: Staging | None = None) -> None:
        self.perform(ops.Open("o1", BACKEND, vllm_payloads.encode_info({}), 1, 2, 1))
        self.arm(tensors, staging)
        if staging is not None:
            self.channel(ops.Start(staged=True))
            self.channel(ops.ReceiveChunk(0, BACKEND, HANDLE, staged=True))
            return
        self.perform(ops.Start("model", recover=False))
        self.receive(0)

    def arm(self, tensors: dict[str, Tensor], staging: Staging | None) -> None:
        manifest = replace(manifest_of(tensors), is_open=True)
        self.perform(ops.ArmManifest(manifest, "model", staging))

    def extend(self, tensors: dict[str, Tensor], *, staged: bool = False) -> None:
        (self.channel if staged else self.perform)(ops.Extend(manifest_of(tensors)))

    def receive(self, seq: int) -> None:
        self.perform(ops.ReceiveChunk(seq, BACKEND, HANDLE))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    from sidecar._vllm.plugin.staging import stager  # noqa: PLC0415 - after require_vllm
    from sidecar._vllm.plugin.worker import native_engine  # noqa: PLC0415 - same

    monkeypatch.setattr(agreement, "_groups", lambda: iter(()))
    monkeypatch.setattr(manifest_check, "quiet_loading", nullcontext)
    for module in (native_engine, stager):
        monkeypatch.setattr(module, "set_current_vllm_config", lambda _: nullcontext())
    return Worker()


def test_all_parts_are_loaded_and_finished_once(worker: Worker) -> None:
    worker.begin(FIRST)
    with pytest.raises(EngineError, match="not in the armed"):
        worker.receive(1)
    worker.extend(SECOND)
    worker.receive(1)
    worker.perform(ops.Finish())
    assert worker.model.gate_up.eq(1.0).all()
    assert not worker.updates.session.open


def test_a_missing_part_is_found_before_anything_is_finished(worker: Worker) -> None:
    """The session stays open, for a whole update that recovers it."""
    worker.begin(FIRST)
    with pytest.raises(EngineError, match="missing: the manifest fills") as refused:
        worker.perform(ops.Finish())
    assert refused.value.code is NackCode.MANIFEST_REFUSED
    assert (worker.finished, worker.updates.session.open) == (0, True)


def test_all_parts_are_staged_and_swapped_in_once(worker: Worker) -> None:
    for turn in range(2):
        worker.model.gate_up.zero_()
        worker.begin(FIRST, STAGED)
        worker.extend(SECOND, staged=True)
        worker.channel(ops.ReceiveChunk(1, BACKEND, HANDLE, staged=True))
        assert worker.unmapped == turn
        worker.channel(ops.Finish(staged=True))
        assert worker.unmapped == turn + 1
        assert worker.model.gate_up.eq(0.0).all()
        worker.perform(ops.SwapStaged(1))
        assert worker.model.gate_up.eq(1.0).all()
    assert worker.finished == 0


def test_a_part_that_no_copies_can_load_ends_the_update_and_the_next_one_pauses(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That shows when it comes. Nothing has changed, and the reason is known from then on."""
    last, load = next(reversed(SECOND)), Mixture.load_weights

    def computed(model: Mixture, pairs: Iterable[tuple[str, Tensor]]) -> None:
        load(model, [(name, 1 + each if name == last else each) for name, each in pairs])

    monkeypatch.setattr(Mixture, "load_weights", computed)
    worker.begin(FIRST, STAGED)
    with pytest.raises(EngineError, match=rf"{last}.*the next update uses a pause") as refused:
        worker.extend(SECOND, staged=True)
    assert refused.value.code is NackCode.STAGING_REFUSED
    worker.perform(ops.Restore(staged=True))
    assert worker.model.gate_up.eq(0.0).all()
    worker.arm(FIRST, STAGED)
    known = worker.updates._loadable["model"].plans.entry
    assert (known.plan is None, last in known.reason) == (True, True)


def test_a_staged_update_that_lacks_a_part_is_refused_and_changes_nothing(worker: Worker) -> None:
    """The whole one after it is staged again."""
    worker.begin(FIRST, STAGED)
    with pytest.raises(EngineError, match="missing: the manifest fills") as refused:
        worker.channel(ops.Finish(staged=True))
    assert refused.value.code is NackCode.MANIFEST_REFUSED
    with pytest.raises(EngineError, match="no whole update"):
        worker.perform(operations.CheckReady())
    worker.perform(ops.Restore(staged=True))
    assert worker.model.gate_up.eq(0.0).all()
    test_all_parts_are_staged_and_swapped_in_once(worker)


@pytest.mark.parametrize("name", ["unknown", next(iter(FIRST))])
def test_a_part_that_is_refused_leaves_the_parts_before_it(worker: Worker, name: str) -> None:
    worker.begin(FIRST)
    with pytest.raises(EngineError, match=name) as refused:
        worker.extend({name: torch.empty(2)})
    assert refused.value.code is NackCode.MANIFEST_REFUSED
    with pytest.raises(EngineError, match="not in the armed"):
        worker.receive(1)
