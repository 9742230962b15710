"""Runs one update through its steps, for the trainer agent and for vLLM's trainer engines.

Every update ends in a commit or is undone, and the trainer's other ranks are informed::

    async with updates.begin(options) as update:
        await update.arm(plan, transport, label)
        await update.release_ranks(drain)
        await update.start()            # chunks are sent during and after it
        await update.commit(label, verified)

Steps are sent ahead of their turn where the broker queues them: UPDATE_START until the group is
paused, COMMIT until all engines have finished, and RESUME until all of them serve the version. So
engines never wait for the trainer's next request.
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
from bus._protocol.trainer.update import TrainerUpdate, UpdateRequest
from bus.errors import Refused, UsageError, WavebusError
from trainer_agent._canary import compare
from trainer_agent._report import UpdateReport
from trainer_agent._update.rank_sync import RankZero
from trainer_agent._update.steps import ask_in_order

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

    from bus.messages import (
        Differing,
        EngineView,
        Message,
        StaleEngines,
        Target,
        Verify,
    )
    from trainer_agent._options import UpdateOptions
    from trainer_agent._update.plan import UpdatePlan
    from trainer_agent._update.steps import Steps
    from trainer_agent._weights.snapshot import Snapshot, WeightsCopy


class OpenTransport(Protocol):
    """The transport that brings an update's weights: :class:`trainer_agent._update.transport`."""

    backend: str
    communicator: int
    opening: str


class Updates:
    """Starts the updates of one trainer, one at a time, and records the commits.

    Args:
        steps: sends the requests.
        alone: whether the trainer has one rank only.
        snapshot: the kept weights; each commit replaces them or makes them outdated.

    Attributes:
        last: the report of the last committed update.
    """

    def __init__(self, steps: Steps, *, alone: bool, snapshot: Snapshot | None = None) -> None:
        self.last: UpdateReport | None = None
        self._snapshot = snapshot
        self._connection = steps.connection
        self._steps = steps
        self._alone = alone
        self._begun = 0  # including refused ones, because the other ranks count them too
        self._committed: list[int] = []  # versions, ascending
        self._is_busy = False
        self._warned = False
        self._last_reason = ""  # the last reason for which the engines' features were read

    def begin(
        self,
        options: UpdateOptions,
        target: Target = "model",
        *,
        alone: bool = False,
        catch_up: StaleEngines | None = None,
    ) -> Update:
        """Returns the next update, on rank 0; its context manager or :meth:`Update.end` ends it.

        Args:
            options: the options of the update.
            target: the model or the draft model.
            alone: whether the other ranks take no part in the update, and don't count it.
            catch_up: the only engines to update, and the version to send; None: all engines.

        Raises:
            UsageError: another update is under way, or an update of a draft has a canary.
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
        """Whether an update is under way."""
        return self._is_busy

    @contextlib.asynccontextmanager
    async def with_all_ranks(self) -> AsyncIterator[RankZero]:
        """Runs a block on rank 0 in which all ranks connect to the engines.

        The block counts as an update, so that the other ranks can follow it by its number.
        """
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
        """Marks the next update as under way, on ranks other than 0; yields its number."""
        number = self._claim()
        try:
            yield number
        finally:
            self.release()

    def record_commit(self, report: UpdateReport, copy: WeightsCopy | None) -> UpdateReport:
        """Records a commit, and returns its report with the memory that the snapshot takes.

        Args:
            report: the update's report.
            copy: a copy of the committed weights, to be kept; None: they were not copied.
        """
        if self._snapshot is not None:
            self._snapshot.on_committed(report.version, copy)
            report = replace(report, kept_bytes=self._snapshot.memory_bytes)
        self.last = report
        if not self._committed or report.version > self._committed[-1]:  # else: a catch-up
            self._committed.append(report.version)
        return report

    def count_after(self, version: int) -> int:
        """Returns how many committed updates have a greater version."""
        return len(self._committed) - bisect.bisect_right(self._committed, version)

    def require_idle(self) -> None:
        """Raises ``UsageError`` if an update is under way."""
        if self._is_busy:
            raise UsageError("an update is under way; await it first")

    async def warn_of_fallback(self, why_paused: str) -> None:
        """Logs a warning, once, if an engine's version of vLLM can't stage these updates.

        Engines are asked for their features once per reason, because other reasons, such as too
        little memory, come before or after this one.

        Args:
            why_paused: why the engines could not stage the update, by their answers to ARM.
        """
        if self._warned or why_paused == self._last_reason:
            return
        self._last_reason = why_paused
        engines: tuple[EngineView, ...] = ()
        with contextlib.suppress(WavebusError):  # the update goes on without the warning
            engines = await self._connection.engines()
        lacking = (
            (engine, why)
            for engine in engines
            for name in ("staged_updates", "staged_worker_engines")
            if (why := engine.features.get(name))
            and (name == "staged_updates" or why in why_paused)  # not every update needs the other
        )
        found = next(lacking, None)
        if found is not None:
            self._warned = True
            engine, why = found
            bus.log.logger().warning(
                "staged_updates_off",
                engine=engine.name,
                software=engine.software,
                reason=why,
                hint="updates pause the engines; see `wavebus doctor --vllm PATH` for this vLLM",
            )

    def release(self) -> None:
        """Permits the next update to start."""
        self._is_busy = False

    def _claim(self, *, counts: bool = True) -> int:
        self.require_idle()
        self._is_busy = True
        self._begun += counts
        return self._begun


class Update:
    """Runs one update of the group. After a step that raises, call :meth:`end`.

    Args:
        machine: the state machine that decides which messages are sent.
        updates: records the commit.
        steps: sends the messages.
        rank_zero: informs the trainer's other ranks.
        options: the options of the update.

    Attributes:
        paused: set when chunks may be announced, in a pause or for staging, or on a failure.
        started: set when every engine waits for chunks, or on a failure.
        on_end: called when the update has ended, also if it failed.
        copy: a copy of the weights, to be kept at the commit; None: nothing is kept.
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
        self.on_end: Callable[[], None] = lambda: None
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

    async def __aexit__(self, _kind: object, exc: BaseException | None, *_: object) -> None:
        await self.end(exc)

    async def arm(self, plan: UpdatePlan, transport: OpenTransport, label: str) -> None:
        """Makes every engine check the manifest, and wake sleeping weights.

        Args:
            plan: the tensors that the update sends.
            transport: the open transport.
            label: the trainer's own name of the weights.

        Raises:
            ManifestRefused: an engine's model doesn't take these tensors.
            Refused: code ``transfer_closed`` if an engine has no transport open, or another one;
                the update may then be armed again.
        """
        self._plan = plan
        machine = self._machine
        await self._ask(
            machine.arm(
                plan.manifest,
                version=self._steps.version,
                label=label,
                backend=transport.backend,
                communicator=transport.communicator,
                base=plan.base,
                transfer=transport.opening,
            )
        )
        assert machine.armed is not None
        if self._options.how == "auto" and machine.armed.why_paused:
            await self._updates.warn_of_fallback(machine.armed.why_paused)

    async def release_ranks(self, drain: Callable[[], None]) -> None:
        """Permits the trainer's other ranks to gather tensors; see :meth:`RankZero.release`."""
        await self._rank_zero.release(drain)

    async def start(self) -> None:
        """Pauses the group if necessary, and makes every engine ready for chunks."""
        try:
            await ask_in_order(partial(self._ask, self._machine.start()), self._open_for_chunks)
        finally:
            self.paused.set()
            self.started.set()

    async def extend(self, plan: UpdatePlan, part: UpdatePlan) -> None:
        """Makes every engine check further tensors of an update that was armed open.

        Args:
            plan: the plan of all tensors, with those that follow.
            part: the plan of those that follow, which is sent in the next chunks.

        Raises:
            ManifestRefused: an engine's model doesn't take these tensors.
        """
        assert self._plan is not None
        await self._ask(self._machine.extend(self._plan.manifest, part.manifest))
        self._plan = plan

    def finish(self) -> None:
        """Sends UPDATE_FINISH after the last chunk, without waiting for the answer."""
        if self._finishing is None:
            self._finishing = asyncio.ensure_future(self._ask(self._machine.finish()))

    async def commit(self, label: str, verified: Verify) -> UpdateReport:
        """Commits the weights, ends the update's own pause, and returns the update's report.

        Args:
            label: the trainer's own name of the weights.
            verified: how much of each tensor was verified by checksum, for the report.
        """
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
        request = self._machine.request
        if self._machine.staging is not None:
            return of_engines
        if request.catch_up:
            return "engines that are behind catch up in a pause"
        return self._options.needs_pause or f"a {request.target} is loaded in a pause"

    async def _run_canary(self) -> tuple[Differing, ...]:
        """Runs the canary's probes on all engines, and returns the engines that differ.

        Raises:
            CanaryFailed: no engine passed.
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
        """Ends the update, so that the next one can begin.

        Args:
            error: why the update failed. It is then aborted first, engines resume, and the other
                ranks get the error. None: the update is committed.
        """
        try:
            if error is not None:
                self._machine.describe_end(error)
                await self._undo()
            await self._rank_zero.finish(self._machine.version, error)
        finally:
            self._updates.release()
            self.on_end()

    async def _undo(self) -> None:
        """Aborts the update and resumes the engines.

        If that fails, the broker does it as soon as the trainer is gone.
        """
        if self._finishing is not None:
            self._finishing.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(self._finishing, return_exceptions=True)
        await self._steps.undo(*self._machine.undo())

    async def _ask(self, messages: Sequence[Message]) -> None:
        """Sends messages in order, and those that follow from answers; waits for all answers."""
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
    """Starts an update, and returns its task as soon as the tensors may be modified.

    Args:
        update: runs the update, and calls ``on_sent`` at that moment.
        at_once: whether the tensors may be modified already.
    """
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
        await task  # it failed; or this is another rank, which has sent its part
    return task


async def cancel_and_wait(task: asyncio.Task[int]) -> None:
    """Cancels a task and waits until it has ended."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
