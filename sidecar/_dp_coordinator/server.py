"""Serves one DP group as its coordinator, with sockets, a link to the broker and a timer.

While the broker is reachable, it decides which waves start. Otherwise the coordinator decides
alone, so that requests never wait for the broker. Both decisions are in
:mod:`bus._protocol.dp.coordinator`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import bus.log
from bus._keys import security
from bus._net import is_loopback
from bus._protocol.core.effects import Note, Send
from bus._protocol.core.link import LinkState
from bus._protocol.dp.coordinator import DpCoordinator, Publish, Ready, StartCores
from bus._runtime.clock import Alarm, AsyncioScheduler
from bus._runtime.peer import HOST, PeerClient, default_name
from bus._runtime.zmq_dp import DpSockets
from bus.messages import CoordinatorFacts, Join
from sidecar._dp_coordinator import frames

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._protocol.dp.coordinator import CoordinatorEffect
    from bus._runtime.interfaces import Handle
    from bus.messages import Envelope, Message

# After a refusal the join is repeated: another broker may be at that address by then.
REFUSED_RETRY_MS: Final = 5_000.0


class DpCoordinatorServer:
    """Serves one DP group as its coordinator, from construction to :meth:`close`.

    Args:
        dp_group: the DP group's name on the bus.
        size: how many ranks the DP group has.
        host: the address to listen on, such as ``127.0.0.1``.
        broker: the broker's address; empty: the coordinator decides alone. Keys come from the
            environment (:func:`bus._keys.security`).
        group: the group on the bus that the DP group belongs to.

    Raises:
        UsageError: the host, the broker's address or a key is wrong.
    """

    def __init__(
        self, *, dp_group: str, size: int, host: str, broker: str = "", group: str = "policy"
    ) -> None:
        self.machine = DpCoordinator(dp_group, size)
        self.name = default_name(f"coordinator-{dp_group[:64]}")
        self.sockets = DpSockets.of_coordinator(host)
        self._size = size
        self._broker = broker
        self._security = security()
        self._group = group
        self._scheduler = AsyncioScheduler()
        self._log = bus.log.logger(peer=self.name, group=group)
        self._alarm = Alarm(self._scheduler, self._on_alarm)
        self._rejoin: Handle | None = None
        self._closed = False
        try:
            self._peer = self._make_peer()
        except BaseException:
            self.sockets.close()
            raise

    def start(self) -> None:
        """Begins to receive from the DP group, and to join the bus; does not wait."""
        self.sockets.core_in.listen(self._on_core_subscription)
        self.sockets.front.listen(self._on_front)
        self.sockets.core_out.listen(self._on_core_report)
        self._log.info("dp_coordinator_serves", size=self._size, broker=self._broker)
        if not is_loopback(self.sockets.front.address):
            detail = "vLLM's processes have no keys: anyone who reaches the address can start waves"
            self._log.warning("insecure", address=self.sockets.front.address, detail=detail)
        if self._peer is not None:
            self._peer.start()
        self._perform([])

    def close(self) -> None:
        """Leaves the bus, and closes the sockets."""
        self._closed = True
        self._alarm.cancel()
        if self._rejoin is not None:
            self._rejoin.cancel()
        if self._peer is not None:
            self._peer.close("the DP group's front end has ended")
        self.sockets.close()

    # -- the DP group --------------------------------------------------------------

    def _on_front(self, parts: list[bytes]) -> None:
        now_ms = self._scheduler.now_ms()
        with frames.bad_frames_logged(self._log):
            said = frames.decode_front_frame(parts, self._size)
            if isinstance(said, frames.FirstRequest):
                joined = self._is_joined()
                self._perform(self.machine.first_req(said.rank, said.wave, now_ms, broker=joined))
            elif said:
                self._perform(self.machine.on_front_subscribed(now_ms))

    def _on_core_subscription(self, parts: list[bytes]) -> None:
        with frames.bad_frames_logged(self._log):
            if frames.is_core_subscription(parts):
                self._perform(self.machine.on_core_subscribed())

    def _on_core_report(self, parts: list[bytes]) -> None:
        now_ms = self._scheduler.now_ms()
        with frames.bad_frames_logged(self._log):
            report = frames.decode_core_frame(parts, self._size)
            if report.complete is not None:
                self._perform(self.machine.complete(report.complete, now_ms))
            if report.started is not None:
                self._perform(self.machine.on_started(report.started, report.rank, now_ms))

    # -- the bus -------------------------------------------------------------------

    def _make_peer(self) -> PeerClient | None:
        if not self._broker:
            return None
        return PeerClient(
            name=self.name,
            group=self._group,
            broker=self._broker,
            security=self._security,
            scheduler=self._scheduler,
            join=self._join,
            on_message=self._on_message,
            on_state=self._on_state,
        )

    def _is_joined(self) -> bool:
        return self._peer is not None and self._peer.link.state is LinkState.JOINED

    def _join(self) -> Join:
        machine = self.machine
        facts = CoordinatorFacts(
            machine.dp_group, self._size, machine.wave, machine.running, machine.started_by
        )
        return Join("coordinator", HOST, os.getpid(), None, facts)

    def _on_message(self, _envelope: Envelope, message: Message) -> None:
        if self._is_joined():
            self._perform(self.machine.on_message(message, self._scheduler.now_ms()))

    def _on_state(self, state: LinkState) -> None:
        now_ms = self._scheduler.now_ms()
        if state is LinkState.JOINED:
            self._perform(self.machine.on_joined(now_ms))
        elif state is LinkState.REFUSED and not self._closed:
            self._rejoin = self._scheduler.call_at(now_ms + REFUSED_RETRY_MS, self._rejoin_bus)

    def _rejoin_bus(self) -> None:
        if self._peer is not None and not self._closed:
            self._peer.close()
            self._peer = self._make_peer()
            if self._peer is not None:
                self._peer.start()

    # -- effects of the machine ------------------------------------------------------

    def _perform(self, effects: Iterable[CoordinatorEffect]) -> None:
        for effect in effects:
            match effect:
                case StartCores():
                    self.sockets.core_in.send(*frames.encode_start_wave(effect))
                case Publish():
                    self.sockets.front.send(frames.encode_wave_status(effect))
                case Ready():
                    self.sockets.core_in.send(frames.READY)
                case Send() if self._is_joined():
                    assert self._peer is not None
                    self._peer.perform([effect])
                case Note():
                    bus.log.write(self._log, effect)
                case _:
                    pass  # a message to the broker, which is not connected
        if not self._closed:
            self._alarm.ring_by(self.machine.next_deadline_ms())

    def _on_alarm(self) -> None:
        if not self._closed:
            self._perform(self.machine.tick(self._scheduler.now_ms()))
