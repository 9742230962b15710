"""Votes of peer ranks: whose are taken."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bus._keys import Security
from bus.messages import LeaseVote, PeerRank, PeerRanks, codec
from sidecar._peer_links import PeerLinks

if TYPE_CHECKING:
    from collections.abc import Callable

BOOT: Final = 7


def links(rank: int, boot: int, on_vote: Callable[[LeaseVote], None]) -> PeerLinks:
    return PeerLinks(
        f"rank-{rank}",
        boot,
        group="policy",
        dp_group="moe",
        dp_rank=rank,
        broker="tcp://127.0.0.1:7710",
        security=Security(),
        on_vote=on_vote,
    )


def test_late_votes_of_an_earlier_life_are_dropped_and_so_are_repeated_ones() -> None:
    """The rank has restarted under its name; the broker says which life it is in."""
    heard: list[int] = []

    async def scenario() -> None:
        mine = links(0, 1, lambda found: heard.append(found.version))
        peers = (
            PeerRank("rank-0", 0, mine.address, "", 1),
            PeerRank("rank-1", 1, "tcp://127.0.0.1:1", "", BOOT),
        )
        mine.connect_peers(PeerRanks(peers))

        def comes(version: int, boot: int, seq: int) -> None:
            vote = LeaseVote("moe", 1, "held", "u1", version, asks=False)
            mine._on_frame(b"", codec.encode_frame(vote, "rank-1", boot, seq, group="policy"), "")

        comes(1, BOOT, 4)
        comes(2, BOOT - 1, 9)  # of its earlier life
        comes(3, BOOT, 4)  # again
        comes(4, BOOT, 3)  # overtaken
        comes(5, BOOT, 5)
        assert heard == [1, 5]
        later = replace(peers[1], boot=BOOT + 1)
        mine.connect_peers(PeerRanks((peers[0], later)))
        comes(6, BOOT, 6)
        comes(7, BOOT + 1, 1)
        mine.connect_peers(PeerRanks((peers[0], replace(later, boot=0))))
        comes(8, BOOT + 2, 1)  # a broker of an earlier version names no life
        assert heard == [1, 5, 7, 8]
        mine.close()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
