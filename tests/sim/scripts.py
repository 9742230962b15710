"""What a simulated trainer does, as scripts: generators that yield what is to be asked."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from bus.errors import Refused, UpdateFailed, WavebusError, refusal
from bus.messages import (
    Abort,
    Arm,
    Commit,
    Differing,
    Escalation,
    GroupAck,
    Message,
    Nack,
    NackCode,
    PauseLocal,
    PauseMode,
    PlanTransfer,
    Probe,
    ProbeReport,
    Resume,
    Sleep,
    SleepLevel,
    Staging,
    StaleEngines,
    Target,
    TransferInit,
    TransferPlan,
    UpdateFinish,
    UpdateStart,
    Verify,
    Wake,
)
from tests.sim.engine import TENSORS
from tests.sim.makers import make_arm, make_chunk, make_manifest, make_nack, make_sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.manifest import Manifest

# A script yields requests to be answered together, or a number of milliseconds to wait.
Yielded: TypeAlias = tuple["Message | Later", ...] | float
Script: TypeAlias = Generator[Yielded, tuple[Message, ...], "Outcome"]
Steps: TypeAlias = Generator[Yielded, tuple[Message, ...], GroupAck]
Differences: TypeAlias = Generator[Yielded, tuple[Message, ...], tuple[Differing, ...]]


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
    target: Target = "model"


class TrainerScripts(ABC):
    """Of one trainer. Who runs one, asks what it yields, and sends back the answers.

    Attributes:
        collective: whether engines are in one communicator with it.
        send_ms: what it takes to send one chunk; 0: the second message follows the first.
        ahead: it does not wait for answers where the broker can: it asks for pause and start
            together, and for finish, commit and resume with the last chunk.
        canary: it has engines run a probe, and leaves out who differs. Not with ``ahead``.
        staging: how updates of all engines are staged, where they can be.
    """

    def __init__(
        self,
        boot: int,
        *,
        lease_ms: int,
        timeout_ms: int,
        wait_ms: int,
        escalate: Escalation,
        prefetch_depth: int,
    ) -> None:
        self.boot = boot
        self.lease_ms = lease_ms
        self.timeout_ms = timeout_ms
        self.wait_ms = wait_ms
        self.escalate = escalate
        self.prefetch_depth = prefetch_depth
        self.collective = False
        self.send_ms = 0.0
        self.pipelined = False
        self.canary = False
        self.staging: Staging | None = None
        self._pause_held: tuple[str, int] | None = None  # the pause, and the epoch it was made in
        self._count = itertools.count(1)
        self._transfers = itertools.count(1)
        self._open = False
        self._communicator = 0
        self._stale: StaleEngines | None = None  # who catches up by what is under way

    @property
    @abstractmethod
    def epoch(self) -> int:
        """What the bus gave it."""

    def update(
        self,
        payload: int,
        *,
        tensors: Sequence[str] = TENSORS,
        chunk_bytes: int = 16,
        mode: PauseMode = "keep",
        think_ms: float = 0.0,
        verify: Verify = "full",
        target: Target = "model",
    ) -> Script:
        """A whole update: weights named ``payload``, in chunks, with a pause around it.

        ``think_ms`` is what the trainer takes between two steps.
        """
        update_id = self.new_update_id()
        manifest = make_manifest(tensors, chunk_bytes=chunk_bytes)
        try:
            armed = yield from self._arm_or_wake(update_id, payload, manifest, mode, target)
            if think_ms:
                yield think_ms
            started = False
            if self._staging_for(target) and not armed.why_paused:
                done = yield from self._stage(update_id, payload, armed, manifest, think_ms, verify)
                return Outcome("staged", update_id, done.version, payload, done.excluded)
            try:
                if self._pause_held is None:
                    started = self.pipelined
                    yield from self._pause(update_id, mode, start=started)
            except WavebusError:
                yield from self._undo(update_id, resume=started)
                raise
            try:
                done = yield from self._load(
                    update_id, payload, armed, manifest, think_ms, verify, started=started
                )
            except WavebusError:
                yield from self._undo(update_id, resume=True)
                raise
            if not self.pipelined:
                yield from self._resume(update_id)
        except WavebusError as error:
            return Outcome("update", update_id, error=error)
        return Outcome("update", update_id, done.version, payload, done.excluded, None, target)

    def _staging_for(self, target: Target) -> Staging | None:
        can_be = target == "model" and not self._scope and not self.canary
        return self.staging if can_be else None

    def _stage(
        self,
        update_id: str,
        payload: int,
        armed: GroupAck,
        manifest: Manifest,
        think_ms: float,
        verify: Verify,
    ) -> Steps:
        """In no pause; and nothing is to be mended."""
        try:
            yield from self._step(UpdateStart(update_id, staged=True))
            last_steps: tuple[Message, ...] = (
                UpdateFinish(update_id),
                Commit(update_id, armed.version, f"p{payload}", ()),
            )
            early = last_steps if self.pipelined else ()
            sent = yield from self._send_all(update_id, payload, manifest, think_ms, verify, early)
            if not self.pipelined:
                yield from self._step(last_steps[0])
                return (yield from self._step(last_steps[1]))
            return [_require_ack(answer) for answer in sent][-1]
        except WavebusError:
            yield from self._undo(update_id, resume=False)
            raise

    def catch_up(self, stale: StaleEngines, payload: int) -> Script:
        """These DP groups take the weights named ``payload``, as the version that they lack."""
        self._stale, self._open = stale, False
        try:
            done = yield from self.update(payload)
        finally:
            self._stale, self._open = None, False
        return replace(done, what="catch_up")

    def sleep(
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
                    yield from self._wake(pause_id)
                    armed = yield from self._arm(update_id, payload, manifest)
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
            try:
                if all(isinstance(answer, GroupAck) for answer in answers):
                    yield from self._send_all(update_id, payload, manifest, 0.0, "full")
            except WavebusError:
                yield from self._undo(update_id, resume=True)
                raise
            yield from self._undo(update_id, resume=True)
            for answer in answers:
                _require_ack(answer)
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

    def _arm_or_wake(
        self, update_id: str, payload: int, manifest: Manifest, mode: PauseMode, target: Target
    ) -> Steps:
        """Armed, if need be after a wake: a trainer that is gone may have left one asleep."""
        try:
            return (yield from self._arm(update_id, payload, manifest, target))
        except Refused as refused:
            if refused.code is not NackCode.ENGINE_ASLEEP:
                raise
        yield from self._pause(update_id, mode)
        try:
            yield from self._wake(update_id)
            return (yield from self._arm(update_id, payload, manifest, target))
        except WavebusError:
            yield from self._undo(update_id, resume=True)
            raise

    def _wake(self, pause_id: str) -> Steps:
        return (yield from self._step(Wake(pause_id)))

    def _load(
        self,
        update_id: str,
        payload: int,
        armed: GroupAck,
        manifest: Manifest,
        think_ms: float,
        verify: Verify,
        *,
        started: bool = False,
    ) -> Steps:
        """From the start to the commit; who asks ahead, has resumed then, too."""
        if not started:
            yield from self._step(UpdateStart(update_id))
        commit = Commit(update_id, armed.version, f"p{payload}", ())
        if not self.pipelined:
            yield from self._send_all(update_id, payload, manifest, think_ms, verify)
            yield from self._step(UpdateFinish(update_id))
            if self.canary:
                commit = replace(commit, differing=(yield from self._differing(update_id, payload)))
            return (yield from self._step(commit))
        assert self._pause_held is not None
        last_steps = (UpdateFinish(update_id), commit, Resume(self._pause_held[0]))
        try:
            answers = yield from self._send_all(
                update_id, payload, manifest, think_ms, verify, last_steps
            )
        finally:
            if self._pause_held is not None and self._pause_held[0] == update_id:
                self._pause_held = None
        _, committed, _ = (_require_ack(answer) for answer in answers)
        return committed

    def _differing(self, update_id: str, payload: int) -> Differences:
        (answer,) = yield (Probe(update_id, ((1, 2),), 4, update_id),)
        if isinstance(answer, Nack):
            raise refusal(answer)
        assert isinstance(answer, ProbeReport)
        differing = tuple(
            Differing(each.engine, 0, str(payload), str(each.results[0].tokens))
            for each in answer.engines
            if set(each.results[0].tokens) != {payload}
        )
        if len(differing) == len(answer.engines):
            nack = make_nack(NackCode.CANARY_FAILED, step="probe", update_id=update_id)
            raise refusal(nack)
        return differing

    def _arm(
        self, update_id: str, payload: int, manifest: Manifest, target: Target = "model"
    ) -> Steps:
        if not self._open:
            yield from self._reopen()
        label = f"p{payload}"

        def arm() -> Arm:
            number = self._communicator
            return make_arm(
                update_id,
                manifest,
                canary="keep" if self.canary else "",
                version=self._stale.version if self._stale else 0,
                label=label,
                communicator=number,
                target=target,
                scope=self._scope,
                staging=self._staging_for(target),
            )

        try:
            return (yield from self._step(arm()))
        except Refused as refused:
            if refused.code is not NackCode.TRANSFER_CLOSED:
                raise
        yield from self._reopen()
        return (yield from self._step(arm()))

    @property
    def _scope(self) -> tuple[str, ...]:
        return self._stale.dp_groups if self._stale else ()

    def _reopen(self) -> Steps:
        self._open = False
        self._communicator = 0
        if self.collective:
            (plan,) = yield (PlanTransfer(self._scope),)
            if isinstance(plan, Nack):
                raise refusal(plan)
            assert isinstance(plan, TransferPlan)
            self._communicator = plan.communicator
        params = f"{self.boot:x}-{next(self._transfers)}".encode()
        init = TransferInit(
            self.new_update_id(), "sim", params, self._communicator, 0, {}, self._scope
        )
        done = yield from self._step(init)
        self._open = True
        return done

    def _send_all(
        self,
        update_id: str,
        payload: int,
        manifest: Manifest,
        think_ms: float,
        verify: Verify,
        behind: tuple[Message, ...] = (),
    ) -> Generator[Yielded, tuple[Message, ...], tuple[Message, ...]]:
        """All chunks; with the last ones, what is to follow them. Returns the answers to that."""
        answers: tuple[Message, ...] = ()
        for first in range(0, manifest.chunks, self.prefetch_depth):
            numbers = range(first, min(first + self.prefetch_depth, manifest.chunks))
            if think_ms:
                yield think_ms
            self._check_pause(update_id)
            batch: list[Message | Later] = []
            for place, k in enumerate(numbers):
                batch.append(make_chunk(update_id, manifest, k, payload))
                sent = make_sent(update_id, manifest, k, payload, verify=verify)
                batch.append(Later(sent, (place + 1) * self.send_ms))
            if numbers[-1] + 1 == manifest.chunks:
                batch += [Later(message, len(numbers) * self.send_ms) for message in behind]
            answers = yield tuple(batch)
            for answer in answers[: 2 * len(numbers)]:
                _require_ack(answer)
            answers = answers[2 * len(numbers) :]
        return answers

    def _pause(self, update_id: str, mode: PauseMode, *, start: bool = False) -> Steps:
        """``start``: and have the update of that id start, all at once."""
        ask = PauseLocal(
            update_id,
            mode,
            True,
            self.lease_ms,
            self.timeout_ms,
            self.wait_ms,
            self.escalate,
            self._scope,
        )
        if not start:
            done = yield from self._step(ask)
            self._pause_held = (update_id, self.epoch)
            return done
        paused, started = yield (ask, UpdateStart(update_id))
        done = _require_ack(paused)
        self._pause_held = (update_id, self.epoch)
        _require_ack(started)
        return done

    def _resume(self, update_id: str) -> Steps:
        try:
            return (yield from self._step(Resume(update_id)))
        finally:
            self._pause_held = None

    def _undo(self, update_id: str, *, resume: bool) -> Generator[Yielded, tuple[Message, ...]]:
        """What fails here, the broker mends."""
        with contextlib.suppress(Refused):
            # Whoever holds the pause now: an update that nobody goes on with stands in the way.
            (answer,) = yield (Abort(update_id, "the trainer gave up"),)
            _require_ack(answer)
        if resume:
            with contextlib.suppress(Refused):
                yield from self._resume(update_id)

    def _step(self, message: Message) -> Steps:
        self._check_pause(getattr(message, "update_id", ""))
        (answer,) = yield (message,)
        return _require_ack(answer)

    def _check_pause(self, update_id: str) -> None:
        if self._pause_held is not None and self._pause_held[1] != self.epoch:
            self._pause_held = None
            raise UpdateFailed(make_nack(NackCode.FENCED, step="update", update_id=update_id))


def _require_ack(answer: Message) -> GroupAck:
    if isinstance(answer, Nack):
        raise refusal(answer)
    assert isinstance(answer, GroupAck)
    return answer
