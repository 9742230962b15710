"""Decides by rate, role and key which frames a peer may send to the broker.

**Rate.** Each connection has a token bucket that fills at a steady rate. The bucket is small until
its peer has joined. A frame costs one token, and one more per 4 KiB. A refused frame costs
:data:`REFUSED_COST` more, because it is answered and logged. While the bucket is empty, frames are
dropped unread, and their sender is notified once a second. Each role has a largest frame: only a
trainer sends manifests.

**Role.** A peer names its role when it joins. :data:`bus.messages.VERBS` has the messages of each
role.

**Key.** If the broker has keys, :data:`JOINS_AS` lists the roles as which the owner of a key may
join. The key may send the messages of these roles only, whatever role the peer names.

Invariants: a refused frame has changed nothing; a frame counts for the peer that it names only
under the key with which that peer has joined.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from bus._protocol.core.failures import Failure
from bus.messages import MAX_FRAME_BYTES, VERBS, WIRE_NAMES, Message, NackCode, Role

if TYPE_CHECKING:
    from collections.abc import Mapping


KIB: Final = 1024
# MAX_REPORTED: the greatest epoch or version that a JOIN or ARM may report for an unknown group.
# MAX_JUMP: by how much it may exceed the number of a known group. The wire carries up to 2**53.
MAX_REPORTED: Final = 2**40
MAX_JUMP: Final = 2**20
BYTES_PER_TOKEN: Final = 4 * KIB
REFUSED_COST: Final = 10
REPORT_EVERY_MS: Final = 1000

# How many requests of one trainer may be open at a time.
OPEN_REQUESTS: Final = 1024

STRANGERS_FRAME_BYTES: Final = 64 * KIB
FRAME_BYTES: Final[dict[Role, int]] = {
    "trainer": MAX_FRAME_BYTES,
    "follower": 64 * KIB,
    "engine": 4 * KIB * KIB,  # an ack may name thousands of requests
    "booting": 64 * KIB,
    "coordinator": 64 * KIB,
    "observer": 64 * KIB,
    "scheduler": 64 * KIB,
}


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate of ``per_s`` tokens per second, of which at most ``burst`` accumulate."""

    per_s: float
    burst: float


@dataclass(frozen=True, slots=True)
class Limits:
    """The rate limits for received frames, as token buckets.

    A frame costs one token, and one more for each full 4 KiB.

    Attributes:
        peer: limit of each peer that has joined.
        stranger: limit of each connection whose peer has not joined.
        status: limit of status requests from all such connections together, one token each.
    """

    peer: Rate = field(default_factory=lambda: Rate(5_000, 20_000))
    stranger: Rate = field(default_factory=lambda: Rate(50, 200))
    status: Rate = field(default_factory=lambda: Rate(50, 100))


class Bucket:
    """Token bucket that limits the rate of one peer's frames; full at first."""

    __slots__ = ("_at_ms", "_reported_ms", "_tokens", "rate")

    def __init__(self, rate: Rate, now_ms: float) -> None:
        self.rate = rate
        self._tokens = rate.burst
        self._at_ms = now_ms
        self._reported_ms = -float(REPORT_EVERY_MS)

    def take(self, cost: float, now_ms: float) -> bool:
        """Takes ``cost`` tokens, and returns True if at least one token was there.

        The balance may become negative. Returns False, without any change, if the bucket has no
        token.
        """
        rate = self.rate
        tokens = self._tokens + (now_ms - self._at_ms) * rate.per_s / 1000
        tokens = min(tokens, rate.burst)
        if tokens < 1:
            return False
        self._at_ms = now_ms
        self._tokens = tokens - cost
        return True

    def charge(self, cost: float) -> None:
        """Takes tokens for a frame that was read and then refused.

        The balance may become negative.
        """
        self._tokens -= cost

    def should_report(self, now_ms: float) -> bool:
        """Returns whether to notify the limited sender now; True at most once a second."""
        if now_ms < self._reported_ms + REPORT_EVERY_MS:
            return False
        self._reported_ms = now_ms
        return True

    def full(self, now_ms: float) -> bool:
        """Returns whether the bucket has all its tokens again.

        A full bucket may be dropped, because a new one has as many tokens.
        """
        return self._tokens + (now_ms - self._at_ms) * self.rate.per_s / 1000 >= self.rate.burst


def cost_of(size_bytes: int) -> int:
    """Returns how many tokens a frame of this size costs."""
    return 1 + size_bytes // BYTES_PER_TOKEN


def outside_bounds(field: str, reported: int, known: int) -> Failure | None:
    """Returns why a reported epoch or version is rejected; None: the number is plausible.

    Args:
        field: the name of the message's field.
        known: the group's own number; 0 if nothing is known yet.
    """
    highest = known + MAX_JUMP if known else MAX_REPORTED
    if reported <= highest:
        return None
    detail = f"{field} {reported} is too far above the group's {known}; at most {highest} is valid"
    hint = "restart the peer and the vLLM that it is attached to, or use another group"
    return Failure(NackCode.MALFORMED, detail, field=field, hint=hint)


KeyRole: TypeAlias = Literal["trainer", "engine", "observer", "scheduler"]
Verbs: TypeAlias = frozenset[type[Message]]

JOINS_AS: Final[dict[KeyRole, frozenset[Role]]] = {
    "trainer": frozenset({"trainer", "follower", "observer"}),
    "engine": frozenset({"engine", "booting", "coordinator"}),
    "observer": frozenset({"observer"}),
    "scheduler": frozenset({"scheduler"}),
}
KEY_VERBS: Final[dict[KeyRole, Verbs]] = {
    key: frozenset[type[Message]]().union(*(VERBS[role] for role in roles))
    for key, roles in JOINS_AS.items()
}


def outside_role(role: Role, kind: type[Message]) -> Failure | None:
    """Returns why this role may not send such messages; None: the role may send them."""
    if kind in VERBS[role]:
        return None
    return _forbidden(f"a peer of role {role} may not send {WIRE_NAMES[kind]}")


def outside_key(
    keys: Mapping[str, KeyRole], user: str, kind: type[Message], joins_as: Role | None = None
) -> Failure | None:
    """Returns why a key forbids a message of this kind; None: the message is allowed.

    Args:
        keys: the authorised keys, with their roles.
        user: the key that the sender has proven to have.
        joins_as: the role that a JOIN names; None: it is no JOIN.
    """
    role = keys.get(user)
    if role is None:
        return _forbidden("the key is not authorised", field="sender")
    if kind not in KEY_VERBS[role]:
        return _forbidden(f"a key of role {role} may not send {WIRE_NAMES[kind]}")
    if joins_as is not None and joins_as not in JOINS_AS[role]:
        return _forbidden(f"a key of role {role} may not join as {joins_as}", field="role")
    return None


def _forbidden(detail: str, field: str = "kind") -> Failure:
    hints = {
        "sender": "copy its .pub file into the broker's folder `authorized`, then send SIGHUP",
        "role": "use a key of another role: `wavebus keygen NAME --role ROLE` makes one",
    }
    return Failure(NackCode.FORBIDDEN, detail, field=field, hint=hints.get(field, ""))
