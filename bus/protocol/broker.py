"""The broker as a machine without I/O: frames in, effects out.

The way of a message: :meth:`Broker.receive` finds the peer by its route, drops what
is old or doubled, and hands the rest to the peer's group; what the group wants
done comes back as effects. :meth:`Broker.tick` is time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bus.messages import (
    Ack,
    AwaitStep,
    CoreStatus,
    Envelope,
    FirstReq,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    Message,
    Nack,
    NackCode,
    Phase,
    Status,
    StatusRequest,
    Step,
    WaveComplete,
    WaveStarted,
    Welcome,
)
from bus.protocol.effects import Effect, Note, Send
from bus.protocol.group import Group
from bus.protocol.instructions import Failure
from bus.protocol.membership import Membership, Peer

if TYPE_CHECKING:
    from bus.errors import DecodeError

BROKER_NAME: Final = "broker"
# A pause must outlive what the bus needs to miss a peer, or an engine could run
# again while its group still counts it as paused.
LEASE_PER_PEER_TIMEOUT: Final = 2

WAVE_WORDS: Final = (FirstReq, WaveStarted, WaveComplete)

_PHASE_AFTER: Final[dict[Step, Phase]] = {
    Step.PAUSE_LOCAL: "pausing",
    Step.PAUSE_GLOBAL: "paused",
    Step.RESUME: "running",
    Step.START: "updating",
    Step.COMMIT: "paused",
}
# What an ABORT found; an engine that was untouched is where it was.
_PHASE_FOUND: Final[dict[str, Phase]] = {"partial": "quarantined", "restored": "paused"}


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Times are in milliseconds.

    ``peer_timeout_ms``: silence after which a peer is lost. ``retry_ms``: how often
    engines that have not answered are asked again. ``step_timeout_ms``: how long an
    engine that lives may take for one step of an update or pause.
    """

    heartbeat_ms: int = 1000
    peer_timeout_ms: int = 5000
    retry_ms: int = 1000
    step_timeout_ms: int = 300_000


class Broker:
    """All groups and peers. One door for frames, one for time."""

    def __init__(self, config: BrokerConfig | None = None) -> None:
        self.config = config or BrokerConfig()
        self.peers = Membership(self.config.peer_timeout_ms)
        self.groups: dict[str, Group] = {}
        self._sweep_ms = 0.0

    # -- frames ---------------------------------------------------------------

    def receive(
        self, route: bytes, envelope: Envelope, message: Message, now_ms: float
    ) -> list[Effect]:
        """One decoded frame."""
        if type(message) is Join:
            return self._join(route, envelope, message, now_ms)
        peer = self.peers.by_route.get(route)
        if peer is None or peer.boot != envelope.boot or peer.name != envelope.sender:
            return self._stranger(route, envelope, message, now_ms)
        if envelope.seq <= peer.last_seq:
            if type(message) is Nack:
                return []
            failure = Failure(
                NackCode.STALE,
                f"frame {envelope.seq} after {peer.last_seq}",
                field="seq",
            )
            return [
                Note("stale_frame", "debug", {"peer": peer.name, "kind": envelope.kind}),
                self._nack((route,), envelope.id, failure),
            ]
        peer.last_seq = envelope.seq
        peer.last_heard_ms = now_ms
        if type(message) is Ack:
            if peer.role == "engine":
                # Between heartbeats, acks tell where an engine stands.
                peer.phase = _PHASE_AFTER.get(message.step, peer.phase)
                if message.outcome in _PHASE_FOUND:
                    peer.phase = _PHASE_FOUND[message.outcome]
                return self.groups[peer.group].acked(peer.name, message, now_ms)
            return self._forbidden(peer, envelope)
        return self._from_peer(peer, envelope, message, now_ms)

    def malformed(self, route: bytes, error: DecodeError, reply_to: int) -> list[Effect]:
        """A frame that could not be decoded: say which field, change nothing."""
        peer = self.peers.by_route.get(route)
        name = peer.name if peer else ""
        return [
            Note(
                "bad_frame",
                "warning",
                {
                    "peer": name,
                    "code": error.code.value,
                    "field": error.field,
                    "detail": str(error),
                },
            ),
            self._nack((route,), reply_to, Failure(error.code, error.detail, field=error.field)),
        ]

    def _from_peer(
        self, peer: Peer, envelope: Envelope, message: Message, now_ms: float
    ) -> list[Effect]:
        group = self.groups.get(peer.group)
        if isinstance(message, Heartbeat):
            beat: list[Effect] = [
                Send(
                    HeartbeatAck(group.version if group else 0),
                    (peer.route,),
                    envelope.id,
                    peer.group,
                    group.epoch if group else 0,
                )
            ]
            if peer.role == "engine" and group is not None:
                beat += group.heard(peer, message)
            return beat
        if isinstance(message, CoreStatus) and peer.role == "engine" and group is not None:
            return group.waves.core_status(peer, message, now_ms)
        if isinstance(message, Leave):
            return self._gone(peer, "peer_left", message.reason or "left", now_ms)
        if isinstance(message, StatusRequest):
            return [Send(self.status(now_ms), (peer.route,), envelope.id, peer.group)]
        if isinstance(message, Nack):
            if peer.role == "engine" and group is not None and message.step:
                return group.nacked(peer.name, message, now_ms)
            note = {"peer": peer.name, "code": message.code.value, "detail": message.detail}
            return [Note("peer_nack", "warning", note)]
        if peer.role == "gateway" and group is not None and isinstance(message, WAVE_WORDS):
            return group.waves.told(peer, envelope.id, message)
        if peer.role == "follower" and group is not None and isinstance(message, AwaitStep):
            return group.followers.asks(peer, envelope.id, message)
        if peer.role == "trainer" and group is not None:
            return group.command(peer, envelope.id, envelope.epoch, message, now_ms)
        return self._forbidden(peer, envelope)

    def _join(self, route: bytes, envelope: Envelope, join: Join, now_ms: float) -> list[Effect]:
        known = self.peers.by_name.get(envelope.sender)
        if known is not None and known.boot == envelope.boot and envelope.seq <= known.last_seq:
            return []  # an old copy of a join that was answered
        result = self._admit(route, envelope, join, now_ms)
        if isinstance(result, Failure):
            return [
                Note(
                    "join_refused",
                    "warning",
                    {
                        "peer": envelope.sender,
                        "group": envelope.group,
                        "code": result.code.value,
                        "detail": result.detail,
                    },
                ),
                self._nack((route,), envelope.id, result, retry_ms=self.config.retry_ms),
            ]
        peer, group = result
        again = known is not None and known.boot == envelope.boot
        effects: list[Effect] = [
            Note(
                "peer_rejoined" if again else "peer_joined",
                fields={
                    "peer": peer.name,
                    "group": peer.group,
                    "role": peer.role,
                    "host": peer.host,
                    "pid": peer.pid,
                    "epoch": group.epoch if group else 0,
                    "version": peer.version,
                    **({"phase": peer.phase, "kind": join.engine.kind} if join.engine else {}),
                },
            ),
            Send(
                Welcome(
                    self.config.heartbeat_ms,
                    self.config.peer_timeout_ms,
                    group.version if group else 0,
                ),
                (route,),
                envelope.id,
                peer.group,
                group.epoch if group else 0,
            ),
        ]
        if peer.role == "engine" and group is not None:
            effects += group.joined(peer, now_ms)
        elif peer.role == "gateway" and group is not None:
            effects += group.waves.gateway_joined(peer)
        return effects

    def _admit(
        self, route: bytes, envelope: Envelope, join: Join, now_ms: float
    ) -> tuple[Peer, Group | None] | Failure:
        peer = self.peers.join(
            name=envelope.sender,
            group=envelope.group,
            route=route,
            boot=envelope.boot,
            seq=envelope.seq,
            join=join,
            now_ms=now_ms,
        )
        if isinstance(peer, Failure):
            return peer
        if peer.role == "observer":
            return peer, None
        group = self.groups.get(peer.group)
        if group is None:
            group = self.groups[peer.group] = Group(
                peer.group,
                retry_ms=self.config.retry_ms,
                step_timeout_ms=self.config.step_timeout_ms,
                min_lease_ms=self.config.peer_timeout_ms * LEASE_PER_PEER_TIMEOUT,
            )
        # A peer that outlived an earlier broker knows how far the fencing had come.
        if peer.role == "engine" or group.holder is None:
            group.holding.epoch = max(group.epoch, envelope.epoch)
        if peer.role == "trainer":
            refused = group.holding.take(peer, now_ms)
            if refused is not None:
                self.peers.remove(peer)
                return refused
        return peer, group

    def _stranger(
        self, route: bytes, envelope: Envelope, message: Message, now_ms: float
    ) -> list[Effect]:
        """A frame of a peer that has not joined (or that another one replaced)."""
        if isinstance(message, StatusRequest):
            return [Send(self.status(now_ms), (route,), envelope.id)]
        if isinstance(message, (Nack, Leave)):
            return []
        failure = Failure(
            NackCode.NOT_JOINED,
            f"{envelope.sender} has not joined this broker",
            field="sender",
            hint="JOIN first",
        )
        return [self._nack((route,), envelope.id, failure)]

    def _forbidden(self, peer: Peer, envelope: Envelope) -> list[Effect]:
        failure = Failure(
            NackCode.FORBIDDEN,
            f"a peer of role {peer.role} does not send {envelope.kind}",
            field="kind",
        )
        note = {"peer": peer.name, "kind": envelope.kind}
        return [
            Note("forbidden", "warning", note),
            self._nack((peer.route,), envelope.id, failure),
        ]

    # -- time -----------------------------------------------------------------

    def tick(self, now_ms: float) -> list[Effect]:
        """Miss silent peers, ask again, end what took too long."""
        effects: list[Effect] = []
        if now_ms >= self._sweep_ms:
            self._sweep_ms = now_ms + self.config.heartbeat_ms / 2
            for peer in self.peers.silent(now_ms):
                silent_ms = now_ms - peer.last_heard_ms
                reason = f"{peer.name} was not heard for {silent_ms:.0f} ms"
                effects += self._gone(peer, "peer_lost", reason, now_ms)
        for group in self.groups.values():
            effects += group.tick(now_ms)
        return effects

    def next_deadline_ms(self) -> float:
        """When :meth:`tick` is due."""
        due_ms = self._sweep_ms
        for group in self.groups.values():
            group_ms = group.next_deadline_ms()
            if group_ms is not None and group_ms < due_ms:
                due_ms = group_ms
        return due_ms

    def _gone(self, peer: Peer, event: str, reason: str, now_ms: float) -> list[Effect]:
        self.peers.remove(peer)
        note = Note(
            event,
            "info" if event == "peer_left" else "warning",
            {"peer": peer.name, "group": peer.group, "role": peer.role, "reason": reason},
        )
        effects: list[Effect] = [note]
        group = self.groups.get(peer.group)
        if group is None:
            return effects
        if peer.role == "gateway":
            return effects + group.waves.gateway_lost(peer)
        if peer.role == "engine":
            failure = Failure(NackCode.PEER_LOST, reason, peer.name)
            return effects + group.lost(peer, failure, now_ms)
        if peer.role == "follower":
            group.followers.gone(peer)
        if group.holder is peer:
            effects += group.released(f"trainer {reason}", now_ms)
        return effects

    # -- answers --------------------------------------------------------------

    def status(self, now_ms: float) -> Status:
        """The whole view; the shell adds what it knows of the process."""
        return Status(
            broker=BROKER_NAME,
            uptime_s=round(now_ms / 1000, 3),
            cpu_s=0.0,
            rss_bytes=0,
            heartbeat_ms=self.config.heartbeat_ms,
            peer_timeout_ms=self.config.peer_timeout_ms,
            peers=len(self.peers),
            groups=tuple(self.groups[name].status(now_ms) for name in sorted(self.groups)),
        )

    def _nack(
        self, routes: tuple[bytes, ...], reply_to: int, failure: Failure, retry_ms: int = 0
    ) -> Send:
        nack = Nack(
            code=failure.code,
            step="",
            update_id="",
            chunk=0,
            detail=failure.detail[:4096],
            field=failure.field[:256],
            peer=failure.peer[:256],
            tensor="",
            hint=failure.hint,
            retry_after_ms=retry_ms,
        )
        return Send(nack, routes, reply_to)
