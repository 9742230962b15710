"""A trainer, simulated: scripts of updates and pauses, asked step by step until answered.

It mirrors ``trainer_agent/agent.py``: a request keeps its id and is sent again until
it is answered; a trainer that was replaced while it held a pause stops; whoever fails
in the middle aborts and resumes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from bus.errors import Refused, UpdateFailed, WavebusError, refusal
from bus.messages import (
    Abort,
    Commit,
    Envelope,
    Escalation,
    GroupAck,
    Heartbeat,
    Join,
    Message,
    Nack,
    NackCode,
    PauseLocal,
    PauseMode,
    PlanTransfer,
    Resume,
    Sleep,
    SleepLevel,
    Step,
    TransferInit,
    TransferPlan,
    UpdateFinish,
    UpdateStart,
    Verify,
    Wake,
)
from bus.protocol.link import LinkConfig, LinkState
from bus.runtime.peer import Peer, route_of
from bus.testing.makers import make_arm, make_chunk, make_manifest, make_nack, make_sent
from bus.testing.sim_engine import TENSORS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bus.manifest import Manifest
    from bus.runtime.base import Handle, Scheduler
    from bus.runtime.memory import MemoryNetwork

# A script yields requests to be answered together, or a number of milliseconds to wait.
Yielded: TypeAlias = tuple["Message | Later", ...] | float
Script: TypeAlias = Generator[Yielded, tuple[Message, ...], "Outcome"]
Steps: TypeAlias = Generator[Yielded, tuple[Message, ...], GroupAck]


@dataclass(frozen=True, slots=True)
class Later:
    """A request that is asked so long after the others of its batch."""

    message: Message
    after_ms: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a script ended: ``version`` is what was committed, 0 if nothing was."""

    what: str
    update_id: str
    version: int = 0
    payload: int = 0
    excluded: tuple[str, ...] = ()
    error: WavebusError | None = None


@dataclass(slots=True)
class Request:
    """One request. It is asked from ``asked_ms`` on."""

    message: Message
    msg_id: int
    asked_ms: float
    answered_ms: float | None = None
    answer: Message | None = None
    sent: int = 0


class SimTrainer:
    """One trainer on the bus; one script at a time.

    Attributes:
        window: the pause that the trainer was told of and has not asked to end, and
            the epoch in which it was told.
        requests: all that was ever asked, in order.
        outcomes: how the scripts ended.
        nacks: every NACK that came, by its code.
        on_told: called with every answer, as it arrives.
        collective: whether engines are in one communicator with it.
        send_ms: what it takes to send one chunk; 0: the second message follows the first.
    """

    def __init__(
        self,
        name: str,
        *,
        network: MemoryNetwork,
        scheduler: Scheduler,
        boot: int,
        group: str = "policy",
        resend_ms: float = 1000.0,
        lease_ms: int = 10_000,
        timeout_ms: int = 60_000,
        wait_ms: int = 0,
        escalate: Escalation = "keep",
        depth: int = 2,
        link_config: LinkConfig | None = None,
        on_told: Callable[[Message], None] = lambda _answer: None,
    ) -> None:
        self.name = name
        self.boot = boot
        self.group = group
        self.lease_ms = lease_ms
        self.timeout_ms = timeout_ms
        self.wait_ms = wait_ms
        self.escalate = escalate
        self.depth = depth
        self.alive = True
        self.window: tuple[str, int] | None = None
        self.requests: list[Request] = []
        self.outcomes: list[Outcome] = []
        self.nacks: Counter[NackCode] = Counter()
        self.on_told = on_told
        self.collective = False
        self.send_ms = 0.0
        self._scheduler = scheduler
        self._resend_ms = resend_ms
        self._resend_due_ms = 0.0
        self._held: tuple[str, int] | None = None
        self._script: Script | None = None
        self._waiting: dict[int, Request] = {}
        self._batch: list[Request] = []
        self._timer: Handle | None = None
        self._count = itertools.count(1)
        self._transfers = itertools.count(1)
        self._open = False
        self._communicator = 0
        self.peer = Peer(
            name=name,
            group=group,
            boot=boot,
            transport=network.client(route_of(name, boot)),
            scheduler=scheduler,
            join=lambda: Join("trainer", "sim", 1, None, None),
            beat=lambda: Heartbeat("running", 0, 0, ""),
            on_message=self._on_message,
            on_state=self._on_state,
            link_config=link_config,
        )

    @property
    def route(self) -> bytes:
        """The network's name of this life."""
        return route_of(self.name, self.boot)

    @property
    def joined(self) -> bool:
        return self.peer.link.state is LinkState.JOINED

    @property
    def busy(self) -> bool:
        """Whether a script runs."""
        return self._script is not None

    @property
    def waiting(self) -> list[Request]:
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
        assert self._script is None, f"{self.name} runs a script already"
        self._script = script
        self._advance(None)

    def update(
        self,
        payload: int,
        *,
        tensors: Sequence[str] = TENSORS,
        chunk_bytes: int = 16,
        mode: PauseMode = "keep",
        think_ms: float = 0.0,
        verify: Verify = "full",
    ) -> Script:
        """A whole update: weights named ``payload``, in chunks, with a pause around it.

        ``think_ms`` is what the trainer takes between two steps.
        """
        update_id = self.new_update_id()
        manifest = make_manifest(tensors, chunk_bytes=chunk_bytes)
        try:
            armed = yield from self._fit(update_id, payload, manifest, mode)
            if think_ms:
                yield think_ms
            try:
                if self._held is None:
                    yield from self._pause(update_id, mode)
            except WavebusError:
                yield from self._undo(update_id, resume=False)
                raise
            try:
                done = yield from self._load(update_id, payload, armed, manifest, think_ms, verify)
            except WavebusError:
                yield from self._undo(update_id, resume=True)
                raise
            yield from self._resume(update_id)
        except WavebusError as error:
            return Outcome("update", update_id, error=error)
        return Outcome("update", update_id, done.version, payload, done.excluded)

    def asleep(
        self,
        level: SleepLevel,
        *,
        payload: int = 0,
        hold_ms: float = 100.0,
        verify: Verify = "full",
    ) -> Script:
        """A sleep for so long; with a payload, in it, an update of all weights."""
        pause_id = self.new_update_id()
        update_id = self.new_update_id()
        manifest = make_manifest()
        done = None
        try:
            yield from self._pause(pause_id, "keep")
            try:
                yield from self._step(Sleep(pause_id, level))
                if hold_ms:
                    yield hold_ms
                if payload:
                    yield from self._woken(pause_id)
                    armed = yield from self._armed(update_id, payload, manifest)
                    done = yield from self._load(
                        update_id, payload, armed, manifest, hold_ms, verify
                    )
            except WavebusError:
                yield from self._undo(update_id, resume=False)
                with contextlib.suppress(Refused):
                    yield from self._resume(pause_id)
                raise
            yield from self._resume(pause_id)
        except WavebusError as error:
            return Outcome("asleep", update_id, error=error)
        if done is None:
            return Outcome("asleep", update_id)
        return Outcome("asleep", update_id, done.version, payload, done.excluded)

    def pause(self, *, hold_ms: float = 100.0, mode: PauseMode = "keep") -> Script:
        """A pause for so long, and a resume."""
        update_id = self.new_update_id()
        try:
            yield from self._pause(update_id, mode)
            if hold_ms:
                yield hold_ms
            yield from self._resume(update_id)
        except WavebusError as error:
            return Outcome("pause", update_id, error=error)
        return Outcome("pause", update_id)

    def hasty(self, payload: int) -> Script:
        """An update whose start does not wait for ARMED; whatever came of it is given up."""
        update_id = self.new_update_id()
        manifest = make_manifest()
        try:
            if not self._open:
                yield from self._reopen()
            yield from self._pause(update_id, "keep")
            arm = make_arm(update_id, manifest, communicator=self._communicator)
            answers = yield (arm, UpdateStart(update_id))
            if all(isinstance(answer, GroupAck) for answer in answers):
                yield from self._send_all(update_id, payload, manifest, 0.0, "full")
            yield from self._undo(update_id, resume=True)
            for answer in answers:
                _checked(answer)
        except WavebusError as error:
            return Outcome("hasty", update_id, error=error)
        return Outcome("hasty", update_id)

    def ask(self, *messages: Message) -> Script:
        """These requests, all at once."""
        answers = yield messages
        for answer in answers:
            if isinstance(answer, Nack):
                return Outcome("ask", "", error=refusal(answer))
        return Outcome("ask", "")

    def new_update_id(self) -> str:
        return f"u{next(self._count)}-{self.boot:x}"

    # -- parts of scripts -----------------------------------------------------------

    def _fit(self, update_id: str, payload: int, manifest: Manifest, mode: PauseMode) -> Steps:
        """Armed, if need be after a wake: a trainer that is gone may have left one asleep."""
        try:
            return (yield from self._armed(update_id, payload, manifest))
        except Refused as refused:
            if refused.code is not NackCode.ENGINE_ASLEEP:
                raise
        yield from self._pause(update_id, mode)
        try:
            yield from self._woken(update_id)
            return (yield from self._armed(update_id, payload, manifest))
        except WavebusError:
            yield from self._undo(update_id, resume=True)
            raise

    def _woken(self, pause_id: str) -> Steps:
        return (yield from self._step(Wake(pause_id)))

    def _load(
        self,
        update_id: str,
        payload: int,
        armed: GroupAck,
        manifest: Manifest,
        think_ms: float,
        verify: Verify,
    ) -> Steps:
        """From the start to the commit."""
        yield from self._step(UpdateStart(update_id))
        yield from self._send_all(update_id, payload, manifest, think_ms, verify)
        yield from self._step(UpdateFinish(update_id))
        return (yield from self._step(Commit(update_id, armed.version, f"p{payload}")))

    def _armed(self, update_id: str, payload: int, manifest: Manifest) -> Steps:
        if not self._open:
            yield from self._reopen()
        label = f"p{payload}"
        arm = make_arm(update_id, manifest, label=label, communicator=self._communicator)
        try:
            return (yield from self._step(arm))
        except Refused as refused:
            if refused.code is not NackCode.TRANSFER_CLOSED:
                raise
        yield from self._reopen()
        arm = make_arm(update_id, manifest, label=label, communicator=self._communicator)
        return (yield from self._step(arm))

    def _reopen(self) -> Steps:
        self._open = False
        self._communicator = 0
        if self.collective:
            (plan,) = yield (PlanTransfer(),)
            if isinstance(plan, Nack):
                raise refusal(plan)
            assert isinstance(plan, TransferPlan)
            self._communicator = plan.communicator
        params = f"{self.boot:x}-{next(self._transfers)}".encode()
        init = TransferInit(self.new_update_id(), "sim", params, self._communicator, 0, {})
        done = yield from self._step(init)
        self._open = True
        return done

    def _send_all(
        self, update_id: str, payload: int, manifest: Manifest, think_ms: float, verify: Verify
    ) -> Generator[Yielded, tuple[Message, ...]]:
        for first in range(0, manifest.chunks, self.depth):
            numbers = range(first, min(first + self.depth, manifest.chunks))
            if think_ms:
                yield think_ms
            self._check_window(update_id)
            batch: list[Message | Later] = []
            for place, k in enumerate(numbers):
                batch.append(make_chunk(update_id, manifest, k, payload))
                sent = make_sent(update_id, manifest, k, payload, verify=verify)
                batch.append(Later(sent, (place + 1) * self.send_ms))
            answers = yield tuple(batch)
            for answer in answers:
                _checked(answer)

    def _pause(self, update_id: str, mode: PauseMode) -> Steps:
        ask = PauseLocal(
            update_id, mode, True, self.lease_ms, self.timeout_ms, self.wait_ms, self.escalate
        )
        done = yield from self._step(ask)
        self._held = (update_id, self.peer.link.epoch)
        return done

    def _resume(self, update_id: str) -> Steps:
        try:
            return (yield from self._step(Resume(update_id)))
        finally:
            self._held = None

    def _undo(self, update_id: str, *, resume: bool) -> Generator[Yielded, tuple[Message, ...]]:
        """What fails here, the broker mends."""
        with contextlib.suppress(Refused):
            # Whoever holds the pause now: an update that nobody goes on with stands in the way.
            (answer,) = yield (Abort(update_id, "the trainer gave up"),)
            _checked(answer)
        if resume:
            with contextlib.suppress(Refused):
                yield from self._resume(update_id)

    def _step(self, message: Message) -> Steps:
        self._check_window(getattr(message, "update_id", ""))
        (answer,) = yield (message,)
        return _checked(answer)

    def _check_window(self, update_id: str) -> None:
        if self._held is not None and self._held[1] != self.peer.link.epoch:
            self._held = None
            raise UpdateFailed(make_nack(NackCode.FENCED, step="update", update_id=update_id))

    # -- asking -----------------------------------------------------------------

    def _advance(self, answers: tuple[Message, ...] | None) -> None:
        script = self._script
        assert script is not None
        refused = self.peer.link.refusal if self.peer.link.state is LinkState.REFUSED else None
        try:
            if refused is not None:
                yielded = script.throw(refusal(refused))
            elif answers is None:
                yielded = next(script)
            else:
                yielded = script.send(answers)
        except StopIteration as stop:
            self._script = None
            self.outcomes.append(stop.value)
            return
        except WavebusError as error:
            self._script = None
            self.outcomes.append(Outcome("refused", "", error=error))
            return
        if isinstance(yielded, float | int):
            self._set(yielded, lambda: self._advance(()))
            return
        now_ms = self._scheduler.now_ms()
        self._batch = []
        for each in yielded:
            later = each if isinstance(each, Later) else Later(each, 0.0)
            asked_ms = now_ms + later.after_ms
            self._batch.append(Request(later.message, self.peer.new_id(), asked_ms))
        self._waiting = {each.msg_id: each for each in self._batch}
        self.requests += self._batch
        if any(isinstance(request.message, Resume) for request in self._batch):
            self.window = None
        self._resend_due_ms = now_ms
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send until answered. The broker knows the id, and does nothing twice."""
        if self.peer.link.state is LinkState.REFUSED:
            self._waiting = {}
            self._advance(())
            return
        now_ms = self._scheduler.now_ms()
        again = now_ms >= self._resend_due_ms
        if again:
            self._resend_due_ms = now_ms + self._resend_ms
        if self.joined:
            for each in self._waiting.values():
                if each.asked_ms <= now_ms and (again or not each.sent):
                    each.sent += 1
                    self.peer.send(each.message, msg_id=each.msg_id)
        ahead = [each.asked_ms for each in self._waiting.values() if each.asked_ms > now_ms]
        self._set(min([self._resend_due_ms, *ahead]) - now_ms, self._send_waiting)

    def _set(self, after_ms: float, callback: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._scheduler.call_at(self._scheduler.now_ms() + after_ms, callback)

    def _on_message(self, envelope: Envelope, message: Message) -> None:
        if isinstance(message, Nack):
            self.nacks[message.code] += 1
        request = self._waiting.get(envelope.reply_to)
        if request is None:
            return
        if isinstance(message, Nack) and message.code in (NackCode.STALE, NackCode.NOT_JOINED):
            return
        del self._waiting[envelope.reply_to]
        request.answer = message
        request.answered_ms = self._scheduler.now_ms()
        if isinstance(message, GroupAck) and message.step is Step.PAUSE_GLOBAL:
            self.window = (message.update_id, self.peer.link.epoch)
        self.on_told(message)
        if not self._waiting:
            if self._timer is not None:
                self._timer.cancel()
            self._advance(tuple(each.answer for each in self._batch if each.answer is not None))

    def _on_state(self, state: LinkState) -> None:
        if state is not LinkState.JOINED:
            self.window = None  # it may have been replaced; the next epoch tells

    def _end_of_life(self) -> None:
        self.alive = False
        self.window = None
        self._script = None
        self._waiting = {}
        if self._timer is not None:
            self._timer.cancel()


def _checked(answer: Message) -> GroupAck:
    if isinstance(answer, Nack):
        raise refusal(answer)
    assert isinstance(answer, GroupAck)
    return answer
