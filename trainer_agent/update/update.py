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
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import anyio
import anyio.to_thread

import bus.log
from bus.errors import Refused, UsageError, WavebusError
from bus.messages import Abort, Arm, Commit, NackCode, Resume, Step, UpdateFinish, UpdateStart
from trainer_agent.canary import compare
from trainer_agent.report import UpdateReport
from trainer_agent.update.rank_sync import RankZero
from trainer_agent.update.steps import ask_in_order

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from types import TracebackType

    from bus.messages import (
        CanaryMode,
        Differing,
        EngineView,
        GroupAck,
        Staging,
        StaleEngines,
        Target,
        Verify,
    )
    from trainer_agent.connection import Connection
    from trainer_agent.options import UpdateOptions
    from trainer_agent.update.plan import UpdatePlan
    from trainer_agent.update.steps import Steps
    from trainer_agent.weights.snapshot import Snapshot, WeightsCopy


# With one of these a COMMIT ends for who asked, and engines may carry it out; unless it is about a
# step that comes before.
_ENDS_OTHERWISE: Final = frozenset({NackCode.FENCED, NackCode.PEER_LOST, NackCode.TIMEOUT})
_BEFORE_COMMIT: Final = frozenset({Step.START.value, Step.CHUNK.value, Step.FINISH.value})


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
        return Update(update_id, self, self._steps, rank_zero, options, target, catch_up)

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
        update_id: str,
        updates: Updates,
        steps: Steps,
        rank_zero: RankZero,
        options: UpdateOptions,
        target: Target,
        catch_up: StaleEngines | None,
    ) -> None:
        self.id = update_id
        self._catch_up = catch_up
        self._scope = catch_up.dp_groups if catch_up else ()
        self.copy: WeightsCopy | None = None
        self._target = target
        self._updates = updates
        self._steps = steps
        self._rank_zero = rank_zero
        self._options = options
        self._plan: UpdatePlan | None = None
        self._armed: GroupAck | None = None
        self._pause: GroupAck | None = None
        self._pause_requested = False  # we have asked for a pause, and it has not been resumed
        self._is_known_to_bus = False  # the bus has it, and has not committed it
        self._version = 0
        self._commit_sent = False
        self.paused = anyio.Event()
        self.started = anyio.Event()
        self._finishing: asyncio.Future[GroupAck] | None = None

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
        manifest = plan.manifest
        self._plan = plan
        ask = Arm(
            self.id,
            self._catch_up.version if self._catch_up else self._steps.version,
            label,
            self._target,
            backend,
            communicator,
            manifest.names,
            manifest.dtypes,
            manifest.shapes,
            manifest.chunk_ends,
            manifest.counts,
            plan.base,
            self._options.quorum_on_the_wire,
            self._canary_mode(),
            manifest.digest(),
            self._scope,
            self._staging,
            self._options.quorum is None,
        )
        if self._steps.is_asleep and self._steps.holds_pause:
            await self._steps.wake()
        try:
            self._armed = await self._send_arm(ask)
        except Refused as refused:
            # A trainer that is gone has left one asleep, without its weights.
            if refused.code is not NackCode.ENGINE_ASLEEP:
                raise
            await self._pause_unless_paused()
            await self._steps.wake()
            self._armed = await self._send_arm(ask)
        if self._options.how == "auto" and self._armed.why_paused:
            await self._updates.warn_of_fallback(self._armed.why_paused)

    def _canary_mode(self) -> CanaryMode:
        """What the pause leaves of requests, if there is a canary."""
        if self._options.canary is None:
            return ""
        steps = self._steps
        held = steps.pause_options if steps.holds_pause and not self._pause_requested else None
        return "abort" if (held or self._options.pause).ends_requests else "keep"

    @property
    def _staging(self) -> Staging | None:
        """How it may be staged: of a catch-up, or what engines held in a pause take, no way."""
        return None if self._scope or self._target != "model" else self._options.staging

    @property
    def is_staged(self) -> bool:
        """Whether it is, as engines have armed it."""
        armed = self._armed
        return self._staging is not None and armed is not None and not armed.why_paused

    async def _send_arm(self, ask: Arm) -> GroupAck:
        self._is_known_to_bus = True
        try:
            return await self._steps.step(ask)
        except Refused:
            self._is_known_to_bus = False
            raise

    async def _pause_unless_paused(self) -> None:
        if not self._steps.holds_pause:
            self._pause_requested = True
            self._pause = await self._steps.request_pause(self.id, self._options.pause, self._scope)

    async def release_ranks(self, drain: Callable[[], None]) -> None:
        """Every engine has armed: all ranks may gather tensors. For ``drain`` see
        :meth:`trainer_agent.update.rank_sync.RankZero.release`."""
        await self._rank_zero.release(drain)

    async def start(self) -> None:
        """Pause, unless the group is held already, or the update is staged; and have every engine
        wait for chunks."""
        start = UpdateStart(self.id, self.is_staged)
        try:
            if self.is_staged:
                await self._steps.step(start)
            else:
                await ask_in_order(self._reach_pause, lambda: self._steps.step(start))
        finally:
            self.paused.set()
            self.started.set()

    async def _reach_pause(self) -> None:
        await self._pause_unless_paused()
        self.paused.set()

    def finish(self) -> None:
        """Ask every engine to finish, once the last chunk is sent; :meth:`commit` waits for it."""
        if self._finishing is None:
            self._finishing = asyncio.ensure_future(self._steps.step(UpdateFinish(self.id)))

    async def commit(self, label: str, verified: Verify) -> UpdateReport:
        """Have every engine serve the weights, and resume, unless the group was held before."""
        await self.started.wait()
        assert self._armed is not None
        assert self._plan is not None
        self.finish()
        differing = await self._run_canary()
        pause, commit = self._pause, Commit(self.id, self._armed.version, label, differing)
        done: GroupAck | None = None
        resumed: GroupAck | None = None

        async def await_finish() -> None:
            assert self._finishing is not None
            await self._finishing

        async def send_commit() -> None:
            nonlocal done
            self._commit_sent = True
            done = await self._steps.step(commit)
            self._is_known_to_bus = False
            self._version = done.version

        async def send_resume() -> None:
            nonlocal resumed
            if pause is not None:
                resumed = await self._steps.resume_if_paused(self.id)
                self._pause_requested = False

        await ask_in_order(await_finish, send_commit, send_resume)
        assert done is not None
        report = UpdateReport.of_acks(
            self._armed,
            pause,
            done,
            resumed,
            label=label,
            target=self._target,
            size_bytes=self._plan.size_bytes,
            chunks=self._plan.chunks,
            verified=verified,
            differing=differing,
            how="staged" if self.is_staged else "paused",
            why_paused=self._pause_reason,
            staging_bytes=self._armed.staging_bytes if self.is_staged else 0,
        )
        return self._updates.record_commit(report, self.copy)

    @property
    def _pause_reason(self) -> str:
        """Of an update that is not staged."""
        if self._staging is not None:
            assert self._armed is not None
            return self._armed.why_paused
        if self._scope:
            return "engines that are behind catch up in a pause"
        return self._options.needs_pause or f"a {self._target} is loaded in a pause"

    async def _run_canary(self) -> tuple[Differing, ...]:
        """Have all engines that have finished run the canary's probes; who differs.

        Raises:
            CanaryFailed: nobody is proven.
        """
        canary = self._options.canary
        if canary is None:
            return ()
        assert self._armed is not None
        assert self._finishing is not None
        await self._finishing
        probe = canary.probe(self.id, self._armed.version)
        report = await self._steps.probe(probe)
        return await anyio.to_thread.run_sync(compare, canary, report)

    async def end(self, error: BaseException | None) -> None:
        """It is over; with an error, it is undone first, as far as it got."""
        try:
            if error is not None:
                describe_end(error, self._armed, self._version, asked=self._commit_sent)
                await self._undo()
            await self._rank_zero.finish(self._version, error)
        finally:
            self._updates.release()

    async def _undo(self) -> None:
        """Give it up, and let the engines go on: in this order, since a resume waits for the end of
        an update that has started. What fails here, the broker mends: it aborts and resumes for a
        trainer that is gone."""
        if self._finishing is not None:
            self._finishing.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(self._finishing, return_exceptions=True)
        messages: list[Abort | Resume] = []
        if self._is_known_to_bus:
            messages.append(Abort(self.id, "the trainer gave up"))
        if self._pause_requested:
            messages.append(Resume(self.id))
        await self._steps.undo(*messages)


def describe_end(
    error: BaseException, armed: GroupAck | None, version: int, *, asked: bool
) -> None:
    """Say in the error which version it is about, and whether engines serve that.

    Args:
        error: what the update ended with.
        armed: the answer to ARM, with the version that the bus gave the update.
        version: what was committed; 0 if no answer said that.
        asked: COMMIT was sent.
    """
    if not isinstance(error, WavebusError):
        return
    error.version = armed.version if armed else 0
    if version:
        error.outcome = "committed"
    elif asked and not _shows_no_commit(error):
        error.outcome = "unknown"
    else:
        error.outcome = "not_committed"


def _shows_no_commit(error: WavebusError) -> bool:
    """Whether an error that came after COMMIT was sent shows that no engine has committed."""
    return isinstance(error, Refused) and (
        error.nack.step in _BEFORE_COMMIT or error.code not in _ENDS_OTHERWISE
    )


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
