"""The trainer's library: pause engines, send weights, resume; all in one call."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Final, Self, TypeVar

import anyio

from bus.errors import BusClosed, BusTimeout, Refused, UpdateFailed, UsageError
from bus.gloo import address_towards, host_of
from bus.ids import check_name, new_update_id
from bus.messages import (
    Abort,
    Arm,
    Commit,
    EngineView,
    Escalation,
    GroupAck,
    GroupView,
    Message,
    Nack,
    NackCode,
    PauseLocal,
    PauseMode,
    PlanTransfer,
    Resume,
    Status,
    TransferInit,
    TransferPlan,
    UpdateFinish,
    UpdateStart,
    Verify,
    WaitEngines,
)
from bus.runtime.peer import default_name
from bus.settings import DEFAULT_BROKER
from bus.transfer import ALONE, World
from trainer_agent.connection import Connection
from trainer_agent.how import WAIT_S, PauseHow
from trainer_agent.ranks import Leading, follow
from trainer_agent.report import UpdateReport
from trainer_agent.sources import Weights, as_source
from trainer_agent.stream import ChunkStream, first_of
from trainer_agent.transfer import make_sender

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from bus.manifest import Manifest
    from bus.protocol.link import LinkConfig
    from bus.runtime.base import ClientTransport

M = TypeVar("M", bound=Message)

_RESEND_S: Final = 1.0
_CLEANUP_S: Final = 30.0
_OPENINGS: Final = 3


class TrainerAgent:
    """A trainer on the bus: holds one group of engines.

    ::

        async with TrainerAgent("tcp://127.0.0.1:7710", group="policy") as agent:
            await agent.wait_for_engines(2, timeout_s=60)
            version = await agent.update_weights(model, label=f"step {step}")

    The event loop must stay free while you train, or the bus takes you for dead
    after some seconds: run training steps in a thread, or use
    :class:`trainer_agent.SyncTrainerAgent`, which keeps a thread for the bus.

    Args:
        broker: the broker's address.
        group: the engines to hold; one trainer holds a group at a time.
        name: this trainer's name on the bus. Default: from host and pid.
        rank, ranks: of a trainer with several processes (FSDP). Every rank has an agent, and all
            call :meth:`update_weights` with their part of the same model; rank 0 holds the
            group, does the rest, and sends.
        backend: how tensors travel: ``shm`` (one host), ``gloo`` (TCP, any number of hosts), or
            one of your own
            (:func:`trainer_agent.transfer.register_sender`).
        chunk_bytes: at most so much is in one chunk; two chunks are under way at a time,
            so memory for two is taken. A larger tensor gets a chunk of its own.
        verify: how chunks are checked before engines load them: ``sample`` looks at 4,096 words
            of each tensor, ``full`` at all (about a second per 2 GB and core), ``off`` at none.
        lease_ms: how long engines stay paused when trainer and broker are both gone.
        timeout_s: how long a step (a pause, an ack of all engines) may take.
    """

    def __init__(
        self,
        broker: str = DEFAULT_BROKER,
        *,
        group: str = "policy",
        name: str | None = None,
        rank: int = 0,
        ranks: int = 1,
        backend: str = "shm",
        chunk_bytes: int = 64 * 1024 * 1024,
        verify: Verify = "sample",
        lease_ms: int = 30_000,
        timeout_s: float = 300.0,
        transport: ClientTransport | None = None,
        link_config: LinkConfig | None = None,
    ) -> None:
        if chunk_bytes <= 0:
            raise UsageError(f"chunk_bytes={chunk_bytes}: must be positive")
        if verify not in ("off", "sample", "full"):
            raise UsageError(f"verify={verify!r}: choose one of off, sample, full")
        if timeout_s <= 0:
            raise UsageError(f"timeout_s={timeout_s}: must be positive")
        self.broker = broker
        self.group = check_name(group, "group")
        self.name = check_name(name or default_name("trainer"), "name")
        if not 0 <= rank < ranks:
            raise UsageError(f"rank={rank}: of {ranks} ranks")
        self.rank = rank
        self.ranks = ranks
        self.backend = backend
        self.chunk_bytes = chunk_bytes
        self.verify: Verify = verify
        self.lease_ms = lease_ms
        self.timeout_s = timeout_s
        self.last_update: UpdateReport | None = None
        self._sender = make_sender(backend)
        self._room_bytes = 0
        self._communicator = 0
        self._line = Connection(
            broker,
            role="follower" if rank else "trainer",
            name=self.name,
            group=self.group,
            timeout_s=timeout_s,
            transport=transport,
            link_config=link_config,
        )
        self._ids = 0
        self._updates = 0  # how many were begun, refused ones too: the other ranks count as well
        self._version = 0  # the greatest that the bus has told of
        self._window: tuple[str, int] | None = None  # the pause we hold: its id and epoch
        self._busy = False

    # -- coming and going -------------------------------------------------------

    async def connect(self) -> Self:
        """Join the bus and take the group.

        Raises:
            BusTimeout: no broker answers at the address within ``timeout_s``.
            Refused: the name is taken, or another trainer holds the group.
        """
        await self._line.open()
        return self

    async def close(self) -> None:
        """Leave the bus. A pause that is still held is resumed by the broker."""
        self._line.close()
        self._sender.close()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # -- what trainers call -----------------------------------------------------

    async def wait_for_engines(self, count: int, timeout_s: float = 60.0) -> list[EngineView]:
        """Wait until ``count`` engines have joined the group; return all that have.

        Raises:
            Refused: with code ``timeout`` and the names of those that are there.
        """
        if count < 1:
            raise UsageError(f"count={count}: wait for one engine at least")
        view = await self._line.ask(
            WaitEngines(count, int(timeout_s * 1000)), GroupView, timeout_s=timeout_s + 10
        )
        self._version = max(self._version, view.version)
        return list(view.engines)

    async def status(self) -> Status:
        """The broker's whole view."""
        return await self._line.status()

    @contextlib.asynccontextmanager
    async def paused(
        self,
        *,
        mode: PauseMode = "keep",
        clear_cache: bool = True,
        wait_s: float = WAIT_S,
        escalate: Escalation = "keep",
    ) -> AsyncIterator[GroupAck]:
        """Keep the group paused for the length of a block.

        Args:
            mode: ``keep`` freezes requests, ``wait`` lets running ones end, ``abort`` ends
                all with the tokens they have.
            clear_cache: kept requests recompute their KV cache with the weights they find
                after the pause, and no prefix cache is kept.
            wait_s: how long ``wait`` lets requests run.
            escalate: what the pause becomes on engines whose requests have not ended by
                then. The answer names these engines (``escalated``) and their requests
                (``waited_for``).

        Raises:
            PauseFailed: not every engine could be paused; those that were, have resumed.
        """
        if self._window is not None:
            raise UsageError("the group is paused already by this agent")
        update_id = self._new_id()
        how = PauseHow(mode, clear_cache=clear_cache, wait_s=wait_s, escalate=escalate)
        ack = await self._pause(update_id, how)
        try:
            yield ack
        finally:
            with anyio.move_on_after(_CLEANUP_S, shield=True):
                await self._resume(update_id)

    async def update_weights(
        self,
        source: Weights,
        *,
        label: str = "",
        mode: PauseMode = "keep",
        clear_cache: bool = True,
        wait_s: float = WAIT_S,
        escalate: Escalation = "keep",
    ) -> int:
        """Send weights to every engine and have them serve them: arm, pause, send, commit,
        resume. The pause's arguments are those of :meth:`paused`; inside one, the pause is
        that one.

        Args:
            source: an ``nn.Module``, a state dict, ``(name, tensor)`` pairs, or a
                :class:`trainer_agent.sources.WeightSource`; all weights of the model,
                by their Hugging Face names.
            label: your own name of these weights, for logs and status.

        Returns:
            The version the bus gave. :attr:`last_update` tells the rest.

        Raises:
            ManifestRefused: an engine's model doesn't take these tensors; nothing was
                loaded, and the old weights serve on.
            PauseFailed: see :meth:`paused`.
            UpdateFailed: it was given up; engines that had loaded a part are quarantined
                until the next whole update.
            BusTimeout: somebody did not answer in time; the text says who.
        """
        if self._busy:
            raise UsageError("an update is under way; await it first")
        how = PauseHow(mode, clear_cache=clear_cache, wait_s=wait_s, escalate=escalate)
        self._busy = True
        self._updates += 1
        try:
            if self.rank:
                return await follow(self._line, as_source(source), self._updates)
            leading = Leading(self._line, self._updates, alone=self.ranks == 1)
            async with leading:
                leading.version = await self._update(source, label, how, leading)
            return leading.version
        finally:
            self._busy = False

    # -- one update -------------------------------------------------------------

    async def _update(self, source: Weights, label: str, how: PauseHow, leading: Leading) -> int:
        stream = ChunkStream(
            as_source(source), self._sender, chunk_bytes=self.chunk_bytes, verify=self.verify
        )
        update_id = self._new_id()
        await self._open(stream)
        armed = await self._arm(update_id, label, stream)
        held = self._window
        try:
            pause = None if held else await self._pause(update_id, how)
        except BaseException:
            await self._undo(update_id, resume=False)
            raise
        try:
            await self._step(UpdateStart(update_id))
            await leading.go(stream)
            await stream.send(update_id, self._step)
            await self._step(UpdateFinish(update_id))
            done = await self._step(Commit(update_id, armed.version, label))
        except BaseException:
            if self._sender.collective:
                self._room_bytes = 0  # whoever was in a broadcast may have left it
            await self._undo(update_id, resume=held is None)
            raise
        resumed = None if held else await self._resume(update_id)
        self.last_update = UpdateReport(
            version=done.version,
            label=label,
            update_id=update_id,
            engines=done.engines,
            excluded=done.excluded,
            interrupted=pause.in_flight if pause else 0,
            arm_ms=armed.duration_ms,
            pause_ms=pause.duration_ms if pause else 0.0,
            paused_ms=resumed.paused_ms if resumed else 0.0,
            slowest=pause.slowest if pause else "",
            size_bytes=stream.size_bytes,
            chunks=stream.manifest.chunks,
            verified=stream.verify,
        )
        return done.version

    async def _open(self, stream: ChunkStream) -> None:
        """Open the transport, if there is none with room enough."""
        if self._room_bytes < stream.room_bytes:
            await self._reopen(stream)

    async def _reopen(self, stream: ChunkStream) -> None:
        """Open the transport for those who are there, again if somebody comes or goes."""
        self._room_bytes = 0
        for left in reversed(range(_OPENINGS)):
            world = await self._world()
            params = await anyio.to_thread.run_sync(self._sender.open, stream.room_bytes, world)
            try:
                await self._meet_all(TransferInit(self.backend, params, world.number, 0, {}))
                break
            except Refused as refused:
                if refused.code is not NackCode.TRANSFER_CLOSED or not left:
                    raise
        self._sender.opened()
        self._room_bytes = stream.room_bytes
        self._communicator = world.number

    async def _meet_all(self, init: TransferInit) -> None:
        """Every engine opens its end; a sender with collectives meets them meanwhile."""
        try:
            async with anyio.create_task_group() as tasks:
                if self._sender.collective:
                    tasks.start_soon(self._meet)
                await self._step(init)
        except BaseExceptionGroup as group:
            raise first_of(group) from group

    async def _world(self) -> World:
        """Who is to meet; nobody, where each engine opens its end alone."""
        if not self._sender.collective:
            return ALONE
        plan = await self._line.ask(PlanTransfer(), TransferPlan)
        return World(plan.communicator, plan.world_size, address_towards(host_of(self.broker)))

    async def _meet(self) -> None:
        """Wait in a thread until all ends are there; closed, the sender gives up waiting."""
        try:
            await anyio.to_thread.run_sync(self._sender.meet, abandon_on_cancel=True)
        except BaseException:
            self._sender.close()
            raise

    async def _arm(self, update_id: str, label: str, stream: ChunkStream) -> GroupAck:
        """Every engine checks the manifest. One that joined since the transport was opened
        has no end of it: then it is opened anew, for all."""
        manifest: Manifest = stream.manifest
        arm = Arm(
            update_id,
            self._version,
            label,
            self.backend,
            self._communicator,
            manifest.names,
            manifest.dtypes,
            manifest.shapes,
            manifest.chunk_ends,
            manifest.digest(),
        )
        try:
            return await self._step(arm)
        except Refused as refused:
            if refused.code is not NackCode.TRANSFER_CLOSED:
                raise
        await self._reopen(stream)
        return await self._step(dataclasses.replace(arm, communicator=self._communicator))

    async def _pause(self, update_id: str, how: PauseHow) -> GroupAck:
        ask = PauseLocal(
            update_id,
            how.mode,
            how.clear_cache,
            self.lease_ms,
            int(self.timeout_s * 1000),
            int(how.wait_s * 1000),
            how.escalate,
        )
        ack = await self._step(ask)
        self._window = (update_id, self._line.epoch)
        return ack

    async def _resume(self, update_id: str) -> GroupAck:
        try:
            return await self._step(Resume(update_id))
        finally:
            self._window = None

    async def _undo(self, update_id: str, *, resume: bool) -> None:
        """Give the update up, and let the engines go on. What fails here, the broker mends:
        it aborts and resumes for a trainer that is gone."""
        with anyio.move_on_after(_CLEANUP_S, shield=True):
            with contextlib.suppress(Refused, BusTimeout, BusClosed):
                await self._step(Abort(update_id, "the trainer gave up"))
            if resume:
                with contextlib.suppress(Refused, BusTimeout, BusClosed):
                    await self._resume(update_id)

    # -- asking the broker --------------------------------------------------------

    async def _step(self, message: Message) -> GroupAck:
        """One step of all engines; in a pause, only as the trainer that made it."""
        if self._window is not None and self._line.epoch != self._window[1]:
            self._window = None
            raise UpdateFailed(
                Nack(
                    code=NackCode.FENCED,
                    step="update",
                    update_id=getattr(message, "update_id", ""),
                    chunk=0,
                    detail="the bus took this trainer for dead, and has resumed its engines",
                    field="epoch",
                    peer="",
                    tensor="",
                    hint="keep the event loop free, or use SyncTrainerAgent",
                    retry_after_ms=0,
                )
            )
        done = await self._line.ask(message, GroupAck)
        self._version = max(self._version, done.version)
        return done

    def _new_id(self) -> str:
        self._ids += 1
        return new_update_id(self._line.boot, self._ids)
