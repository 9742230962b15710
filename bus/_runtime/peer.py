"""The bus client that trainers, sidecars and observers share."""

from __future__ import annotations

import os
import re
import socket
from collections import deque
from typing import TYPE_CHECKING, Final

import bus.log
from bus._ids import new_boot
from bus._keys import silence_hint
from bus._net import shown_broker
from bus._protocol.core.config import BROKER_NAME
from bus._protocol.core.effects import Effect, Note, Send
from bus._protocol.core.failures import Failure
from bus._protocol.core.link import LINK_MESSAGES, Link, LinkConfig, LinkState
from bus._runtime.clock import Alarm, AsyncioScheduler
from bus._runtime.zmq_transport import ZmqClient
from bus.errors import DecodeError, Refused, refusal
from bus.messages import (
    MAX_FRAME_BYTES,
    WIRE_NAMES,
    Envelope,
    Heartbeat,
    Join,
    Message,
    Nack,
    NackCode,
    codec,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bus._keys import Security
    from bus._net import Broker
    from bus._runtime.interfaces import ClientTransport, Scheduler
    from bus.messages import Role

# Refusals may be late, but not by more JOINs than this.
_JOINS_KEPT: Final = 64
# After this time without any frame of a broker, the peer logs that no broker answers.
_ABSENT_MS: Final = 10_000.0
HOST = socket.gethostname()[:256]


def default_name(role: str) -> str:
    """Returns a unique peer name made of role, host and process id."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", HOST.split(".")[0]) or "host"
    return f"{role}-{host}-{os.getpid()}"[:128]


def route_of(name: str, boot: int) -> bytes:
    """Returns the route of one life of a peer: its name and ``boot``."""
    return f"{name}#{boot:x}".encode()


class PeerClient:
    """Keeps one peer joined to the broker; sends and receives the peer's messages.

    Args:
        name: the peer's name.
        group: its group; empty for an observer of all groups.
        on_message: called with every message of the broker, also the link's; not with duplicates.
        role: the peer's role, for the default of ``join``.
        broker: where the broker runs, for the default of ``transport``.
        security: the keys to connect with, for the default of ``transport``.
        boot: the number of this life of the peer. Default: random.
        transport: the network. Default: a ZeroMQ connection to ``broker``.
        scheduler: the clock and timers. Default: those of the running event loop.
        join: makes each JOIN message. Default: one with the role only.
        beat: makes each heartbeat. Default: one that reports only that the peer is alive.
        on_state: called with the link's new state whenever the state changes.
        on_tick: called with the current time when ``next_deadline_ms`` may have passed.
        next_deadline_ms: returns when ``on_tick`` must be called, in ms; None: no deadline.
        link_config: timeouts of the link.

    Raises:
        UsageError: the address is malformed, or beyond loopback without keys.
    """

    def __init__(
        self,
        *,
        name: str,
        group: str,
        on_message: Callable[[Envelope, Message], None],
        role: Role = "observer",
        broker: Broker = "",
        security: Security | None = None,
        boot: int | None = None,
        transport: ClientTransport | None = None,
        scheduler: Scheduler | None = None,
        join: Callable[[], Join] | None = None,
        beat: Callable[[], Heartbeat] = lambda: Heartbeat("running", 0, 0, ""),
        on_state: Callable[[LinkState], None] = lambda _state: None,
        on_tick: Callable[[float], None] = lambda _now_ms: None,
        next_deadline_ms: Callable[[], float | None] = lambda: None,
        link_config: LinkConfig | None = None,
    ) -> None:
        self.name = name
        self.boot = new_boot() if boot is None else boot
        join = join or (lambda: Join(role, HOST, os.getpid(), None, None))
        self.link = Link(group=group, join=join, beat=beat, config=link_config)
        self.log = bus.log.logger(peer=name, group=group)
        text = f"no broker answers at {shown_broker(broker)}{silence_hint(security)}"
        self._absent = Note("no_broker_answers", "warning", {"detail": text})
        self._absent_at_ms: float | None = None
        self._transport = transport or ZmqClient(broker, route_of(name, self.boot), security)
        self._scheduler = scheduler or AsyncioScheduler()
        self._on_message = on_message
        self._on_state = on_state
        self._on_tick = on_tick
        self._next_deadline_ms = next_deadline_ms
        self._seq = 0
        self._last_id = 0
        self._joins: deque[int] = deque(maxlen=_JOINS_KEPT)  # ids of handled messages
        self._alarm = Alarm(self._scheduler, self._on_alarm)
        self._closed = False

    @property
    def address(self) -> str:
        """Where this peer connects to the broker now; empty: nowhere."""
        return self._transport.address

    def start(self) -> None:
        """Starts to join the broker, and returns at once; ``on_state`` reports the result."""
        self._transport.listen(self._on_frame)
        self._absent_at_ms = self._scheduler.now_ms() + _ABSENT_MS
        self.perform(self.link.start(self._scheduler.now_ms()))

    def now_ms(self) -> float:
        """Returns the time of this peer's clock, which is monotonic, in milliseconds."""
        return self._scheduler.now_ms()

    def new_id(self) -> int:
        """Returns an id for a message that may be sent several times."""
        self._last_id += 1
        return self._last_id

    def send(self, message: Message, *, msg_id: int = 0, reply_to: int = 0) -> int:
        """Sends a message to the broker, with the fencing epoch that the link has.

        A message is lost if the broker can't be reached, or this peer is closed: repeat it if it
        needs an answer.

        Args:
            message: the message.
            msg_id: the id of an earlier send that this one repeats. Default: a new id.
            reply_to: the id of the message that it answers.

        Returns:
            The message's id.

        Raises:
            Refused: code ``oversized``: the frame would be larger than the wire allows.
        """
        msg_id = msg_id or self.new_id()
        self._transmit(message, msg_id, reply_to, self.link.epoch)
        return msg_id

    def perform(self, effects: Iterable[Effect]) -> None:
        """Carries out a state machine's effects, then sets the timer."""
        for effect in effects:
            if isinstance(effect, Send):
                msg_id = self.new_id()
                is_join = isinstance(effect.message, Join)
                if is_join:
                    self._joins.append(msg_id)
                sent = self._transmit(effect.message, msg_id, effect.reply_to, self.link.epoch)
                if is_join and not sent:
                    self.link.on_join_unsent(self._scheduler.now_ms())
            else:
                self.note(effect)
        self.arm()

    def note(self, note: Note) -> None:
        """Logs a state machine's note."""
        bus.log.write(self.log, note)

    def close(self, reason: str = "closed") -> None:
        """Sends LEAVE and closes the transport. A second call does nothing."""
        if self._closed:
            return
        state = self.link.state
        self.perform(self.link.leave(reason))
        self.kill()
        self._report_state(state)

    def kill(self) -> None:
        """Closes the transport without LEAVE, as if the process was killed."""
        self._closed = True
        self._alarm.cancel()
        self._transport.close()

    def arm(self) -> None:
        """Sets the timer to the earlier of the link's deadline and ``next_deadline_ms``."""
        for due_ms in (self.link.next_deadline_ms(), self._next_deadline_ms()):
            if due_ms is not None:
                self.arm_by(due_ms)

    def arm_by(self, due_ms: float) -> None:
        """Sets the timer to ``due_ms``, unless it is set to an earlier moment."""
        if not self._closed:
            self._alarm.ring_by(due_ms)

    def _on_alarm(self) -> None:
        if self._closed:
            return
        now_ms = self._scheduler.now_ms()
        state = self.link.state
        if self._absent_at_ms is not None and now_ms >= self._absent_at_ms:
            self._absent_at_ms = None
            self.note(self._absent)
        self.perform(self.link.tick(now_ms))
        self._report_state(state)
        self._on_tick(now_ms)
        self.arm()

    def _on_frame(self, frame: bytes) -> None:
        self._absent_at_ms = None
        state = self.link.state
        try:
            envelope, message = codec.decode(frame)
        except DecodeError as error:
            fields: dict[str, object] = {"field": error.field, "detail": str(error)}
            self.note(Note("bad_frame", "warning", fields))
            if error.code is NackCode.WIRE_VERSION:
                hint = "use the same wavebus on both sides"
                why = Failure(error.code, error.detail, BROKER_NAME, field=error.field, hint=hint)
                self.perform(self.link.other_version(why.nack()))
                self._report_state(state)
            return
        now_ms = self._scheduler.now_ms()
        if not self.link.fresh(envelope, now_ms):
            self.note(Note("stale_frame", "debug", {"kind": envelope.kind, "seq": envelope.seq}))
            return
        if type(message) in LINK_MESSAGES and self._is_link_message(envelope, message):
            effects = self.link.receive(envelope, message, now_ms)
            if effects:
                self.perform(effects)
            self._report_state(state)
        self._on_message(envelope, message)

    def _is_link_message(self, envelope: Envelope, message: Message) -> bool:
        # A NACK may answer another request, which was sent before the broker fell silent.
        if not isinstance(message, Nack) or message.code is NackCode.NOT_JOINED:
            return True
        return envelope.reply_to in self._joins

    def _report_state(self, before: LinkState) -> None:
        if self.link.state is not before:
            self._on_state(self.link.state)

    def _transmit(self, message: Message, msg_id: int, reply_to: int, epoch: int) -> bool:
        """Sends a message; returns False if no broker is there."""
        if self._closed:
            return False
        self._seq += 1
        frame = codec.encode_frame(
            message,
            self.name,
            self.boot,
            self._seq,
            msg_id=msg_id,
            reply_to=reply_to,
            group=self.link.group,
            epoch=epoch,
        )
        if len(frame) > MAX_FRAME_BYTES:
            raise _oversized(message, len(frame))
        return self._transport.send(frame)


def _oversized(message: Message, size_bytes: int) -> Refused:
    kind = WIRE_NAMES[type(message)]
    detail = f"{kind} has {size_bytes} bytes; a frame has at most {MAX_FRAME_BYTES}"
    hint = "a manifest is smaller with fewer tensors, or with shorter names"
    failure = Failure(NackCode.OVERSIZED, detail, hint=hint if kind == "ARM" else "")
    return refusal(failure.nack(update_id=getattr(message, "update_id", "")))
