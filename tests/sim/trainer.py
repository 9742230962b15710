"""A trainer, simulated: scripts of updates and pauses, asked step by step until answered.

It mirrors ``trainer_agent/_connection.py``: a request keeps its id and is sent again until it is
answered. What is asked for, the library's own machines say (:mod:`tests.sim.scripts`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bus._protocol.core.link import LinkConfig, LinkState
from bus._protocol.core.validation import by_digest
from bus._protocol.trainer.pause_window import PauseWindow
from bus._runtime.peer import PeerClient, route_of
from bus.errors import WavebusError, refusal
from bus.messages import (
    Arm,
    Envelope,
    Escalation,
    GroupAck,
    Heartbeat,
    Join,
    Message,
    Nack,
    NackCode,
    Resume,
    StaleEngines,
    Step,
)
from tests.sim.scripts import Batch, Hearer, Later, Outcome, Script, TrainerScripts

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus._runtime.interfaces import Handle, Scheduler
    from tests.sim.process import Process
    from tests.sim.scripts import Asks


@dataclass(slots=True)
class SimRequest:
    """One request. It is asked from ``asked_ms`` on."""

    message: Message
    msg_id: int
    asked_ms: float
    answered_ms: float | None = None
    answer: Message | None = None
    sent: int = 0
    is_due: bool = False


class SimTrainer(TrainerScripts):
    """One trainer on the bus; one script at a time.

    Attributes:
        window: the pause that the trainer was told of and has not asked to end, and
            the epoch in which it was told.
        requests: all that was ever asked, in order.
        outcomes: how the scripts ended.
        keep_last: it keeps the model's weights of its last update, and brings engines to their
            version by itself; what it is told to run meanwhile, follows.
        kept: the version of these, and their payload.
        catch_ups: how these ended.
        nacks: every NACK that came, by its code.
        on_told: called with every answer, as it arrives.
    """

    def __init__(
        self,
        name: str,
        *,
        process: Process,
        boot: int,
        group: str = "policy",
        resend_ms: float = 1000.0,
        lease_ms: int = 10_000,
        timeout_ms: int = 60_000,
        wait_ms: int = 0,
        escalate: Escalation = "keep",
        prefetch_depth: int = 2,
        link_config: LinkConfig | None = None,
        on_answer: Callable[[Message], None] = lambda _answer: None,
    ) -> None:
        super().__init__(
            boot,
            lease_ms=lease_ms,
            timeout_ms=timeout_ms,
            wait_ms=wait_ms,
            escalate=escalate,
            prefetch_depth=prefetch_depth,
        )
        self.name = name
        self.process = process
        self.group = group
        self.alive = True
        self.pause_window: tuple[str, int] | None = None
        self.requests: list[SimRequest] = []
        self.outcomes: list[Outcome] = []
        self.keep_last = False
        self.kept = (0, 0)
        self.catch_ups: list[Outcome] = []
        self.nacks: Counter[NackCode] = Counter()
        self.on_answer = on_answer
        self._scheduler: Scheduler = process
        self._resend_ms = resend_ms
        self._resend_due_ms = 0.0
        self._script: Script | None = None
        self._next: Script | None = None
        self._is_catching_up = False
        self._waiting: dict[int, SimRequest] = {}
        self._armed: set[str] = set()  # digests of manifests
        self._batch: list[SimRequest] = []
        self._hearer: Hearer | None = None  # of the batch
        self._is_undoing = False
        self._timer: Handle | None = None
        self.peer = PeerClient(
            name=name,
            group=group,
            boot=boot,
            transport=process.client(route_of(name, boot)),
            scheduler=process,
            join=lambda: Join("trainer", "sim", 1, None, None),
            beat=lambda: Heartbeat("running", self.kept[0], 0, ""),
            on_message=self._on_message,
            on_state=self._on_state,
            link_config=link_config,
        )

    @property
    def route(self) -> bytes:
        """The network's name of this life."""
        return route_of(self.name, self.boot)

    @property
    def epoch(self) -> int:
        return self.peer.link.epoch

    def now_ms(self) -> float:
        return self._scheduler.now_ms()

    @property
    def is_joined(self) -> bool:
        return self.peer.link.state is LinkState.JOINED

    @property
    def is_busy(self) -> bool:
        """Whether a script runs, or waits for a catch-up to end."""
        return self._next is not None or (self._script is not None and not self._is_catching_up)

    @property
    def unanswered(self) -> list[SimRequest]:
        """What is asked and not yet answered."""
        return list(self._waiting.values())

    def start(self) -> None:
        """Begin to join."""
        self.peer.start()

    def kill(self) -> None:
        """The process is gone."""
        self.peer.kill()
        self._end_of_life()

    def leave(self, reason: str = "closed") -> None:
        """Leave the bus in order, and end."""
        self.peer.close(reason)
        self._end_of_life()

    # -- scripts ----------------------------------------------------------------

    def run(self, script: Script) -> None:
        """Begin a script; :attr:`outcomes` has its end."""
        if self._is_catching_up:
            assert self._next is None
            self._next = script
            return
        assert self._script is None, f"{self.name} runs a script already"
        self._script = script
        self.process.run(lambda: self._advance(None))

    def cancel(self) -> None:
        """Give the script up where it is: nobody waits for its answers any more."""
        self._script = self._next = None
        self._is_catching_up = False
        self._waiting = {}
        self.window = PauseWindow()
        if self._timer is not None:
            self._timer.cancel()

    def give_up(self) -> None:
        """The task that runs the script is cancelled: it undoes what it has begun."""
        self.process.run(lambda: self._interrupt(WavebusError("the trainer gives up")))

    @property
    def can_give_up(self) -> bool:
        """Whether a script runs that is not undoing anything yet."""
        return self.alive and self._script is not None and not self._is_undoing

    def _interrupt(self, error: WavebusError) -> None:
        if self.can_give_up:
            self._waiting = {}
            self._end_batch(error)

    # -- asking -----------------------------------------------------------------

    def _advance(
        self, answers: tuple[Message, ...] | None, error: WavebusError | None = None
    ) -> None:
        script = self._script
        assert script is not None
        refused = self.peer.link.refusal if self.peer.link.state is LinkState.REFUSED else None
        try:
            if refused is not None:
                yielded = script.throw(refusal(refused))
            elif error is not None:
                yielded = script.throw(error)
            elif answers is None:
                yielded = next(script)
            else:
                yielded = script.send(answers)
        except StopIteration as stop:
            self._on_script_end(stop.value)
            return
        except WavebusError as unhandled:
            self._on_script_end(Outcome("refused", "", error=unhandled))
            return
        if isinstance(yielded, float | int):
            self._is_undoing = False
            self._set_timer(yielded, lambda: self._advance(()))
            return
        batch = yielded if isinstance(yielded, Batch) else Batch(yielded, None)
        self._batch, self._waiting, self._hearer = [], {}, batch.hearer
        self._is_undoing = batch.is_undo
        self._resend_due_ms = self.now_ms()
        self._continue(lambda: batch.messages)

    def _continue(self, following: Callable[[], Asks]) -> None:
        """Ask for what follows in the batch; what is raised ends it. In a pause, all is asked for
        only as the trainer that made it."""
        now_ms = self.now_ms()
        try:
            asks = [each if isinstance(each, Later) else Later(each, 0.0) for each in following()]
            if self._hearer is not None:
                for each in asks:
                    self.window.on_asked(each.message, self.epoch)
        except WavebusError as error:
            self._waiting = {}
            self._end_batch(error)
            return
        new = [SimRequest(e.message, self.peer.new_id(), now_ms + e.after_ms) for e in asks]
        self._batch += new
        self.requests += new
        self._waiting |= {request.msg_id: request for request in new}
        if any(isinstance(request.message, Resume) for request in new):
            self.pause_window = None
        if not self._waiting:
            self._end_batch(None)
        elif new:
            self._send_waiting()

    def _end_batch(self, error: WavebusError | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        answers = tuple(each.answer for each in self._batch if each.answer is not None)
        self._advance(answers, error)

    def _on_script_end(self, outcome: Outcome) -> None:
        self._script = None
        if self._is_catching_up:
            self._is_catching_up = False
            self.catch_ups.append(outcome)
            following, self._next = self._next, None
            if following is not None:
                self.run(following)
            return
        self.outcomes.append(outcome)
        if self.keep_last and outcome.version:
            whole = outcome.payload and outcome.target == "model"
            self.kept = (outcome.version, outcome.payload) if whole else (0, 0)

    def _catch_up(self, stale: StaleEngines) -> None:
        if self._script is None and stale.version == self.kept[0]:
            self._script, self._is_catching_up = self.catch_up(stale, self.kept[1]), True
            self.process.run(lambda: self._advance(None))

    def _send_waiting(self) -> None:
        """Send until answered. The broker knows the id, and does nothing twice."""
        if self.peer.link.state is LinkState.REFUSED:
            self._waiting = {}
            self._advance(())
            return
        now_ms = self.now_ms()
        batch, hearer = self._batch, self._hearer
        for each in batch:
            if hearer is None or each.is_due or each.asked_ms > now_ms:
                continue
            each.is_due = True
            self._continue(partial(hearer.on_due, each.message))
            if self._batch is not batch:
                return
        again = now_ms >= self._resend_due_ms
        if again:
            self._resend_due_ms = now_ms + self._resend_ms
        if self.is_joined or self._is_undoing:  # a broker that is missed may hear all the same
            for each in self._waiting.values():
                if each.asked_ms <= now_ms and (again or not each.sent):
                    each.sent += 1
                    is_known = getattr(each.message, "digest", "") in self._armed
                    sent = by_digest(each.message) if is_known or each.sent > 1 else each.message
                    self.peer.send(sent, msg_id=each.msg_id)
        ahead = [each.asked_ms for each in self._waiting.values() if each.asked_ms > now_ms]
        self._set_timer(min([self._resend_due_ms, *ahead]) - now_ms, self._send_waiting)

    def _set_timer(self, after_ms: float, callback: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._scheduler.call_at(self._scheduler.now_ms() + after_ms, callback)

    def _on_message(self, envelope: Envelope, message: Message) -> None:
        if isinstance(message, StaleEngines) and self.alive:
            self._catch_up(message)
        if isinstance(message, Nack):
            self.nacks[message.code] += 1
            if message.step == Step.RESUME and not envelope.reply_to:
                self.window.on_no_engines(message.update_id)
                if self.pause_window is not None and self.pause_window[0] == message.update_id:
                    self.pause_window = None
        request = self._waiting.get(envelope.reply_to)
        if request is None:
            return
        if isinstance(message, Nack) and message.code in (NackCode.STALE, NackCode.NOT_JOINED):
            return
        arm = request.message
        if isinstance(message, Nack) and message.code is NackCode.MANIFEST_UNKNOWN:
            self.peer.send(arm, msg_id=request.msg_id)
            return
        if isinstance(message, GroupAck) and isinstance(arm, Arm):
            self._armed.add(arm.digest)
        del self._waiting[envelope.reply_to]
        request.answer = message
        request.answered_ms = self._scheduler.now_ms()
        # A RESUME that was asked for ahead of this answer may be under way already.
        resumes = any(isinstance(each.message, Resume) for each in self._batch)
        if isinstance(message, GroupAck) and message.step is Step.PAUSE_GLOBAL and not resumes:
            self.pause_window = (message.update_id, self.peer.link.epoch)
        self.on_answer(message)
        hearer = self._hearer
        if hearer is None:
            if not self._waiting:
                self._end_batch(None)
            return
        self.window.on_over(request.message)
        if isinstance(message, GroupAck):
            self.window.on_acked(request.message, self.epoch)
            self.version = max(self.version, message.version)
        self._continue(partial(hearer.on_answer, request.message, message))

    def _on_state(self, state: LinkState) -> None:
        if state is not LinkState.JOINED:
            self.pause_window = None  # it may have been replaced; the next epoch tells

    def _end_of_life(self) -> None:
        self.alive = False
        self.process.kill()
        self.pause_window = None
        self.cancel()
