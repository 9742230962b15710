"""Connects a trainer rank or a rollout client to the broker; repeats unanswered requests."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar

import anyio

import bus.log
from bus._keys import silence_hint
from bus._net import shown_broker
from bus._protocol.core.config import min_lease_ms
from bus._protocol.core.followed_routes import FollowedRoutes
from bus._protocol.core.link import LinkConfig, LinkState
from bus._protocol.core.validation import MANIFESTS_KEPT, by_digest
from bus._runtime.peer import PeerClient
from bus.errors import BusClosed, BusTimeout, Refused, UsageError, refusal
from bus.messages import (
    Arm,
    Envelope,
    GroupAck,
    GroupView,
    Heartbeat,
    Message,
    Nack,
    NackCode,
    PauseLocal,
    PlanTransfer,
    Role,
    Routes,
    StaleEngines,
    Status,
    StatusRequest,
    Step,
    TransferInit,
    WaitEngines,
)
from bus.messages.codec import encode_body
from trainer_agent._failures import require_process, silent_broker, silent_engines
from trainer_agent._guaranteed_delivery import GuaranteedDelivery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bus._keys import Security
    from bus._net import Broker
    from bus._runtime.interfaces import ClientTransport
    from bus.messages import EngineView

M = TypeVar("M", bound=Message)

_RESEND_S: Final = 1.0
_JOIN_S: Final = 30.0
_STATUS_S: Final = 10.0
# A running broker answers a status request at once.
_EXPLAIN_S: Final = 2.0
_BEATS_MISSED: Final = 2
_SLOW_S: Final = 10.0  # then the log names the late peers
# The first requests of a pause or an update.
_OPENING: Final = (PauseLocal, PlanTransfer, TransferInit, Arm)
# The request is repeated under a new number, after the next join.
_UNREAD: Final = (NackCode.STALE, NackCode.NOT_JOINED)


class Connection:
    """Connects a peer to the broker; arguments are as in :class:`trainer_agent.TrainerAgent`.

    Attributes:
        delivery: repeats undo commands (ABORT, RESUME, TRAINER_STEP) in the background.
        kept_version: returns the version of the snapshot, 0 without one; heartbeats report it.
        on_stale: called with the stale engines that lack the snapshot's version.
        on_pause_ended: called with the id of a pause that the broker has ended by itself.
        on_routes: called with a group's name and its routes; rollout clients receive them.
        tensors_taken: how many tensors of the present update were read; heartbeats report it.
        lost_rank: the broker's NACK if another rank of the trainer is gone; else None.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        role: Role,
        name: str,
        group: str,
        timeout_s: float,
        security: Security | None = None,
        transport: ClientTransport | None = None,
        link_config: LinkConfig | None = None,
    ) -> None:
        self.broker = broker
        self._role: Role = role
        self._name = name
        self._group = group
        self.timeout_s = timeout_s
        self._security = security
        self._transport = transport
        self._link_config = link_config
        self.kept_version: Callable[[], int] = lambda: 0
        self.on_stale: Callable[[StaleEngines], None] = lambda _stale: None
        self.on_pause_ended: Callable[[str], None] = lambda _update_id: None
        self.on_routes: Callable[[str, Routes], None] = lambda _group, _routes: None
        self._routes = FollowedRoutes(lambda request: self._require_peer().send(request))
        self._peer: PeerClient | None = None
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._steps: dict[int, Message] = {}  # steps of all engines, in order
        self._changed = asyncio.Event()
        self._progress_ms = 0.0  # when the last step was done
        self.delivery = GuaranteedDelivery(self.ask, lambda: self.is_joined)
        self.lost_rank: Nack | None = None
        self.tensors_taken = self.pid = 0  # pid: of the process that has connected
        self._known = _KnownBroker()

    @property
    def address(self) -> str:
        """The broker's address, or how a text names it before there is one."""
        return (self._peer and self._peer.address) or shown_broker(self.broker)

    async def open(self, lease_ms: int | None = None) -> None:
        """Joins the bus; returns when the broker has accepted the join and leases of ``lease_ms``.

        Raises:
            BusTimeout: no broker answers at the address within ``timeout_s``.
            Refused: the broker refuses the join.
            UsageError: the broker takes longer to miss a peer than the lease allows.
        """
        if self._peer is not None:
            raise UsageError("this agent is connected already")
        self.pid = os.getpid()
        self._peer = PeerClient(
            name=self._name,
            group=self._group,
            role=self._role,
            broker=self.broker,
            security=self._security,
            transport=self._transport,
            beat=lambda: Heartbeat("running", self.kept_version(), self.tensors_taken, ""),
            on_message=self._on_message,
            on_state=lambda _state: self._changed.set(),
            link_config=self._link_config,
        )
        self._peer.start()
        try:
            with anyio.fail_after(min(self.timeout_s, _JOIN_S)):
                await self._wait_until_joined()
            if lease_ms is not None and lease_ms < (least_ms := self.least_lease_ms):
                text = f"at least {least_ms}, twice the broker's --peer-timeout-ms"
                raise UsageError(f"lease_ms={lease_ms}: {text}")
        except BaseException as error:
            self._peer.close()
            self._peer = None  # so that it may be tried again
            if not isinstance(error, TimeoutError):
                raise
            text = f"no broker answers at {self.address}; start one with `wavebus broker`"
            raise BusTimeout(text + silence_hint(self._security)) from None

    def close(self) -> None:
        """Leaves the bus; requests under way fail with ``BusClosed``."""
        if self._peer is not None:
            self._require_peer().close()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(BusClosed("the agent was closed"))

    @property
    def is_joined(self) -> bool:
        """Whether the broker has accepted the join and sends frames."""
        return self._require_peer().link.state is LinkState.JOINED

    @property
    def least_lease_ms(self) -> int:
        """The shortest lease that the broker accepts, in ms."""
        return min_lease_ms(round(self._require_peer().link.peer_timeout_ms))

    @property
    def epoch(self) -> int:
        """The fencing epoch that the broker assigned."""
        return self._require_peer().link.epoch

    @property
    def boot(self) -> int:
        """A random number, which :meth:`open` draws; it tells restarted peers of one name apart."""
        return self._require_peer().boot

    async def ask(
        self,
        message: Message,
        expect: type[M],
        *,
        timeout_s: float | None = None,
        even_if_silent: bool = False,
    ) -> M:
        """Repeats a request until it is answered; returns the answer. The broker executes it once.

        Args:
            message: the request.
            expect: the type of the answer.
            timeout_s: how long to wait, in seconds. For a request to all engines the time counts
                from the end of the previous one, because requests may be sent ahead of their turn.
                Default: that of the constructor.
            even_if_silent: whether to send even if nothing was received from the broker lately.

        Raises:
            Refused: the answer is a NACK.
            BusTimeout: there is no answer in time; the text names the peer that is late.
            BusClosed: the connection was closed.
        """
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        peer = self._require_peer()
        msg_id = peer.new_id()
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[msg_id] = future
        if expect is GroupAck:
            self._steps[msg_id] = message
        asked_ms = peer.now_ms()
        slow_s = _SLOW_S if expect is GroupAck else wait_s
        sent = self._known.shorten(message)
        try:
            while not future.done():
                since_ms = max(asked_ms, self._progress_ms) if expect is GroupAck else asked_ms
                waited_s = (peer.now_ms() - since_ms) / 1000
                left_s = wait_s - waited_s
                first = next(iter(self._steps.values())) if expect is GroupAck else message
                if left_s <= 0:
                    raise await _explain_timeout(self, peer, first, wait_s)
                if waited_s > slow_s and first is message:
                    late, slow_s = await _explain_timeout(self, peer, first, slow_s), wait_s
                    bus.log.logger().warning("step_slow", step=late.step, detail=str(late))
                if peer.link.state is LinkState.REFUSED and peer.link.refusal is not None:
                    raise refusal(peer.link.refusal)
                if peer.link.state is LinkState.CLOSED:
                    raise BusClosed("the agent was closed")
                is_joined = peer.link.state is LinkState.JOINED
                if is_joined and self._known.has_new_broker(message, peer.link.broker_boot):
                    await self._known.wait(self, wait_s)
                    asked_ms = peer.now_ms()
                    continue
                if even_if_silent or is_joined:
                    peer.send(sent, msg_id=msg_id)
                    sent = by_digest(message)
                await asyncio.wait([future], timeout=min(_RESEND_S, left_s))
        finally:
            del self._answers[msg_id]
            self._steps.pop(msg_id, None)
        answer = future.result()
        if isinstance(answer, Nack):
            raise refusal(answer)
        if not isinstance(answer, expect):
            raise BusTimeout(f"the broker answered {type(answer).__name__}, not {expect.__name__}")
        self._known.note(message, answer, peer.link.broker_boot)
        return answer

    async def status(self) -> Status:
        """Returns the broker's view of all groups and engines."""
        return await self.ask(StatusRequest(), Status, timeout_s=min(self.timeout_s, _STATUS_S))

    async def engines(self) -> tuple[EngineView, ...]:
        """Returns the engines of the group."""
        status = await self.status()
        return next((group.engines for group in status.groups if group.name == self._group), ())

    async def engine_dtype(self) -> str:
        """Returns torch's name of the dtype of the group's models; empty without engines.

        Raises:
            UsageError: the dtypes differ, or an engine does not report its own.
        """
        dtypes = {engine.name: engine.dtype for engine in await self.engines()}
        found = sorted(set(dtypes.values()))
        if len(found) > 1 or found == [""]:
            raise UsageError(
                f'dtype="engine": the engines must report one dtype, found {dtypes}: cast the '
                "weights yourself, or give engines of each dtype their own group"
            )
        return found[0] if found else ""

    async def wait_until_delivered(self, message: Message, timeout_s: float) -> None:
        """Waits until undo commands, such as ABORT, are answered, so that ``message`` may be sent.

        Raises:
            BusTimeout: an undo command is still unanswered after ``timeout_s``.
        """
        if not await self.delivery.drain(timeout_s):
            raise await _explain_timeout(self, self._require_peer(), message, timeout_s)

    def _on_message(self, envelope: Envelope, message: Message) -> None:
        if isinstance(message, StaleEngines):
            self.on_stale(message)
        elif (routes := self._routes.receive(envelope, message)) is not None:
            self.on_routes(envelope.group, routes)
        if type(message) is Nack and not envelope.reply_to:
            _on_news(self, message)
        future = self._answers.get(envelope.reply_to or _refused_unread(message, self._steps))
        if future is None or future.done() or getattr(message, "code", None) in _UNREAD:
            return
        if whole := _with_tensors(message, self._steps.get(envelope.reply_to)):
            self._require_peer().send(whole, msg_id=envelope.reply_to)
            return
        if isinstance(message, GroupAck):
            self._progress_ms = self._require_peer().now_ms()
        future.set_result(message)

    async def _wait_until_joined(self) -> None:
        link = self._require_peer().link
        while link.state is not LinkState.JOINED:
            if link.state is LinkState.REFUSED and link.refusal is not None:
                raise refusal(link.refusal)
            self._changed.clear()
            await self._changed.wait()

    def _require_peer(self) -> PeerClient:
        require_process(self.pid, self.address)
        if self._peer is None:
            raise BusClosed("connect() first, or use `async with`")
        return self._peer


async def _explain_timeout(
    connection: Connection, peer: PeerClient, message: Message, wait_s: float
) -> BusTimeout:
    """Returns the error for an unanswered request, with the peer that has not answered."""
    beats_ms = _BEATS_MISSED * peer.link.heartbeat_ms
    heard_ms = peer.now_ms() - peer.link.last_heard_ms
    silent = not connection.is_joined or heard_ms >= max(wait_s * 1000, beats_ms)
    if not silent and not isinstance(message, StatusRequest):
        try:
            status = await connection.ask(StatusRequest(), Status, timeout_s=_EXPLAIN_S)
        except (BusTimeout, Refused):
            heard_ms = peer.now_ms() - peer.link.last_heard_ms
        else:
            named = (group for group in status.groups if group.name == peer.link.group)
            return silent_engines(message, wait_s, peer.link.group, next(named, None))
    return silent_broker(message, wait_s, connection.address, heard_ms / 1000)


def _on_news(connection: Connection, nack: Nack) -> None:
    """Records what a NACK says that answers no request."""
    if nack.step == Step.RESUME:
        connection.on_pause_ended(nack.update_id)
    elif nack.code is NackCode.PEER_LOST:
        connection.lost_rank = nack


def _refused_unread(message: Message, steps: Mapping[int, Message]) -> int:
    """Returns the id of the request that an OVERSIZED NACK refuses (the largest); else 0."""
    if not isinstance(message, Nack) or message.code is not NackCode.OVERSIZED:
        return 0
    sizes = {each: len(bytes(encode_body(step))) for each, step in steps.items()}
    return max(sizes, key=sizes.__getitem__, default=0)


def _with_tensors(answer: Message, request: Message | None) -> Message | None:
    """Returns the request whose digest the broker doesn't know, if it has tensors; else None."""
    if not isinstance(answer, Nack) or answer.code is not NackCode.MANIFEST_UNKNOWN:
        return None
    return request if getattr(request, "names", None) else None


class _KnownBroker:
    """What the broker has had from this trainer: manifests, and how many engines.

    After a restart of the broker, the trainer waits for the engines that it knew: the new broker
    knows no engine until it has joined again.
    """

    def __init__(self) -> None:
        self._count = 0
        self._boot = 0  # of the broker that had so many engines
        self._manifests: deque[str] = deque(maxlen=MANIFESTS_KEPT)  # digests

    def shorten(self, message: Message) -> Message:
        """Returns an ARM without its tensors, if its manifest was armed before."""
        is_known = isinstance(message, Arm) and message.digest in self._manifests
        return by_digest(message) if is_known else message

    def note(self, message: Message, answer: Message, boot: int) -> None:
        """Records the manifest and the number of engines of a done request.

        Args:
            message: the request.
            answer: its answer.
            boot: the broker's.
        """
        if isinstance(message, Arm) and not message.counts and self.shorten(message) is message:
            self._manifests.append(message.digest)
        found = 0
        if isinstance(answer, GroupView):
            found = len(answer.engines)
        elif isinstance(answer, GroupAck) and isinstance(message, _OPENING):
            found = 0 if message.scope else answer.engines
        if found:
            self._count, self._boot = found, boot

    def has_new_broker(self, message: Message, boot: int) -> bool:
        """Whether a request begins a pause or an update while engines may still have to rejoin."""
        return isinstance(message, _OPENING) and bool(self._count) and boot != self._boot

    async def wait(self, connection: Connection, timeout_s: float) -> None:
        """Waits until as many engines have joined the new broker as the last one had.

        After the timeout, the group goes on with those that have joined.
        """
        count, self._count = self._count, 0
        bus.log.logger().warning("engines_awaited", engines=count, timeout_s=timeout_s)
        wait = WaitEngines(count, int(timeout_s * 1000))
        try:
            await connection.ask(wait, GroupView, timeout_s=timeout_s + _EXPLAIN_S)
        except Refused as error:
            if error.code is not NackCode.TIMEOUT:
                raise
