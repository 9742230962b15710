"""The engine core: a thread that steps the model, and is asked things between steps.

Everything that touches requests, cache or parameters runs in the core's thread.
Others put work into its inbox and hold a future for the answer; the thread
empties the inbox between two steps. So whatever a call sees and does, it does
with no step running, and a pause that has returned means an idle device.

Pausing, as in vLLM:

======  ==========================  ===========================
mode    running requests            returns
======  ==========================  ===========================
keep    stay as they are            at once
wait    run to their end            when the last one has ended
abort   end with what they have     at once
======  ==========================  ===========================

While paused, new requests wait; in modes ``wait`` and ``keep`` those that had not
begun wait too. ``clear_cache`` forgets keys and values: requests kept in ``keep``
are then computed anew, over prompt and output so far, after the resume. Without it
they go on with the keys and values they had, whatever was loaded meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from bus.errors import EngineDead, EngineError
from bus.messages import NackCode
from sidecar.embedded.requests import Delta, Request, Sequence, sequences_of
from sidecar.embedded.sampling import SamplingBatch, raw_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.messages import PauseMode
    from sidecar.embedded.model import Qwen3
    from sidecar.embedded.requests import Publish

T = TypeVar("T")

# Padded tokens that one step may prefill; a longer prompt goes alone.
MAX_PREFILL_TOKENS: Final = 4096


class EngineCore:
    """Scheduler, step loop and control calls of one model.

    Args:
        model: its parameters and cache belong to the core's thread from now on.
        slots: sequences that may run at once.
        publish: called in the core's thread, at most once per step, with what came
            of it, and before the answer of a call that ended requests.
        died: called in the core's thread, once, if it crashes.
    """

    def __init__(
        self, model: Qwen3, *, slots: int, publish: Publish, died: Callable[[str], None]
    ) -> None:
        self.model = model
        self.version = 0
        self._slots = slots
        self._publish = publish
        self._died = died
        self._waiting: deque[Sequence] = deque()
        # Row i runs in slot i of the cache.
        self._rows: list[Sequence] = []
        self._batch: SamplingBatch | None = None
        self._mode: PauseMode | None = None
        self._clear_cache = False
        self._pausing: list[Future[None]] = []
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Guards the door: after the thread's end nothing may enter the inbox.
        self._door = threading.Lock()
        self._unanswered: set[Future[object]] = set()
        self._gone = ""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="wavebus-embedded", daemon=True)

    # Called from other threads

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End every request, then the thread; blocks until it is gone."""

        def leave() -> None:
            self._abort(lambda _: True)
            self._stopping = True

        with self._door:
            if not self._gone:
                self._inbox.put(leave)
        self._thread.join()

    def submit(self, request: Request) -> None:
        """Queue a request; its deltas go to ``publish``.

        Raises:
            EngineDead: the core is gone.
        """
        self._put(lambda: self._waiting.extend(sequences_of(request)))

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run ``action`` between two steps.

        An :class:`EngineError` is the caller's answer; any other error is a defect
        and ends the core.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = action()
            except EngineError as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._put(run, future)
        return future

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """Stop generation; done when no step runs and none will start."""
        future: Future[None] = Future()

        def run() -> None:
            self._mode = mode
            self._clear_cache = self._clear_cache or clear_cache
            if mode == "abort":
                self._abort(lambda _: True)
            self._pausing.append(future)
            self._settle_pause()

        self._put(run, future)
        return future

    def abort_all(self) -> Future[int]:
        """End every request with the tokens it has; how many there were."""
        return self.call(lambda: self._abort(lambda _: True))

    def abort(self, request_id: str) -> None:
        """End one request, if it is still there."""

        def run() -> None:
            self._abort(lambda request: request.id == request_id)

        self._put(run)

    # Called in the core's thread, from control calls

    def require_paused(self, what: str) -> None:
        """Refuse ``what`` unless a pause has returned and no resume came since.

        Raises:
            EngineError: code ``wrong_state``.
        """
        if self._mode is None or self._pausing:
            raise _wrong_state(f"{what} needs a paused engine, and this one is not")

    def resume(self) -> None:
        """Schedule again, from the next step on.

        Raises:
            EngineError: code ``wrong_state``, without a pause that has returned.
        """
        self.require_paused("resume")
        self._mode = None

    # The thread

    def _put(self, action: Callable[[], None], future: Future[T] | None = None) -> None:
        with self._door:
            if self._gone:
                raise EngineDead(self._gone)
            if future is not None:
                self._unanswered.add(future)  # type: ignore[arg-type] # of any result
                future.add_done_callback(self._unanswered.discard)
            self._inbox.put(action)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._serve_inbox()
                    if self._may_step():
                        self._step()
                        self._settle_pause()
        except Exception as error:  # noqa: BLE001 - the thread ends, and everyone is told why
            self._leave(f"the engine core crashed: {type(error).__name__}: {error}")
            self._died(self._gone)
        else:
            self._leave("the engine is closed")

    def _leave(self, reason: str) -> None:
        """Shut the door, and answer those who still wait."""
        with self._door:
            self._gone = reason
        for future in list(self._unanswered):
            future.set_exception(EngineDead(reason))

    def _serve_inbox(self) -> None:
        """Do what was asked; wait for something to be asked when there is no step to make."""
        while not self._stopping and (not self._inbox.empty() or not self._may_step()):
            self._inbox.get()()

    def _may_step(self) -> bool:
        if self._mode == "keep":
            return False
        return bool(self._rows or (self._waiting and self._mode is None))

    def _step(self) -> None:
        """One token for every running sequence, and for those that begin now."""
        running = len(self._rows)
        logits: list[torch.Tensor] = []
        if running:
            tokens = [sequence.tokens[-1] for sequence in self._rows]
            places = [len(sequence.tokens) - 1 for sequence in self._rows]
            logits.append(self.model.decode(tokens, places))
        if self._waiting and self._mode is None and running < self._slots:
            logits.append(self._begin())
        self._take(torch.cat(logits) if len(logits) > 1 else logits[0])

    def _begin(self) -> torch.Tensor:
        """Move waiting sequences into free slots; logits [admitted, vocab] for their next token.

        Choices of one request that begin together share one prefill.
        """
        owners: list[Sequence] = []
        owner_slots: list[int] = []
        owner_of: list[int] = []
        longest = 0
        while self._waiting and len(self._rows) < self._slots:
            sequence = self._waiting[0]
            if not owners or not _shares_prefill(owners[-1], sequence):
                longest = max(longest, len(sequence.tokens))
                if owners and (len(owners) + 1) * longest > MAX_PREFILL_TOKENS:
                    break
                owners.append(sequence)
                owner_slots.append(len(self._rows))
            owner_of.append(len(owners) - 1)
            self._rows.append(self._waiting.popleft())
        self._batch = None
        logits = self.model.prefill([s.tokens for s in owners], owner_slots)
        first = len(self._rows) - len(owner_of)
        for slot, owner in enumerate(owner_of, start=first):
            if slot != owner_slots[owner]:
                self.model.kv.move(owner_slots[owner], slot, len(owners[owner].tokens))
        return logits[owner_of]

    def _take(self, logits: torch.Tensor) -> None:
        """Sample from ``logits`` [rows, vocab], and let go who has ended."""
        rows = self._rows
        if self._batch is None:
            self._batch = SamplingBatch(
                [sequence.request.params for sequence in rows],
                [sequence.seed for sequence in rows],
                self.model.config.vocab_size,
            )
        allowed = _without_banned(logits, rows)
        tokens = self._batch.sample(allowed, [sequence.output_len for sequence in rows])
        logprobs: list[float | None] = [None] * len(rows)
        if self._batch.wants_logprobs:
            logprobs = list(raw_logprobs(logits, tokens))
        deltas: list[Delta] = []
        ended: list[int] = []
        for row, (sequence, token, logprob) in enumerate(zip(rows, tokens, logprobs, strict=True)):
            wanted = sequence.request.params.logprobs is not None
            sequence.append(token, logprob if wanted else None, self.version)
            if sequence.finish_reason:
                ended.append(row)
            if sequence.finish_reason or sequence.request.stream:
                deltas.append(sequence.delta(fresh=1))
        if ended:
            self._free(ended)
        if deltas:
            self._publish(deltas)

    def _free(self, ended: list[int]) -> None:
        """Take rows out, and keep the others dense: the last one moves into the gap."""
        for row in reversed(ended):
            last = self._rows.pop()
            if row < len(self._rows):
                self._rows[row] = last
                self.model.kv.move(len(self._rows), row, len(last.tokens) - 1)
        self._batch = None

    def _settle_pause(self) -> None:
        """Answer pauses, once nothing runs and nothing will."""
        if not self._pausing or self._may_step():
            return
        if self._clear_cache:
            self._waiting.extendleft(reversed(self._rows))
            self._rows.clear()
            self._batch = None
            self.model.kv.clear()
            self._clear_cache = False
        for future in self._pausing:
            future.set_result(None)
        self._pausing.clear()

    def _abort(self, chosen: Callable[[Request], bool]) -> int:
        """End the chosen requests' sequences; how many requests that were."""
        ended = [row for row, s in enumerate(self._rows) if chosen(s.request)]
        gone = [self._rows[row] for row in ended]
        gone += [s for s in self._waiting if chosen(s.request)]
        self._waiting = deque(s for s in self._waiting if not chosen(s.request))
        self._free(ended)
        for sequence in gone:
            sequence.finish_reason = "abort"
        if gone:
            self._publish([sequence.delta(fresh=0) for sequence in gone])
        self._settle_pause()
        return len({sequence.request.id for sequence in gone})


def _shares_prefill(owner: Sequence, sequence: Sequence) -> bool:
    """Whether both stand at the end of one prompt."""
    same = owner.request is sequence.request
    return same and not owner.output_len and not sequence.output_len


def _without_banned(logits: torch.Tensor, rows: list[Sequence]) -> torch.Tensor:
    """``logits`` with what may not be sampled yet at minus infinity."""
    banned = [(row, token) for row, s in enumerate(rows) for token in s.banned]
    if not banned:
        return logits
    index, tokens = zip(*banned, strict=True)
    allowed = logits.clone()
    allowed[torch.tensor(index), torch.tensor(tokens)] = float("-inf")
    return allowed


def _wrong_state(detail: str) -> EngineError:
    return EngineError(detail, code=NackCode.WRONG_STATE)
