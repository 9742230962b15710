"""Drives vLLM's own worker engines over the bus, with the checks of wavebus's engine.

An engine booted with ``--weight-transfer-config '{"backend": "nccl"}'`` gets a subclass of whatever
class vLLM's factory has registered under that name. Calls of other callers reach that class
unchanged. The sidecar's operations (:mod:`sidecar._vllm.plugin.operations`) are carried out by
:class:`NativeUpdates`, as in wavebus's own engine. So manifests are checked before any rank enters
a collective, no worker raises alone, and an interrupted update can be recovered. Only four things
remain with vLLM's class: opening its transport, starting, receiving (which loads) and finishing.
Of a staged update vLLM's class only receives
(:mod:`sidecar._vllm.plugin.worker.native_transport`); all else is as for wavebus's backends.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config

from bus._vllm import payloads as vllm_payloads
from bus._weight_transfer.formats import transfer_failed
from bus.errors import EngineError, wrong_state
from bus.messages import NackCode
from sidecar._transfer.chunk_receiver import require_chunk
from sidecar._transfer.unloaded import CheckedLoading, refused
from sidecar._vllm.plugin import agreement
from sidecar._vllm.plugin.loading.target_model import require_armed
from sidecar._vllm.plugin.worker.engine import WavebusWeightTransferEngine, not_this_engine
from sidecar._vllm.plugin.worker.native_handles import rebuildable
from sidecar._vllm.plugin.worker.native_transport import VllmTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bus import operations as ops
    from bus._manifest import Manifest
    from bus._weight_transfer.allocation import RankAssignment
    from bus._weight_transfer.packing import Tensors
    from sidecar._vllm.plugin.loading.target_model import ArmedUpdate

__all__ = ["NativeUpdates", "guarded"]


class NativeUpdates(WavebusWeightTransferEngine):
    """Carries out a sidecar's operations with one of vLLM's own engines, or without.

    Updates that come over a backend of wavebus's are loaded without vLLM's engine.

    Args:
        name: the engine's name in vLLM's factory.
        engine: the engine, of the class that :func:`guarded` returns.
        original: the ``super()`` of that engine, which has the methods of vLLM's own class.
    """

    def __init__(self, name: str, engine: Any, original: Any) -> None:
        super().__init__(engine.config, engine.vllm_config, engine.device, engine.model)
        self._name = name
        self._engine = engine
        self._original = original
        self._transport = VllmTransport(name, engine, original, engine.device)
        self._started_theirs = False  # whether the update session is vLLM's
        # The last staged update whose chunks were received here, and its next chunk.
        self._begun: tuple[ArmedUpdate | None, int] = None, 0
        self._stager.theirs = self
        self._checked = CheckedLoading(self._loadable["model"].unloaded)  # of one update

    def preempted(self) -> AbstractContextManager[None]:
        """Keeps the staging channel from using vLLM's engine during a block."""
        return self._stager.channel.preempted()

    @property
    def unstaged_reason(self) -> str:
        """As :attr:`VllmTransport.unstaged_reason`."""
        return self._transport.unstaged_reason

    def buffer_bytes(self, armed: ArmedUpdate) -> int:
        """Returns how much memory vLLM takes while tensors of the update arrive, in bytes."""
        return self._transport.buffer_bytes(armed.announced.chunks)

    def receive(
        self, armed: ArmedUpdate, operation: ops.ReceiveChunk, put: Callable[[Tensors], None]
    ) -> None:
        """Receives a chunk of a staged update; see :class:`VllmReceiver`.

        Raises:
            EngineError: code ``wrong_state``: another chunk of the update comes next. Others as
                :meth:`VllmTransport.receive`.
        """
        update, next_seq = self._begun
        due = next_seq if update is armed else 0
        if operation.seq != due:
            raise wrong_state(f"chunk {operation.seq} is out of turn: chunk {due} comes next")
        self._begun = armed, due + 1
        info = self._update_info(armed, operation)
        metas = require_chunk(armed.announced.chunks, operation.seq)
        self._transport.receive(info, metas, put)

    def finish(self) -> None:
        """Releases the memory that vLLM keeps between an update's chunks."""
        self._transport.finish()

    def drain(self, operation: ops.Drain) -> None:
        """Receives the sender's tensors, and discards them; see :class:`VllmReceiver`."""
        try:
            if operation.backend != self._receiver.backend:
                raise transfer_failed(f"transport {operation.backend!r} is not open in this worker")
            if why := self.unstaged_reason:
                raise transfer_failed(why)
            info = vllm_payloads.decode_info(operation.handle)
            self._transport.discard(info, operation.timeout_ms / 1000)
        except BaseException:
            self._transport.close()
            raise

    def interrupt(self) -> None:
        """Makes :meth:`receive` or :meth:`drain` of another thread end soon."""
        self._transport.interrupt()

    def _start(self) -> None:
        self._started_theirs = self._transport.is_open
        if not self._started_theirs:
            super()._start()
            return
        loadable = self._loadable[self._target]
        loadable.begin(self.armed)
        self._checked = CheckedLoading(loadable.unloaded)
        loadable.repacking.before_start()
        self._original.start_weight_update()

    def _receive(self, worker: Any, operation: ops.ReceiveChunk) -> None:
        """Receives a chunk. vLLM's own transports also load it, in the same call."""
        if not vllm_payloads.engine_of(operation.backend):
            super()._receive(worker, operation)
            return
        chunk: dict[str, Any] = {}

        def prepare() -> None:
            nonlocal chunk
            self.session.require_open(worker)
            self._require_its_session()
            chunk = self._update_info(require_armed(self.armed), operation)

        # Workers must fail before the collective: one that stays out of it hangs the others.
        agreement.run_before_any_continues(prepare)
        names = [meta.name for meta in require_armed(self.armed).announced.chunks[operation.seq]]
        with set_current_vllm_config(self.vllm_config), self._checked_loading(names):
            self._original.update_weights(chunk)

    @contextmanager
    def _checked_loading(self, names: list[str]) -> Iterator[None]:
        """Checks the tensors that vLLM's class loads in a block; the finish raises failures."""
        model, checked = self.model, self._checked
        checked.loader = model.load_weights
        model.load_weights = checked.load  # hides the class's method
        try:
            yield
        finally:
            del model.load_weights
        checked.require_checked(names)

    def _update_info(self, armed: ArmedUpdate, operation: ops.ReceiveChunk) -> dict[str, Any]:
        """Returns the arguments of the guarded engine's ``update_weights``."""
        if not self._transport.is_open or operation.backend != self._receiver.backend:
            raise transfer_failed(f"transport {operation.backend!r} is not open in this worker")
        metas = require_chunk(armed.announced.chunks, operation.seq)
        columns = vllm_payloads.columns_of(metas, armed.counts(operation.seq))
        return rebuildable(vllm_payloads.decode_chunk(operation.handle, columns))  # type: ignore[no-any-return]

    def _post_process(self) -> None:
        if not self._started_theirs:
            super()._post_process()
            return
        try:
            self._original.finish_weight_update()
            self._loadable[self._target].repacking.after_finish()
        finally:
            self._checked.require_loaded()  # the cause, if the finish has failed for it

    def shutdown(self) -> None:
        """Closes wavebus's receiver; the caller closes vLLM's own transport itself."""
        self._transport.is_open = False
        super().shutdown()

    # -- operations ------------------------------------------------------------------

    def _open(self, operation: ops.Open) -> None:
        if not vllm_payloads.engine_of(operation.backend):
            self._transport.close()
            super()._open(operation)
            return
        typed: Any = None
        parallel = self.vllm_config.parallel_config

        def prepare() -> None:
            nonlocal typed, parallel
            if vllm_payloads.engine_of(operation.backend) != self._name:
                raise not_this_engine(operation.backend)
            info = vllm_payloads.decode_info(operation.params)
            place = operation.place
            if vllm_payloads.is_sharding(operation.backend):
                info, parallel = self._in_mesh(info, place)
            else:
                info = self._placed(info, place)
            typed = self._original.parse_init_info(info)

        agreement.run_before_any_continues(prepare)
        self._receiver.close()
        self._transport.close()
        self.armed = None
        self._transport.open(typed, parallel)
        self._receiver.backend = operation.backend

    def _placed(self, info: dict[str, Any], place: RankAssignment) -> dict[str, Any]:
        """Returns vLLM's init info with this worker's rank from the bus, if any.

        vLLM's workers add to ``rank_offset`` their index among all workers of all data parallel
        ranks, which they compute themselves. They do so even behind an external load balancer,
        where each rank is a separate engine on the bus. So that index is subtracted here.
        """
        if "rank_offset" not in info:
            return info
        _require_rank(place)
        parallel = self.vllm_config.parallel_config
        added = parallel.data_parallel_index * parallel.world_size + parallel.rank
        offset = place.of_worker(self._index).rank - added
        return {**info, "rank_offset": offset, "world_size": place.world_size}

    def _in_mesh(self, info: dict[str, Any], place: RankAssignment) -> tuple[dict[str, Any], Any]:
        """Returns vLLM's init info and parallel config for a mesh with several trainer ranks.

        The mesh has the trainer's ranks first, then the workers of all engines. ``rank_offset`` is
        the first worker's number in the mesh. The broker's numbers count the whole trainer as one
        rank; the returned ones count each of its ranks.

        vLLM computes a worker's number in the mesh from its parallel config, as if there were a
        single engine. So the returned config is of data parallel index 0, and its rank counts the
        workers of all engines.
        """
        _require_rank(place)
        first = info.get("rank_offset")
        if type(first) is not int or first < 1:
            raise transfer_failed(
                f"rank_offset={first!r}: it must be the first worker's rank, 1 or more"
            )
        parallel = copy.copy(self.vllm_config.parallel_config)
        parallel.data_parallel_index = 0
        parallel.rank = place.of_worker(self._index).rank - 1
        return {**info, "world_size": place.world_size - 1 + first}, parallel

    def _arm(self, operation: ops.ArmManifest, manifest: Manifest) -> None:
        takes_draft = self._engine.supports_draft_weight_update
        if self._transport.is_open and operation.target == "draft" and not takes_draft:
            raise EngineError(
                f"vLLM's {self._name!r} does not update draft models", code=NackCode.DRAFT_MISSING
            )
        target = self._loadable.get(operation.target)
        in_place = self._name in vllm_payloads.SHARDING | vllm_payloads.PATCHING
        is_tied = target is not None and target.tied_head in manifest.names
        if self._transport.is_open and in_place and target is not None and is_tied:
            raise refused(
                target.tied_head,
                f"is tied to the embeddings, and vLLM's {self._name!r} writes directly into the "
                "served weights, so the two can't be compared first: leave the tensor out",
            )
        super()._arm(operation, manifest)


def _require_rank(place: RankAssignment) -> None:
    if not place.communicator:
        raise transfer_failed(
            "vLLM's init info asks for a rank, but the broker has assigned no place in a "
            "communicator"
        )


def guarded(name: str, theirs: type[Any]) -> type[Any]:
    """Returns a subclass of a vLLM engine class that a sidecar can drive, too.

    Args:
        name: the engine's name in vLLM's factory, such as ``nccl``.
        theirs: vLLM's engine class. Other callers than a sidecar reach its methods unchanged.
    """

    class Guarded(theirs):  # type: ignore[misc]
        wavebus_drives = name
        _wavebus: NativeUpdates | None = None

        def _guard(self) -> NativeUpdates:
            # Created at a sidecar's first call, so that other callers see no difference.
            if self._wavebus is None:
                self._wavebus = NativeUpdates(name, self, super())
            return self._wavebus

        def introduce_draft(self, model: Any, built: Any) -> None:
            self._guard().introduce_draft(model, built)

        def set_weight_update_target(self, model: Any, model_config: Any) -> None:
            super().set_weight_update_target(model, model_config)
            if self._wavebus is not None:
                self._wavebus.set_weight_update_target(model, model_config)

        def reset_weight_update_target(self) -> None:
            super().reset_weight_update_target()
            if self._wavebus is not None:
                self._wavebus.reset_weight_update_target()

        @property
        def wavebus_loading(self) -> dict[str, Any]:
            return {} if self._wavebus is None else self._wavebus.wavebus_loading

        def wavebus_perform(self, worker: Any, operation: str) -> ops.Done:
            return self._guard().wavebus_perform(worker, operation)

        def start_weight_update(self) -> None:
            if self._wavebus is not None and self._wavebus.session.ours:
                self._wavebus.start_weight_update()
            else:
                with self._alone():
                    super().start_weight_update()

        def init_transfer_engine(self, init_info: Any) -> None:
            with self._alone():
                super().init_transfer_engine(init_info)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            with self._alone():
                super().update_weights(update_info)

        def finish_weight_update(self) -> None:
            if self._wavebus is not None and self._wavebus.session.ours:
                self._wavebus.finish_weight_update()
            else:
                with self._alone():
                    super().finish_weight_update()

        def shutdown(self) -> None:
            with self._alone():
                if self._wavebus is not None:
                    self._wavebus.shutdown()
                super().shutdown()

        def _alone(self) -> AbstractContextManager[None]:
            """Interrupts the staging channel for a call that is not the sidecar's."""
            return nullcontext() if self._wavebus is None else self._wavebus.preempted()

    Guarded.__name__ = Guarded.__qualname__ = f"{theirs.__name__}OnTheBus"
    return Guarded
