"""One update over the bus, as the benches measure it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_agent.bench_transfer import MeasuredAgent
    from trainer_agent.how import How
    from trainer_agent.sources import Weights


async def bus_update(
    agent: MeasuredAgent, weights: Weights, *, how: How = "paused", clear_cache: bool = True
) -> dict[str, Any]:
    """What it took, and when its parts were, in seconds on ``time.monotonic()``'s clock.

    ``receive_ms``: from when the first chunk left to the last one's ack.
    """
    timed = agent.timed
    timed.begin()
    since_s = time.monotonic()
    await agent.update_weights(weights, how=how, clear_cache=clear_cache)
    until_s = time.monotonic()
    report = agent.last_update
    assert report is not None, "an update has just been made"
    return {
        "since_s": since_s,
        "until_s": until_s,
        "transfer_ms": timed.transfer_ms(),
        "receive_ms": timed.receive_ms(),
        "commit_ms": report.commit_ms,
        "window_ms": report.paused_ms,
        "interrupted": report.interrupted,
        "chunks": report.chunks,
        "verified": report.verified,
        "calls": [
            *(("put", *span) for span in timed.puts),
            *(("send", *span) for span in timed.transfers),
        ],
    }
