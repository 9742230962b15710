"""The engine core: a thread that steps the model, and executes calls between steps.

Everything that touches requests, cache or parameters runs in the core's thread. Other threads put
an action into the core's inbox and wait for a future. The thread empties the inbox between two
steps. So no step runs during a call, and the device is idle when a pause has returned.

Pausing, as in vLLM:

======  ==========================  ===========================
mode    running requests            returns
======  ==========================  ===========================
keep    stay as they are            at once
wait    run to their end            when the last one has ended
abort   end with what they have     at once
======  ==========================  ===========================

While the core is paused, new requests wait, and so do those that had not begun. With
``clear_cache`` keys and values are discarded: requests that ``keep`` has kept are recomputed after
the resume, over prompt and output so far. Otherwise they continue with the keys and values that
they had, even if new weights were loaded meanwhile.

If a pause is requested before an earlier one has returned, its mode replaces the earlier one's, and
both return together.

A core that steps together with others is a :class:`sidecar._embedded.parallel.core.LockstepCore`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import torch

from bus.errors import EngineDead, EngineError, wrong_state
from bus.messages import NackCode
from sidecar._embedded.memory import ModelMemory, ModelMemoryState
from sidecar._embedded.probing import run_probes
from sidecar._embedded.scheduler import BatchScheduler
from sidecar._shared_pages.core_status import (
    GLOBALLY_PAUSED,
    LOCALLY_PAUSED,
    STEPPING,
    CoreStatusPage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bus.messages import CorePhase, PauseMode, ProbeResult, SleepLevel
    from sidecar._embedded.model import ModelRunner
    from sidecar._embedded.requests import GenerationRequest, Publish

T = TypeVar("T")


class EngineCore:
    """Runs the step loop of one model, and the control calls between its steps.

    Args:
        model: the model; only the core's thread uses it from now on.
        slots: how many sequences may run at once.
        publish: called in the core's thread with the results of a step, at most once per step, and
            before the answer of a call that ended requests.
        died: called in the core's thread, once, if the core crashes.
        page: the status page; by default the core has one that no other process sees.
    """

    def __init__(
        self,
        model: ModelRunner,
        *,
        slots: int,
        publish: Publish,
        died: Callable[[str], None],
        page: CoreStatusPage | None = None,
    ) -> None:
        self.model = model
        self.version = 0
        self.step_s = 0.0  # the least time of a step
        self.memory = ModelMemory(model)
        self.page = page or CoreStatusPage(None)
        self._slots = slots
        self._scheduler = BatchScheduler(model, slots=slots, publish=publish)
        self._steps = 0
        self._died = died
        self._mode: PauseMode | None = None
        self._clear_cache = False
        self._pausing: list[Future[None]] = []
        self._actions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # After the thread's end nothing may be put into `_actions`.
        self._actions_lock = threading.Lock()
        self._unanswered: set[Future[object]] = set()
        self._gone = ""
        self._stopping = False
        self._admits = True
        self._thread = threading.Thread(target=self._run, name="wavebus-embedded", daemon=True)

    # Called from other threads

    def start(self) -> None:
        """Starts the core's thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends every request, then the thread; blocks until the thread has ended."""
        self._ask_to_stop()
        self._thread.join()

    def submit(self, request: GenerationRequest, wave: int = 0) -> None:
        """Queues a request; while admission is closed, ends it at once without a token.

        Args:
            request: the request, whose results go to ``publish``.
            wave: the wave for which the front end has sent the request; 0 without waves.

        Raises:
            EngineDead: the core's thread has ended.
        """

        def run() -> None:
            if self._admits:
                self._scheduler.add(request)
                self._on_request(wave)
            else:
                self._scheduler.reject(request)
                self._on_rejected(wave)

        self._put(run)

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Runs ``action`` in the core's thread between two steps; returns a future of its result.

        The future raises an :class:`EngineError` that ``action`` raises. :class:`EngineDead`, or
        any other error, ends the core.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = action()
            except EngineDead:
                raise
            except EngineError as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._put(run, future)
        return future

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """Stops generation; the future is done when no step runs and none will start."""
        future: Future[None] = Future()

        def run() -> None:
            self._mode = mode
            self._clear_cache = self._clear_cache or clear_cache
            if mode == "abort":
                self._scheduler.abort(lambda _: True)
            self._pausing.append(future)
            self._on_pause_requested()
            self._settle_pause()

        self._put(run, future)
        return future

    def admit(self, *, open: bool) -> Future[None]:  # noqa: A002 - as in the protocol
        """Opens or closes admission; while it is closed, new requests end without a token."""

        def run() -> None:
            self._admits = open

        return self.call(run)

    def abort_all(self) -> Future[int]:
        """Ends every request with the tokens it has; the future's result is their number."""
        return self.call(lambda: self._abort(lambda _: True))

    def clear_cache(self) -> Future[None]:
        """Discards keys and values of all requests; allowed only in a pause."""

        def run() -> None:
            self.require_paused("clear_cache")
            self._scheduler.discard_cache()

        return self.call(run)

    def swap(
        self, check: Callable[[], None], take: Callable[[], None], *, clear_cache: bool
    ) -> Future[None]:
        """Changes the weights between two steps, if a check allows it.

        The future raises what ``check`` or ``take`` has raised.

        Args:
            check: called first; raises :class:`EngineError` ``called_off`` to cancel the swap.
            take: changes the weights, after ``check``. If it raises, weights may be mixed.
            clear_cache: whether requests recompute their keys and values.
        """

        def run() -> None:
            check()
            self._swap_now(take, clear_cache=clear_cache)

        return self.call(run)

    def call_off(self) -> Future[None]:
        """Does nothing, because without other ranks no swap ever waits."""
        return self.call(lambda: None)

    def probe(self, requests: Sequence[GenerationRequest]) -> Future[tuple[ProbeResult, ...]]:
        """Runs the canary's probes in a pause; requests that the pause keeps are unchanged."""

        def run() -> tuple[ProbeResult, ...]:
            self.require_paused("a probe")
            self._require_awake("a probe")
            return run_probes(
                self.model,
                requests,
                slots=self._slots,
                version=self.version,
                in_use=bool(self._scheduler.running),
                stepping=lambda: self._show("step"),
            )

        return self.call(run)

    def abort(self, request_id: str) -> None:
        """Ends one request with the tokens it has; does nothing if it has ended."""

        def run() -> None:
            self._abort(lambda request: request.id == request_id)

        self._put(run)

    def fail(self, reason: str) -> None:
        """Ends the core with this reason, as if it had crashed. Safe in any thread."""

        def run() -> None:
            raise EngineDead(reason)

        with contextlib.suppress(EngineDead):
            self._put(run)

    # Called in the core's thread, from control calls

    def require_paused(self, what: str) -> None:
        """Rejects a call unless the core is in a completed pause; ``what`` names the call.

        Raises:
            EngineError: code ``wrong_state``.
        """
        if self._mode is None or self._pausing:
            raise wrong_state(f"{what} needs a paused engine, and this engine is not paused")

    def sleep(self, level: SleepLevel) -> None:
        """Gives the model's memory back to the system.

        Raises:
            EngineError: code ``wrong_state``: there is no pause, or it has kept keys and values.
        """
        self.require_paused("sleep")
        if self._scheduler.running:
            raise wrong_state("sleep needs a pause that drops the caches, and this pause kept them")
        self.memory.sleep(level)

    def resume(self) -> None:
        """Resumes scheduling with the next step.

        Raises:
            EngineError: code ``wrong_state``: there is no pause that has returned;
                ``engine_asleep``: memory is not allocated.
        """
        self.require_paused("resume")
        self._require_awake("resume")
        self._mode = None

    def _require_awake(self, what: str) -> None:
        if self.memory.state is not ModelMemoryState.AWAKE:
            raise EngineError(
                f"{what}: the engine is {self.memory.state}", code=NackCode.ENGINE_ASLEEP
            )

    def _swap_now(self, take: Callable[[], None], *, clear_cache: bool) -> None:
        take()
        if clear_cache:
            self._scheduler.discard_cache()

    # Overridden by a core in lockstep

    def _on_request(self, wave: int) -> None:
        """Reacts to a request that was queued."""

    def _on_rejected(self, wave: int) -> None:
        """Reacts to a request that was rejected."""

    def _on_pause_requested(self) -> None:
        """Reacts to the request of a pause."""

    def _has_step(self) -> bool:
        """Returns whether the core must make a step."""
        return self._may_step()

    def _is_quiet(self) -> bool:
        """Returns whether no step will start, so that a pause is complete."""
        return not self._may_step()

    def _turn(self) -> None:
        """Makes one step."""
        self._step()

    def _wave(self) -> tuple[int, bool]:
        """Returns the wave's number and whether it runs, for the status page."""
        return 0, self._may_step()

    # The thread

    def _put(self, action: Callable[[], None], future: Future[T] | None = None) -> None:
        with self._actions_lock:
            if self._gone:
                raise EngineDead(self._gone)
            if future is not None:
                self._unanswered.add(future)  # type: ignore[arg-type] # of any result
                future.add_done_callback(self._unanswered.discard)
            self._actions.put(action)

    def _ask_to_stop(self) -> None:
        def leave() -> None:
            self._abort(lambda _: True)
            self._stopping = True

        with contextlib.suppress(EngineDead):
            self._put(leave)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._run_actions()
                    if self._has_step() and not self._stopping:
                        self._turn()
                        self._settle_pause()
        except EngineDead as error:
            self._leave(str(error))
            self._died(self._gone)
        except Exception as error:  # noqa: BLE001 - the thread ends, and all futures get the reason
            self._leave(f"the engine core crashed: {type(error).__name__}: {error}")
            self._died(self._gone)
        else:
            self._leave("the engine is closed")

    def _leave(self, reason: str) -> None:
        """Accepts no more actions; fails all futures that are not done."""
        with self._actions_lock:
            self._gone = reason
        for future in list(self._unanswered):
            future.set_exception(EngineDead(reason))

    def _run_actions(self) -> None:
        """Executes the queued actions; waits for an action if there is no step to make."""
        while not self._stopping and (not self._actions.empty() or not self._has_step()):
            if self._actions.empty():
                self._show("idle")
            action = self._actions.get()
            self._show("work")
            action()

    def _may_step(self) -> bool:
        """Returns whether a sequence may get a token."""
        if self._mode == "keep":
            return False
        admits = self._mode is None
        return bool(self._scheduler.running or (admits and self._scheduler.waiting))

    def _step(self) -> None:
        self._steps += 1
        self._show("step")
        begun_s = time.monotonic()
        self._scheduler.step(admit=self._mode is None, version=self.version)
        left_s = begun_s + self.step_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)

    def _settle_pause(self) -> None:
        """Completes pending pauses as soon as no request runs and none will start."""
        if not self._pausing or not self._is_quiet():
            return
        if self._clear_cache:
            self._scheduler.discard_cache()
            self._clear_cache = False
        for future in self._pausing:
            future.set_result(None)
        self._pausing.clear()

    def _abort(self, chosen: Callable[[GenerationRequest], bool]) -> int:
        count = self._scheduler.abort(chosen, closed=not self._admits)
        self._settle_pause()
        return count

    def _show(self, phase: CorePhase) -> None:
        """Writes the status page at the start of a phase."""
        wave, stepping = self._wave()
        flags = STEPPING if stepping else 0
        if self._mode is not None:
            flags |= LOCALLY_PAUSED if self._pausing else LOCALLY_PAUSED | GLOBALLY_PAUSED
        self.page.count(
            step=self._steps,
            wave=wave,
            flags=flags,
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
        )
        self.page.enter(phase)
