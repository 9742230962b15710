"""Stages weight updates in a vLLM worker while the engine keeps stepping.

::

    caller          operation        thread        what happens
    the channel     Open             channel's     the transport is opened
    the channel     ArmManifest      channel's     the manifest is checked, or armed again
    the channel     Start            channel's     memory is allocated beside the weights
    the channel     Extend           channel's     the update is open: further tensors are checked
    the channel     ReceiveChunk,    channel's     a chunk is received, and staged. Over a
                    Stage                          transport of vLLM's own, ReceiveChunk does both
    the channel     Drain            channel's     what comes over a transport of vLLM's own is
                                                   received, and discarded
    the channel     Finish           channel's     checked: every element is staged, and no tensor
                                                   of an open update is missing
    the core        CheckReady,      worker's      checked; then everything is copied into the
                    SwapStaged                     weights
    the core        Restore          worker's      the staged weights are dropped

Until the swap the worker runs steps. Steps are mostly Python, and so is the staging channel, and
Python runs one thread at a time. So everything that the channel does in Python delays a step, and
must be short. On a GPU the channel uses its own CUDA stream, and acknowledges an operation only
when the GPU has finished it.

A worker with peer workers receives a new manifest, and parts of an open one, through the core,
because checking them is a collective of the workers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from vllm.config import set_current_vllm_config

from bus._vllm.payloads import engine_of
from bus._weight_transfer.allocation import StagingCapacity
from bus._weight_transfer.cuda import synchronize
from bus.errors import EngineError, wrong_state
from bus.messages import NackCode
from sidecar._transfer.memory_budget import free_memory, staging_capacity
from sidecar._transfer.streams import own_stream, within
from sidecar._transfer.verification import DeferredSums
from sidecar._vllm.plugin import agreement
from sidecar._vllm.plugin.loading.copy_plan import NoPlanError
from sidecar._vllm.plugin.loading.target_model import ArmedUpdate, require_armed
from sidecar._vllm.plugin.staging.channel_server import StagingChannelServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bus._manifest import Manifest
    from bus._weight_transfer.packing import Tensors
    from bus.operations import Done, Drain, LoadChunk, ReceiveChunk
    from sidecar._transfer.chunk_receiver import ChunkReceiver
    from sidecar._vllm.plugin.loading.copy_plan import CopyPlan
    from sidecar._vllm.plugin.loading.target_model import TargetModel
    from sidecar._vllm.plugin.operations import WorkerOperation

# How long Python lets one thread run while another waits, at most. The default is 5 ms, and a step
# that waits for the staging channel would be late by as much.
_SWITCH_INTERVAL_S: Final = 0.0005


class VllmReceiver(Protocol):
    """The methods by which a stager receives over a transport of vLLM's own."""

    @property
    def unstaged_reason(self) -> str:
        """Why nothing can be staged or discarded over this transport; empty if it can."""

    def buffer_bytes(self, armed: ArmedUpdate) -> int:
        """Returns how much memory vLLM takes while tensors of the update arrive, in bytes."""

    def receive(
        self, armed: ArmedUpdate, operation: ReceiveChunk, put: Callable[[Tensors], None]
    ) -> None:
        """Receives a chunk.

        Args:
            armed: the update that is being staged.
            operation: names the chunk.
            put: gets some of the tensors at a time, in the current CUDA stream.
        """

    def finish(self) -> None:
        """Releases the memory that vLLM keeps between an update's chunks."""

    def drain(self, operation: Drain) -> None:
        """Receives the sender's tensors, and discards them.

        If this fails, the transport is closed.
        """

    def interrupt(self) -> None:
        """Makes a running :meth:`receive` or :meth:`drain` end soon; called from any thread."""


class Stager:
    """Stages the updates of one model while the engine keeps stepping.

    Args:
        loadable: the served model, and what is needed to load it.
        receiver: the worker's receiver of chunks.
        vllm_config: the configuration with which the model was built.
        device: the device of its weights.
        execute: executes an operation of the staging channel, in the channel's thread.

    Attributes:
        swap_ms: how long the last swap kept the device from running steps, in milliseconds.
        channel: the worker's staging channel, which executes its operations here.
        theirs: receives over transports of vLLM's own; None in an engine that has none.
        armed: the update that is being staged; None: none.
    """

    def __init__(
        self,
        loadable: TargetModel,
        receiver: ChunkReceiver,
        vllm_config: Any,
        device: torch.device,
        execute: Callable[[WorkerOperation], Done],
    ) -> None:
        self.channel = StagingChannelServer(self._execute, self._interrupt, self._thread_context)
        self.theirs: VllmReceiver | None = None
        self._execute_operation = execute
        self._target = loadable
        self._receiver = receiver
        self._vllm_config = vllm_config
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self.armed: ArmedUpdate | None = None
        self._sums = DeferredSums()
        # (requested, reported free) of the last allocation that failed, in bytes.
        self._last_refusal: tuple[int, int] | None = None
        self.swap_ms = 0.0

    # -- on the worker's thread --------------------------------------------------------

    def capacity(self, armed: ArmedUpdate | None, *, is_partial: bool) -> StagingCapacity:
        """Returns how much memory staging needs, or why the armed update can't be staged.

        Args:
            armed: the armed update; None without one.
            is_partial: whether the model's weights are incomplete because an earlier load stopped
                half-way. If so, the next update must be loaded in a pause.
        """
        if armed is None or armed.staging is None or armed.target != "model":
            return StagingCapacity(why_not="no update was armed that may be staged")
        theirs = self.theirs if engine_of(self._receiver.backend) else None
        if theirs is not None and theirs.unstaged_reason:
            return StagingCapacity(why_not=theirs.unstaged_reason)
        known = self._target.plans.entry
        if known.plan is None:
            reason = f"the update needs the model's own loader: {known.reason}"
            return StagingCapacity(why_not=reason)
        if is_partial:
            return StagingCapacity(why_not="an earlier update was interrupted in this engine")
        if mismatch := _layout_mismatch(self._target, known.plan):
            return StagingCapacity(why_not=f"the served weights don't fit the plan: {mismatch}")
        needed = known.plan.size_bytes
        held = self._target.staged.memory.reusable_bytes(needed)
        if needed > held and self._is_refused_again(needed):
            return StagingCapacity(needed, "the last attempt to allocate the memory failed")
        needed += theirs.buffer_bytes(armed) if theirs is not None else 0
        return staging_capacity(armed.staging, needed, self._device, held_bytes=held)

    def _is_refused_again(self, needed: int) -> bool:
        """Returns whether an allocation would probably fail again.

        Free memory may be fragmented, or reserved for CUDA graphs. So staging is not tried again
        until at least 10 % of the needed size more is free.
        """
        if self._last_refusal is None:
            return False
        asked, free = self._last_refusal
        return needed >= asked and free_memory(self._device) < free + needed // 10

    def discard_transport(self) -> None:
        """Drops references to the transport's buffers, before another transport is opened."""
        self._sums.close()

    def swap(self) -> None:
        """Copies the staged weights into the served ones, in all workers or in none.

        First all workers check that they can swap. If the swap fails after that check, some workers
        may have swapped, and the engine must not continue.

        Raises:
            EngineError: code ``called_off``: a worker can't swap, and nothing has changed. Any
                other code: the swap failed after the check.
        """
        loadable = self._target
        agreement.run_before_any_continues(loadable.staged.require_sealed)
        with _timed(self._device) as took_ms:
            loadable.repacking.before_start()
            loadable.staged.swap()
            loadable.process_deferred(self._vllm_config.model_config.dtype)
            loadable.repacking.after_finish()
        self.swap_ms = took_ms[0]
        loadable.plans.on_staged(proven=True)
        self.release()

    def release(self) -> None:
        """Drops the staged weights, and chunks that have not been staged yet."""
        self._discard_chunks()
        staging = None if self.armed is None else self.armed.staging
        self.armed = None
        self._target.staged.release(keep=staging is not None and staging.keep)

    def _discard_chunks(self) -> None:
        """Drops chunks of an abandoned update, because steps must not wait for its trainer."""
        self._receiver.interrupt()
        self._receiver.clear()
        self._sums.discard()

    def extend(self, armed: ArmedUpdate, target: TargetModel, part: Manifest) -> None:
        """Checks further tensors of an open update, staged or not: :meth:`TargetModel.extend`."""
        announced = target.extend(armed, part, is_staged=armed is self.armed)
        announced.check_room(self._receiver.backend, self._receiver.receiver)
        armed.announced = announced

    # -- on the channel's -----------------------------------------------------------------

    @contextlib.contextmanager
    def _thread_context(self) -> Iterator[None]:
        if self._stream is None:
            self._stream = own_stream(self._device)
        with torch.no_grad(), within(self._stream, self._device):
            yield

    def _execute(self, operation: WorkerOperation) -> Done:
        with _short_switch_interval():
            return self._execute_operation(operation)

    def start(self, armed: ArmedUpdate | None) -> bool:
        """Allocates memory for the armed update; returns whether chunks arrive directly in it.

        Raises:
            EngineError: code ``wrong_state``: no update that can be staged is armed.
        """
        known = self._target.plans.entry
        if armed is None or armed.staging is None or known.plan is None:
            raise wrong_state("no update was armed that can be staged")
        self._discard_chunks()
        staged, receiver = self._target.staged, self._receiver.receiver
        try:
            staged.begin(known.plan, armed.announced.chunks, is_open=armed.manifest.is_open)
        except EngineError as error:
            mismatch = _layout_mismatch(self._target, known.plan)
            if error.code is NackCode.STAGING_REFUSED and not mismatch:
                self._last_refusal = known.plan.size_bytes, free_memory(self._device)
            raise
        synchronize(self._device)  # earlier work of this stream may still use the memory
        self._target.begin(armed)
        self.armed = armed
        launches = receiver is not None and receiver.can_launch
        return launches and known.proven and staged.buffer_for(0) is not None

    def receive(self, asked: ReceiveChunk) -> None:
        """Begins to receive a chunk; over a transport of vLLM's own, also stages it."""
        armed = require_armed(self.armed)
        if engine_of(asked.backend) and self.theirs is not None:
            self.theirs.receive(armed, asked, functools.partial(self._put, asked.seq))
            return
        chunks = armed.announced.chunks
        into = self._target.staged.buffer_for(asked.seq)
        self._receiver.begin(asked.seq, chunks, asked.backend, asked.handle, into)

    def seal(self) -> None:
        """Checks that all chunks are staged, and prepares the swap."""
        if self.armed is not None and self.armed.manifest.is_open:
            self._target.complete(self.armed.manifest)
        self._target.staged.seal()
        if engine_of(self._receiver.backend) and self.theirs is not None:
            self.theirs.finish()

    def _put(self, seq: int, tensors: Tensors) -> None:
        """Stages tensors of a chunk that arrives over a transport of vLLM's own."""
        self._target.unloaded.check(tensors)
        self._target.staged.stage_part(seq, tensors)
        if not self._target.plans.entry.proven:
            self._prove(self._target.without_tied_head(tensors))

    def _interrupt(self) -> None:
        self._receiver.interrupt()
        if self.theirs is not None:
            self.theirs.interrupt()

    def stage(self, chunks: Sequence[LoadChunk]) -> None:
        """Waits for some chunks and stages them; compares checksums at the update's last one."""
        try:
            if chunks:
                self._receiver.take(chunks[-1].seq)  # the others arrived before it
            for sent in chunks:
                self._stage_one(sent)
        except BaseException:
            self._receiver.clear()
            raise
        for sent in chunks:
            self._receiver.release(sent.seq)

    def _stage_one(self, sent: LoadChunk) -> None:
        loadable, seq = self._target, sent.seq
        received = self._receiver.take(seq)
        if sent.sums:
            stays = received is loadable.staged.buffer_for(seq)
            self._sums.record(seq, received, sent.verify, sent.sums, stays=stays)
        if seq + 1 == require_armed(self.armed).manifest.chunks:
            self._sums.check()
        loadable.unloaded.check(received)
        tensors = loadable.without_tied_head(received)
        if loadable.staged.stage(seq, tensors):
            synchronize(self._device)  # the sender may reuse the source from here on
        if not loadable.plans.entry.proven:
            self._prove(tensors)
            synchronize(self._device)

    def _prove(self, tensors: Tensors) -> None:
        loadable = self._target
        with set_current_vllm_config(self._vllm_config):
            try:
                loadable.staged.prove(tensors, *loadable.checker.loader())
            except EngineError:
                loadable.plans.on_staged(proven=False)
                raise


def _layout_mismatch(target: TargetModel, plan: CopyPlan) -> str:
    """Returns how the model's parameters differ from the plan; empty if they match."""
    try:
        target.staged.find_parameters(plan)
    except NoPlanError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def _timed(device: torch.device) -> Iterator[list[float]]:
    """Measures a block until the device has finished; yields a list that gets the ms.

    On a GPU the clock starts when the device has finished all earlier work.
    """
    took_ms: list[float] = []
    if device.type != "cuda":
        since_s = time.perf_counter()
        yield took_ms
        took_ms.append((time.perf_counter() - since_s) * 1000)
        return
    begun, done = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    begun.record()
    yield took_ms
    done.record()
    done.synchronize()
    took_ms.append(begun.elapsed_time(done))


@contextlib.contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Shortens Python's thread switch interval during a block."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
