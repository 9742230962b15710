"""A peer's shell: what trainers, sidecars and observers have in common."""

from __future__ import annotations

import os
import re
import socket
from collections import deque
from typing import TYPE_CHECKING, Final

import bus.log
from bus.errors import DecodeError, refusal
from bus.ids import new_boot
from bus.messages import MAX_FRAME_BYTES, WIRE_NAMES, Envelope, Join, Message, Nack, NackCode, codec
from bus.protocol.core.effects import Effect, Note, Send
from bus.protocol.core.link import LINK_MESSAGES, Link, LinkConfig, LinkState
from bus.runtime.clock import Alarm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bus.messages import Heartbeat
    from bus.runtime.interfaces import ClientTransport, Scheduler

# Refusals come late, but not after so many more JOINs.
_JOINS_KEPT: Final = 64
HOST = socket.gethostname()[:256]


def default_name(role: str) -> str:
    """A readable peer name that two processes will not share: role, host, pid."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", HOST.split(".")[0]) or "host"
    return f"{role}-{host}-{os.getpid()}"[:128]


def route_of(name: str, boot: int) -> bytes:
    """The transport's name of one life of a peer."""
    return f"{name}#{boot:x}".encode()


class PeerClient:
    """One peer on a transport.

    ``on_message`` gets every fresh frame that is not of the membership itself;
    ``on_state`` every change of the link's state; ``on_tick`` is called with the
    current time whenever ``next_deadline_ms`` (of the owner) may have passed.
    """

    def __init__(
        self,
        *,
        name: str,
        group: str,
        boot: int | None = None,
        transport: ClientTransport,
        scheduler: Scheduler,
        join: Callable[[], Join],
        beat: Callable[[], Heartbeat],
        on_message: Callable[[Envelope, Message], None],
        on_state: Callable[[LinkState], None] = lambda _state: None,
        on_tick: Callable[[float], None] = lambda _now_ms: None,
        next_deadline_ms: Callable[[], float | None] = lambda: None,
        link_config: LinkConfig | None = None,
    ) -> None:
        self.name = name
        self.boot = new_boot() if boot is None else boot
        self.link = Link(group=group, join=join, beat=beat, config=link_config)
        self.log = bus.log.logger(peer=name, group=group)
        self._transport = transport
        self._scheduler = scheduler
        self._on_message = on_message
        self._on_state = on_state
        self._on_tick = on_tick
        self._next_deadline_ms = next_deadline_ms
        self._seq = 0
        self._last_id = 0
        self._joins: deque[int] = deque(maxlen=_JOINS_KEPT)  # their ids
        self._alarm = Alarm(scheduler, self._on_alarm)
        self._closed = False

    def start(self) -> None:
        """Begin to join."""
        self._transport.listen(self._on_frame)
        self.perform(self.link.start(self._scheduler.now_ms()))

    def now_ms(self) -> float:
        return self._scheduler.now_ms()

    def new_id(self) -> int:
        """An id for a message that may be sent several times."""
        self._last_id += 1
        return self._last_id

    def send(self, message: Message, *, msg_id: int = 0, reply_to: int = 0) -> int:
        """Send to the broker, with the link's epoch; return the message's id.

        It is lost if the broker can't be reached: who wants an answer asks again.

        Raises:
            Refused: with code ``oversized``; the message would be a larger frame than the wire has.
        """
        msg_id = msg_id or self.new_id()
        self._transmit(message, msg_id, reply_to, self.link.epoch)
        return msg_id

    def perform(self, effects: Iterable[Effect]) -> None:
        """Do what a machine wants done, then set the timer anew."""
        for effect in effects:
            if isinstance(effect, Send):
                msg_id = self.new_id()
                if isinstance(effect.message, Join):
                    self._joins.append(msg_id)
                self._transmit(effect.message, msg_id, effect.reply_to, self.link.epoch)
            else:
                self.note(effect)
        self.arm()

    def note(self, note: Note) -> None:
        bus.log.write(self.log, note)

    def close(self, reason: str = "closed") -> None:
        """Leave in order, and end."""
        if self._closed:
            return
        self.perform(self.link.leave(reason))
        self._closed = True
        self._alarm.cancel()
        self._transport.close()

    def kill(self) -> None:
        """End without a word, as a process that was killed does. For tests."""
        self._closed = True
        self._alarm.cancel()
        self._transport.close()

    def arm(self) -> None:
        """One timer, set to the earliest of the link's and the owner's deadlines."""
        for due_ms in (self.link.next_deadline_ms(), self._next_deadline_ms()):
            if due_ms is not None:
                self.arm_by(due_ms)

    def arm_by(self, due_ms: float) -> None:
        """Set the timer to ``due_ms``, unless it is set to an earlier moment."""
        if not self._closed:
            self._alarm.ring_by(due_ms)

    def _on_alarm(self) -> None:
        if self._closed:
            return
        now_ms = self._scheduler.now_ms()
        state = self.link.state
        self.perform(self.link.tick(now_ms))
        self._report_state(state)
        self._on_tick(now_ms)
        self.arm()

    def _on_frame(self, frame: bytes) -> None:
        state = self.link.state
        try:
            envelope, message = codec.decode(frame)
        except DecodeError as error:
            fields: dict[str, object] = {"field": error.field, "detail": str(error)}
            self.note(Note("bad_frame", "warning", fields))
            if error.code is NackCode.WIRE_VERSION:
                self.perform(self.link.other_version(_version_nack(error)))
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
        """A refusal may be the answer to something else, that was asked before the broker was
        missed."""
        if not isinstance(message, Nack) or message.code is NackCode.NOT_JOINED:
            return True
        return envelope.reply_to in self._joins

    def _report_state(self, before: LinkState) -> None:
        if self.link.state is not before:
            self._on_state(self.link.state)

    def _transmit(self, message: Message, msg_id: int, reply_to: int, epoch: int) -> None:
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
            raise refusal(_oversized_nack(message, len(frame)))
        self._transport.send(frame)


def _oversized_nack(message: Message, size_bytes: int) -> Nack:
    """What a broker can't answer to the request itself, since it does not read the frame."""
    kind, update_id = WIRE_NAMES[type(message)], str(getattr(message, "update_id", ""))
    detail = f"{kind} would be a frame of {size_bytes} bytes; at most {MAX_FRAME_BYTES}"
    hint = "a manifest is smaller with fewer tensors, or with shorter names"
    return Nack(
        NackCode.OVERSIZED, "", update_id, 0, detail, "", "", "", hint if kind == "ARM" else "", 0
    )


def _version_nack(error: DecodeError) -> Nack:
    """What the broker would say, if it could be read."""
    hint = "use the same wavebus on both sides"
    return Nack(NackCode.WIRE_VERSION, "", "", 0, error.detail, error.field, "broker", "", hint, 0)
