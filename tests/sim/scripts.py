"""What a simulated trainer does, as scripts: generators that yield what is to be asked.

An update's decisions are those of the library's machine, :class:`TrainerUpdate`; a script carries
out what the machine asks for, as ``trainer_agent/_update/update.py`` does.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from msgspec import structs

from bus._lora import removal_backend
from bus._manifest import NO_TENSORS
from bus._protocol.trainer.chunk_window import ChunkWindow
from bus._protocol.trainer.pause_window import PauseWindow
from bus._protocol.trainer.update import TrainerUpdate, TrainerUpdateState, UpdateRequest
from bus.errors import Refused, WavebusError, refusal
from bus.messages import (
    Abort,
    ChunkSent,
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
    UpdateStart,
    Verify,
    WeightChunkMeta,
)
from tests.sim.engine import TENSORS
from tests.sim.makers import make_arm, make_chunk, make_manifest, make_nack, make_sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus._manifest import Manifest

# A script yields requests to be answered together, or a number of milliseconds to wait.
Yielded: TypeAlias = "tuple[Message | Later, ...] | Batch | float"
Script: TypeAlias = Generator[Yielded, tuple[Message, ...], "Outcome"]
Asks: TypeAlias = "Sequence[Message | Later]"
Part: TypeAlias = Generator[Yielded, tuple[Message, ...]]
Differences: TypeAlias = Generator[Yielded, tuple[Message, ...], tuple[Differing, ...]]


@dataclass(frozen=True, slots=True)
class Later:
    """A request that is asked so long after the others of its batch."""

    message: Message
    after_ms: float


class Hearer(Protocol):
    """Hears of the requests of a batch as they are asked for and answered; what it returns is asked
    for as well, and what it raises ends the batch, with all that is not answered yet."""

    def on_due(self, message: Message) -> Asks:
        """A request that was to be asked for later is asked for now."""

    def on_answer(self, message: Message, answer: Message) -> Asks:
        """It is answered."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests whose answers somebody hears as they come. None: all are awaited, whatever comes.
    ``is_undo``: they are sent also to a broker that is missed, and nobody gives them up."""

    messages: Asks
    hearer: Hearer | None
    is_undo: bool = False


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


def _require_ack(answer: Message) -> GroupAck:
    if isinstance(answer, Nack):
        raise refusal(answer)
    assert isinstance(answer, GroupAck)
    return answer


class Acks:
    """Hears acknowledgements, and takes none for a refusal."""

    def on_due(self, message: Message) -> Asks:
        del message
        return ()

    def on_answer(self, message: Message, answer: Message) -> Asks:
        del message
        _require_ack(answer)
        return ()


class Steps(Acks):
    """Has the machine of an update hear the answers to its steps."""

    def __init__(self, update: TrainerUpdate) -> None:
        self.update = update

    def on_answer(self, message: Message, answer: Message) -> Asks:
        if isinstance(answer, Nack):
            return self.update.on_refused(message, refusal(answer))
        return self.update.on_acked(message, _require_ack(answer))


class Stream(Steps):
    """The chunks of an update on their way, as ``trainer_agent/_update/chunk_stream.py`` sends
    them, and behind the last one all that is left to ask for.

    Args:
        send_ms: what it takes to send one chunk; one leaves after the other.
        think_ms: what the trainer takes to fill one.
    """

    def __init__(
        self,
        update: TrainerUpdate,
        chunks: Sequence[tuple[WeightChunkMeta, ChunkSent]],
        window: ChunkWindow,
        label: str,
        *,
        now_ms: Callable[[], float],
        send_ms: float,
        think_ms: float,
    ) -> None:
        super().__init__(update)
        self._chunks = chunks
        self._window = window
        self._label = label
        self._now_ms = now_ms
        self._send_ms = send_ms
        self._think_ms = think_ms
        self._filled_ms: list[float] = []  # when each chunk is announced
        self._left_ms: list[float] = []  # and has left
        self._unanswered: Counter[int] = Counter()

    def begin(self) -> Asks:
        """The start, and chunks, if the group is paused already."""
        start = self.update.start()
        return [*start, *self._more()]

    def on_due(self, message: Message) -> Asks:
        if isinstance(message, ChunkSent):
            self._window.on_left(message.chunk)
            self._window.on_sent(message.chunk)
            if self._window.has_sent_all:
                return [*self.update.finish(), *self.update.commit(self._label, ())]
            return self._more()
        return ()

    def on_answer(self, message: Message, answer: Message) -> Asks:
        following = super().on_answer(message, answer)
        if isinstance(message, WeightChunkMeta | ChunkSent):
            self._unanswered[message.chunk] -= 1
            if not self._unanswered[message.chunk]:
                self._window.on_applied(message.chunk)
        return [*following, *self._more()]

    def _more(self) -> list[Message | Later]:
        """Chunks that there is room for, and, once engines have started, that they have left."""
        asks: list[Message | Later] = []
        now_ms = self._now_ms()
        if not self.update.takes_chunks:
            return asks
        while (seq := len(self._filled_ms)) < len(self._chunks) and self._window.has_room(seq):
            self._window.on_announced(seq)
            self._filled_ms.append(max([now_ms, *self._filled_ms[-1:]]) + self._think_ms)
            self._unanswered[seq] = 2
            asks.append(Later(self._chunks[seq][0], self._filled_ms[seq] - now_ms))
        is_loading = self.update.state is TrainerUpdateState.LOADING
        while is_loading and (seq := len(self._left_ms)) < len(self._filled_ms):
            begun_ms = max([now_ms, self._filled_ms[seq], *self._left_ms[-1:]])
            self._left_ms.append(begun_ms + self._send_ms)
            asks.append(Later(self._chunks[seq][1], self._left_ms[seq] - now_ms))
        return asks


class TrainerScripts(ABC):
    """Of one trainer. Who runs one, asks what it yields, and sends back the answers.

    Attributes:
        collective: whether engines are in one communicator with it.
        send_ms: what it takes to send one chunk; 0: the second message follows the first.
        ahead: it does not wait for answers where the broker can: it asks for pause and start
            together, and for finish, commit and resume with the last chunk.
        canary: it has engines run a probe, and leaves out who differs. Not with ``ahead``.
        staging: how updates of all engines are staged, where they can be.
        quorum: without so many DP groups, no update of all engines is committed.
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
        self.quorum = 1
        self.window = PauseWindow()
        self.version = 0  # the greatest that the bus has told of
        self.updating: TrainerUpdate | None = None  # the update that was begun last
        self._count = itertools.count(1)
        self._transfers = itertools.count(1)
        self._open = False
        self._communicator = 0
        self._sender = self._opening = ""  # the params of the open transport, and its id
        self._stale: StaleEngines | None = None  # who catches up by what is under way

    @abstractmethod
    def now_ms(self) -> float:
        """The time, as its process sees it."""

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
        parts: Sequence[Sequence[str]] = (),
    ) -> Script:
        """A whole update: weights named ``payload``, in chunks, with a pause around it.

        ``think_ms`` is what the trainer takes between two steps. With ``parts``, further tensors
        are armed one part after the other.
        """
        update = self._new_update(mode, target)
        manifest = make_manifest(tensors, chunk_bytes=chunk_bytes)
        manifest = replace(manifest, is_open=bool(parts))
        further = [make_manifest(part, chunk_bytes=chunk_bytes) for part in parts]
        try:
            yield from self._send_weights(update, payload, manifest, think_ms, verify, further)
        except WavebusError as error:
            yield from self._undo(*update.undo())
            return Outcome("update", update.id, error=error)
        return _outcome_of("staged" if update.is_staged else "update", update, payload)

    def remove(self, adapter: str) -> Script:
        """The removal of an adapter, over a transport of its own, which brings nothing."""
        update = self._new_update()
        backend, self._open = removal_backend(adapter), False
        try:
            opening = self.new_update_id()
            yield from self._step(TransferInit(opening, backend, b"", 0, 0, {}, ()))
            arm = update.arm(
                NO_TENSORS,
                version=self.version,
                label=adapter,
                backend=backend,
                communicator=0,
                transfer=opening,
            )
            yield from self._ask_for(update, arm)
            yield from self._ask_for(update, update.start())
            yield from self._ask_for(update, update.finish())
            yield from self._ask_for(update, update.commit(adapter, ()))
        except WavebusError as error:
            yield from self._undo(*update.undo())
            return Outcome("remove", update.id, error=error)
        return _outcome_of("remove", update, 0)

    def _new_update(self, mode: PauseMode = "keep", target: Target = "model") -> TrainerUpdate:
        request = UpdateRequest(
            self._pause_message(self.new_update_id(), mode),
            target,
            None if self.canary else self.staging,
            has_canary=self.canary,
            quorum=1 if self._stale else self.quorum,
            default_quorum=False,
            catch_up=self._stale,
        )
        self.updating = TrainerUpdate(self.window, request)
        return self.updating

    def _send_weights(
        self,
        update: TrainerUpdate,
        payload: int,
        manifest: Manifest,
        think_ms: float,
        verify: Verify,
        parts: Sequence[Manifest] = (),
    ) -> Part:
        yield from self._arm(update, payload, manifest)
        if think_ms:
            yield think_ms
        label = f"p{payload}"
        if self.pipelined and not (self.canary or parts):
            yield from self._stream(update, payload, manifest, think_ms, verify, label)
            return
        yield from self._ask_for(update, update.start())
        yield from self._send_all(update.id, payload, manifest, think_ms, verify)
        for part in parts:
            yield from self._ask_for(update, update.extend(manifest, part))
            before, manifest = manifest.chunks, manifest.join(part)
            yield from self._send_all(update.id, payload, manifest, think_ms, verify, before)
        yield from self._ask_for(update, update.finish())
        differing = (yield from self._differing(update, payload)) if self.canary else ()
        yield from self._ask_for(update, update.commit(label, differing))

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
        return self._hold(level, (payload,) if payload else (), hold_ms, verify)

    def update_in_pause(self, *payloads: int, hold_ms: float = 100.0) -> Script:
        """Updates of all weights in one pause, and so long before each."""
        return self._hold(None, payloads, hold_ms, "full")

    def _hold(
        self, level: SleepLevel | None, payloads: tuple[int, ...], hold_ms: float, verify: Verify
    ) -> Script:
        what, think_ms = ("asleep", hold_ms) if level else ("pause", 0.0)
        pause_id = self.new_update_id()
        update = self._new_update()
        try:
            yield from self._pause_step(self._pause_message(pause_id, "keep"))
            try:
                if level:
                    yield from self._step(Sleep(pause_id, level))
                if hold_ms:
                    yield hold_ms
                for number, payload in enumerate(payloads):
                    if number:
                        update = self._new_update()
                        yield hold_ms
                    yield from self._send_weights(
                        update, payload, make_manifest(), think_ms, verify
                    )
            except WavebusError:
                yield from self._undo(*update.undo())
                yield from self._undo(Resume(pause_id))
                raise
            yield from self._pause_step(Resume(pause_id))
        except WavebusError as error:
            return Outcome(what, update.id, error=error)
        return _outcome_of(what, update, payloads[-1] if payloads else 0)

    def pause(self, *, hold_ms: float = 100.0, mode: PauseMode = "keep") -> Script:
        """A pause for so long, and a resume."""
        update_id = self.new_update_id()
        try:
            yield from self._pause_step(self._pause_message(update_id, mode))
            try:
                if hold_ms:
                    yield hold_ms
            except WavebusError:
                yield from self._undo(Resume(update_id))
                raise
            yield from self._pause_step(Resume(update_id))
        except WavebusError as error:
            return Outcome("pause", update_id, error=error)
        return Outcome("pause", update_id)

    def hasty(self, payload: int, *, digest: str = "") -> Script:
        """An update whose start does not wait for ARMED; whatever came of it is given up. With a
        ``digest``, ARM says that its manifest has that one."""
        update_id = self.new_update_id()
        manifest = make_manifest()
        try:
            if not self._open:
                yield from self._reopen()
            yield from self._step(self._pause_message(update_id, "keep"))
            arm = make_arm(
                update_id, manifest, communicator=self._communicator, transfer=self._opening
            )
            arm = structs.replace(arm, digest=digest or arm.digest)
            answers = yield (arm, UpdateStart(update_id))
            failed: WavebusError | None = None
            try:
                if all(isinstance(answer, GroupAck) for answer in answers):
                    yield from self._send_all(update_id, payload, manifest, 0.0, "full")
            except WavebusError as error:
                failed = error
            yield from self._undo(
                Abort(update_id, "the trainer aborted the update"), Resume(update_id)
            )
            if failed is not None:
                raise failed
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

    def close_transport(self) -> None:
        """The next update opens its transport anew, as for larger chunks."""
        self._open = False

    def new_update_id(self) -> str:
        return f"u{next(self._count)}-{self.boot:x}"

    # -- parts of scripts -----------------------------------------------------------

    def _differing(self, update: TrainerUpdate, payload: int) -> Differences:
        update.probe()
        (answer,) = yield (Probe(update.id, ((1, 2),), 4, update.id),)
        if isinstance(answer, Nack):
            raise refusal(answer)
        assert isinstance(answer, ProbeReport)
        update.on_probed()
        differing = tuple(
            Differing(each.engine, 0, str(payload), str(each.results[0].tokens))
            for each in answer.engines
            if set(each.results[0].tokens) != {payload}
        )
        if len(differing) == len(answer.engines):
            nack = make_nack(NackCode.CANARY_FAILED, step="probe", update_id=update.id)
            raise refusal(nack)
        return differing

    def _arm(self, update: TrainerUpdate, payload: int, manifest: Manifest) -> Part:
        """Armed; once more, with the transport opened anew, if somebody has joined since."""
        for is_last in (False, True):
            if not self._open:
                yield from self._reopen()
            ask = update.arm(
                manifest,
                version=self.version,
                label=f"p{payload}",
                backend="sim",
                communicator=self._communicator,
                transfer=self._opening,
            )
            try:
                yield from self._ask_for(update, ask)
            except Refused as refused:
                if refused.code is not NackCode.TRANSFER_CLOSED or is_last:
                    raise
                self._open = False
            else:
                return

    @property
    def _scope(self) -> tuple[str, ...]:
        return self._stale.dp_groups if self._stale else ()

    def _reopen(self) -> Part:
        self._open = False
        self._communicator = 0
        if self.collective:
            (plan,) = yield (PlanTransfer(self._scope),)
            if isinstance(plan, Nack):
                raise refusal(plan)
            assert isinstance(plan, TransferPlan)
            self._communicator = plan.communicator
        self._sender = f"{self.boot:x}-{next(self._transfers)}"
        self._opening = self.new_update_id()
        params, scope = self._sender.encode(), self._scope
        yield from self._step(
            TransferInit(self._opening, "sim", params, self._communicator, 0, {}, scope)
        )
        self._open = True

    def _stream(
        self,
        update: TrainerUpdate,
        payload: int,
        manifest: Manifest,
        think_ms: float,
        verify: Verify,
        label: str,
    ) -> Part:
        """All from the start to the commit, with nothing awaited that the broker can await."""
        stream = Stream(
            update,
            [
                (
                    make_chunk(update.id, manifest, number, payload, self._sender),
                    make_sent(update.id, manifest, number, payload, verify=verify),
                )
                for number in range(manifest.chunks)
            ],
            ChunkWindow(manifest.chunks, self.prefetch_depth, frees_early=self.collective),
            label,
            now_ms=self.now_ms,
            send_ms=self.send_ms,
            think_ms=think_ms,
        )
        yield from self._ask_together(stream.begin(), stream)

    def _send_all(
        self,
        update_id: str,
        payload: int,
        manifest: Manifest,
        think_ms: float,
        verify: Verify,
        begin: int = 0,
    ) -> Part:
        """All chunks from ``begin`` on, ``prefetch_depth`` at a time."""
        for first in range(begin, manifest.chunks, self.prefetch_depth):
            if think_ms:
                yield think_ms
            batch: list[Message | Later] = []
            for place, number in enumerate(
                range(first, min(first + self.prefetch_depth, manifest.chunks))
            ):
                batch.append(make_chunk(update_id, manifest, number, payload, self._sender))
                sent = make_sent(update_id, manifest, number, payload, verify=verify)
                batch.append(Later(sent, (place + 1) * self.send_ms))
            yield from self._ask_together(batch, Acks())

    def _pause_message(self, update_id: str, mode: PauseMode) -> PauseLocal:
        return PauseLocal(
            update_id,
            mode,
            True,
            self.lease_ms,
            self.timeout_ms,
            self.wait_ms,
            self.escalate,
            self._scope,
        )

    # -- asking ---------------------------------------------------------------------

    def _ask_for(self, update: TrainerUpdate, messages: Sequence[Message]) -> Part:
        """Ask for what the machine wants: ahead, or one after the other."""
        for batch in [messages] if self.pipelined else [[message] for message in messages]:
            yield from self._ask_together(batch, Steps(update))

    def _pause_step(self, message: PauseLocal | Resume) -> Part:
        """As ``Steps.resume_on_failure`` of the library."""
        try:
            yield from self._step(message)
        except WavebusError as error:
            yield from self._undo(*self.window.undo(message.update_id, error))
            raise

    def _step(self, message: Message) -> Part:
        yield from self._ask_together([message], Acks())

    def _ask_together(self, messages: Asks, hearer: Hearer) -> Part:
        if messages:
            yield Batch(messages, hearer)

    def _undo(self, *messages: Abort | Resume) -> Part:
        """What fails here, the broker mends."""
        for message in messages:
            self.window.on_over(message)
        if messages:
            with contextlib.suppress(Refused):
                yield Batch(messages, None, is_undo=True)


def _outcome_of(what: str, update: TrainerUpdate, payload: int) -> Outcome:
    done = update.committed
    if done is None:
        return Outcome(what, update.id)
    target = update.request.target
    return Outcome(what, update.id, done.version, payload, done.excluded, None, target)
