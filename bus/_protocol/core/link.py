"""Keeps a peer joined to the broker: sends its JOIN and heartbeats, and joins again.

::

    state     event               next      effect
    JOINING   welcome             JOINED    heartbeats begin
    JOINING   JOIN not sent       JOINING   JOIN again after retry_ms: no broker is there
    JOINING   no answer           JOINING   JOIN again after answer_ms: the broker may be busy
    JOINING   nack, worth a wait  JOINING   JOIN again after retry_ms (name taken, group held),
                                            until the broker has detected a lost peer
    JOINING   nack, final         REFUSED
    JOINING   unreadable version  REFUSED
    JOINED    nack not_joined     JOINING   JOIN: the broker is a new one
    JOINED    welcome             JOINED    a later epoch is adopted
    JOINED    broker silent       JOINING   JOIN
    JOINED    leave               CLOSED    LEAVE
    JOINING   leave               CLOSED    LEAVE, if a JOIN was sent: the answer may be on its way
    REFUSED   leave               CLOSED

Invariants: while not JOINED, the link itself sends only JOIN and LEAVE; an old or duplicate frame
of the broker changes nothing.

A broker to which a thousand peers connect at once answers late. A JOIN that was sent reaches the
broker unless the connection breaks, so repeating the JOIN soon would only delay the broker more.
And if this process did not run for a while, an answer may wait unread. So after a late tick the
link waits for LATE_MS before it counts the broker as silent, or a JOIN as unanswered.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from bus import messages as m
from bus._protocol.core.effects import Effect, Note, Send

if TYPE_CHECKING:
    from collections.abc import Callable

# The messages that Link.receive handles; it ignores all others.
LINK_MESSAGES: Final = frozenset({m.Welcome, m.HeartbeatAck, m.Nack})
LATE_MS: Final = 100.0
WORTH_A_WAIT: Final = frozenset({m.NackCode.NAME_TAKEN, m.NackCode.GROUP_HELD})
# NACKs with these codes answer frames that were sent before the JOIN.
_NOT_OF_THE_JOIN: Final = frozenset(
    {m.NackCode.NOT_JOINED, m.NackCode.STALE, m.NackCode.OVERSIZED, m.NackCode.RATE_LIMITED}
)


class LinkState(StrEnum):
    """The state of a peer's membership."""

    JOINING = "joining"
    JOINED = "joined"
    REFUSED = "refused"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Times of a link, in ms.

    Attributes:
        retry_ms: how soon a JOIN is repeated that could not be sent, or that the broker has refused
            for a reason that may pass.
        answer_ms: how soon a JOIN is repeated that was sent and not answered.
        patience_ms: how long, at least, to retry while another peer holds the name or group. The
            other peer may be dead without the broker having noticed. The broker's NACK may give
            more time.
    """

    retry_ms: int = 500
    answer_ms: int = 5_000
    patience_ms: int = 8_000


class Link:
    """Keeps one peer joined. ``join`` and ``beat`` return each JOIN and heartbeat to send."""

    def __init__(
        self,
        *,
        group: str,
        join: Callable[[], m.Join],
        beat: Callable[[], m.Heartbeat],
        config: LinkConfig | None = None,
    ) -> None:
        self.group = group
        self.config = config or LinkConfig()
        self.state = LinkState.JOINING
        self.epoch = 0
        self.version = 0
        self.run = ""  # the group's run, from the last WELCOME
        self.heartbeat_ms = 1000.0
        self.peer_timeout_ms = 5000.0
        self.last_heard_ms = 0.0
        self.refusal: m.Nack | None = None
        self._join = join
        self._beat = beat
        self._asked = False  # a JOIN was sent: the broker may count the peer as joined
        self._commanded = False  # an engine adopts later epochs; a trainer keeps its own
        self.broker_boot = 0  # identifies the broker's process; a restart changes it
        self._last_seq = 0
        self._next_ms = 0.0
        self._waits_late = False  # a tick came late, and frames that wait unread are read first
        self._held_ms: float | None = None  # since when another peer holds the name or group

    def start(self, now_ms: float) -> list[Effect]:
        """Sends the first JOIN."""
        return self._ask(now_ms)

    def fresh(self, envelope: m.Envelope, now_ms: float) -> bool:
        """Returns whether a frame of the broker is new; others must be dropped."""
        if envelope.boot != self.broker_boot:
            self.broker_boot = envelope.boot
            self._last_seq = 0
        if envelope.seq <= self._last_seq:
            return False
        self._last_seq = envelope.seq
        self._waits_late = False
        self.last_heard_ms = now_ms
        if self._commanded and envelope.group == self.group and envelope.epoch > self.epoch:
            # After a restart of the broker, engines report the last epoch to it.
            self.epoch = envelope.epoch
        return True

    def receive(self, envelope: m.Envelope, message: m.Message, now_ms: float) -> list[Effect]:
        """Handles a message about the membership; any other message changes nothing."""
        if isinstance(message, m.Welcome):
            return self._welcome(envelope, message, now_ms)
        if isinstance(message, m.HeartbeatAck):
            self.version = message.version
            return []
        if isinstance(message, m.Nack):
            return self._nack(message, now_ms)
        return []

    def other_version(self, nack: m.Nack) -> list[Effect]:
        """Handles a frame of a broker with another wire version; ``nack`` has the reason.

        A peer that is joining becomes REFUSED. Otherwise nothing changes.
        """
        return self._on_refused(nack) if self.state is LinkState.JOINING else []

    def leave(self, reason: str) -> list[Effect]:
        """Leaves the bus: sends LEAVE if the broker may have received a JOIN."""
        may_be_in = self._asked and self.state in (LinkState.JOINING, LinkState.JOINED)
        self.state = LinkState.CLOSED
        return [Send(m.Leave(reason))] if may_be_in else []

    def tick(self, now_ms: float) -> list[Effect]:
        """Sends the heartbeat or JOIN that is due; joins again if the broker is silent."""
        if now_ms < self._next_ms or self.state in (LinkState.REFUSED, LinkState.CLOSED):
            return []
        silent_ms = now_ms - self.last_heard_ms
        is_silent = self.state is LinkState.JOINING or silent_ms > self.peer_timeout_ms
        is_late = now_ms > self._next_ms + LATE_MS
        if is_silent and is_late and not self._waits_late:
            self._waits_late = True
            self._next_ms = now_ms + LATE_MS
            return []
        self._waits_late = False
        if self.state is LinkState.JOINING:
            return self._ask(now_ms)
        if is_silent:
            self.state = LinkState.JOINING
            note = Note("broker_lost", "warning", {"silent_ms": round(silent_ms)})
            return [note, *self._ask(now_ms)]
        self._next_ms = now_ms + self.heartbeat_ms
        return [Send(self._beat(), group=self.group, epoch=self.epoch)]

    def next_deadline_ms(self) -> float | None:
        """Returns when :meth:`tick` is due; None: never."""
        return None if self.state in (LinkState.REFUSED, LinkState.CLOSED) else self._next_ms

    def on_join_unsent(self, now_ms: float) -> None:
        """Records that the JOIN could not be sent, because no broker is there."""
        self._next_ms = min(self._next_ms, now_ms + self.config.retry_ms)

    def _ask(self, now_ms: float) -> list[Effect]:
        self._next_ms = now_ms + max(self.config.retry_ms, self.config.answer_ms)
        self._asked = True
        join = self._join()
        self._commanded = join.role == "engine"
        return [Send(join, group=self.group, epoch=self.epoch)]

    def _welcome(self, envelope: m.Envelope, welcome: m.Welcome, now_ms: float) -> list[Effect]:
        if self.state is LinkState.JOINED:
            # The first WELCOME came late, from a broker that is gone.
            self.epoch = max(self.epoch, envelope.epoch)
        if self.state is not LinkState.JOINING:
            return []
        self._held_ms = None
        self.state = LinkState.JOINED
        self.epoch = envelope.epoch
        self.version = welcome.version
        self.run = welcome.run
        self.heartbeat_ms = float(max(welcome.heartbeat_ms, 1))
        self.peer_timeout_ms = float(max(welcome.peer_timeout_ms, 1))
        self._next_ms = now_ms + self.heartbeat_ms
        return [Note("joined", fields={"epoch": self.epoch, "version": self.version})]

    def _nack(self, nack: m.Nack, now_ms: float) -> list[Effect]:
        if nack.code is m.NackCode.NOT_JOINED and self.state is LinkState.JOINED:
            self.state = LinkState.JOINING
            return [Note("broker_new", "warning"), *self._ask(now_ms)]
        if self.state is LinkState.JOINING and nack.code is m.NackCode.RATE_LIMITED:
            # The JOIN may be among the frames that were dropped.
            self._next_ms = min(self._next_ms, now_ms + max(nack.retry_after_ms, LATE_MS))
        if self.state is not LinkState.JOINING or nack.code in _NOT_OF_THE_JOIN:
            return []
        if self._held_ms is None:
            self._held_ms = now_ms
        patience_ms = max(self.config.patience_ms, nack.retry_after_ms + self.config.retry_ms)
        if nack.code in WORTH_A_WAIT and now_ms < self._held_ms + patience_ms:
            self._next_ms = min(self._next_ms, now_ms + self.config.retry_ms)
            fields = {"code": nack.code.value, "detail": nack.detail}
            return [Note("join_waits", "warning", fields)] if now_ms == self._held_ms else []
        return self._on_refused(nack)

    def _on_refused(self, nack: m.Nack) -> list[Effect]:
        self.state = LinkState.REFUSED
        self.refusal = nack
        return [Note("join_refused", "error", {"code": nack.code.value, "detail": nack.detail})]
