"""A worker's part in a staged update.

::

    asked by        operation       where                    what
    the core        StartStaging    the worker's thread      memory beside the weights
    the lane        Receive, Stage  the lane's thread        a chunk comes, and is copied there
    the lane        Seal            the lane's thread        all of it is there
    the core        Ready, Swap     the worker's thread      it is copied into the weights
    the core        LetGo           the worker's thread      nothing is staged any more

Between ``StartStaging`` and ``Seal`` the worker makes steps. On a GPU the lane has a stream of its
own, and says that something is done when the GPU has done it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Final

import torch
from vllm.config import set_current_vllm_config

from bus.errors import EngineError
from bus.messages import NackCode
from bus.staging import Room
from sidecar.transfer import staging_room
from sidecar.transfer.checks import LateSums
from sidecar.transfer.streams import own_stream, synchronize, within
from sidecar.vllm_plugin import ranks, wire
from sidecar.vllm_plugin.lane import Lane
from sidecar.vllm_plugin.loadable import Armed, need_armed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from sidecar.transfer.base import Tensors
    from sidecar.transfer.inbox import Inbox
    from sidecar.vllm_plugin.loadable import Loadable
    from sidecar.vllm_plugin.planned import Place

# How long Python lets one thread run while another waits, at most. As it comes, 5 ms: a step that
# waits so long for the lane, is late by as much.
_SWITCH_S: Final = 0.0005


class Stager:
    """Of one model.

    Args:
        inbox: the worker's.
        vllm_config: with which the model was built.

    Attributes:
        swap_ms: how long the last swap kept the device from steps.
    """

    def __init__(
        self, loadable: Loadable, inbox: Inbox, vllm_config: Any, device: torch.device
    ) -> None:
        self.lane = Lane(self._carry_out, inbox.interrupt)
        self._loadable = loadable
        self._inbox = inbox
        self._vllm_config = vllm_config
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._armed: Armed | None = None
        self._sums = LateSums()
        self.swap_ms = 0.0

    # -- on the worker's thread --------------------------------------------------------

    def room(self, armed: Armed | None, *, broken: bool) -> Room:
        """Whether the armed update can be staged here. ``broken``: the model is in the middle of
        a load."""
        if armed is None or armed.staging is None or armed.target != "model":
            return Room(why_not="no update was armed that may be staged")
        known = self._loadable.plans.known
        if known.plan is None:
            return Room(why_not=f"it needs the model's own loader: {known.reason}")
        if broken:
            return Room(why_not="an update broke off in this engine")
        held = self._loadable.staged.held_bytes
        return staging_room(armed.staging, known.plan.size_bytes, self._device, held_bytes=held)

    def start(self, armed: Armed | None) -> None:
        """Have memory for the armed update.

        Raises:
            EngineError: code ``wrong_state``: none can be staged.
        """
        plan = self._loadable.plans.known.plan
        if armed is None or armed.staging is None or plan is None:
            raise EngineError("no update was armed that can be staged", code=NackCode.WRONG_STATE)
        self._forget_chunks()
        self._loadable.staged.begin(plan, armed.announced.chunks)
        synchronize(self._device)  # the memory may have been somebody's in this stream
        self._armed = armed

    def check_ready(self) -> None:
        """Whether a swap would go through."""
        self._loadable.staged.need_sealed()

    def swap(self) -> None:
        """In all workers, or in none. What fails behind that, leaves an engine that must not go
        on: it is not :data:`NackCode.CALLED_OFF`."""
        loadable = self._loadable
        places: dict[str, Place] = {}
        ranks.together(lambda: places.update(loadable.staged.need_sealed()))
        with self._timed():
            loadable.repacking.before_start()
            loadable.staged.swap(places)
            loadable.process_deferred(self._vllm_config.model_config.dtype)
            loadable.repacking.after_finish()
        loadable.plans.staged(proven=True)
        self.let_go()

    def let_go(self) -> None:
        """Nothing is staged any more."""
        self._forget_chunks()
        staging = None if self._armed is None else self._armed.staging
        self._armed = None
        self._loadable.staged.let_go(keep=staging is not None and staging.keep)

    def _forget_chunks(self) -> None:
        """What comes yet is of an update that was given up: steps don't wait for its trainer."""
        self._inbox.interrupt()
        self._inbox.clear()
        self._sums.forget()

    # -- on the lane's -----------------------------------------------------------------

    def _carry_out(self, operation: wire.Operation) -> None:
        if self._stream is None:
            self._stream = own_stream(self._device)
        with _switching_fast(), torch.no_grad(), within(self._stream, self._device):
            match operation:
                case wire.Receive():
                    armed = need_armed(self._armed)
                    into = self._loadable.staged.room(operation.seq)
                    armed.receive(operation, self._inbox, into)
                case wire.Stage():
                    self._stage(operation)
                case wire.Seal():
                    self._loadable.staged.seal()
                case _:
                    raise EngineError("that is asked of the core", code=NackCode.WRONG_STATE)

    def _stage(self, operation: wire.Stage) -> None:
        """What has arrived lies beside the weights; and when it is the last, all of it is what was
        sent."""
        loadable = self._loadable
        try:
            received = self._inbox.take(operation.seq)
            if operation.sums:
                self._sums.look(operation.seq, received, operation.verify, operation.sums)
            if operation.seq + 1 == need_armed(self._armed).manifest.chunks:
                self._sums.check()
            tensors = loadable.taken(received)
            loadable.staged.stage(operation.seq, tensors)
            if not loadable.plans.known.proven:
                self._prove(tensors)
            synchronize(self._device)
        except BaseException:
            self._inbox.clear()
            raise
        self._inbox.done(operation.seq)

    def _prove(self, tensors: Tensors) -> None:
        loadable = self._loadable
        with set_current_vllm_config(self._vllm_config):
            try:
                loadable.staged.prove(tensors, *loadable.checker.loader())
            except EngineError:
                loadable.plans.staged(proven=False)
                raise

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Of a block: until the device has done it, and, on a GPU, not before it has done what it
        was asked earlier."""
        if self._device.type != "cuda":
            since_s = time.perf_counter()
            yield
            self.swap_ms = (time.perf_counter() - since_s) * 1000
            return
        begun, done = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begun.record()
        yield
        done.record()
        done.synchronize()
        self.swap_ms = begun.elapsed_time(done)


@contextlib.contextmanager
def _switching_fast() -> Iterator[None]:
    """Have threads wait less for each other."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
