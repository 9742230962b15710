"""The trainer of the benches: a process that pauses and resumes on command.

``python -m trainer_agent.bench.pause ADDRESS GROUP ENGINES LOOP``; says where its engines take
requests, and then, by lines on stdin, answers ``round`` with how long a pause and the
resume after it took together (``pause_ms``: the pause alone; ``engines_ms``: what the
slowest engine took of that, as its sidecar saw it), ``idle SINCE`` once every
engine's core has come to rest after SINCE (seconds on ``time.monotonic()``'s clock), and
``status`` with the broker's own figures.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final, cast

import anyio

import bus.log
from bus.runtime import event_loop
from bus.runtime.json_lines import read_commands, write_answer
from trainer_agent.agent import TrainerAgent

if TYPE_CHECKING:
    from bus.messages import Status
    from bus.runtime.event_loop import LoopChoice


# Engines that are real may load for long.
BOOT_S: Final = 600.0
IDLE_LOOK_S: Final = 0.05


async def drive(broker: str, group: str, engines: int) -> None:
    """Hold the group and do what is asked, until stdin ends."""
    async with TrainerAgent(broker, group=group) as agent:
        views = await agent.wait_for_engines(engines, timeout_s=BOOT_S)
        write_answer(endpoints=[view.endpoint for view in views])
        async for command in read_commands():
            if command == "round":
                since_s = time.perf_counter()
                async with agent.paused(mode="keep") as ack:
                    paused_s = time.perf_counter()
                took_s = time.perf_counter() - since_s
                pause_ms = (paused_s - since_s) * 1000
                write_answer(round_ms=took_s * 1000, pause_ms=pause_ms, engines_ms=ack.slowest_ms)
            elif command.startswith("idle "):
                while not _idle(await agent.status(), group, float(command.split()[1])):  # noqa: ASYNC110 - the broker is asked
                    await anyio.sleep(IDLE_LOOK_S)
                write_answer(idle=True)
            else:
                status = await agent.status()
                write_answer(cpu_s=status.cpu_s, rss_bytes=status.rss_bytes)


def _idle(status: Status, group: str, since_s: float) -> bool:
    """All cores are idle, and began to be after ``since_s``: so this is no old news."""
    [shown] = [shown for shown in status.groups if shown.name == group]
    after_ms = (time.monotonic() - since_s) * 1000
    return all(e.core_phase == "idle" and e.core_since_ms < after_ms for e in shown.engines)


if __name__ == "__main__":
    bus.log.configure(json=True)
    address, group_name, count, kind = sys.argv[1:]
    event_loop.run(drive(address, group_name, int(count)), loop=cast("LoopChoice", kind))
