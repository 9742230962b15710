"""An update, step by step, for all who drive one: the agent itself, and vLLM's trainer engines.

Begun, it is committed or undone, and the trainer's other ranks hear of its end, whatever
happens in between::

    async with updates.begin(how) as update:
        await update.arm(plan, backend, communicator, label)
        await update.go(drain)
        await update.start()            # beside it, and behind it: chunks; staged, without a pause
        await update.commit(label, verified)

No step waits for the answer to the one before if the broker can: it keeps UPDATE_START until the
group is paused, COMMIT until all have finished, and RESUME until all serve the version. So what
engines wait for is the broker, and not the trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import anyio
import anyio.to_thread

import bus.log
from bus.errors import Refused, UsageError, WavebusError
from bus.messages import Abort, Arm, Commit, NackCode, Resume, UpdateFinish, UpdateStart
from trainer_agent.asking import in_turn
from trainer_agent.canary import compare
from trainer_agent.ranks import Leading
from trainer_agent.report import UpdateReport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
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
    from trainer_agent.how import UpdateHow
    from trainer_agent.plan import Plan
    from trainer_agent.snapshot import Copy, Snapshot
    from trainer_agent.steps import Steps


class Updates:
    """A trainer's, one at a time. ``alone``: there are no other ranks. ``snapshot``: is kept, or
    outdated, by each that is committed.

    Attributes:
        last: the last one that was committed.
    """

    def __init__(
        self, line: Connection, steps: Steps, *, alone: bool, snapshot: Snapshot | None = None
    ) -> None:
        self.last: UpdateReport | None = None
        self._snapshot = snapshot
        self._line = line
        self._steps = steps
        self._alone = alone
        self._begun = 0  # refused ones too: the other ranks count as well
        self._busy = False
        self._warned = False
        self._looked_into = ""  # the reason for which engines were asked last

    def begin(
        self,
        how: UpdateHow,
        target: Target = "model",
        *,
        alone: bool = False,
        behind: StaleEngines | None = None,
    ) -> Update:
        """Rank 0's part of the next one. It ends with :meth:`Update.end`, or as a context.

        Args:
            alone: the other ranks have no part in it, and don't count it.
            behind: who catches up by it, and with which version; None: it is for all.

        Raises:
            UsageError: one is under way; or a draft's has a canary.
        """
        if how.canary is not None and target != "model":
            raise UsageError("canary: a draft model changes no token: there is nothing to probe")
        update_id = self._steps.new_id()
        number = self._take(counts=not alone)
        leading = Leading(self._line, number, alone=alone or self._alone)
        return Update(update_id, self, self._steps, leading, how, target, behind)

    @property
    def busy(self) -> bool:
        """Whether one is under way."""
        return self._busy

    @contextlib.asynccontextmanager
    async def meeting(self) -> AsyncIterator[Leading]:
        """Rank 0's part of what is no update, but counts as one: all ranks meet the engines."""
        leading = Leading(self._line, self._take(), alone=self._alone)
        failed: BaseException | None = None
        try:
            yield leading
        except BaseException as error:
            failed = error
            raise
        finally:
            try:
                await leading.end(0, failed)
            finally:
                self.ended()

    @contextlib.contextmanager
    def beside(self) -> Iterator[int]:
        """Another rank's part of the next one, which has this number."""
        number = self._take()
        try:
            yield number
        finally:
            self.ended()

    def committed(self, report: UpdateReport, copy: Copy | None) -> UpdateReport:
        """It is the last one from now on; what is kept of it, or of none, is of it, too."""
        if self._snapshot is not None:
            self._snapshot.committed(report.version, copy)
            report = replace(report, kept_bytes=self._snapshot.memory_bytes)
        self.last = report
        return report

    async def warn_of_fallback(self, why_paused: str) -> None:
        """Warn, once, if updates take a pause because of an engine's version of vLLM. Engines are
        asked for it once per reason, which may be another one at first: want of memory, say."""
        if self._warned or why_paused == self._looked_into:
            return
        self._looked_into = why_paused
        engines: tuple[EngineView, ...] = ()
        with contextlib.suppress(WavebusError):  # the update goes on without the warning
            engines = await self._line.engines()
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

    def ended(self) -> None:
        """The next may begin."""
        self._busy = False

    def _take(self, *, counts: bool = True) -> int:
        if self._busy:
            raise UsageError("an update is under way; await it first")
        self._busy = True
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
        leading: Leading,
        how: UpdateHow,
        target: Target,
        behind: StaleEngines | None,
    ) -> None:
        self.id = update_id
        self._behind = behind
        self._scope = behind.dp_groups if behind else ()
        self.copy: Copy | None = None
        self._target = target
        self._updates = updates
        self._steps = steps
        self._leading = leading
        self._how = how
        self._plan: Plan | None = None
        self._armed: GroupAck | None = None
        self._pause: GroupAck | None = None
        self._pausing = False  # we have asked for a pause, and it has not been resumed
        self._open = False  # the bus has it, and has not committed it
        self._version = 0
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

    async def arm(self, plan: Plan, backend: str, communicator: int, label: str) -> None:
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
            self._behind.version if self._behind else self._steps.version,
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
            self._how.quorum_on_the_wire,
            self._canary_way(),
            manifest.digest(),
            self._scope,
            self._staging,
        )
        if self._steps.asleep and self._steps.held:
            await self._steps.wake()
        try:
            self._armed = await self._ask_to_arm(ask)
        except Refused as refused:
            # A trainer that is gone has left one asleep, without its weights.
            if refused.code is not NackCode.ENGINE_ASLEEP:
                raise
            await self._pause_unless_held()
            await self._steps.wake()
            self._armed = await self._ask_to_arm(ask)
        if self._how.how == "auto" and self._armed.why_paused:
            await self._updates.warn_of_fallback(self._armed.why_paused)

    def _canary_way(self) -> CanaryMode:
        """What the pause leaves of requests, if there is a canary."""
        if self._how.canary is None:
            return ""
        held = self._steps.held_how if self._steps.held and not self._pausing else None
        return "abort" if (held or self._how.pause).ends_requests else "keep"

    @property
    def _staging(self) -> Staging | None:
        """How it may be staged: of a catch-up, or what engines held in a pause take, no way."""
        return None if self._scope or self._target != "model" else self._how.staging

    @property
    def staged(self) -> bool:
        """Whether it is, as engines have armed it."""
        armed = self._armed
        return self._staging is not None and armed is not None and not armed.why_paused

    async def _ask_to_arm(self, ask: Arm) -> GroupAck:
        self._open = True
        try:
            return await self._steps.step(ask)
        except Refused:
            self._open = False
            raise

    async def _pause_unless_held(self) -> None:
        if not self._steps.held:
            self._pausing = True
            self._pause = await self._steps.ask_pause(self.id, self._how.pause, self._scope)

    async def go(self, drain: Callable[[], None]) -> None:
        """Every engine has armed: all ranks may gather tensors. For ``drain`` see
        :meth:`trainer_agent.ranks.Leading.go`."""
        await self._leading.go(drain)

    async def start(self) -> None:
        """Pause, unless the group is held already, or the update is staged; and have every engine
        wait for chunks."""
        start = UpdateStart(self.id, self.staged)
        try:
            if self.staged:
                await self._steps.step(start)
            else:
                await in_turn(self._reach_pause, lambda: self._steps.step(start))
        finally:
            self.paused.set()
            self.started.set()

    async def _reach_pause(self) -> None:
        await self._pause_unless_held()
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
        differing = await self._prove()
        pause, commit = self._pause, Commit(self.id, self._armed.version, label, differing)
        done = resumed = None

        async def finished() -> None:
            assert self._finishing is not None
            await self._finishing

        async def committed() -> None:
            nonlocal done
            done = await self._steps.step(commit)
            self._open = False

        async def goes_on() -> None:
            nonlocal resumed
            if pause is not None:
                resumed = await self._steps.resume(self.id)
                self._pausing = False

        await in_turn(finished, committed, goes_on)
        assert done is not None
        self._version = done.version
        report = UpdateReport(
            version=done.version,
            label=label,
            target=self._target,
            update_id=self.id,
            engines=done.engines,
            excluded=tuple(dict.fromkeys((*done.excluded, *(resumed.excluded if resumed else ())))),
            interrupted=pause.in_flight if pause else 0,
            arm_ms=self._armed.duration_ms,
            pause_ms=pause.duration_ms if pause else 0.0,
            paused_ms=resumed.paused_ms if resumed else 0.0,
            slowest=pause.slowest if pause else "",
            size_bytes=self._plan.size_bytes,
            chunks=self._plan.chunks,
            verified=verified,
            differing=differing,
            how="staged" if self.staged else "paused",
            why_paused=self._why_paused,
            staging_bytes=self._armed.staging_bytes if self.staged else 0,
            commit_ms=done.duration_ms,
        )
        return self._updates.committed(report, self.copy)

    @property
    def _why_paused(self) -> str:
        """Of an update that is not staged."""
        if self._staging is not None:
            assert self._armed is not None
            return self._armed.why_paused
        if self._scope:
            return "engines that are behind catch up in a pause"
        return self._how.needs_pause or f"a {self._target} is loaded in a pause"

    async def _prove(self) -> tuple[Differing, ...]:
        """Have all engines that have finished run the canary's probes; who differs.

        Raises:
            CanaryFailed: nobody is proven.
        """
        canary = self._how.canary
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
                await self._undo()
            await self._leading.end(self._version, error)
        finally:
            self._updates.ended()

    async def _undo(self) -> None:
        """Give it up, and let the engines go on: in this order, since a resume waits for the end of
        an update that has started. What fails here, the broker mends: it aborts and resumes for a
        trainer that is gone."""
        if self._finishing is not None:
            self._finishing.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(self._finishing, return_exceptions=True)
        words: list[Abort | Resume] = []
        if self._open:
            words.append(Abort(self.id, "the trainer gave up"))
        if self._pausing:
            words.append(Resume(self.id))
        await self._steps.undo(*words)
