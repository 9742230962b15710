"""A worker's update session: vLLM's own bookkeeping, under calls of the sidecar's and of others."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bus import operations as ops
from bus._manifest import Manifest
from bus._weight_transfer.allocation import StagingCapacity
from bus.errors import EngineError
from bus.messages import NackCode, Staging
from sidecar._vllm.plugin import operations
from tests.vllm._vllm import require_vllm

if TYPE_CHECKING:
    from bus.messages import Target

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

LIMIT_S = 60.0
MODELS: tuple[Target, ...] = ("model", "draft")


@pytest.fixture(autouse=True)
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM's groups: nobody is there to agree with."""
    from sidecar._vllm.plugin import agreement  # noqa: PLC0415 - it needs torch

    monkeypatch.setattr(agreement, "_groups", lambda: iter(()))


def made() -> tuple[Any, Any]:
    """A worker with vLLM's methods for sessions, and an engine that says what it is told of which
    model; its model is the name of its target."""
    from vllm.config import VllmConfig  # noqa: PLC0415 - it needs vLLM
    from vllm.v1.worker.gpu_worker import Worker  # noqa: PLC0415 - same

    from sidecar._transfer.chunk_receiver import ChunkReceiver  # noqa: PLC0415 - same
    from sidecar._vllm.plugin.staging.stager import Stager  # noqa: PLC0415 - same
    from sidecar._vllm.plugin.worker.engine import WavebusWeightTransferEngine  # noqa: PLC0415 - same
    from sidecar._vllm.plugin.worker.lora import LoraAdapters  # noqa: PLC0415 - same
    from sidecar._vllm.plugin.worker.session import UpdateSession  # noqa: PLC0415 - same

    class Engine(WavebusWeightTransferEngine):
        def __init__(self) -> None:
            self.session, self.armed = UpdateSession(), None
            self._receiver = ChunkReceiver(torch.device("cpu"))
            loadable: Any = None  # nothing is staged
            self._stager = Stager(loadable, self._receiver, None, torch.device("cpu"), self.execute)
            self.model = self._default_model = "model"
            self.model_config = self._default_model_config = None
            self.said: list[str] = []
            self.fails = ""
            self._incoming, self._adapters = None, LoraAdapters(None)

        def _say(self, what: str) -> None:
            self.said.append(f"{what} {self.model}")
            if self.fails == what:
                raise RuntimeError("on purpose")

        def _start(self) -> None:
            self._say("start")

        def _finish(self) -> None:
            self._say("finish")

        def _discard(self) -> None:
            self._say("discard")

    class OfVllm:
        start_weight_update = Worker.start_weight_update
        start_draft_weight_update = Worker.start_draft_weight_update
        update_weights = Worker.update_weights
        finish_weight_update = Worker.finish_weight_update
        _start_weight_update = Worker._start_weight_update
        _check_weight_transfer_engine = Worker._check_weight_transfer_engine
        _weight_update_active = _weight_update_is_draft = False

        def __init__(self) -> None:
            self.vllm_config = VllmConfig()
            self.weight_transfer_engine = Engine()
            self.model_runner = self

        def _set_draft_weight_update_target(self) -> None:
            self.weight_transfer_engine.set_weight_update_target("draft", None)

        def get_draft_model(self) -> None:
            """Asked for by vLLM 0.33, which skips its work on the draft's output head then."""

        def reset_lora_state(self) -> None:
            pass

    worker = OfVllm()
    return worker, worker.weight_transfer_engine


def perform(worker: Any, operation: operations.WorkerOperation) -> operations.WorkerFailure | None:
    """How it failed, as the sidecar hears it."""
    engine = worker.weight_transfer_engine
    engine.said.clear()
    try:
        engine.wavebus_perform(worker, operations.encode(operation))
    except Exception as error:  # noqa: BLE001 - whatever vLLM would pass on
        failure = operations.find_failure(str(error))
        assert failure is not None
        return failure
    return None


@pytest.mark.parametrize("target", MODELS)
def test_a_session_is_of_its_target(target: Target) -> None:
    """vLLM knows of it, and it is open once."""
    worker, engine = made()
    assert perform(worker, ops.Start(target, recover=False)) is None
    assert engine.said == [f"start {target}"]
    assert worker._weight_update_active
    failure = perform(worker, ops.Start(target, recover=False))
    assert failure is not None
    assert failure.code is NackCode.WRONG_STATE
    assert engine.said == []
    assert perform(worker, ops.Finish()) is None
    assert engine.said == [f"finish {target}"]
    assert not worker._weight_update_active
    failure = perform(worker, ops.Finish())
    assert failure is not None
    assert failure.code is NackCode.WRONG_STATE


@pytest.mark.parametrize("left_open", [None, "model", "draft"])
@pytest.mark.parametrize("target", MODELS)
def test_a_recovery_closes_what_is_open_and_mends_the_target(
    target: Target, left_open: Target | None
) -> None:
    """Whichever it was that broke off: what another update has left on meta comes back, too."""
    worker, engine = made()
    if left_open:
        perform(worker, ops.Start(left_open, recover=False))
    assert perform(worker, ops.Start(target, recover=True)) is None
    closed = [f"discard {left_open}", f"finish {left_open}"] if left_open else []
    mended = [f"start {target}", f"discard {target}", f"finish {target}"]
    assert engine.said == [*closed, *mended, f"start {target}"]
    assert engine.session.open


@pytest.mark.parametrize("target", MODELS)
def test_a_restore_closes_the_session_that_is_open(target: Target) -> None:
    """One of the target is opened first, if none is."""
    worker, engine = made()
    perform(worker, ops.Start(target, recover=False))
    closed = [f"discard {target}", f"finish {target}"]
    assert perform(worker, ops.Restore(target)) is None
    assert engine.said == closed
    assert perform(worker, ops.Restore(target)) is None
    assert engine.said == [f"start {target}", *closed]
    assert not worker._weight_update_active


@pytest.mark.parametrize("target", MODELS)
def test_a_start_that_fails_leaves_a_session_open(target: Target) -> None:
    """As in all the workers in which it did not fail; vLLM would close this one."""
    worker, engine = made()
    engine.fails = "start"
    failure = perform(worker, ops.Start(target, recover=False))
    assert failure is not None
    assert "on purpose" in failure.detail
    assert worker._weight_update_active
    engine.fails = ""
    assert perform(worker, ops.Start(target, recover=True)) is None


def test_a_finish_that_fails_leaves_none() -> None:
    """What comes next recovers."""
    worker, engine = made()
    perform(worker, ops.Start("model", recover=False))
    engine.fails = "finish"
    failure = perform(worker, ops.Finish())
    assert failure is not None
    assert "on purpose" in failure.detail
    assert not worker._weight_update_active
    engine.fails = ""
    assert perform(worker, ops.Start("model", recover=True)) is None


@pytest.mark.parametrize("target", MODELS)
def test_a_session_that_somebody_was_refused_is_in_nobodys_way(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several workers one says so; vLLM has begun a session in all the others."""
    from sidecar._vllm.plugin import agreement  # noqa: PLC0415 - it needs torch

    worker, engine = made()
    monkeypatch.setattr(agreement, "is_last_worker", lambda: False)
    worker.start_draft_weight_update()
    assert worker._weight_update_active
    assert perform(worker, ops.Start(target, recover=False)) is None
    assert engine.said == [f"start {target}"]


def test_a_session_of_somebody_else_is_left_alone() -> None:
    """Where the engine takes such calls: those of vLLM's own do."""
    worker, engine = made()
    worker._weight_update_active = True
    for recover in (False, True):
        failure = perform(worker, ops.Start("model", recover=recover))
        assert failure is not None
        assert failure.code is NackCode.WRONG_STATE
        assert "another client" in failure.detail
        assert engine.said == []
        assert worker._weight_update_active


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("target", MODELS)
def test_a_session_that_somebody_else_has_closed_is_lost(target: Target, refused: bool) -> None:
    """For vLLM it is; what belongs into it is refused, until the next recovers."""
    worker, engine = made()
    perform(worker, ops.Start(target, recover=False))
    if refused:
        with pytest.raises(Exception, match="through wavebus"):
            worker.update_weights({})
    else:
        worker.finish_weight_update()
    assert not worker._weight_update_active
    for operation in (ops.Finish(), ops.Start(target, recover=False)):
        failure = perform(worker, operation)
        assert failure is not None
        assert failure.code is NackCode.WRONG_STATE
    assert perform(worker, ops.Start(target, recover=True)) is None
    mended = [f"start {target}", f"discard {target}", f"finish {target}"]
    assert engine.said[-4:] == [*mended, f"start {target}"]


def test_a_transport_is_for_no_adapter_of_the_one_before() -> None:
    """Or a model's manifest would be checked as an adapter's, or not at all."""
    from sidecar._vllm.plugin.worker.lora import LoraAdapters  # noqa: PLC0415 - it needs vLLM

    _, engine = made()
    opened = []
    type(engine)._open = lambda _, operation: opened.append(operation.backend)  # as vLLM's own
    engine._opening, engine._adapters = threading.Lock(), LoraAdapters(None)
    engine._incoming, engine._adapters.outgoing = object(), "tuned"
    engine.open_transfer(ops.Open("o1", "vllm:nccl", b"", 0, 3, 1))
    assert opened == ["vllm:nccl"]
    assert (engine._incoming, engine._adapters.outgoing) == (None, "")


def test_only_the_update_that_was_armed_last_is_armed_again() -> None:
    """Of the model; and the transport, which may be another by now, has room for it."""
    from bus._weight_transfer.shm import ShmReceiver  # noqa: PLC0415 - it needs torch
    from sidecar._vllm.plugin.loading.target_model import ArmedManifest, ArmedUpdate  # noqa: PLC0415 - it needs vLLM

    _, engine = made()
    type(engine).wavebus_room = StagingCapacity(8)
    engine._receiver.use("shm", ShmReceiver())
    first, then = (Staging(False, budget, keep=False, clear_cache=False) for budget in (0, 9))
    known = ArmedManifest(Manifest(("a",), ("float32",), ((2,),), (1,)))
    again = ops.ArmManifest(None, "model", then, digest=known.manifest.digest)
    refused = [None, ArmedUpdate(known, "draft", first)]
    other = ArmedManifest(Manifest(("a",), ("float32",), ((3,),), (1,)))
    for armed in (*refused, ArmedUpdate(other, "model", first)):
        engine.armed = armed
        with pytest.raises(EngineError, match="another update was armed later"):
            engine.execute(again)
        assert engine.armed is armed
    engine.armed = ArmedUpdate(known, "model", first)
    assert engine.execute(again).room == StagingCapacity(8)
    armed = engine.armed
    assert (armed.announced, armed.target, armed.staging) == (known, "model", then)
    engine._receiver.receiver.room_bytes = 4
    with pytest.raises(EngineError, match="chunk 0 takes 64 bytes"):
        engine.execute(again)


def test_steps_do_not_wait_for_the_chunks_of_an_update_that_is_let_go() -> None:
    """Its trainer is silent, and the chunk was begun and is taken by nobody."""
    from bus._weight_transfer.base import Receiver  # noqa: PLC0415 - it needs torch
    from sidecar._transfer.chunk_receiver import ChunkReceiver  # noqa: PLC0415 - same
    from sidecar._vllm.plugin.staging.stager import Stager  # noqa: PLC0415 - it needs vLLM

    class Silent(Receiver):
        is_collective = True
        closed = threading.Event()

        def open(self, params: bytes, place: Any) -> None:
            raise NotImplementedError

        def receive(self, tensors: Any, handle: bytes) -> Any:  # noqa: ARG002 - nothing comes
            self.closed.wait()
            raise RuntimeError("it was closed")

        def close(self) -> None:
            self.closed.set()

    class Staged:
        kept: bool | None = None

        def release(self, *, keep: bool) -> None:
            self.kept = keep

    cpu = torch.device("cpu")
    inbox, staged = ChunkReceiver(cpu), Staged()
    inbox.use("silent", Silent())
    inbox.begin(0, ((),), "silent", b"")
    loadable: Any = SimpleNamespace(staged=staged)
    arms: Any = None  # nobody asks
    stager = Stager(loadable, inbox, None, cpu, arms)
    letting_go = threading.Thread(target=stager.release, daemon=True)
    letting_go.start()
    letting_go.join(LIMIT_S)
    assert not letting_go.is_alive()
    assert staged.kept is False
    assert Silent.closed.is_set()
