"""The program of a trainer that pauses and resumes its group, and sends no weights."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import anyio

from trainer_agent._agent import TrainerAgent

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

_BOOT_S: Final = 600.0  # vLLM's engines may load for long
_IDLE_LOOK_S: Final = 0.05


class PausingTrainer:
    """Pauses and resumes a group, and measures that."""

    def __init__(self, agent: TrainerAgent, group: str, endpoints: list[str]) -> None:
        self.hello = {"endpoints": endpoints}
        self._agent = agent
        self._group = group

    async def round(self) -> dict[str, float]:
        """Pauses and resumes the group once.

        Returns:
            Times in ms: ``round_ms``, of the pause and the resume together; ``pause_ms``, of the
                pause; ``engines_ms``, of the slowest engine's own pause.
        """
        since_s = time.perf_counter()
        async with self._agent.paused(mode="keep") as ack:
            paused_s = time.perf_counter()
        took_s = time.perf_counter() - since_s
        pause_ms = (paused_s - since_s) * 1000
        return {"round_ms": took_s * 1000, "pause_ms": pause_ms, "engines_ms": ack.slowest_ms}

    async def status(self) -> dict[str, float]:
        """Returns the broker's CPU time in seconds and its memory in bytes."""
        status = await self._agent.status()
        return {"cpu_s": status.cpu_s, "rss_bytes": status.rss_bytes}

    async def idle(self, since_s: float) -> None:
        """Waits until every engine core of the group has become idle after ``since_s``.

        A core that has been idle for longer may not have begun its work yet.
        """
        while True:
            [shown] = [s for s in (await self._agent.status()).groups if s.name == self._group]
            after_ms = (time.monotonic() - since_s) * 1000
            if all(e.core_phase == "idle" and e.core_since_ms < after_ms for e in shown.engines):
                return
            await anyio.sleep(_IDLE_LOOK_S)


async def pausing_trainer(
    stack: AsyncExitStack, broker: str, group: str, engines: int
) -> PausingTrainer:
    """Makes a trainer that owns a group, after all engines have joined the group."""
    agent = await stack.enter_async_context(TrainerAgent(broker, group=group))
    views = await agent.wait_for_engines(engines, timeout_s=_BOOT_S)
    return PausingTrainer(agent, group, [view.endpoint for view in views])
