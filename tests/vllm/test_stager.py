"""What a worker says of an update that may be staged, without an engine around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from bus.errors import EngineError
from bus.messages import NackCode, Staging
from sidecar._transfer.chunk_receiver import ChunkReceiver
from sidecar._transfer.unloaded import UnloadedTensors
from sidecar._vllm.plugin.loading.plan_cache import PlanCache
from sidecar._vllm.plugin.loading.staged_weights import StagedWeights
from sidecar._vllm.plugin.loading.staging_buffers import StagingBuffers
from sidecar._vllm.plugin.loading.target_model import ArmedManifest, ArmedUpdate
from tests.unit.sidecar.vllm.plugin.loading._small_model import (
    HIDDEN,
    Parts,
    manifest_of,
    trace_of,
    weights,
)
from tests.unit.sidecar.vllm.plugin.loading.test_staged_weights import Whole
from tests.vllm._vllm import require_vllm

if TYPE_CHECKING:
    from sidecar._vllm.plugin.staging.stager import Stager

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

CPU = torch.device("cpu")
STAGING = Staging(required=False, budget_bytes=0, keep=False, clear_cache=True)


def stager_of(model: Whole) -> Stager:
    """Of a worker that serves this model, and has armed all of its weights."""
    from sidecar._vllm.plugin.staging.stager import Stager  # noqa: PLC0415 - after require_vllm

    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=False))
    plans = PlanCache(config, model, CPU, "", any_rank=lambda flags: flags)
    plans.on_armed(manifest_of(weights(0), 2), trace_of(Whole("meta"), weights(0)))
    unloaded = UnloadedTensors("", lambda _: None)
    loadable: Any = SimpleNamespace(
        plans=plans, staged=StagedWeights(model, CPU), begin=lambda _: unloaded.begin(())
    )
    engine: Any = SimpleNamespace()
    return Stager(loadable, ChunkReceiver(CPU), config, CPU, engine)


def armed(staging: Staging = STAGING) -> ArmedUpdate:
    return ArmedUpdate(ArmedManifest(manifest_of(weights(0), 2)), "model", staging)


def test_a_model_as_it_is_loaded_has_room() -> None:
    room = stager_of(Whole()).capacity(armed(), is_partial=False)
    assert not room.why_not
    assert room.needed_bytes > 0


def test_an_update_of_which_not_all_is_known_needs_room_for_all() -> None:
    stager = stager_of(Whole())
    needed = stager.capacity(armed(), is_partial=False).needed_bytes
    parts = Parts(Whole("meta"), weights(0))
    part = parts.next(2)
    stager._target.plans.on_armed(part, parts.trace)
    room = stager.capacity(ArmedUpdate(ArmedManifest(part), "model", STAGING), is_partial=False)
    assert not room.why_not
    buffers = sum(each.nbytes for each in Whole().buffers())  # none has come yet
    assert room.needed_bytes == needed - buffers


def test_weights_that_are_laid_out_anew_are_said_to_be_when_they_are_armed() -> None:
    """The update is loaded in a pause then; it would fail, each time, as soon as it begins."""
    model = Whole()
    model.out = nn.Parameter(torch.empty(HIDDEN, HIDDEN).t(), requires_grad=False)
    room = stager_of(model).capacity(armed(), is_partial=False)
    assert "the served out is not contiguous" in room.why_not


def test_what_could_not_be_had_is_not_tried_again_before_there_is_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each update would be armed as one that is staged, and fail."""
    stager = stager_of(Whole())
    free = 1 << 40
    monkeypatch.setattr("sidecar._vllm.plugin.staging.stager.free_memory", lambda _: free)

    def refused(*_: object) -> None:
        raise EngineError("no room", code=NackCode.STAGING_REFUSED)

    assert not stager.capacity(armed(), is_partial=False).why_not
    with monkeypatch.context() as short:
        short.setattr(StagingBuffers, "allocate", refused)
        with pytest.raises(EngineError, match="no room"):
            stager.start(armed())
    assert (
        "the last attempt to allocate the memory failed"
        in stager.capacity(armed(), is_partial=False).why_not
    )
    free *= 2
    assert not stager.capacity(armed(), is_partial=False).why_not
    stager.start(armed())


def test_memory_that_was_let_go_and_is_nobody_elses_yet_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's driver takes its time for an answer, and steps go on meanwhile."""
    stager = stager_of(Whole())
    needed, spare, asked = stager.capacity(armed(), is_partial=False).needed_bytes, 0, 0

    def free(_: object) -> int:
        nonlocal asked
        asked += 1
        return 0

    monkeypatch.setattr("sidecar._transfer.memory_budget.free_memory", free)
    spared = "sidecar._vllm.plugin.loading.staging_buffers.spare_memory"
    monkeypatch.setattr(spared, lambda _: spare)
    memory = stager._target.staged.memory
    memory.tensors = {"all": torch.empty(needed, dtype=torch.uint8)}  # as a GPU has it
    assert stager._target.staged.memory.released_bytes == needed
    assert "are available" in stager.capacity(armed(), is_partial=False).why_not
    spare = needed
    assert not stager.capacity(armed(), is_partial=False).why_not
    assert asked == 1
    small = Staging(required=False, budget_bytes=needed - 1, keep=False, clear_cache=True)
    assert "limit is" in stager.capacity(armed(small), is_partial=False).why_not
    memory.tensors = {}
    assert "are available" in stager.capacity(armed(), is_partial=False).why_not


def test_who_was_laid_out_anew_when_it_began_has_room_again_as_it_is_loaded() -> None:
    """It was no lack of memory."""
    model = Whole()
    stager, loaded = stager_of(model), model.out
    model.out = nn.Parameter(torch.empty(HIDDEN, HIDDEN).t(), requires_grad=False)
    with pytest.raises(EngineError, match="the served out is not contiguous"):
        stager.start(armed())
    model.out = loaded
    assert not stager.capacity(armed(), is_partial=False).why_not
