"""Runs updates of vLLM's trainer engines over the bus; their clients and sources call this.

A trainer engine calls ``start_weight_update``, which carries no plan; ``update_weights``, once for
each chunk; and ``finish_weight_update``. It also reads its source, on every rank of the trainer.
On the bus these are one update:

========================= ==============================================================
trainer engine            the bus
========================= ==============================================================
reads the metadata        (that is the plan)
``start_weight_update``   ARM, with the plan; the other ranks receive GO. Then, in the
                          background: UPDATE_START, after a pause unless it is staged
first tensor of a pass    waits for UPDATE_START (other ranks: for GO), or raises its error
``update_weights``        WEIGHT_CHUNK_META and CHUNK_SENT; returns when the chunk is applied.
                          After the last one: UPDATE_FINISH
``finish_weight_update``  COMMIT; resume, if it has paused
========================= ==============================================================

wavebus's own trainer engine makes none of these calls: the agent sends its source as an update of
its own (:meth:`TrainerEngineSession.send`).

A trainer engine that sends patches reads no source. It reads all patches before it calls
``start_weight_update``; their wrapper (:meth:`TrainerAgent.patches`) has then recorded the metadata
for ARM. The other ranks of the trainer take no part in the update.

A failure ends the update: ABORT, resume, and the other ranks receive the error. So does a pass over
the source that ends early.

This module does not import vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

import bus.log
from bus._protocol.core.failures import Failure
from bus._vllm import payloads as vllm_payloads
from bus._weight_transfer.allocation import ALONE
from bus.errors import BusClosed, BusTimeout, UpdateFailed, UsageError, WavebusError
from bus.messages import NackCode
from trainer_agent._bus_thread import wait_for
from trainer_agent._failures import require_process
from trainer_agent._update.plan import UpdatePlan
from trainer_agent._update.rank_sync import wait_for_rank_zero
from trainer_agent._update.steps import first_error
from trainer_agent._vllm import native_payloads
from trainer_agent._vllm.client_update import ClientUpdate
from trainer_agent._vllm.patches import NextPatch
from trainer_agent._vllm.source import BusWeightSource, DescribedSource, wrap_source
from trainer_agent._weights.source import as_described, tensor_metas

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    import torch

    from bus._manifest import TensorMeta
    from bus._weight_transfer.allocation import World
    from bus.messages import Target
    from trainer_agent._connection import Connection
    from trainer_agent._options import UpdateOptions
    from trainer_agent._update.steps import Steps
    from trainer_agent._update.transport import Leave, Transport
    from trainer_agent._update.update import Updates
    from trainer_agent._weights.source import WeightSource


T = TypeVar("T")


class TrainerEngineSession:
    """Carries out on the bus what vLLM's trainer engine asks its client and source.

    A trainer engine runs in a thread, and its calls block. So the client and the source run the
    coroutines of this class in the agent's event loop, by :meth:`call`.
    """

    def __init__(
        self,
        connection: Connection,
        steps: Steps,
        updates: Updates,
        transport: Transport,
        *,
        rank: int,
        ranks: int,
        chunk_bytes: int,
        timeout_s: float,
        suspend_catch_up: Callable[[], AbstractAsyncContextManager[None]],
        update_weights: Callable[..., Awaitable[int]],
    ) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._connection = connection
        self._steps = steps
        self._updates = updates
        self._transport = transport
        self._rank = rank
        self._ranks = ranks
        self._chunk_bytes = chunk_bytes
        self._timeout_s = timeout_s
        self._suspend_catch_up = suspend_catch_up  # requests from here take priority
        self._update_weights = update_weights  # the agent's own
        self._log = bus.log.logger()
        self._source: BusWeightSource | None = None
        self.next_patch = NextPatch()
        self._current: ClientUpdate | None = None
        self._begun = anyio.Event()  # set when the next update begins
        self._step_lock = anyio.Lock()
        self._closing: asyncio.Task[None] | None = None  # of a pass; tasks are held weakly
        # The transport that was opened last, of vLLM's own.
        self._native_transport: native_payloads.NativeTransport | None = None
        self.packed_bytes: int | None = None  # of the last init info

    # -- for any thread ---------------------------------------------------------

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs ``work`` in the agent's event loop, and waits for the result.

        Raises:
            UsageError: the caller runs in the agent's event loop.
            BusClosed: the agent is not connected.
        """
        loop = self._require_loop()
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
            return wait_for(future)
        except CancelledError:
            raise BusClosed("the agent was closed") from None
        except BaseException:
            future.cancel()  # the wait was interrupted; this does nothing if the work itself failed
            raise

    def wrap(self, source: WeightSource) -> BusWeightSource:
        """Makes ``source`` the agent's source, and returns it wrapped for trainer engines."""
        self._source = wrap_source(self.read_source, source)
        return self._source

    @property
    def is_patching(self) -> bool:
        """Whether the trainer engine sends patches."""
        theirs = self._native_transport
        return theirs is not None and vllm_payloads.is_patching(theirs.backend)

    @property
    def _is_sharding(self) -> bool:
        theirs = self._native_transport
        return theirs is not None and vllm_payloads.is_sharding(theirs.backend)

    def require_rank_zero(self) -> None:
        """Checks that this is rank 0, because the other ranks only read their source."""
        if self._rank:
            raise UsageError(f"rank {self._rank} sends nothing: rank 0 calls the client")

    def source_plan(self) -> UpdatePlan:
        """Returns the plan made from the source's metadata."""
        if self._source is None:
            raise UsageError("no source yet: give the trainer engine source=agent.source(model)")
        theirs = self._native_transport
        if not self._is_sharding:
            _require_full(self._source)
        chunk_bytes = self._chunk_bytes if theirs is None else theirs.plan_bytes
        plan = UpdatePlan.of_source(self._source.take_metas(), chunk_bytes=chunk_bytes)
        if theirs is not None:
            theirs.check(plan)
        return plan

    def read_source(
        self, source: BusWeightSource, *, shards: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields a source's tensors: this rank's shards if ``shards`` is set, else full ones."""
        self._require_own(source)
        inner = source.tensors(shards=shards)
        if self._rank:
            self.call(self._wait_for_release)
            beside = iter(inner)
            yield from as_described(tensor_metas(inner.metadata()), beside) if shards else beside
            return
        current = self.call(self._wait_until_started)
        try:
            metas = tensor_metas(inner.metadata()) if shards else current.plan.metas
            tensors = current.begin_pass(iter(inner), metas)
            while (pair := current.take(tensors)) is not None:
                yield pair
        except GeneratorExit:
            if current.tensors_left:  # else the pass was complete
                left = UsageError("the source was not read to its end")
                with contextlib.suppress(WavebusError):
                    self._abort_pass(current, left)
            raise
        except BaseException as error:
            with contextlib.suppress(WavebusError):
                self._abort_pass(current, error)
            raise

    def _require_own(self, source: BusWeightSource) -> None:
        if source is not self._source:
            raise UsageError("this agent has another source by now: it has one at a time")

    def _abort_pass(self, current: ClientUpdate, error: BaseException) -> None:
        loop = self._require_loop()
        if _runs_here(loop):  # the garbage collector may close a pass in any thread
            self._closing = loop.create_task(self._fail(current, error))
        else:
            self.call(lambda: self._fail(current, error))

    def _require_loop(self) -> asyncio.AbstractEventLoop:
        if self.loop is None:
            raise BusClosed("connect() the agent first, or use `with`")
        require_process(self._connection.pid, self._connection.address)
        return self.loop

    # -- the client's calls -----------------------------------------------------

    async def open(self, source: BusWeightSource) -> None:
        """Opens the agent's own transport at every engine, with room for the source's chunks."""
        plan = UpdatePlan.of_source(self._take_metas(source), chunk_bytes=self._chunk_bytes)
        async with self._step_lock, self._suspend_catch_up():
            await self._undo_unfinished()
            self._updates.require_idle()
            await self._transport.open(plan.buffer_bytes(self._transport.sender_for(None)))

    async def send(self, source: BusWeightSource, options: UpdateOptions, target: Target) -> None:
        """Sends the source as the agent sends its own updates."""
        async with self._step_lock:
            await self._undo_unfinished()
            described = DescribedSource(self._take_metas(source), source.tensors(shards=False))
            await self._update_weights(described, target=target, **options.as_arguments())

    def _take_metas(self, source: BusWeightSource) -> list[TensorMeta]:
        self._require_own(source)
        _require_full(source)
        return source.take_metas()

    async def plan_native_world(self, engine: str) -> World:
        """Returns a new communicator's members, if all engines have worker engine ``engine``."""
        native_payloads.require_engines(await self._connection.engines(), engine)
        return await self._transport.plan(native_payloads.sender_count(engine, self._ranks))

    async def init(self, info: object, chunk_bytes: int | None, leave: Leave = None) -> None:
        """Makes every engine open its end; arguments as of :meth:`Transport.open_foreign`."""
        async with self._step_lock, self._suspend_catch_up():
            await self._undo_unfinished()
            try:
                engine = native_payloads.engine_of_all(await self._connection.engines())
                senders, world = native_payloads.sender_count(engine, self._ranks), ALONE
                if native_payloads.has_communicator(info):
                    world = await self._transport.plan(senders)
                opening = native_payloads.transfer_init(info, engine, world, self._steps.new_id())
                await self._transport.open_foreign(opening, leave)
                opened_for = native_payloads.opened_for(info, engine)
            except WavebusError as error:
                # With a communicator, vLLM's rendezvous waits before it raises this.
                if native_payloads.has_communicator(info):
                    self._log.error("trainer_engine_refused", detail=str(error))
                raise
            self._native_transport = native_payloads.NativeTransport(
                opening.backend, chunk_bytes or self.packed_bytes, opened_for
            )

    async def shutdown(self) -> None:
        """Aborts an update that was not finished, and stops using the transport."""
        await self.undo()
        if self._transport.is_foreign or self._updates.is_busy:
            self._transport.invalidate()
        else:
            await self._transport.discard()

    async def undo(self) -> None:
        """Aborts an update that was not finished."""
        async with self._step_lock:
            await self._undo_unfinished()

    async def refuse(self, error: BaseException, options: UpdateOptions) -> None:
        """Begins an update and ends it with ``error``, which the other ranks raise as well."""
        async with self._step_lock:
            await self._undo_unfinished()
            await self._updates.begin(options).end(error)

    async def start(
        self,
        plan: UpdatePlan,
        options: UpdateOptions,
        target: Target = "model",
        *,
        reads_source: bool,
    ) -> None:
        """Arms every engine for an update, and starts the pause in the background.

        Args:
            plan: the tensors to send.
            options: the update's options.
            target: the model or the draft model.
            reads_source: whether the trainer engine sends this agent's source, on every rank. Else
                rank 0 alone sends what it has: patches, or the tensors of a client over HTTP.
        """
        async with self._step_lock:
            await self._undo_unfinished()
            async with self._suspend_catch_up():
                update = self._updates.begin(options, target, alone=not reads_source)
            source = self._source if reads_source else None
            sends = None if source is None else source.tensors(shards=self._is_sharding)
            current = ClientUpdate(update, plan, sends, self.loop)
            self._current = current
            self._begun.set()
            self._begun = anyio.Event()
            async with self._undo_on_failure(current):
                transport = self._transport
                if not transport.is_foreign:
                    closed = Failure(
                        NackCode.TRANSFER_CLOSED,
                        "the trainer engine's transport is not open any more",
                        hint="create the trainer engine again",
                    )
                    raise UpdateFailed(closed.nack("arm", current.update.id))
                await current.update.arm(plan, transport, "")
                if not self._is_sharding:
                    await current.update.release_ranks(current.drain)
            current.starting = asyncio.ensure_future(self._start_engines(current))

    async def _start_engines(self, current: ClientUpdate) -> None:
        """Pauses and starts the engines; tasks that wait for the start raise its error."""
        try:
            await current.update.start()
            if self._is_sharding:  # the other ranks enter a collective with the started engines
                await current.update.release_ranks(current.drain)
        except Exception as error:  # noqa: BLE001 - it is raised by what waits
            await self._fail(current, error)
        else:
            current.started.set()

    async def extend(self, metas: Sequence[TensorMeta]) -> None:
        """Has every engine check the tensors that the next call of :meth:`update` brings."""
        current = self._require_current()
        async with self._undo_on_failure(current):
            await current.extend(metas)

    async def update(self, info: object) -> None:
        """Announces the chunk in ``info``; returns when every engine has applied it."""
        current = self._require_current()
        async with self._undo_on_failure(current):
            seq = current.chunks_announced
            current.chunks_announced += 1
            meta, sent = native_payloads.chunk_messages(info, current.plan, seq, current.update.id)
            async with current.chunk(), self._steps.announce_chunk(meta):
                with anyio.move_on_after(self._timeout_s):  # gathering is the trainer's time
                    await current.wait_until_taken(seq)
                answer = asyncio.ensure_future(self._steps.send_chunk(sent))
                if current.is_last(seq):
                    current.update.finish()
                await answer

    async def finish(self, label: str) -> None:
        """Commits the update, and resumes the engines."""
        async with self._step_lock:
            current = self._require_current()
            async with self._undo_on_failure(current):
                await self._wait_until_started()
                await current.update.commit(label, "unsupported")
            current.is_over = True
            self._current = None
            await current.update.end(None)

    async def _wait_for_release(self) -> None:
        """Waits, on ranks other than 0, for GO: then all ranks gather tensors."""
        with self._updates.as_follower() as number:
            await wait_for_rank_zero(self._connection, number, "go")

    async def _wait_until_started(self) -> ClientUpdate:
        """Waits, on rank 0, until engines are started; returns the update."""
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
        current.raise_failure()
        return current

    def _require_current(self) -> ClientUpdate:
        current = self._current
        if current is None:
            raise UsageError("no update is under way: start_weight_update() comes first")
        current.raise_failure()
        return current

    async def _undo_unfinished(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            await self._fail(current, UsageError("the update was begun, and never finished"))

    @contextlib.asynccontextmanager
    async def _undo_on_failure(self, current: ClientUpdate) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as group:  # noqa: BLE001 - it is raised again
            error = first_error(group)
            await self._fail(current, error)
            raise error from None

    async def _fail(self, current: ClientUpdate, error: BaseException) -> None:
        """Aborts an update and resumes the engines, once; returns when that is done."""
        if current.is_over:
            return
        if current.failure is not None:
            await current.undone.wait()
            return
        may_broadcast = current.may_be_in_broadcast(patches=self.is_patching)
        current.on_failed(error)
        starting = current.starting
        if starting is not None and starting is not asyncio.current_task():
            starting.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(starting, return_exceptions=True)
        try:
            with anyio.CancelScope(shield=True):
                if may_broadcast and self._transport.communicator:
                    await self._transport.discard()  # some rank may have left a broadcast
                await current.update.end(error)
        finally:
            current.undone.set()


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _require_full(source: BusWeightSource) -> None:
    """Raises ``UsageError`` if a source can't yield full tensors."""
    if not source.implements_iter_full():
        raise UsageError(
            "source: yields each rank's shards, which no trainer engine but nccl_m2n sends: "
            "give the others agent.source(model)"
        )
