"""How much one peer may ask of the broker, so that none starves the others.

Every route has a bucket of tokens, which fills at a steady rate; a small one until its peer has
joined. A frame costs one token, and one more per 4 KiB; one that is refused costs
more, since it is answered and logged. With an empty bucket frames are dropped unread, and
their sender is told once a second.

What a role has to say bounds a frame's size: manifests are a trainer's alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from bus.messages import MAX_FRAME_BYTES, Role

KIB: Final = 1024
BYTES_PER_TOKEN: Final = 4 * KIB
REFUSED_COST: Final = 10
TOLD_EVERY_MS: Final = 1000
# Requests that one trainer may have open at a time.
OPEN_REQUESTS: Final = 1024

STRANGERS_FRAME_BYTES: Final = 64 * KIB
FRAME_BYTES: Final[dict[Role, int]] = {
    "trainer": MAX_FRAME_BYTES,
    "follower": 64 * KIB,
    "engine": 4 * KIB * KIB,  # an ack may name thousands of requests
    "gateway": 64 * KIB,
    "observer": 64 * KIB,
    "scheduler": 64 * KIB,
}


@dataclass(frozen=True, slots=True)
class Rate:
    """``per_s``: tokens that come in a second. ``burst``: as many are there at most."""

    per_s: float
    burst: float


@dataclass(frozen=True, slots=True)
class Limits:
    """``peer``: of each that has joined. ``stranger``: of each route that has not.
    ``status``: requests for the whole view, of all strangers together."""

    peer: Rate = field(default_factory=lambda: Rate(5_000, 20_000))
    stranger: Rate = field(default_factory=lambda: Rate(50, 200))
    status: Rate = field(default_factory=lambda: Rate(50, 100))


class Bucket:
    """Tokens of one peer; full at first."""

    __slots__ = ("_at_ms", "_tokens", "_told_ms", "rate")

    def __init__(self, rate: Rate, now_ms: float) -> None:
        self.rate = rate
        self._tokens = rate.burst
        self._at_ms = now_ms
        self._told_ms = -float(TOLD_EVERY_MS)

    def take(self, cost: float, now_ms: float) -> bool:
        """Take so many tokens; False, and nothing at all is changed, if none is left."""
        rate = self.rate
        tokens = self._tokens + (now_ms - self._at_ms) * rate.per_s / 1000
        tokens = min(tokens, rate.burst)
        if tokens < 1:
            return False
        self._at_ms = now_ms
        self._tokens = tokens - cost
        return True

    def charge(self, cost: float) -> None:
        """Take tokens afterwards; there may be less than none then."""
        self._tokens -= cost

    def tell(self, now_ms: float) -> bool:
        """Whether the sender is to be told that it is limited."""
        if now_ms < self._told_ms + TOLD_EVERY_MS:
            return False
        self._told_ms = now_ms
        return True

    def full(self, now_ms: float) -> bool:
        """Whether forgetting it would change nothing."""
        return self._tokens + (now_ms - self._at_ms) * self.rate.per_s / 1000 >= self.rate.burst


def cost_of(size_bytes: int) -> int:
    """What a frame costs."""
    return 1 + size_bytes // BYTES_PER_TOKEN
