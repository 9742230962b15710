"""Runs the broker's state machine on a transport, with a clock, a log and a journal."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import structs

import bus.log
from bus._ids import new_boot
from bus._protocol.broker.broker import Broker
from bus._protocol.core.config import BROKER_NAME, BrokerConfig
from bus._protocol.core.effects import Effect, Note, Send
from bus._runtime.clock import Alarm
from bus._runtime.heartbeat_acks import HeartbeatAcks
from bus.errors import DecodeError
from bus.messages import WIRE_NAMES, Ack, Commit, HeartbeatAck, Message, Status, Step, codec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bus._protocol.core.access import KeyRole
    from bus._runtime.interfaces import Handle, Journal, Scheduler, ServerTransport

# Heartbeats within this time are answered by one frame, encoded once and sent in one
# go: with a thousand peers, most of a heartbeat's cost is waking up to answer it.
_ACKS_WAIT_MS: Final = 50.0


class BrokerServer:
    """Runs a :class:`bus._protocol.broker.broker.Broker` on a transport, until :meth:`close`.

    Args:
        transport: the broker's end of the network.
        scheduler: the clock and timers.
        config: the broker's times and limits.
        keys: roles by authorised public key; None: there are no keys.
        boot: the number of this life of the broker. Default: random.
        journal: records all frames received and sent, so that the machine can be replayed
            (:mod:`bus._journal.replay`). A commit is flushed before it has any effect. None: no
            journal.
    """

    def __init__(
        self,
        transport: ServerTransport,
        scheduler: Scheduler,
        config: BrokerConfig | None = None,
        keys: Mapping[str, KeyRole] | None = None,
        *,
        boot: int | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.machine = Broker(config, keys)
        self.boot = new_boot() if boot is None else boot
        self._journal = journal
        self._transport = transport
        self._scheduler = scheduler
        self._log = bus.log.logger()
        self._seq = 0
        self._alarm = Alarm(scheduler, self._on_alarm)
        self._ticks_from_ms = 0.0
        self._acks = HeartbeatAcks()
        self._acks_timer: Handle | None = None

    def start(self) -> None:
        """Starts to receive frames and to check deadlines, and returns at once."""
        self._transport.listen(self._on_frame)
        self._arm()

    def close(self) -> None:
        """Stops serving. Peers keep their state, and reconnect to the next broker."""
        self._alarm.cancel()
        if self._acks_timer is not None:
            self._acks_timer.cancel()
        self._transport.close()
        if self._journal is not None:
            self._journal.close()

    def rekey(self, keys: Mapping[str, KeyRole]) -> None:
        """Replaces the authorised keys (roles by public key), and removes unauthorised peers."""
        now_ms = self._scheduler.now_ms()
        if self._journal is not None:
            self._journal.on_keys_changed(now_ms, keys)
        self._perform(self.machine.rekey(keys, now_ms))

    def _on_frame(self, route: bytes, frame: bytes, user: str) -> None:
        now_ms = self._scheduler.now_ms()
        refusal = self.machine.admit(route, len(frame), now_ms)
        if refusal is not None:
            if refusal:  # without effects, nothing has changed
                if self._journal is not None:
                    self._journal.on_refused(now_ms, route, len(frame))
                self._perform(refusal)
            return
        if self._journal is not None:
            self._journal.on_received(now_ms, route, frame, user)
        try:
            envelope, message = codec.decode(frame)
        except DecodeError as error:
            self._perform(self.machine.on_malformed_frame(route, error, now_ms))
            return
        if self._journal is not None and _is_commit(message):
            self._journal.flush()  # before the commit has any effect
        effects = self.machine.receive(route, envelope, message, now_ms, user)
        if effects:
            self._perform(effects)

    def _on_alarm(self) -> None:
        now_ms = self._scheduler.now_ms()
        self._check_stall(now_ms)
        if now_ms < self._ticks_from_ms:
            self._arm()
            return
        if self._journal is not None:
            self._journal.on_timer(now_ms)
        self._perform(self.machine.tick(now_ms))

    def _check_stall(self, now_ms: float) -> None:
        """Delays the next check of deadlines by a heartbeat after a stall of this process.

        Frames that peers have sent meanwhile are then read before the peers would count as lost.
        After a stall about as long as a pause lease, nothing is delayed: engines may have resumed.
        """
        config, due_ms = self.machine.config, self.machine.next_deadline_ms()
        limit_ms = config.min_lease_ms - 2 * config.heartbeat_ms
        if self._ticks_from_ms <= due_ms and config.heartbeat_ms < now_ms - due_ms < limit_ms:
            self._ticks_from_ms = now_ms + config.heartbeat_ms

    def _perform(self, effects: Iterable[Effect]) -> None:
        notes: list[Note] = []
        for effect in effects:
            if not isinstance(effect, Send):
                notes.append(effect)
            elif isinstance(effect.message, HeartbeatAck):
                self._acknowledge(effect.message, effect)
            else:
                self._send_acks()  # so that no later message overtakes them
                self._send(effect)
        self._arm()
        for note in notes:  # no peer waits for these
            bus.log.write(self._log, note)

    def _acknowledge(self, ack: HeartbeatAck, send: Send) -> None:
        self._acks.add(ack, send)
        if self._acks_timer is None:
            due_ms = self._scheduler.now_ms() + _ACKS_WAIT_MS
            self._acks_timer = self._scheduler.call_at(due_ms, self._send_acks)

    def _send_acks(self) -> None:
        if self._acks_timer is None:
            return
        self._acks_timer.cancel()
        self._acks_timer = None
        for each in self._acks.take():
            self._send(each)

    def _send(self, send: Send) -> None:
        message = send.message
        if isinstance(message, Status):
            message = structs.replace(message, cpu_s=time.process_time(), rss_bytes=rss_bytes())
        self._seq += 1
        frame = codec.encode_frame(
            message,
            BROKER_NAME,
            self.boot,
            self._seq,
            reply_to=send.reply_to,
            group=send.group,
            epoch=send.epoch,
        )
        if self._journal is not None:
            self._journal.on_sent(self._scheduler.now_ms(), send.routes, frame)
        for route in self._transport.send(send.routes, frame):
            kind = WIRE_NAMES[type(message)]
            self._log.debug("unreachable", route=route.decode(errors="replace"), kind=kind)

    def _arm(self) -> None:
        self._alarm.ring_by(max(self.machine.next_deadline_ms(), self._ticks_from_ms))


def _is_commit(message: Message) -> bool:
    """Returns whether a message makes an engine serve a version, or reports that."""
    return type(message) is Commit or (isinstance(message, Ack) and message.step is Step.COMMIT)


def rss_bytes() -> int:
    """Returns the resident memory of this process; 0 if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
