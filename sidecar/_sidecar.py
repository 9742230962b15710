"""The sidecar: connects one engine to the bus.

The session machine (:mod:`bus._protocol.engine.session`) decides what each message of the broker
means for the engine. This module makes the engine calls that the machine requests, and passes the
results back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Final, Self

import anyio
from msgspec import structs

from bus._ids import check_name, new_boot
from bus._keys import security
from bus._net import advertised
from bus._protocol.core.effects import Note, Send
from bus._protocol.core.failures import Failure
from bus._protocol.core.link import LinkConfig, LinkState
from bus._protocol.engine.calls import (
    COMMANDS,
    Call,
    CallCancel,
    CallCommit,
    CallEscalate,
    CallPause,
    SessionEffect,
)
from bus._protocol.engine.session import EngineSession
from bus._runtime.clock import AsyncioScheduler
from bus._runtime.peer import HOST, PeerClient, default_name
from bus._settings import DEFAULT_BROKER
from bus.errors import BusClosed, EngineError, refusal
from bus.messages import (
    EngineFacts,
    Envelope,
    Heartbeat,
    HeartbeatAck,
    Join,
    Message,
    Nack,
    NackCode,
    Restart,
    codec,
)
from sidecar._cache_run import CacheRun
from sidecar._departure import Departure
from sidecar._dispatch import dispatch
from sidecar._pause_lease import PauseLeaseWriter
from sidecar._supervised_tasks import SupervisedTasks
from sidecar.engine import START_ANSWER_S, answers_within

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from bus._net import Broker
    from bus._runtime.interfaces import ClientTransport
    from bus.messages import PdRole
    from bus.operations import ReceiveChunk, SwapStaged
    from sidecar.engine import Engine, EngineInfo

# How often the cancellation of a call is repeated until the call returns.
CANCEL_RETRY_S: Final = 0.5
# How long a closing sidecar waits for the engine call under way.
CLOSE_TIMEOUT_S: Final = 10.0


class Sidecar:
    """Connects one engine to the bus, for the length of an ``async with`` block.

    ::

        async with Sidecar(VllmEngine(async_llm), broker="tcp://...:7710", group="policy"):
            ...  # serve requests; updates come over the bus

    Args:
        engine: the engine's adapter. The sidecar starts it, and closes it at the end.
        broker: the broker's address; if it may move, several separated by commas, or a function
            that returns the present one (docs/operations.md).
        group: the group of engines that take the same weights.
        name: this engine's name on the bus; unique. Default: from host and pid.
        dp_group: the DP group that the engine is a rank of. Default: a DP group of its own.
        supervised: whether a supervisor restarts this process, its engine and all other ranks of
            the DP group when this process ends. If so, the sidecar ends when the broker finds that
            the engine is stuck for good.
        pd_role: ``prefill`` or ``decode``, if the engine does only that. Default: both.
        advertise: host or URL by which clients reach the engine. Default: where it listens.
        key: file with this engine's secret key (`wavebus keygen`). Default: WAVEBUS_KEY, or none.
        broker_key: file with the broker's public key. Default: WAVEBUS_BROKER_KEY, or none.
        insecure: whether to go beyond loopback without keys. Default: as WAVEBUS_INSECURE says.
        transport: replaces the ZeroMQ connection to ``broker``, in tests.
        link_config: timeouts of the link to the broker.

    Raises:
        EngineError: on entering, if the engine can't be started or reached.
        UsageError: a name, a key or the address is wrong.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        broker: Broker = DEFAULT_BROKER,
        group: str = "policy",
        name: str | None = None,
        dp_group: str | None = None,
        supervised: bool = False,
        pd_role: PdRole = "",
        advertise: str = "",
        key: Path | str | None = None,
        broker_key: Path | str | None = None,
        insecure: bool = False,
        transport: ClientTransport | None = None,
        link_config: LinkConfig | None = None,
    ) -> None:
        self.engine = engine
        self.name = check_name(name or default_name("engine"), "name")
        self.group = check_name(group, "group")
        self.dp_group = check_name(dp_group or self.name, "dp_group")
        self.supervised = supervised
        self._advertise, self._pd_role = advertise, pd_role
        self.session = EngineSession(self.name)
        self._lease_writer = PauseLeaseWriter(engine, self.session, self.dp_group)
        self.info: EngineInfo | None = None
        self.death = ""
        self._broker = broker
        self._security = security(key, broker_key, insecure=insecure)
        self._transport, self._link_config = transport, link_config
        self._peer: PeerClient | None = None
        self._tasks = SupervisedTasks(self._on_task_failed)
        self._caller: asyncio.Task[None] | None = None  # makes the engine calls, one at a time
        self._next_call: Call | None = None
        self._wake: asyncio.Future[None] | None = None  # set while the caller has nothing to do
        self._cancelled: SwapStaged | ReceiveChunk | None = None  # the last call that was cancelled
        self._cache_run, self._departure = CacheRun(engine), Departure()
        self._closing = self._is_frozen = False  # whether the core is frozen
        self._ended, self._changed = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        """Starts the engine and begins to join the bus; does not wait for the broker.

        Raises:
            EngineError: the engine can't be started, or does not answer.
        """
        try:
            info = await self.engine.start()
            self.info = structs.replace(info, endpoint=advertised(info.endpoint, self._advertise))
            with answers_within(START_ANSWER_S, "the engine"):
                version = await self.engine.version()
            self.session = EngineSession(
                self.name,
                version=version,
                draft=self.info.draft,
                closed=self.info.closed,
                dp_size=self.info.dp_size,
            )
            self._lease_writer = PauseLeaseWriter(self.engine, self.session, self.dp_group)
            scheduler = AsyncioScheduler()
            left = self.engine.abandoned_pause()
            found = None
            if left is not None:
                with answers_within(START_ANSWER_S, "the paused engine"):
                    found = await self._lease_writer.take_over(left, scheduler.now_ms())
            self.session.admission.closed |= self.info.booted_closed  # opened after the join
            self._peer = PeerClient(
                name=self.name,
                group=self.group,
                boot=new_boot(),
                broker=self._broker,
                security=self._security,
                transport=self._transport,
                scheduler=scheduler,
                join=self._join,
                beat=self._beat,
                on_message=self._on_message,
                on_state=self._on_state,
                on_tick=lambda now_ms: self._perform(self.session.tick(now_ms)),
                next_deadline_ms=self.session.next_deadline_ms,
                link_config=self._link_config,
            )
            if found is not None:
                self._client.note(found)
            self._caller = self._tasks.start(self._make_calls())
            self._peer.start()
            for watch in (self._watch_engine, self._watch_load, self._watch_core):
                self._tasks.start(watch())
        except BaseException:
            await self.close("it could not be started")
            raise

    @property
    def _client(self) -> PeerClient:
        """The sidecar's end of the link to the broker; raises BusClosed before the start."""
        if self._peer is None:
            raise BusClosed("the sidecar is not started: call start(), or use `async with`")
        return self._peer

    async def __aexit__(self, _kind: object, exc: BaseException | None, *_: object) -> None:
        await self.close("closed" if exc is None else f"closing on {exc!r}"[:256])

    async def joined(self) -> None:
        """Waits until the broker has accepted this engine, which may be long after :meth:`start`.

        Raises:
            Refused: the broker refuses the join, for example because the name is taken.
            BusClosed: the sidecar was closed.
        """
        while True:
            link = self._client.link
            if link.state is LinkState.JOINED:
                return
            if link.state is LinkState.REFUSED and link.refusal is not None:
                raise refusal(link.refusal)
            if link.state is LinkState.CLOSED:
                raise BusClosed("the sidecar was closed")
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> None:
        """Serves until the engine dies, the broker refuses the join, or the sidecar is closed.

        Raises:
            EngineError: the engine died; the text says how.
            Refused: the broker refused the join.
        """
        await self._ended.wait()
        if self.death:
            raise EngineError(self.death, code=NackCode.ENGINE_DEAD)
        if self._client.link.refusal is not None:
            raise refusal(self._client.link.refusal)

    async def close(self, reason: str = "closed") -> None:
        """Leaves the bus for a ``reason``, resumes the engine if safe, and closes its adapter.

        Raises:
            EngineError: the engine could not be released. Everything is closed all the same.
        """
        try:
            if self._peer is not None:
                await self._departure.leave(self._peer, self._beat, self.death, reason)
        finally:
            with anyio.CancelScope(shield=True):
                try:
                    refusal = self._client.link.refusal if self._peer is not None else None
                    if not self.death and (
                        refusal is None or refusal.code is not NackCode.NAME_TAKEN
                    ):
                        runs_on = self.info is None or not self.info.ends_with_sidecar
                        with anyio.move_on_after(CLOSE_TIMEOUT_S):
                            await self._last_call()
                            await self._lease_writer.release(runs_on=runs_on)
                finally:
                    await self._tasks.cancel()
                    self._ended.set()
                    await self.engine.close()

    # -- messages that the link sends ------------------------------------------

    def _join(self) -> Join:
        assert self.info is not None
        facts = EngineFacts(
            **self.info.properties(),
            closed=self.session.admission.closed,
            run=self._client.link.run or f"{self._client.boot:x}",
            dp_group=self.dp_group,
            supervised=self.supervised,
            pd_role=self._pd_role,
            version=self.session.version,
            phase=self.session.phase,
            update_id=self.session.shown_id,
        )
        return codec.clip(Join("engine", HOST, os.getpid(), facts, None))

    def _beat(self) -> Heartbeat:
        closed = self.session.admission.closed or self._is_frozen or self._departure.begun
        return structs.replace(self.session.beat(), closed=closed)

    # -- events -----------------------------------------------------------------

    def _on_message(self, envelope: Envelope, message: Message) -> None:
        link = self._client.link
        if isinstance(message, Nack) and link.state is LinkState.JOINED:
            fields = {"code": message.code.value, "field": message.field, "detail": message.detail}
            self._client.note(Note("broker_nack", "warning", fields))
        if link.state is not LinkState.JOINED or not envelope.group:
            return
        if type(message) in COMMANDS:
            now_ms = link.last_heard_ms  # when the command came
            self._perform(self.session.command(envelope.id, envelope.epoch, message, now_ms))
        elif isinstance(message, HeartbeatAck):
            self._departure.on_ack(message)
            self.session.on_lease_renewed(envelope.epoch, message.held, link.last_heard_ms)
            self._perform(self.session.on_group_version(message.version, self._client.now_ms()))
        elif isinstance(message, Restart):
            self._restart(envelope.epoch, message.reason)

    def _restart(self, epoch: int, reason: str) -> None:
        """Ends this sidecar, so that its supervisor restarts it and its stuck engine."""
        if epoch < self.session.epoch or not self.supervised or self.death:
            return
        self.death = f"the engine is stuck, and needs a restart: {reason}"
        self._client.note(Note("restart_asked", "error", {"reason": reason}))
        self._ended.set()

    def _on_state(self, state: LinkState) -> None:
        self._changed.set()
        if state is LinkState.JOINED:
            self._wake_caller()  # the group may have a new run
            peer = self._client
            self._perform(self.session.on_group_version(peer.link.version, peer.now_ms()))
        if state is LinkState.REFUSED:
            self._ended.set()

    def _perform(self, effects: Iterable[SessionEffect]) -> None:
        peer = self._client
        for effect in effects:
            if isinstance(effect, Send):
                peer.send(codec.clip(effect.message), reply_to=effect.reply_to)
            elif isinstance(effect, Note):
                peer.note(effect)
            elif isinstance(effect, CallEscalate):
                self._tasks.start(self._escalate(effect))
            elif isinstance(effect, CallCancel):
                self._tasks.start(self._cancel(effect))
            else:
                assert self._next_call is None, "the machine makes one call at a time"
                self._next_call = effect
                self._wake_caller()
        if self._next_call is None:  # else _make() writes it, before that call
            self._write_lease()
        due_ms = self.session.next_deadline_ms()
        if due_ms is not None:
            peer.arm_by(due_ms)

    def _write_lease(self) -> None:
        effects = self._lease_writer.write(self._client.now_ms())
        if effects:  # the engine has ended the pause by itself
            self._perform(effects)

    # -- engine calls -----------------------------------------------------------

    async def _make_calls(self) -> None:
        """Executes the session machine's engine calls, one at a time, until the sidecar closes.

        Before a call, the engine joins the group's run, if it has not yet (:class:`CacheRun`).
        """
        loop = asyncio.get_running_loop()  # costs a system call
        while True:
            if await self._cache_run.join(self._client.link.run, self._failure):
                continue
            call, self._next_call = self._next_call, None
            if call is not None:
                await self._make(call)
            elif self._closing:
                return
            else:
                self._wake = loop.create_future()
                await self._wake
                self._wake = None

    def _wake_caller(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _last_call(self) -> None:
        """Waits until the running engine call, and the calls that follow from it, have ended."""
        self._closing = True
        self._wake_caller()
        if self._caller is not None:
            await asyncio.wait([self._caller])

    async def _make(self, call: Call) -> None:
        try:
            if isinstance(call, CallPause):
                self._lease_writer.begin_pause()
            self._write_lease()
            if isinstance(call, CallCommit) or getattr(call, "changes_weights", False):
                self._lease_writer.require_held()
            result = await dispatch(self.engine, call)
        except Exception as error:  # noqa: BLE001 - an adapter may raise anything; it is logged
            failure = self._failure(type(call).__name__, error)
            self._perform(self.session.on_call_failed(call, failure, self._client.now_ms()))
        else:
            self._perform(self.session.on_call_done(call, self._client.now_ms(), result=result))

    def _failure(self, name: str, error: Exception) -> Failure:
        """Logs an engine call's error, and returns it as a failure for the session machine."""
        if not isinstance(error, EngineError):
            self._client.log.error("engine_call_broke", call=name, exc_info=error)
            return Failure(NackCode.ENGINE_FAILED, f"{type(error).__name__}: {error}")
        fields: dict[str, object] = {"call": name, "detail": error.detail, "tensor": error.tensor}
        self._client.note(Note("engine_call_failed", "warning", fields))
        return Failure(error.code, error.detail, tensor=error.tensor)

    async def _escalate(self, call: CallEscalate) -> None:
        """Strengthens a ``wait`` pause while its first call still waits for requests."""
        failure = in_flight = None
        try:
            self.session.pause.on_escalated(await self.engine.request_ids())
            in_flight = await self.engine.pause(call.mode, clear_cache=call.clear_cache)
        except Exception as error:  # noqa: BLE001 - an adapter may raise anything; it is logged
            failure = self._failure(type(call).__name__, error)
        now_ms = self._client.now_ms()
        self._perform(self.session.on_escalation_done(failure, now_ms, in_flight=in_flight))

    async def _cancel(self, call: CallCancel) -> None:
        """Cancels the call that waits for others, and repeats that until the call returns.

        A cancellation may reach the engine before that call does, or get lost.
        """
        running = self.session.update.cancellable
        if running is self._cancelled:
            return
        self._cancelled = running
        while running is not None and self.session.update.cancellable is running:
            try:
                await self.engine.call_off()
            except Exception as error:  # noqa: BLE001 - an adapter may raise anything; it is logged
                self._failure(type(call).__name__, error)
            await anyio.sleep(CANCEL_RETRY_S)

    def _on_task_failed(self, error: BaseException) -> None:
        """Ends the sidecar because a task failed; a paused engine resumes after its pause lease."""
        self._client.log.error("sidecar_task_broke", exc_info=error)
        self.death = self.death or f"the sidecar broke: {type(error).__name__}: {error}"
        self._ended.set()

    async def _watch_engine(self) -> None:
        self.death = await self.engine.died()
        self._client.note(Note("engine_died", "error", {"reason": self.death}))
        self._ended.set()

    async def _watch_load(self) -> None:
        """Keeps the lease page, and the number of requests for heartbeats, up to date."""
        while True:
            self._write_lease()
            with contextlib.suppress(Exception):  # an adapter may raise anything
                self.session.pause.in_flight = await self.engine.in_flight()
            await anyio.sleep(self._client.link.heartbeat_ms / 1000)

    async def _watch_core(self) -> None:
        """Reports the core's status page to the broker, also while the core does not respond."""
        while True:
            view = self.engine.core_view()
            if view is not None and view.is_frozen is not self._is_frozen:
                self._is_frozen = not self._is_frozen
                event = "core_frozen" if self._is_frozen else "core_runs"
                self._client.note(Note(event, "warning", {"pid": view.pid, "phase": view.phase}))
            if view is not None and self._client.link.state is LinkState.JOINED:
                self._client.send(view.message())
            await anyio.sleep(self._client.link.heartbeat_ms / 1000)
