"""The broker as a state machine without I/O: frames go in, effects come out.

A frame takes this way. :meth:`Broker.admit` checks its size and its sender's rate before the frame
is decoded. :meth:`Broker.receive` checks the sender's key, finds the peer by its connection, and
refuses frames that are old, duplicate or not allowed for the peer's role. The peer's group gets the
others, and returns effects. :meth:`Broker.tick` handles timeouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from bus import messages as m
from bus._protocol.broker.group_table import GroupTable
from bus._protocol.core.access import (
    FRAME_BYTES,
    JOINS_AS,
    REFUSED_COST,
    REPORT_EVERY_MS,
    STRANGERS_FRAME_BYTES,
    Bucket,
    cost_of,
    outside_key,
    outside_role,
)
from bus._protocol.core.config import BROKER_NAME, BrokerConfig
from bus._protocol.core.effects import Effect, Note, Send
from bus._protocol.core.failures import Declined, Failure
from bus._protocol.core.link import WORTH_A_WAIT
from bus._protocol.core.membership import WATCHERS, Membership, Peer, place_of
from bus._protocol.group.commands import transfer_plan
from bus._protocol.group.group import Group
from bus._protocol.group.replies import engine_fields, lacking

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bus._protocol.core.access import KeyRole
    from bus.errors import DecodeError


class Broker:
    """Handles the frames of all peers, and holds all groups.

    ``keys`` maps each authorised public key to its role, and may be replaced at any time. None:
    there are no keys, and the broker trusts the role that a peer names.
    """

    def __init__(
        self, config: BrokerConfig | None = None, keys: Mapping[str, KeyRole] | None = None
    ) -> None:
        self.config = config or BrokerConfig()
        self.keys = keys
        self.peers = Membership(self.config.peer_timeout_ms)
        self.groups = GroupTable(self.config, self.peers)
        self._sweep_ms = self._due_ms = 0.0  # of the next tick, at the latest
        self._strangers: dict[bytes, Bucket] = {}
        self._views = Bucket(self.config.limits.status, 0.0)

    # -- frames ---------------------------------------------------------------

    def admit(self, route: bytes, size_bytes: int, now_ms: float) -> list[Effect] | None:
        """Decides by size and rate whether the broker reads a received frame.

        Returns:
            None if the frame is to be read. Otherwise the effects of its refusal, such as a NACK to
            the sender. An empty list: the frame is dropped, and nothing has changed.
        """
        peer = self.peers.by_route.get(route)
        bound = FRAME_BYTES[peer.role] if peer else STRANGERS_FRAME_BYTES
        bucket = (peer and peer.bucket) or self._bucket(route, now_ms)
        cost = cost_of(size_bytes) if size_bytes <= bound else REFUSED_COST
        if not bucket.take(cost, now_ms):
            return self._on_rate_limited(peer, route, bucket, now_ms)
        if size_bytes > bound:
            who = f"a peer of role {peer.role}" if peer else "a peer that has not joined"
            detail = f"the frame has {size_bytes} bytes; {who} may send at most {bound}"
            code = m.NackCode.OVERSIZED if peer else m.NackCode.NOT_JOINED  # so it joins anew
            return self._bad(peer, route, Failure(code, detail), 0)
        return None

    def receive(
        self, route: bytes, envelope: m.Envelope, message: m.Message, now_ms: float, user: str = ""
    ) -> list[Effect]:
        """Handles a decoded frame. ``user``: the key that its sender has proven to have."""
        known = self.peers.by_name.get(envelope.sender)
        effects = self._on_message(route, envelope, message, now_ms, user)
        if type(message) is m.Ack and not effects:
            return effects  # other engines' ACKs are missing
        # Only the sender's group is reviewed, so a frame's cost does not grow with their number. A
        # JOIN may have moved the sender from another group.
        touched = {envelope.group, known.group} if known else {envelope.group}
        return self._review(touched, effects, now_ms)

    def _on_message(
        self, route: bytes, envelope: m.Envelope, message: m.Message, now_ms: float, user: str
    ) -> list[Effect]:
        joins_as = message.role if isinstance(message, m.Join) else None
        if self.keys is not None and (
            outside := outside_key(self.keys, user, type(message), joins_as)
        ):
            return self._reject_key(route, envelope, message, outside, user, now_ms)
        if type(message) is m.Join:
            return self._join(route, envelope, message, now_ms, user)
        peer = self.peers.by_route.get(route)
        if (
            peer is None
            or peer.boot != envelope.boot
            or peer.name != envelope.sender
            or peer.user != user
        ):
            return self._stranger(route, envelope, message, now_ms)
        if outside := outside_role(peer.role, type(message)):
            return self._forbidden(route, envelope, outside, now_ms)
        if envelope.seq <= peer.last_seq:
            if type(message) is m.Nack:
                return []
            detail = f"frame {envelope.seq} is older than frame {peer.last_seq}, or the same"
            failure = Failure(m.NackCode.STALE, detail, field="seq")
            return [
                Note("stale_frame", "debug", {"peer": peer.name, "kind": envelope.kind}),
                self._refuse(route, envelope.id, failure, now_ms),
            ]
        peer.last_seq = envelope.seq
        peer.on_frame(now_ms, type(message) is m.Heartbeat, getattr(message, "step", ""))
        if type(message) is m.Ack:
            return self.groups[peer.group].receive(peer, envelope, message, now_ms)
        return self._from_peer(peer, envelope, message, now_ms)

    def on_malformed_frame(self, route: bytes, error: DecodeError, now_ms: float) -> list[Effect]:
        """Refuses a frame that could not be decoded, naming the field; nothing else changes."""
        peer = self.peers.by_route.get(route)
        self._bucket(route, now_ms).charge(REFUSED_COST)
        failure = Failure(error.code, error.detail, field=error.field)
        return self._bad(peer, route, failure, error.reply_to)

    def _bad(
        self, peer: Peer | None, route: bytes, failure: Failure, reply_to: int
    ) -> list[Effect]:
        fields = {
            "peer": peer.name if peer else "",
            "code": failure.code.value,
            "field": failure.field,
            "detail": failure.detail,
        }
        return [Note("bad_frame", "warning", fields), _nack(route, reply_to, failure)]

    def _bucket(self, route: bytes, now_ms: float) -> Bucket:
        peer = self.peers.by_route.get(route)
        if peer is not None and peer.bucket is not None:
            return peer.bucket
        bucket = self._strangers.get(route)
        if bucket is None:
            bucket = self._strangers[route] = Bucket(self.config.limits.stranger, now_ms)
        return bucket

    def _on_rate_limited(
        self, peer: Peer | None, route: bytes, bucket: Bucket, now_ms: float
    ) -> list[Effect]:
        """Drops a frame that exceeds the rate; its sender is notified once a second."""
        if not bucket.should_report(now_ms):
            return []
        name = peer.name if peer else route.decode(errors="replace")
        failure = Failure(
            m.NackCode.RATE_LIMITED,
            f"the limit is {bucket.rate.per_s:g} frames a second, each of up to 4 KiB",
            hint="send fewer frames; until then they are dropped",
        )
        return [
            Note("rate_limited", "warning", {"peer": name, "detail": failure.detail}),
            _nack(route, 0, failure, retry_ms=REPORT_EVERY_MS),
        ]

    def _reject_key(
        self,
        route: bytes,
        envelope: m.Envelope,
        message: m.Message,
        failure: Failure,
        user: str,
        now_ms: float,
    ) -> list[Effect]:
        """Refuses a frame that its sender's key does not allow."""
        assert self.keys is not None
        if user in self.keys or type(message) is m.Join:
            return self._forbidden(route, envelope, failure, now_ms)
        # A removed key gets no answer; its peer would count an answer as the broker's sign of life.
        self._bucket(route, now_ms).charge(REFUSED_COST)
        return [Note("forbidden", "warning", {"peer": envelope.sender, "detail": failure.detail})]

    def _from_peer(
        self, peer: Peer, envelope: m.Envelope, message: m.Message, now_ms: float
    ) -> list[Effect]:
        group = self.groups.get(peer.group)
        if isinstance(message, m.Heartbeat):
            beat: list[Effect] = [
                Send(
                    m.HeartbeatAck(
                        group.version if group else 0,
                        group.pause_held_at(peer.name) if group else "",
                        message.closed and not (group and group.routing.keeps(peer.name)),
                    ),
                    (peer.route,),
                    envelope.id,
                    peer.group,
                    group.epoch if group else 0,
                )
            ]
            if group is None:
                return beat
            if group.owner is peer and envelope.epoch < group.session.granted_epoch:
                beat.append(self._welcome(peer, group, peer.route, envelope.id))  # one was lost
            return beat + group.receive(peer, envelope, message, now_ms)
        if isinstance(message, m.Leave):
            return self._remove_peer(peer, "peer_left", message.reason or "left", now_ms)
        if isinstance(message, m.StatusRequest):
            return [Send(self.status(now_ms), (peer.route,), envelope.id, peer.group)]
        if isinstance(message, m.RoutesTaken):
            watched = self.groups.get(message.group)
            return watched.routing.on_taken(peer.name, message.revision) if watched else []
        if isinstance(message, m.RoutesRequest):
            watched = self.groups.get(message.group)
            return watched.tell_routes((peer.route,)) if watched else []
        if isinstance(message, m.Nack) and not (peer.role == "engine" and message.step):
            note = {"peer": peer.name, "code": message.code.value, "detail": message.detail}
            return [Note("peer_nack", "warning", note)]
        if isinstance(message, m.PlanTransfer) and peer.role in WATCHERS:
            return [_show_plan(peer, envelope.id, group or Group(peer.group, self.config), message)]
        assert group is not None, "watchers send none but the messages above"
        return group.receive(peer, envelope, message, now_ms)

    def _join(
        self, route: bytes, envelope: m.Envelope, join: m.Join, now_ms: float, user: str
    ) -> list[Effect]:
        known = self.peers.by_name.get(envelope.sender)
        if known is not None and known.boot == envelope.boot and envelope.seq <= known.last_seq:
            return []  # an old copy of a JOIN that was answered
        effects: list[Effect] = []
        if known is not None and (known.boot, known.user) == (envelope.boot, user):
            was, now = known.place, place_of(envelope.group, join)
            if was != now:
                reason = f"the peer joins again as {' '.join(map(str, now))}"
                effects += self._remove_peer(known, "peer_left", reason, now_ms)
        result = self._admit(route, envelope, join, now_ms, user)
        if isinstance(result, Failure):
            retry_ms = self.config.retry_ms
            if result.code in WORTH_A_WAIT:  # by then its owner is alive or detected as lost
                retry_ms = self.config.peer_timeout_ms + 2 * self.config.heartbeat_ms
            fields = {"peer": envelope.sender, "group": envelope.group, "detail": result.detail}
            return [
                *effects,
                Note("join_refused", "warning", {**fields, "code": result.code.value}),
                self._refuse(route, envelope.id, result, now_ms, retry_ms=retry_ms),
            ]
        peer, group = result
        came: list[Effect] = []
        if group is not None:
            came = group.on_joined(peer, now_ms)  # may change the WELCOME's version
        elif peer.role in WATCHERS:
            came = [note for each in self.groups.values() for note in each.tell_routes((route,))]
        again = known is not None and known.boot == envelope.boot
        lacks = lacking(join.engine)
        return [
            *effects,
            Note(
                "peer_rejoined" if again else "peer_joined",
                "warning" if lacks else "info",
                {
                    "peer": peer.name,
                    "group": peer.group,
                    "role": peer.role,
                    "host": peer.host,
                    "pid": peer.pid,
                    "epoch": group.epoch if group else 0,
                    "version": peer.version,
                    **engine_fields(join.engine, group.run if group else ""),
                    **lacks,
                },
            ),
            self._welcome(peer, group, route, envelope.id),
            *came,
        ]

    def _welcome(self, peer: Peer, group: Group | None, route: bytes, reply_to: int) -> Send:
        config = self.config
        version, epoch, run = (group.version, group.epoch, group.run) if group else (0, 0, "")
        welcome = m.Welcome(config.heartbeat_ms, config.peer_timeout_ms, version, run)
        return Send(welcome, (route,), reply_to, peer.group, epoch)

    def _admit(
        self, route: bytes, envelope: m.Envelope, join: m.Join, now_ms: float, user: str
    ) -> tuple[Peer, Group | None] | Failure:
        other = self.peers.by_route.get(route)
        if other is not None and other.name != envelope.sender:
            detail = f"this connection belongs to {other.name}"
            return Failure(m.NackCode.FORBIDDEN, detail, field="sender", peer=other.name)
        if refused := self.groups.refuse_more(envelope, join, now_ms):
            return refused
        peer = self.peers.join(route, envelope, join, now_ms, user)
        if isinstance(peer, Failure):
            return peer
        peer.joined_epoch = envelope.epoch
        if peer.bucket is None:
            peer.bucket = self._bucket(route, now_ms)
            peer.bucket.rate = self.config.limits.peer
            del self._strangers[route]
        if peer.role in WATCHERS:
            return peer, None
        group = self.groups.get_or_make(peer.group)
        # A peer that outlived an earlier broker reports that broker's last epoch.
        if peer.role == "engine" or group.owner is None:
            group.session.epoch = max(group.epoch, envelope.epoch)
        if peer.role == "trainer" and (refused := group.session.claim(peer, now_ms)):
            self._drop_peer(peer)
            return refused
        return peer, group

    def _stranger(
        self, route: bytes, envelope: m.Envelope, message: m.Message, now_ms: float
    ) -> list[Effect]:
        """Answers a status request of a peer that has not joined; refuses its other frames."""
        if isinstance(message, m.StatusRequest):
            if not self._views.take(1, now_ms):
                return self._on_rate_limited(None, route, self._views, now_ms)
            return [Send(self.status(now_ms), (route,), envelope.id)]
        if isinstance(message, (m.Nack, m.Leave)):
            self._bucket(route, now_ms).charge(REFUSED_COST)
            return []
        failure = Failure(
            m.NackCode.NOT_JOINED,
            f"{envelope.sender} has not joined this broker",
            field="sender",
            hint="send JOIN first",
        )
        return [self._refuse(route, envelope.id, failure, now_ms)]

    def _forbidden(
        self, route: bytes, envelope: m.Envelope, failure: Failure, now_ms: float
    ) -> list[Effect]:
        note = {"peer": envelope.sender, "kind": envelope.kind, "detail": failure.detail}
        refusal = self._refuse(route, envelope.id, failure, now_ms)
        return [Note("forbidden", "warning", note), refusal]

    def rekey(self, keys: Mapping[str, KeyRole], now_ms: float) -> list[Effect]:
        """Replaces the keys; removes peers whose key was removed or has another role."""
        self.keys = keys
        effects: list[Effect] = []
        for peer in list(self.peers):
            key = keys.get(peer.user)
            if key is None or peer.role not in JOINS_AS[key]:
                effects += self._remove_peer(peer, "peer_lost", "its key was revoked", now_ms)
        return self._review(self.groups, effects, now_ms)

    # -- time -----------------------------------------------------------------

    def tick(self, now_ms: float) -> list[Effect]:
        """Removes silent peers, repeats requests, and ends steps that took too long."""
        effects: list[Effect] = []
        if now_ms >= self._sweep_ms:
            self._sweep_ms = now_ms + self.config.heartbeat_ms / 2
            strangers = self._strangers.items()
            self._strangers = {r: bucket for r, bucket in strangers if not bucket.full(now_ms)}
            for peer in self.peers.silent(now_ms):
                silent_ms = now_ms - peer.last_heard_ms
                reason = f"{peer.name} was not heard for {silent_ms:.0f} ms"
                if peer.is_unreachable:
                    reason = f"{peer.name} has received nothing for {silent_ms:.0f} ms"
                effects += self._remove_peer(peer, "peer_lost", reason, now_ms)
            self.groups.drop_unused(now_ms)
        for group in self.groups.values():
            effects += group.tick(now_ms)
        self._due_ms = self._sweep_ms
        return self._review(self.groups, effects, now_ms)

    def next_deadline_ms(self) -> float:
        """Returns when :meth:`tick` is due at the latest."""
        return self._due_ms

    def _review(self, names: Iterable[str], effects: list[Effect], now_ms: float) -> list[Effect]:
        """Sends changed routes of these groups, and updates when the next tick is due."""
        for name in names:
            group = self.groups.get(name)
            if group is not None:
                effects, due_ms = group.review(effects, self.peers.watchers, now_ms)
                if due_ms is not None and due_ms < self._due_ms:
                    self._due_ms = due_ms
        return effects

    def _drop_peer(self, peer: Peer) -> None:
        self.peers.remove(peer)
        if peer.bucket is not None:  # joining again gives no new bucket
            peer.bucket.rate = self.config.limits.stranger
            self._strangers[peer.route] = peer.bucket

    def _remove_peer(self, peer: Peer, event: str, reason: str, now_ms: float) -> list[Effect]:
        self._drop_peer(peer)
        note = Note(
            event,
            "info" if event == "peer_left" else "warning",
            {"peer": peer.name, "group": peer.group, "role": peer.role, "reason": reason},
        )
        effects: list[Effect] = [note]
        if peer.role in WATCHERS:
            for each in self.groups.values():  # no engine waits for its confirmation any more
                effects += each.routing.remove_watchers((peer.name,))
        group = self.groups.get(peer.group)
        if group is None:
            return effects
        return effects + group.on_gone(peer, reason, now_ms)

    # -- answers --------------------------------------------------------------

    def status(self, now_ms: float) -> m.Status:
        """Returns the status of all groups; the server fills in ``cpu_s`` and ``rss_bytes``."""
        booting = [peer for peer in self.peers if peer.role == "booting"]
        return m.Status(
            broker=BROKER_NAME,
            uptime_s=round(now_ms / 1000, 3),
            cpu_s=0.0,
            rss_bytes=0,
            heartbeat_ms=self.config.heartbeat_ms,
            peer_timeout_ms=self.config.peer_timeout_ms,
            peers=len(self.peers),
            groups=tuple(self.groups[name].status(now_ms, booting) for name in sorted(self.groups)),
        )

    def _refuse(
        self, route: bytes, reply_to: int, failure: Failure, now_ms: float, retry_ms: int = 0
    ) -> Send:
        """Refuses a frame that was read, which costs its sender more than an accepted one."""
        self._bucket(route, now_ms).charge(REFUSED_COST)
        return _nack(route, reply_to, failure, retry_ms)


def _show_plan(observer: Peer, msg_id: int, group: Group, message: m.PlanTransfer) -> Send:
    """Answers an observer's PLAN_TRANSFER with the plan, or with the reason why there is none."""
    answer: m.Message
    try:
        answer = transfer_plan(group, message)
    except Declined as declined:
        answer = declined.failure.nack()
    return Send(answer, (observer.route,), msg_id, group.name, group.epoch)


def _nack(route: bytes, reply_to: int, failure: Failure, retry_ms: int = 0) -> Send:
    return Send(replace(failure.nack(), retry_after_ms=retry_ms), (route,), reply_to)
