"""Who takes part in a collective transfer, in which place: from the broker's view.

Rank 0 is the trainer's sender. After it come the workers of every engine that takes part,
engine by engine, ranks of a DP group in order. The communicator's number is a digest of just
that, with each engine's boot: while nobody comes, goes or restarts it stays the same, for a
broker that was restarted as well; otherwise it is another one, and the transport has to be
made anew before it can be used.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus.protocol.broker.membership import Peer


@dataclass(frozen=True, slots=True)
class Communicator:
    """``first_ranks``: of each engine's first worker; the others follow it."""

    number: int
    world_size: int
    first_ranks: dict[str, int]


def communicator(engines: Iterable[Peer]) -> Communicator:
    """The one that these engines and the trainer would make."""
    first_ranks: dict[str, int] = {}
    taken: list[tuple[str, int, int]] = []
    world_size = 1
    known = [(peer.facts, peer) for peer in engines if peer.facts is not None]
    for facts, peer in sorted(known, key=lambda k: (k[0].dp_group, k[0].dp_rank, k[1].name)):
        first_ranks[peer.name] = world_size
        taken.append((peer.name, peer.boot, facts.workers))
        world_size += facts.workers
    digest = hashlib.sha256(msgspec.msgpack.encode(taken)).digest()
    number = int.from_bytes(digest[:8], "big") >> 1 or 1  # 0 is no communicator
    return Communicator(number, world_size, first_ranks)
