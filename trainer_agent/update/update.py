"""Drives one update through its steps, for the trainer agent and for vLLM's trainer engines.

An update that was begun is committed or undone, and the trainer's other ranks are told which::

    async with updates.begin(options) as update:
        await update.arm(plan, backend, communicator, label)
        await update.release_ranks(drain)
        await update.start()            # beside and after it: chunks. Staged: without a pause
        await update.commit(label, verified)

No step waits for the answer to the one before if the broker can wait instead: the broker keeps
UPDATE_START until the group is paused, COMMIT until all engines have finished, and RESUME until
all of them serve the version. So engines wait for the broker, and not for the trainer.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

import anyio
import anyio.to_thread

import bus.log
from bus.errors import Refused, UsageError, WavebusError
from bus.protocol.trainer.update import TrainerUpdate, UpdateRequest
from trainer_agent.canary import compare
from trainer_agent.report import UpdateReport
from trainer_agent.update.rank_sync import RankZero
from trainer_agent.update.steps import ask_in_order

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
    from types import TracebackType

    from bus.messages import (
        Differing,
        EngineView,
        Message,
        StaleEngines,
        Target,
        Verify,
    )
    from trainer_agent.connection import Connection
    from trainer_agent.options import UpdateOptions
    from trainer_agent.update.plan import UpdatePlan
    from trainer_agent.update.steps import Steps
    from trainer_agent.weights.snapshot import Snapshot, WeightsCopy


class Updates:
    """A trainer's, one at a time. ``alone``: there are no other ranks. ``snapshot``: is kept, or
    outdated, by each that is committed.

    Attributes:
        last: the last one that was committed.
    """

    def __init__(
        self, connection: Connection, steps: Steps, *, alone: bool, snapshot: Snapshot | None = None
    ) -> None:
        self.last: UpdateReport | None = None
        self._snapshot = snapshot
        self._connection = connection
        self._steps = steps
        self._alone = alone
        self._begun = 0  # refused ones too: the other ranks count as well
        self._committed: list[int] = []  # versions, ascending
        self._is_busy = False
        self._warned = False
        self._last_reason = ""  # the reason for which engines were asked last

    def begin(
        self,
        options: UpdateOptions,
        target: Target = "model",
        *,
        alone: bool = False,
        catch_up: StaleEngines | None = None,
    ) -> Update:
        """Rank 0's part of the next one. It ends with :meth:`Update.end`, or as a context.

        Args:
            alone: the other ranks have no part in it, and don't count it.
            catch_up: who catches up by it, and with which version; None: it is for all.

        Raises:
            UsageError: one is under way; or a draft's has a canary.
        """
        if options.canary is not None and target != "model":
            raise UsageError("canary: a draft model changes no token: there is nothing to probe")
        update_id = self._steps.new_id()
        number = self._claim(counts=not alone)
        rank_zero = RankZero(self._connection, number, alone=alone or self._alone)
        scope = catch_up.dp_groups if catch_up else ()
        request = UpdateRequest(
            self._steps.pause_message(update_id, options.pause, scope),
            target,
            options.staging,
            has_canary=options.canary is not None,
            quorum=options.quorum_on_the_wire,
            default_quorum=options.quorum is None,
            catch_up=catch_up,
        )
        machine = TrainerUpdate(self._steps.window, request)
        return Update(machine, self, self._steps, rank_zero, options)

    @property
    def is_busy(self) -> bool:
        """Whether one is under way."""
        return self._is_busy

    @contextlib.asynccontextmanager
    async def with_all_ranks(self) -> AsyncIterator[RankZero]:
        """Rank 0's part of what is no update, but counts as one: all ranks meet the engines."""
        rank_zero = RankZero(self._connection, self._claim(), alone=self._alone)
        failed: BaseException | None = None
        try:
            yield rank_zero
        except BaseException as error:
            failed = error
            raise
        finally:
            try:
                await rank_zero.finish(0, failed)
            finally:
                self.release()

    @contextlib.contextmanager
    def as_follower(self) -> Iterator[int]:
        """Another rank's part of the next one, which has this number."""
        number = self._claim()
        try:
            yield number
        finally:
            self.release()

    def record_commit(self, report: UpdateReport, copy: WeightsCopy | None) -> UpdateReport:
        """It is the last one from now on; what is kept of it, or of none, is of it, too."""
        if self._snapshot is not None:
            self._snapshot.on_committed(report.version, copy)
            report = replace(report, kept_bytes=self._snapshot.memory_bytes)
        self.last = report
        if not self._committed or report.version > self._committed[-1]:  # else: a catch-up
            self._committed.append(report.version)
        return report

    def count_after(self, version: int) -> int:
        """How many were committed with a greater version."""
        return len(self._committed) - bisect.bisect_right(self._committed, version)

    def require_idle(self) -> None:
        """Raises ``UsageError`` if one is under way."""
        if self._is_busy:
            raise UsageError("an update is under way; await it first")

    async def warn_of_fallback(self, why_paused: str) -> None:
        """Warn, once, if updates take a pause because of an engine's version of vLLM. Engines are
        asked for it once per reason, which may be another one at first: want of memory, say."""
        if self._warned or why_paused == self._last_reason:
            return
        self._last_reason = why_paused
        engines: tuple[EngineView, ...] = ()
        with contextlib.suppress(WavebusError):  # the update goes on without the warning
            engines = await self._connection.engines()
        lacking = (each for each in engines if each.features.get("staged_updates"))
        engine = next(lacking, None)
        if engine is not None:
            self._warned = True
            bus.log.logger().warning(
                "staged_updates_off",
                engine=engine.name,
                software=engine.software,
                reason=engine.features["staged_updates"],
                hint="updates take a pause; `wavebus doctor --vllm PATH` shows what a vLLM can do",
            )

    def release(self) -> None:
        """The next may begin."""
        self._is_busy = False

    def _claim(self, *, counts: bool = True) -> int:
        self.require_idle()
        self._is_busy = True
        self._begun += counts
        return self._begun


class Update:
    """One update of the group. Whoever gets an error from a step, ends it with that.

    Attributes:
        paused: every engine is, or it failed.
        started: every engine waits for chunks, or it failed.
        copy: has its weights, once they are sent; to be kept when they are committed.
    """

    def __init__(
        self,
        machine: TrainerUpdate,
        updates: Updates,
        steps: Steps,
        rank_zero: RankZero,
        options: UpdateOptions,
    ) -> None:
        self.id = machine.id
        self.copy: WeightsCopy | None = None
        self._machine = machine
        self._updates = updates
        self._steps = steps
        self._rank_zero = rank_zero
        self._options = options
        self._plan: UpdatePlan | None = None
        self.paused = anyio.Event()
        self.started = anyio.Event()
        self._finishing: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.end(exc)

    async def arm(self, plan: UpdatePlan, backend: str, communicator: int, label: str) -> None:
        """Every engine checks the manifest; weights that sleep are woken for it.

        Raises:
            ManifestRefused: an engine's model doesn't take these tensors.
            Refused: with code ``transfer_closed``, if an engine has no end of the transport;
                it may then be armed again.
        """
        self._plan = plan
        machine = self._machine
        await self._ask(
            machine.arm(
                plan.manifest,
                version=self._steps.version,
                label=label,
                backend=backend,
                communicator=communicator,
                base=plan.base,
            )
        )
        assert machine.armed is not None
        if self._options.how == "auto" and machine.armed.why_paused:
            await self._updates.warn_of_fallback(machine.armed.why_paused)

    async def release_ranks(self, drain: Callable[[], None]) -> None:
        """Every engine has armed: all ranks may gather tensors. For ``drain`` see
        :meth:`trainer_agent.update.rank_sync.RankZero.release`."""
        await self._rank_zero.release(drain)

    async def start(self) -> None:
        """Pause, unless the group is held already, or the update is staged; and have every engine
        wait for chunks."""
        try:
            await ask_in_order(partial(self._ask, self._machine.start()), self._open_for_chunks)
        finally:
            self.paused.set()
            self.started.set()

    def finish(self) -> None:
        """Ask every engine to finish, once the last chunk is sent; :meth:`commit` waits for it."""
        if self._finishing is None:
            self._finishing = asyncio.ensure_future(self._ask(self._machine.finish()))

    async def commit(self, label: str, verified: Verify) -> UpdateReport:
        """Have every engine serve the weights, and resume, unless the group was held before."""
        await self.started.wait()
        self.finish()
        differing = await self._run_canary()
        commit = partial(self._ask, self._machine.commit(label, differing))
        await ask_in_order(self._await_finish, commit)
        machine, plan = self._machine, self._plan
        assert machine.armed is not None
        assert machine.committed is not None
        assert plan is not None
        report = UpdateReport.of_acks(
            machine.armed,
            machine.paused,
            machine.committed,
            machine.resumed,
            label=label,
            target=machine.request.target,
            size_bytes=plan.size_bytes,
            chunks=plan.chunks,
            verified=verified,
            differing=differing,
            how="staged" if machine.is_staged else "paused",
            why_paused=self._pause_reason(machine.armed.why_paused),
            staging_bytes=machine.armed.staging_bytes if machine.is_staged else 0,
        )
        return self._updates.record_commit(report, self.copy)

    def _pause_reason(self, of_engines: str) -> str:
        """Of an update that is not staged."""
        request = self._machine.request
        if self._machine.staging is not None:
            return of_engines
        if request.catch_up:
            return "engines that are behind catch up in a pause"
        return self._options.needs_pause or f"a {request.target} is loaded in a pause"

    async def _run_canary(self) -> tuple[Differing, ...]:
        """Have all engines that have finished run the canary's probes; who differs.

        Raises:
            CanaryFailed: nobody is proven.
        """
        canary = self._options.canary
        if canary is None:
            return ()
        machine = self._machine
        assert machine.armed is not None
        await self._await_finish()
        probe = canary.probe(self.id, machine.armed.version)
        machine.probe()
        report = await self._steps.probe(probe)
        machine.on_probed()
        return await anyio.to_thread.run_sync(compare, canary, report)

    async def end(self, error: BaseException | None) -> None:
        """It is over; with an error, it is undone first, as far as it got."""
        try:
            if error is not None:
                self._machine.describe_end(error)
                await self._undo()
            await self._rank_zero.finish(self._machine.version, error)
        finally:
            self._updates.release()

    async def _undo(self) -> None:
        """Give it up, and let the engines go on. What fails here, the broker mends: it aborts and
        resumes for a trainer that is gone."""
        if self._finishing is not None:
            self._finishing.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(self._finishing, return_exceptions=True)
        await self._steps.undo(*self._machine.undo())

    async def _ask(self, messages: Sequence[Message]) -> None:
        """Ask for these, in this order and at once, and for what follows from each answer."""
        if len(messages) == 1:
            await self._ask_one(messages[0])
        elif messages:
            await ask_in_order(*(partial(self._ask_one, message) for message in messages))

    async def _ask_one(self, message: Message) -> None:
        try:
            done = await self._steps.step(message)
        except Refused as refused:
            following = self._machine.on_refused(message, refused)
        else:
            following = self._machine.on_acked(message, done)
        await self._open_for_chunks()
        await self._ask(following)

    async def _open_for_chunks(self) -> None:
        if self._machine.takes_chunks:
            self.paused.set()

    async def _await_finish(self) -> None:
        assert self._finishing is not None
        await self._finishing


class _StartUpdate(Protocol):
    def __call__(self, *, on_sent: Callable[[], None]) -> Coroutine[Any, Any, int]: ...


async def wait_until_sent(update: _StartUpdate, *, at_once: bool) -> asyncio.Task[int]:
    """Begin it, and return it as soon as its source's tensors may change: ``at_once``, if they
    may already. What fails before, is raised; who is cancelled before, gives it up."""
    sent = asyncio.Event()
    task = asyncio.ensure_future(update(on_sent=sent.set))
    if at_once:
        return task
    waiting = asyncio.ensure_future(sent.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    except BaseException:
        await cancel_and_wait(task)
        raise
    finally:
        waiting.cancel()
    if not sent.is_set():
        await task  # it has failed; or is another rank's, which has sent its part
    return task


async def cancel_and_wait(task: asyncio.Task[int]) -> None:
    """Return when it has ended, one way or the other."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
