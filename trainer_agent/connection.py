"""A trainer rank's line to the broker: join, ask until answered, leave."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeVar

import anyio

import bus.log
from bus.errors import BusClosed, BusTimeout, Refused, UsageError, refusal
from bus.keys import silence_hint
from bus.messages import (
    Envelope,
    GroupAck,
    Heartbeat,
    Message,
    Nack,
    NackCode,
    Role,
    Routes,
    StaleEngines,
    Status,
    StatusRequest,
)
from bus.messages.codec import encode_body
from bus.protocol.core.link import LinkConfig, LinkState
from bus.runtime.peer import PeerClient
from trainer_agent.failures import silent_broker, silent_engines
from trainer_agent.guaranteed_delivery import GuaranteedDelivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.keys import Security
    from bus.messages import EngineView
    from bus.runtime.interfaces import ClientTransport

M = TypeVar("M", bound=Message)

_RESEND_S: Final = 1.0
_JOIN_S: Final = 30.0
_STATUS_S: Final = 10.0
# A broker that is there says at once who it waits for.
_EXPLAIN_S: Final = 2.0
_BEATS_MISSED: Final = 2
_SLOW_S: Final = 10.0  # then the log says who is waited for


class Connection:
    """One life of a peer. Arguments are those of :class:`trainer_agent.TrainerAgent`;
    ``kept_version`` says of which version it keeps the weights, ``on_stale`` hears who lacks them,
    and ``on_routes``, of an observer, where each group's requests go.

    Attributes:
        delivery: what the bus is told even when nobody waits for it.
        tensors_taken: from the source of the update under way; heartbeats tell the broker.
        lost_rank: says which other rank of the trainer is gone, since the update has begun.
    """

    def __init__(
        self,
        broker: str,
        *,
        role: Role,
        name: str,
        group: str,
        timeout_s: float,
        security: Security | None = None,
        transport: ClientTransport | None = None,
        link_config: LinkConfig | None = None,
        kept_version: Callable[[], int] = lambda: 0,
        on_stale: Callable[[StaleEngines], None] = lambda _stale: None,
        on_routes: Callable[[str, Routes], None] = lambda _group, _routes: None,
    ) -> None:
        self.broker = broker
        self._role: Role = role
        self._name = name
        self._group = group
        self.timeout_s = timeout_s
        self._security = security
        self._transport = transport
        self._link_config = link_config
        self._kept_version = kept_version
        self._on_stale = on_stale
        self._on_routes = on_routes
        self._peer: PeerClient | None = None
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._steps: dict[int, Message] = {}  # those that wait for all engines, in their order
        self._changed = asyncio.Event()
        self._progress_ms = 0.0  # when a step was last done
        self.delivery = GuaranteedDelivery(self)
        self.tensors_taken = 0
        self.lost_rank: Nack | None = None

    async def open(self) -> None:
        """Join the bus.

        Raises:
            BusTimeout: no broker answers at the address within ``timeout_s``.
            Refused: the broker refuses the join.
        """
        if self._peer is not None:
            raise UsageError("this agent is connected already")
        self._peer = PeerClient(
            name=self._name,
            group=self._group,
            role=self._role,
            broker=self.broker,
            security=self._security,
            transport=self._transport,
            beat=lambda: Heartbeat("running", self._kept_version(), self.tensors_taken, ""),
            on_message=self._on_message,
            on_state=self._on_state,
            link_config=self._link_config,
        )
        self._peer.start()
        try:
            with anyio.fail_after(min(self.timeout_s, _JOIN_S)):
                await self._wait_until_joined()
        except TimeoutError:
            self._peer.close()
            raise BusTimeout(
                f"no broker answers at {self.broker}; start one with `wavebus broker`"
                f"{silence_hint(self._security)}"
            ) from None
        except BaseException:
            self._peer.close()
            raise

    def close(self) -> None:
        """Leave the bus."""
        if self._peer is not None:
            self._peer.close("trainer closed")
        for future in self._answers.values():
            if not future.done():
                future.set_exception(BusClosed("the agent was closed"))

    @property
    def is_joined(self) -> bool:
        """Whether the broker has let us in, and is heard."""
        return self._require_peer().link.state is LinkState.JOINED

    @property
    def epoch(self) -> int:
        """The fencing number that the broker gave."""
        return self._require_peer().link.epoch

    @property
    def boot(self) -> int:
        """The number of this life."""
        return self._require_peer().boot

    async def ask(
        self,
        message: Message,
        expect: type[M],
        *,
        timeout_s: float | None = None,
        even_if_silent: bool = False,
    ) -> M:
        """Send until answered. The broker knows the id, and does nothing twice.

        Args:
            timeout_s: how long to wait; for a step of all engines from when one was last done: it
                may be asked for long before its turn.
            even_if_silent: also to a broker that is missed: it may hear us all the same.

        Raises:
            Refused: the answer is a NACK.
            BusTimeout: there was none; it says who is waited for.
            BusClosed: the agent was closed.
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
        try:
            while not future.done():
                since_ms = max(asked_ms, self._progress_ms) if expect is GroupAck else asked_ms
                waited_s = (peer.now_ms() - since_ms) / 1000
                left_s = wait_s - waited_s
                first = next(iter(self._steps.values())) if expect is GroupAck else message
                if left_s <= 0:
                    raise await self._explain_timeout(first, wait_s)
                if waited_s > slow_s and first is message:
                    late, slow_s = await self._explain_timeout(first, slow_s), wait_s
                    bus.log.logger().warning("step_slow", step=late.step, detail=str(late))
                if peer.link.state is LinkState.REFUSED and peer.link.refusal is not None:
                    raise refusal(peer.link.refusal)
                if peer.link.state is LinkState.CLOSED:
                    raise BusClosed("the agent was closed")
                if even_if_silent or peer.link.state is LinkState.JOINED:
                    peer.send(message, msg_id=msg_id)
                await asyncio.wait([future], timeout=min(_RESEND_S, left_s))
        finally:
            del self._answers[msg_id]
            self._steps.pop(msg_id, None)
        answer = future.result()
        if isinstance(answer, Nack):
            raise refusal(answer)
        if not isinstance(answer, expect):
            raise BusTimeout(f"the broker answered {type(answer).__name__}, not {expect.__name__}")
        return answer

    async def status(self) -> Status:
        """The broker's whole view."""
        return await self.ask(StatusRequest(), Status, timeout_s=min(self.timeout_s, _STATUS_S))

    async def engines(self) -> tuple[EngineView, ...]:
        """Those of the group."""
        status = await self.status()
        return next((group.engines for group in status.groups if group.name == self._group), ())

    async def engine_dtype(self) -> str:
        """The dtype of the group's models, by torch's name; empty if no engine is there.

        Raises:
            UsageError: the engines have different ones, or one does not report its own.
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
        """Wait until nothing is owed, before ``message`` is asked for.

        Raises:
            BusTimeout: something still is.
        """
        if not await self.delivery.drain(timeout_s):
            raise await self._explain_timeout(message, timeout_s)

    async def _explain_timeout(self, message: Message, wait_s: float) -> BusTimeout:
        """Who has not answered, as far as anybody can tell."""
        peer = self._require_peer()
        beats_ms = _BEATS_MISSED * peer.link.heartbeat_ms
        heard_ms = peer.now_ms() - peer.link.last_heard_ms
        silent = not self.is_joined or heard_ms >= max(wait_s * 1000, beats_ms)
        if not silent and not isinstance(message, StatusRequest):
            try:
                status = await self.ask(StatusRequest(), Status, timeout_s=_EXPLAIN_S)
            except (BusTimeout, Refused):
                heard_ms = peer.now_ms() - peer.link.last_heard_ms
            else:
                named = (group for group in status.groups if group.name == self._group)
                return silent_engines(message, wait_s, self._group, next(named, None))
        return silent_broker(message, wait_s, self.broker, heard_ms / 1000)

    def _on_message(self, envelope: Envelope, message: Message) -> None:
        if isinstance(message, StaleEngines):
            self._on_stale(message)
        elif isinstance(message, Routes):
            self._on_routes(envelope.group, message)
        if type(message) is Nack and message.code is NackCode.PEER_LOST and not envelope.reply_to:
            self.lost_rank = message
        future = self._answers.get(envelope.reply_to or self._refused_unread(message))
        if future is None or future.done():
            return
        if isinstance(message, Nack) and message.code in (NackCode.STALE, NackCode.NOT_JOINED):
            return  # asked again, under a new number or after the new join
        if isinstance(message, GroupAck):
            self._progress_ms = self._require_peer().now_ms()
        future.set_result(message)

    def _refused_unread(self, message: Message) -> int:
        """The id of the request whose frame was too large for the broker to read: the largest."""
        if not isinstance(message, Nack) or message.code is not NackCode.OVERSIZED:
            return 0
        sizes = {each: len(bytes(encode_body(step))) for each, step in self._steps.items()}
        return max(sizes, key=sizes.__getitem__, default=0)

    def _on_state(self, _state: LinkState) -> None:
        self._changed.set()

    async def _wait_until_joined(self) -> None:
        link = self._require_peer().link
        while link.state is not LinkState.JOINED:
            if link.state is LinkState.REFUSED and link.refusal is not None:
                raise refusal(link.refusal)
            self._changed.clear()
            await self._changed.wait()

    def _require_peer(self) -> PeerClient:
        if self._peer is None:
            raise BusClosed("connect() first, or use `async with`")
        return self._peer
