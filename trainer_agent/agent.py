"""The trainer's library: pause engines, send weights, resume; all in one call."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final, Self, TypeVar

import anyio

from bus.errors import BusClosed, BusTimeout, Refused, UpdateFailed, UsageError, refusal
from bus.ids import check_name, new_boot, new_update_id
from bus.messages import (
    Abort,
    Arm,
    Commit,
    EngineView,
    Envelope,
    Escalation,
    GroupAck,
    GroupView,
    Heartbeat,
    Join,
    Message,
    Nack,
    NackCode,
    PauseLocal,
    PauseMode,
    Resume,
    Status,
    StatusRequest,
    TransferInit,
    UpdateFinish,
    UpdateStart,
    WaitEngines,
)
from bus.protocol.link import LinkConfig, LinkState
from bus.runtime.aio import AsyncioScheduler
from bus.runtime.peer import HOST, PID, Peer, default_name, route_of
from bus.runtime.zmq_transport import ZmqClient
from bus.settings import DEFAULT_BROKER
from trainer_agent.how import WAIT_S, PauseHow
from trainer_agent.report import UpdateReport
from trainer_agent.sources import Weights, as_source
from trainer_agent.stream import ChunkStream
from trainer_agent.transfer import make_sender

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from bus.manifest import Manifest
    from bus.runtime.base import ClientTransport

M = TypeVar("M", bound=Message)

_RESEND_S: Final = 1.0
_CLEANUP_S: Final = 30.0


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
        backend: how tensors travel: ``shm`` (one host), or one of your own
            (:func:`trainer_agent.transfer.register_sender`).
        chunk_bytes: at most so much is in one chunk; two chunks are under way at a time,
            so memory for two is taken. A larger tensor gets a chunk of its own.
        lease_ms: how long engines stay paused when trainer and broker are both gone.
        timeout_s: how long a step (a pause, an ack of all engines) may take.
    """

    def __init__(
        self,
        broker: str = DEFAULT_BROKER,
        *,
        group: str = "policy",
        name: str | None = None,
        backend: str = "shm",
        chunk_bytes: int = 64 * 1024 * 1024,
        lease_ms: int = 30_000,
        timeout_s: float = 300.0,
        transport: ClientTransport | None = None,
        link_config: LinkConfig | None = None,
    ) -> None:
        if chunk_bytes <= 0:
            raise UsageError(f"chunk_bytes={chunk_bytes}: must be positive")
        if timeout_s <= 0:
            raise UsageError(f"timeout_s={timeout_s}: must be positive")
        self.broker = broker
        self.group = check_name(group, "group")
        self.name = check_name(name or default_name("trainer"), "name")
        self.backend = backend
        self.chunk_bytes = chunk_bytes
        self.lease_ms = lease_ms
        self.timeout_s = timeout_s
        self.last_update: UpdateReport | None = None
        self._sender = make_sender(backend)
        self._room_bytes = 0
        self._transport = transport
        self._link_config = link_config
        self._peer: Peer | None = None
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._changed = asyncio.Event()
        self._updates = 0
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
        if self._peer is not None:
            raise UsageError("this agent is connected already")
        boot = new_boot()
        self._peer = Peer(
            name=self.name,
            group=self.group,
            boot=boot,
            transport=self._transport or ZmqClient(self.broker, route_of(self.name, boot)),
            scheduler=AsyncioScheduler(),
            join=lambda: Join("trainer", HOST, PID, None, None),
            beat=lambda: Heartbeat("running", 0, 0, ""),
            on_message=self._on_message,
            on_state=self._on_state,
            link_config=self._link_config,
        )
        self._peer.start()
        try:
            with anyio.fail_after(min(self.timeout_s, 30.0)):
                await self._joined()
        except TimeoutError:
            self._peer.close()
            raise BusTimeout(
                f"no broker answers at {self.broker}; start one with `wavebus broker`"
            ) from None
        except BaseException:
            self._peer.close()
            raise
        return self

    async def close(self) -> None:
        """Leave the bus. A pause that is still held is resumed by the broker."""
        if self._peer is not None:
            self._peer.close("trainer closed")
        self._sender.close()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(BusClosed("the agent was closed"))

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
        view = await self._ask(
            WaitEngines(count, int(timeout_s * 1000)), GroupView, timeout_s=timeout_s + 10
        )
        self._version = max(self._version, view.version)
        return list(view.engines)

    async def status(self) -> Status:
        """The broker's whole view."""
        return await self._ask(StatusRequest(), Status, timeout_s=min(self.timeout_s, 10.0))

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
        self._busy = True
        try:
            how = PauseHow(mode, clear_cache=clear_cache, wait_s=wait_s, escalate=escalate)
            return await self._update(source, label, how)
        finally:
            self._busy = False

    # -- one update -------------------------------------------------------------

    async def _update(self, source: Weights, label: str, how: PauseHow) -> int:
        stream = ChunkStream(as_source(source), self._sender, chunk_bytes=self.chunk_bytes)
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
            await stream.send(update_id, self._step)
            await self._step(UpdateFinish(update_id))
            done = await self._step(Commit(update_id, armed.version, label))
        except BaseException:
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
        )
        return done.version

    async def _open(self, stream: ChunkStream) -> None:
        """Open the transport, if there is none with room enough."""
        if self._room_bytes < stream.room_bytes:
            await self._reopen(stream)

    async def _reopen(self, stream: ChunkStream) -> None:
        self._room_bytes = 0
        params = await anyio.to_thread.run_sync(self._sender.open, stream.room_bytes)
        await self._step(TransferInit(self.backend, params))
        self._sender.opened()
        self._room_bytes = stream.room_bytes

    async def _arm(self, update_id: str, label: str, stream: ChunkStream) -> GroupAck:
        """Every engine checks the manifest. One that joined since the transport was opened
        has no end of it: then it is opened anew, for all."""
        manifest: Manifest = stream.manifest
        arm = Arm(
            update_id,
            self._version,
            label,
            self.backend,
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
        return await self._step(arm)

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
        self._window = (update_id, self._link_epoch())
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
        if self._window is not None and self._link_epoch() != self._window[1]:
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
        done = await self._ask(message, GroupAck, timeout_s=self.timeout_s)
        self._version = max(self._version, done.version)
        return done

    async def _ask(self, message: Message, expect: type[M], *, timeout_s: float) -> M:
        """Send until answered. The broker knows the id, and does nothing twice."""
        peer = self._connected()
        msg_id = peer.new_id()
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[msg_id] = future
        until_s = time.monotonic() + timeout_s
        try:
            while not future.done():
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise BusTimeout(await self._explain(message, timeout_s))
                if peer.link.state is LinkState.REFUSED and peer.link.refusal is not None:
                    raise refusal(peer.link.refusal)
                if peer.link.state is LinkState.JOINED:
                    peer.send(message, msg_id=msg_id)
                await asyncio.wait([future], timeout=min(_RESEND_S, left_s))
        finally:
            del self._answers[msg_id]
        answer = future.result()
        if isinstance(answer, Nack):
            raise refusal(answer)
        if not isinstance(answer, expect):
            raise BusTimeout(f"the broker answered {type(answer).__name__}, not {expect.__name__}")
        return answer

    async def _explain(self, message: Message, timeout_s: float) -> str:
        """Who has not answered, as far as the broker can tell."""
        what = f"no answer to {type(message).__name__} within {timeout_s:g} s"
        if isinstance(message, StatusRequest):
            return f"{what}; the broker at {self.broker} is silent"
        try:
            status = await self.status()
        except (BusTimeout, Refused):
            return f"{what}; the broker at {self.broker} is silent"
        for group in status.groups:
            if group.name == self.group:
                waiting = ", ".join(group.waiting_for) or "nobody"
                return (
                    f"{what}; group {group.name} is {group.pause}, update {group.update}, "
                    f"waiting for: {waiting}"
                )
        return f"{what}; the broker does not know group {self.group}"

    def _on_message(self, envelope: Envelope, message: Message) -> None:
        future = self._answers.get(envelope.reply_to)
        if future is None or future.done():
            return
        if isinstance(message, Nack) and message.code in (NackCode.STALE, NackCode.NOT_JOINED):
            return  # asked again, under a new number or after the new join
        future.set_result(message)

    def _on_state(self, _state: LinkState) -> None:
        self._changed.set()

    async def _joined(self) -> None:
        link = self._connected().link
        while link.state is not LinkState.JOINED:
            if link.state is LinkState.REFUSED and link.refusal is not None:
                raise refusal(link.refusal)
            self._changed.clear()
            await self._changed.wait()

    def _connected(self) -> Peer:
        if self._peer is None:
            raise BusClosed("connect() first, or use `async with`")
        return self._peer

    def _link_epoch(self) -> int:
        return self._connected().link.epoch

    def _new_id(self) -> str:
        self._updates += 1
        return new_update_id(self._connected().boot, self._updates)
