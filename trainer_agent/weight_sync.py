"""``client`` and ``source`` for vLLM's trainer engines, with the bus as their control plane.

A trainer engine calls ``start_weight_update``, which carries no plan; ``update_weights``, as
often as it has chunks; and ``finish_weight_update``. Beside that it reads its source, on every
rank of the trainer. On the bus these are one update:

========================= ==============================================================
the engine                the bus
========================= ==============================================================
reads the metadata        (that is the plan)
``start_weight_update``   ARM, with the plan; the other ranks hear GO. Behind it, beside the
                          engine: pause, UPDATE_START
first tensor of a pass    waits for that, on every rank, or raises
``update_weights``        WEIGHT_CHUNK_META and CHUNK_SENT; returns when it is applied. Behind
                          the last one: UPDATE_FINISH
``finish_weight_update``  COMMIT, resume
========================= ==============================================================

A trainer engine that sends patches reads no source. It reads its patches to their end before it
calls ``start_weight_update``; wrapped by :meth:`TrainerAgent.patches`, they have told by then what
the update is armed with. The other ranks of the trainer have no part in it.

What fails in between undoes the update: ABORT, resume, and the others are told. So does a pass
over the source that is left before its end.

Nothing here needs vLLM: its client is a protocol, and its sources are known by what they do.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

import bus.log
from bus.errors import BusClosed, BusTimeout, UpdateFailed, UsageError, WavebusError
from bus.messages import NackCode
from bus.weight_transfer.allocation import ALONE
from trainer_agent import infos, native
from trainer_agent.asking import announced, first_of
from trainer_agent.bus_source import BusWeightSource, wrapped
from trainer_agent.current import CurrentUpdate, once_more
from trainer_agent.patches import NextPatch
from trainer_agent.plan import Plan
from trainer_agent.ranks import reached
from trainer_agent.refusals import own_nack
from trainer_agent.sources import as_announced, tensor_metas

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from contextlib import AbstractAsyncContextManager

    import torch

    from bus.messages import GroupAck, Target
    from bus.weight_transfer.allocation import World
    from trainer_agent.connection import Connection
    from trainer_agent.how import UpdateHow
    from trainer_agent.sources import WeightSource
    from trainer_agent.steps import Steps
    from trainer_agent.transport import Transport
    from trainer_agent.updating import Updates

T = TypeVar("T")


class BusWeightSyncClient:
    """vLLM's ``VLLMWeightSyncClient``, over the bus: made by :meth:`TrainerAgent.client`.

    Its calls block, from any thread but the agent's event loop. All of them raise

    - :class:`bus.errors.UsageError`: for infos of worker engines that engines were not booted
      with, or that the bus can't express, and calls out of order;
    - what :meth:`TrainerAgent.update_weights` raises: the update is undone, engines have resumed;
    - :class:`bus.errors.BusClosed`: the agent is not connected.
    """

    def __init__(
        self,
        sync: WeightSync,
        how: UpdateHow,
        chunk_bytes: int | None = None,
        target: Target = "model",
    ) -> None:
        self._sync = sync
        self._how = how
        self._target: Target = target
        self._chunk_bytes = chunk_bytes

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every engine open its end of the trainer engine's transport."""
        self._sync.call(lambda: self._sync.init(init_info, self._chunk_bytes))

    def shutdown_weight_transfer_engine(self) -> None:
        """The transport is not to be used again; engines let it go when the next one is opened,
        or the trainer leaves."""
        self._sync.call(self._sync.shutdown)

    def start_weight_update(self) -> None:
        """Begin an update: every engine is armed with what the source's metadata tells, or the
        patches that were read. They are paused behind that; if that fails, the source and
        :meth:`update_weights` raise it. One that was begun and not finished is undone first."""
        self._sync.need_rank_0()
        if self._sync.patching:
            patch = self._sync.next_patch.take()
            self._sync.call(lambda: self._sync.start(patch, self._how))
            return
        try:
            plan = self._sync.source_plan()
        except Exception as error:  # the other ranks wait for this update, whatever it is
            refused = error
            self._sync.call(lambda: self._sync.refuse(refused, self._how))
            raise
        self._sync.call(lambda: self._sync.start(plan, self._how, self._target))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Tell of one chunk; return when every engine has applied it."""
        self._sync.call(lambda: self._sync.update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have every engine serve what it was sent, and resume. The version is the bus's to
        give; ``weight_version`` becomes the update's label."""
        self._sync.call(lambda: self._sync.finish(weight_version or ""))


class WeightSync:
    """What the client and the source of one agent share. Its coroutines are for :meth:`call`."""

    def __init__(
        self,
        line: Connection,
        steps: Steps,
        updates: Updates,
        transport: Transport,
        *,
        rank: int,
        ranks: int,
        chunk_bytes: int,
        timeout_s: float,
        aside: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._line = line
        self._steps = steps
        self._updates = updates
        self._transport = transport
        self._rank = rank
        self._ranks = ranks
        self._chunk_bytes = chunk_bytes
        self._timeout_s = timeout_s
        self._aside = aside  # what is asked for here, goes first
        self._log = bus.log.logger()
        self._source: BusWeightSource | None = None
        self.next_patch = NextPatch()
        self._current: CurrentUpdate | None = None
        self._begun = anyio.Event()  # the next update is
        self._one_step = anyio.Lock()
        self._closing: asyncio.Task[None] | None = None  # of a pass; tasks are held weakly
        self._planned = 0  # the communicator that the last plan told of,
        self._met = 0  # and the one of those who opened their ends
        self._native: native.Native | None = None  # what is open is vLLM's own
        self._packed_bytes: int | None = None  # of the info that vLLM's own was promised

    # -- for any thread ---------------------------------------------------------

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` in the agent's loop, and wait for it.

        Raises:
            UsageError: this is the agent's loop.
            BusClosed: the agent is not connected.
        """
        loop = self._connected()
        if _runs_here(loop):
            raise UsageError(
                "vLLM's trainer engines block: call them in a thread, as in "
                "`await anyio.to_thread.run_sync(trainer.send_weights)`, or use SyncTrainerAgent"
            )
        coroutine = work()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:
            coroutine.close()
            raise BusClosed("the agent was closed") from None
        try:
            return future.result()
        except CancelledError:
            raise BusClosed("the agent was closed") from None
        except BaseException:
            future.cancel()  # who waited was interrupted; nothing, if it is the work's own
            raise

    def who_meets(self) -> World | None:
        """Who is to meet; None while those who met are still there, and nobody else is."""
        return self.call(self._plan_world)

    def wrap(self, source: WeightSource) -> BusWeightSource:
        """The agent's source from now on."""
        self._source = wrapped(self, source)
        return self._source

    @property
    def patching(self) -> bool:
        """Whether the trainer engine sends patches."""
        return self._native is not None and self._native.patching

    @property
    def _sharding(self) -> bool:
        return self._native is not None and self._native.sharding

    def need_rank_0(self) -> None:
        """The others only read their source."""
        if self._rank:
            raise UsageError(f"rank {self._rank} sends nothing: rank 0 calls the client")

    def source_plan(self) -> Plan:
        """Of what the source's metadata told."""
        if self._source is None:
            raise UsageError("no source yet: give the trainer engine source=agent.source(model)")
        theirs = self._native
        if not self._sharding and not self._source.implements_iter_full():
            raise UsageError(
                "source: yields each rank's shards, which no trainer engine but nccl_m2n sends: "
                "give the others agent.source(model)"
            )
        chunk_bytes = self._chunk_bytes if theirs is None else theirs.plan_bytes
        plan = Plan.of_source(self._source.take_metas(), chunk_bytes=chunk_bytes)
        if theirs is not None:
            theirs.check(plan)
        return plan

    def passing(
        self, source: BusWeightSource, *, shards: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of a source: whole ones, or this rank's shards."""
        if source is not self._source:
            raise UsageError("this agent has another source by now: it has one at a time")
        inner = source.tensors(shards=shards)
        if self._rank:
            self.call(self._go)
            beside = iter(inner)
            yield from as_announced(tensor_metas(inner.metadata()), beside) if shards else beside
            return
        current = self.call(self._started)
        try:
            metas = tensor_metas(inner.metadata()) if shards else current.plan.metas
            tensors = current.begin_pass(iter(inner), metas)
            while (pair := current.take(tensors)) is not None:
                yield pair
        except GeneratorExit:
            if current.untaken:  # else nobody asked for what comes after the last one
                left = UsageError("the pass over the source was left before its end")
                with contextlib.suppress(WavebusError):
                    self._break_off(current, left)
            raise
        except BaseException as error:
            with contextlib.suppress(WavebusError):
                self._break_off(current, error)
            raise

    def _break_off(self, current: CurrentUpdate, error: BaseException) -> None:
        loop = self._connected()
        if _runs_here(loop):  # the collector closes a pass wherever it happens to run
            self._closing = loop.create_task(self._fail(current, error))
        else:
            self.call(lambda: self._fail(current, error))

    def _connected(self) -> asyncio.AbstractEventLoop:
        if self.loop is None:
            raise BusClosed("connect() the agent first, or use `with`")
        return self.loop

    # -- the client's calls -----------------------------------------------------

    async def _plan_world(self) -> World | None:
        world = await self._transport.plan()
        if self._transport.theirs and world.number == self._met:
            return None
        self._planned = world.number
        return world

    async def meet_native(self, engine: str) -> World:
        """Who meets, once every engine is known to run vLLM's worker engine ``engine``."""
        native.need_engines(await self._line.engines(), engine)
        return await self._transport.plan(native.senders(engine, self._ranks))

    def promise(self, packed_bytes: int | None) -> None:
        """How the trainer engine will cut its source whose info was made last."""
        self._packed_bytes = packed_bytes

    async def init(self, info: object, chunk_bytes: int | None) -> None:
        async with self._one_step, self._aside():
            await self._undo_unfinished()
            if infos.is_ours(info):
                await self._transport.open_theirs(infos.transfer_init(info, self._steps.new_id()))
                self._met, self._native = self._planned, None
                return
            try:
                await self._init_native(info, chunk_bytes or self._packed_bytes)
            except WavebusError as error:
                if native.meets(info):  # and vLLM's rendezvous waits, before it raises this
                    self._log.error("trainer_engine_refused", detail=str(error))
                raise

    async def _init_native(self, info: object, chunk_bytes: int | None) -> None:
        engine = native.engine_of_all(await self._line.engines())
        senders = native.senders(engine, self._ranks)
        world = await self._transport.plan(senders) if native.meets(info) else ALONE
        opening = native.transfer_init(info, engine, world, self._steps.new_id())
        await self._transport.open_theirs(opening)
        opened_for = native.opened_for(info, engine)
        self._met, self._native = 0, native.Native(opening.backend, chunk_bytes, opened_for)

    async def shutdown(self) -> None:
        async with self._one_step:
            await self._undo_unfinished()
            self._transport.spoil()

    async def refuse(self, error: BaseException, how: UpdateHow) -> None:
        """An update that fails before the bus hears of it; the other ranks do."""
        async with self._one_step:
            await self._undo_unfinished()
            await self._updates.begin(how).end(error)

    async def start(self, plan: Plan, how: UpdateHow, target: Target = "model") -> None:
        async with self._one_step:
            await self._undo_unfinished()
            source = self._source
            patch = bool(plan.base)
            assert patch or source is not None, "the plan is its"
            async with self._aside():
                update = self._updates.begin(how, target, alone=patch)
            sends = None if patch or source is None else source.tensors(shards=self._sharding)
            current = CurrentUpdate(update, plan, sends, self.loop)
            self._current = current
            self._begun.set()
            self._begun = anyio.Event()
            async with self._undone_on_failure(current):
                transport = self._transport
                if not transport.theirs:
                    raise UpdateFailed(
                        own_nack(
                            NackCode.TRANSFER_CLOSED,
                            "the trainer engine's transport is not open any more",
                            step="arm",
                            update_id=current.update.id,
                            hint="make the trainer engine anew",
                        )
                    )
                await current.update.arm(plan, transport.backend, transport.communicator, "")
                if not self._sharding:
                    await current.update.go(current.drain)
            current.starting = asyncio.ensure_future(self._start_engines(current))

    async def _start_engines(self, current: CurrentUpdate) -> None:
        """Who waits for it, hears how it failed."""
        try:
            await current.update.start()
            if self._sharding:  # the other ranks enter a collective with those who have started
                await current.update.go(current.drain)
        except Exception as error:  # noqa: BLE001 - it is raised by who waits
            await self._fail(current, error)
        else:
            current.started.set()

    async def update(self, info: object) -> None:
        current = self._need()
        async with self._undone_on_failure(current):
            if self._native is None:
                meta, sent = infos.chunk_messages(info, current.plan, current.update.id)
            else:
                seq, current.told = current.told, current.told + 1
                meta, sent = native.chunk_messages(info, current.plan, seq, current.update.id)
            current.verified = sent.verify
            await current.until_paused()
            async with announced(self._steps.step, meta):
                if self._native is not None:
                    with anyio.move_on_after(self._timeout_s):  # gathering is the trainer's time
                        await current.until_taken(meta.chunk)
                answer = asyncio.ensure_future(self._steps.step(sent))
                if meta.chunk + 1 == current.plan.chunks:
                    current.update.finish()
                done = await answer
            if self._native is not None and current.told < current.plan.chunks:
                self._need_everybody(done)

    def _need_everybody(self, done: GroupAck) -> None:
        """vLLM's own collectives have no deadline: nobody is to wait in one for who fell out."""
        if done.excluded and self._transport.communicator:
            raise UpdateFailed(
                own_nack(
                    NackCode.TRANSFER_FAILED,
                    f"{', '.join(done.excluded)} fell out in the middle, and the next chunk is "
                    "a collective of all",
                    step="chunk",
                    update_id=done.update_id,
                    hint="the broker's log says why; make the trainer engine anew",
                )
            )

    async def finish(self, label: str) -> None:
        async with self._one_step:
            current = self._need()
            async with self._undone_on_failure(current):
                await current.update.commit(label, current.verified)
            current.over = True
            self._current = None
            await current.update.end(None)

    # -- the source's -----------------------------------------------------------

    async def _go(self) -> None:
        """Another rank's: wait until rank 0 says that tensors may be gathered."""
        with self._updates.beside() as number:
            await reached(self._line, number, "go")

    async def _started(self) -> CurrentUpdate:
        """Rank 0's: the update that is started, or will be."""
        if self._current is None:
            with anyio.move_on_after(self._timeout_s):
                await self._begun.wait()
        current = self._current
        if current is None:
            raise BusTimeout(
                f"source: no start_weight_update() within {self._timeout_s:g} s; tensors are "
                "yielded within an update"
            )
        await current.started.wait()
        if current.failure is not None:
            raise once_more(current.failure)
        return current

    # -- when it fails ----------------------------------------------------------

    def _need(self) -> CurrentUpdate:
        current = self._current
        if current is None:
            raise UsageError("no update is under way: start_weight_update() comes first")
        if current.failure is not None:
            raise once_more(current.failure)
        return current

    async def _undo_unfinished(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            await self._fail(current, UsageError("the update was begun, and never finished"))

    @contextlib.asynccontextmanager
    async def _undone_on_failure(self, current: CurrentUpdate) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as group:  # noqa: BLE001 - it is raised again
            error = first_of(group)
            await self._fail(current, error)
            raise error from None

    async def _fail(self, current: CurrentUpdate, error: BaseException) -> None:
        """Undo it, once; returns when it is undone."""
        if current.over:
            return
        if current.failure is not None:
            await current.undone.wait()
            return
        started = current.started.is_set()
        current.failed(error)
        starting = current.starting
        if starting is not None and starting is not asyncio.current_task():
            starting.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(starting, return_exceptions=True)
        if started and self._transport.communicator:
            self._transport.spoil()  # whoever was in a broadcast may have left it
        try:
            with anyio.CancelScope(shield=True):
                await current.update.end(error)
        finally:
            current.undone.set()


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
