"""The weight transfer engine inside each vLLM worker.

A sidecar requests operations (:mod:`bus.operations`). Each operation is one call of all workers,
which agree on its result (:mod:`sidecar._vllm.plugin.agreement`). Of vLLM's own calls the engine
accepts those that open and close the sidecar's session
(:mod:`sidecar._vllm.plugin.worker.session`), and refuses all others. Receiving, loading and
committing are separate steps. There are two ways to load
(:mod:`sidecar._vllm.plugin.loading.plan_cache`):

* By vLLM's loader, which gets copies on the worker's device. These copies are needed: vLLM's
  layerwise reload keeps the tensors of an incomplete layer until a later chunk completes it, and
  the transport would overwrite its buffers meanwhile. Only a transport that hands over tensors of
  its own (:attr:`Receiver.is_owned`) needs no copy.
* By a copy plan, directly from the transport's buffers into the served parameters.

:mod:`sidecar._transfer.chunk_receiver` receives the chunks: the next one may arrive while one is
being loaded.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from bus import operations as ops
from bus._lora import adapter_of
from bus._vllm.payloads import engine_of
from bus._weight_transfer.cuda import synchronize
from bus._weight_transfer.formats import transfer_failed
from bus._weight_transfer.registry import make_receiver
from bus.errors import EngineError, wrong_state
from bus.messages import NackCode, Target
from sidecar._transfer.chunk_receiver import ChunkReceiver
from sidecar._transfer.lora import IncomingAdapter
from sidecar._transfer.verification import check_sums
from sidecar._vllm.plugin import agreement, operations
from sidecar._vllm.plugin.compat import BACKEND, shared_communicators
from sidecar._vllm.plugin.loading.manifest_check import Blueprint, quiet_loading
from sidecar._vllm.plugin.loading.target_model import (
    ArmedManifest,
    ArmedUpdate,
    TargetModel,
    require_armed,
)
from sidecar._vllm.plugin.staging.stager import Stager
from sidecar._vllm.plugin.worker.entry_points import GuardedEntryPoints
from sidecar._vllm.plugin.worker.lora import LoraAdapters
from sidecar._vllm.plugin.worker.session import UpdateSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus._manifest import Manifest
    from bus._weight_transfer.allocation import StagingCapacity
    from bus._weight_transfer.packing import Tensors

__all__ = ["WavebusWeightTransferEngine"]


class WavebusWeightTransferEngine(GuardedEntryPoints):
    """Carries out the sidecar's operations in one worker: checks manifests, receives, loads.

    vLLM points ``self.model`` at the model to update (served or draft) only while a session is
    open. Manifests are armed before that, so :meth:`introduce_draft` makes a draft known.
    """

    wavebus_drives = BACKEND
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        quantised = vllm_config.quant_config is not None
        built = Blueprint(vllm_config, vllm_config.model_config, quantised)
        own = TargetModel(model, built, device)
        self._loadable: dict[Target, TargetModel] = {"model": own}
        self._adapters = LoraAdapters.of(model)
        self._incoming: IncomingAdapter | None = None  # None: the open transport brings no adapter
        self._index = worker_index(vllm_config.parallel_config)
        self.armed: ArmedUpdate | None = None  # the next update, or the current one
        self._last_manifest: ArmedManifest | None = None
        self._began = True  # whether a load may have been interrupted
        self._receiver = ChunkReceiver(device)
        self._opening = threading.Lock()
        self._stager = Stager(own, self._receiver, vllm_config, device, self.execute)
        self.session = UpdateSession()

    def introduce_draft(self, model: torch.nn.Module, built: Blueprint) -> None:
        """Makes the worker's draft model known, so that its manifests can be armed."""
        known = self._loadable.get("draft")
        if known is None or known.model is not model:
            self._loadable["draft"] = TargetModel(model, built, self.device)

    @property
    def _target(self) -> Target:
        """Which model the session updates: ``model``, the served one, or ``draft``."""
        draft = self._loadable.get("draft")
        return "draft" if draft is not None and draft.model is self.model else "model"

    def _start(self) -> None:
        """Prepares copies by the plan, or moves parameters to the meta device for vLLM's loader."""
        self._began = True
        loadable = self._loadable[self._target]
        run = loadable.plans.start(reloading=loadable.is_reloading)
        self._receiver.clear()
        loadable.begin(self.armed)
        loadable.repacking.before_start()
        if not run:
            initialize_layerwise_reload(self.model)

    def _load_tensors(self, received: list[tuple[str, torch.Tensor]]) -> None:
        loadable = self._loadable[self._target]
        plans = loadable.plans
        tensors = loadable.without_tied_head(received)
        with torch.no_grad():
            if plans.update is not None:
                plans.update.load(tensors)
            else:
                plans.on_load(tensors)
                with quiet_loading():
                    self.model.load_weights(iter(tensors))
                plans.on_loaded()
        synchronize(self.device)

    def _require_its_session(self) -> None:
        armed = self.armed
        if armed is not None and armed.target != self._target:
            raise wrong_state(
                f"the update was armed for the {armed.target}, but the open session is of the "
                f"{self._target}"
            )

    def _finish(self) -> None:
        self._receiver.clear()
        plans = self._loadable[self._target].plans
        try:
            self._post_process()
        finally:
            plans.close()
            self._began = self._loadable["model"].is_reloading  # no step waits for this

    def _post_process(self) -> None:
        loadable = self._loadable[self._target]
        if loadable.plans.update is not None:
            loadable.process_deferred(self.model_config.dtype)
        else:
            finalize_layerwise_reload(self.model, self.model_config)
        loadable.plans.on_finished()
        loadable.repacking.after_finish()

    def shutdown(self) -> None:
        """Closes the staging channel and the transport."""
        self._stager.channel.close()
        self._receiver.close()

    @property
    def wavebus_room(self) -> StagingCapacity:
        """How much memory staging the armed update needs, or why it can't be staged."""
        if self._began:
            self._began = self._loadable["model"].is_reloading
        return self._stager.capacity(self.armed, is_partial=self.session.open or self._began)

    @property
    def wavebus_loading(self) -> dict[str, Any]:
        """:meth:`PlanCache.account`, the last swap's duration in ms, and the staging bytes held."""
        model = self._loadable["model"]
        swap_ms, staging_bytes = round(self._stager.swap_ms, 3), model.staged.memory.held_bytes
        return {**model.plans.account(), "swap_ms": swap_ms, "staging_bytes": staging_bytes}

    # -- operations ------------------------------------------------------------------

    def wavebus_perform(self, worker: Any, operation: str) -> ops.Done:
        """Carries out an operation in this engine's worker.

        Raises:
            WorkerRefusal: in the last worker, if the operation failed in any.
        """
        with self._stager.channel.preempted():
            done = agreement.attempt(lambda: self.execute(operations.decode(operation), worker))
            failure = agreement.agree(done if isinstance(done, operations.WorkerFailure) else None)
            if failure is not None:
                agreement.refuse(failure)
        return ops.Done() if isinstance(done, operations.WorkerFailure) else done

    def execute(self, operation: operations.WorkerOperation, worker: Any = None) -> ops.Done:
        """Executes any operation, by either carrier.

        Args:
            operation: the operation.
            worker: vLLM's worker. None: the staging channel brings the operation, while the worker
                runs steps.

        Raises:
            EngineError: code ``wrong_state``: the operation needs the other carrier.
        """
        by = "channel" if worker is None else "core"
        if operation.carrier not in (by, "either"):
            raise wrong_state(f"{type(operation).__name__} can't come by the {by}")
        stager = self._stager
        match operation:
            case operations.Greet():
                pass
            case operations.Hello(protocol=protocol):
                _check_protocol(protocol)
                self._loadable["model"].checker.prepare()
                return ops.Done(channel=stager.channel.name)
            case ops.Open():
                return ops.Done(ahead=self.open_transfer(operation))
            case ops.Drain():
                if stager.theirs is None:
                    raise transfer_failed(f"transport {operation.backend!r} can't be drained")
                stager.theirs.drain(operation)
            case ops.ArmManifest():
                return ops.Done(room=self._arm_for(operation, while_serving=worker is None))
            case ops.Extend(part=part):
                armed = require_armed(stager.armed if worker is None else self.armed)
                stager.extend(armed, self._loadable[armed.target], part)
            case ops.Start(staged=True):
                return ops.Done(in_place=stager.start(self.armed))
            case ops.ReceiveChunk(staged=True):
                stager.receive(operation)
            case operations.Stage(chunks=chunks):
                stager.stage(chunks)
            case ops.Finish(staged=True):
                stager.seal()
            case operations.CheckReady():
                self._loadable["model"].staged.require_sealed()
            case ops.SwapStaged():
                stager.swap()
            case ops.Restore(staged=True):
                stager.release()
            case ops.ReceiveChunk():
                self._receive(worker, operation)
            case operations.VerifyChunk():
                self._arrived(operation)
            case _ if self._is_for_adapter(operation):
                return self._execute_for_adapter(operation)
            case ops.Start(target=target):
                self._begin(worker, target, recover=operation.recover)
            case ops.LoadChunk():
                self._load(worker, operation)
            case ops.Restore(target=target):
                self._restore(worker, target)
            case ops.Finish():
                self._end(worker)
        return ops.Done()

    def _is_for_adapter(self, operation: operations.WorkerOperation) -> bool:
        """Returns whether an operation is on LoRA adapters, or a step of an adapter's update."""
        updates = self._incoming is not None or bool(self._adapters.outgoing)
        return updates or isinstance(operation, operations.OF_ADAPTERS)

    def _execute_for_adapter(self, operation: operations.WorkerOperation) -> ops.Done:
        if isinstance(operation, ops.LoadChunk):
            self._load_adapter(operation)
        elif self._incoming is not None:
            self._receiver.clear()
        return self._adapters.perform(operation)

    def _begin(self, worker: Any, target: Target, *, recover: bool) -> None:
        """Opens a session; ``recover`` first repairs vLLM's state after an interrupted load.

        For that it closes the session that was left open, and runs a whole one for this target.
        """
        if recover:
            agreement.run_before_any_continues(lambda: self._close(worker))
            self._restore(worker, target)
        self.session.begin(worker, target)

    def _end(self, worker: Any) -> None:
        if self.armed is not None and self.armed.manifest.is_open:
            self._loadable[self.armed.target].require_whole(self.armed.manifest)
        self.session.finish(worker)

    def _restore(self, worker: Any, target: Target) -> None:
        """Closes the session; layers that vLLM's loader has not completed get old weights.

        So all old weights are back only if no layer was loaded. If no session is open, one is
        opened for the target first.
        """
        if not self.session.open:
            agreement.run_before_any_continues(lambda: self.session.begin(worker, target))
        agreement.run_before_any_continues(lambda: self._close(worker))

    def _close(self, worker: Any) -> None:
        if self.session.open:
            self._discard()
            self.session.close(worker)

    def _discard(self) -> None:
        self._receiver.clear()
        self._loadable[self._target].discard()

    def open_transfer(self, operation: ops.Open) -> int:
        """Connects to the sender; returns how many chunks may be received before one is loaded.

        Raises:
            EngineError: the transport can't be opened.
        """
        with self._opening:  # an earlier sidecar's open goes on until its deadline
            self._incoming, self._adapters.outgoing = None, ""  # vLLM's own transports have none
            self._open(operation)
        return self._receiver.prefetch_depth

    def _open(self, operation: ops.Open) -> None:
        if engine_of(operation.backend):
            raise not_this_engine(operation.backend)
        backend, params = operation.backend, operation.params
        if self._adapters.opens_removal(backend):
            return
        if adapter := adapter_of(backend):
            self._incoming = IncomingAdapter(adapter, params)
            backend, params = self._incoming.backend, self._incoming.params
        chunks = self._receiver
        receiver = chunks.receiver
        if receiver is None or self._incoming is not None or operation.backend != chunks.backend:
            receiver = make_receiver(backend, self.device)
            chunks.use(operation.backend, receiver)
        chunks.stop()
        self._stager.discard_transport()
        with shared_communicators():
            receiver.open(params, operation.place.of_worker(self._index))

    def _arm(self, operation: ops.ArmManifest, manifest: Manifest) -> None:
        self.armed, target = None, operation.target
        if manifest.counts and self.session.open:
            raise EngineError(
                "an update was interrupted in this engine, and a patch can't repair that: send a "
                "whole set of weights",
                code=NackCode.OTHER_BASE,
            )
        if self._incoming is not None:
            self._adapters.check(self._incoming.config, manifest)
            self._adapters.begin()
            self._incoming.begin()
        elif self._adapters.outgoing:
            self._adapters.begin()
        elif target not in self._loadable:
            raise EngineError(
                "this worker has no draft model whose weights can be updated",
                code=NackCode.DRAFT_MISSING,
            )
        else:
            loadable = self._loadable[target]
            trace = loadable.check(manifest)
            if not manifest.counts:  # a patch is always loaded by vLLM's loader
                loadable.plans.on_armed(manifest, trace)
        if self._last_manifest is None or self._last_manifest.manifest != manifest:
            self._last_manifest = ArmedManifest(manifest)
        self._last_manifest.check_room(self._receiver.backend, self._receiver.receiver)
        self.armed = ArmedUpdate(self._last_manifest, target, operation.staging)

    def _arm_for(self, operation: ops.ArmManifest, *, while_serving: bool) -> StagingCapacity:
        """Arms an update; returns how much memory staging needs, or why it can't be staged.

        Raises:
            EngineError: the manifest doesn't fit the model or draft, or a chunk the transport; code
                ``wrong_state``: the meta model is missing, and can't be built while steps run; or
                another manifest was armed last.
        """
        armed, manifest = self.armed, operation.manifest
        if manifest is None:  # no collective
            known = None if armed is None else (armed.target, armed.manifest.digest)
            if armed is None or known != (operation.target, operation.digest):
                raise wrong_state("another update was armed later")
            armed.announced.check_room(self._receiver.backend, self._receiver.receiver)
            self.armed = ArmedUpdate(armed.announced, armed.target, operation.staging)
        elif while_serving and not self._loadable["model"].checker.prepared:
            raise wrong_state("this worker has checked no manifest yet")
        else:
            self._arm(operation, manifest)
        return self.wavebus_room

    def _receive(self, worker: Any, operation: ops.ReceiveChunk) -> None:  # noqa: ARG002 - see native
        if engine_of(operation.backend):
            raise not_this_engine(operation.backend)
        chunks = require_armed(self.armed).announced.chunks
        self._receiver.begin(operation.seq, chunks, operation.backend, operation.handle)

    def _arrived(self, operation: ops.SentChunk) -> Tensors:
        """Returns the tensors of a chunk, after it has arrived and its checksums were compared."""
        received = self._receiver.take(operation.seq)
        if operation.sums:
            check_sums(operation.seq, received, operation.verify, operation.sums)
        self._loadable[self._target].unloaded.check(received)
        # An adapter's chunk is copied into CPU memory, and a plan copies from the buffers.
        copies = self._incoming is not None or self._loadable[self._target].plans.update is not None
        return received if copies else self._receiver.take_own(operation.seq)

    def _take(self, operation: ops.SentChunk, check: Callable[[], None]) -> Tensors:
        """Returns a chunk when all workers have it; raises if ``check`` raised in any worker."""
        arrived: Tensors = []

        def prepare() -> None:
            check()
            arrived.extend(self._arrived(operation))

        try:
            agreement.run_before_any_continues(prepare)
        except EngineError:
            self._receiver.clear()
            raise
        return arrived

    def _load(self, worker: Any, operation: ops.LoadChunk) -> None:
        def check() -> None:
            self.session.require_open(worker)
            self._require_its_session()

        received = self._take(operation, check)
        try:
            with set_current_vllm_config(self.vllm_config):
                self._load_tensors(received)
        except BaseException:
            self._receiver.clear()
            raise
        self._receiver.release(operation.seq)

    def _load_adapter(self, operation: ops.LoadChunk) -> None:
        incoming = self._incoming

        def check() -> None:
            if incoming is None:
                raise wrong_state("the open transport brings no adapter")

        received = self._take(operation, check)
        assert incoming is not None
        try:
            incoming.add(received)
        finally:
            self._receiver.release(operation.seq)
        if operation.seq + 1 == require_armed(self.armed).manifest.chunks:
            self._adapters.load(incoming.name, incoming.config, incoming.take())


def _check_protocol(theirs: int) -> None:
    if theirs != operations.PROTOCOL:
        raise EngineError(
            f"the sidecar speaks plugin protocol {theirs}, but the wavebus inside vLLM speaks "
            f"{operations.PROTOCOL}: install one version of wavebus for both"
        )


def worker_index(parallel: Any) -> int:
    """Returns this worker's index among all workers of its engine.

    Behind an external load balancer, each data parallel rank is an engine of its own. Behind an
    internal one, all ranks are one engine.
    """
    ranks_here = 0 if parallel.data_parallel_external_lb else parallel.data_parallel_index
    return int(ranks_here * parallel.world_size + parallel.rank)


def not_this_engine(backend: str) -> EngineError:
    """Returns the error for a worker engine of vLLM's that was not chosen at boot."""
    return EngineError(
        f"this engine was not booted with vLLM's worker engine {engine_of(backend)!r}",
        code=NackCode.BACKEND_MISSING,
    )
