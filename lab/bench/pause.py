"""``bench pause``: what the bus adds to a DP group's first request and pause.

Two DP groups of the same model run side by side and are measured in turn, so that other load of the
host affects both alike:

- **direct**: woken by a coordinator that asks no broker (vLLM's own; embedded: a DP coordinator
  without a broker), and paused by concurrent posts to the engines.
- **bus**: woken by a DP coordinator that asks the broker first, and paused over the bus.

The posts go to the same engines as the bus's pauses, again in turn. Embedded engines have no route
for a pause, so only the first request is compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from dataclasses import asdict
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Final

import aiohttp

from lab.bench.fleet import server_argv
from lab.bench.harness import BenchFailed, in_turn, median, medians, say
from lab.demo.processes import VLLM_ON_CPU
from lab.network import Network, PolicyConfig, save_network
from sidecar._supervision.ranks import RankLaunchPlan, RankSupervisor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    from lab.bench.harness import Bench, Worker
    from lab.bench.plans import PausePlan

EXPERTS: Final = 4
_WARM_ROUNDS: Final = 5
# How often the bench checks whether ranks are idle.
_HEARTBEAT_MS: Final = 200
# After its last step a worker of vLLM spins for a second before it sleeps (0.32).
_SPIN_S: Final = 1.1
_BOOT_S: Final = 600.0
_REQUEST: Final = {
    "token_ids": [1, 3, 4, 5],
    "sampling_params": {"max_tokens": 1, "temperature": 0.0},
}
_SERVER: Final = ("--enforce-eager", "--max-num-seqs=8", "--max-model-len=256")


class RestingDpGroup:
    """Measures first requests and pauses of one DP group, each time from an idle state.

    Its trainer reports when all engines are idle.
    """

    def __init__(
        self, session: aiohttp.ClientSession, trainer: Worker, endpoints: Sequence[str]
    ) -> None:
        self.trainer = trainer
        self._session = session
        self._endpoints = endpoints
        self._next: Iterator[str] = itertools.cycle(endpoints)

    async def first_request(self) -> dict[str, float]:
        """Sends one request to the idle DP group; returns the time until its answer."""
        await self._warm()
        since_s = time.monotonic()
        await self._post(next(self._next) + "/inference/v1/generate", json=_REQUEST)
        took_ms = (time.monotonic() - since_s) * 1000
        await self._idle(since_s)
        return {"took_ms": took_ms}

    async def posted_pause(self) -> dict[str, float]:
        """Pauses and resumes all engines by HTTP posts at once; returns the pause's time."""
        await self._warm()
        since_s = time.monotonic()
        await self._all("/pause", {"mode": "keep", "clear_cache": "true"})
        took_ms = (time.monotonic() - since_s) * 1000
        await self._all("/resume", {})
        await self._idle(since_s)
        return {"took_ms": took_ms}

    async def bus_pause(self) -> dict[str, float]:
        """Pauses and resumes the DP group over the bus.

        Returns:
            ``took_ms``: the time of the pause. ``beyond_ms``: by how much that exceeds the time of
                the slowest engine's own pause.
        """
        since_s = time.monotonic()
        answer = await self.trainer.ask("round")
        await self._idle(since_s)
        took_ms = answer["pause_ms"]
        return {"took_ms": took_ms, "beyond_ms": took_ms - answer["engines_ms"]}

    async def _idle(self, since_s: float) -> None:
        """Waits until the group is idle after work that began at ``since_s``.

        Ranks step until their next agreement, and their workers spin even longer, which would
        disturb a measurement on two processors.
        """
        await self.trainer.ask("idle", since_s=since_s)
        await asyncio.sleep(_SPIN_S)

    async def _warm(self) -> None:
        """Opens connections before a measurement, because servers close quiet ones.

        A sidecar keeps its connections open, too.
        """
        for url in self._endpoints:
            async with self._session.get(url + "/health") as response:
                await response.read()

    async def _all(self, route: str, params: dict[str, str]) -> None:
        posts = (self._post(url + route, params=params) for url in self._endpoints)
        await asyncio.gather(*posts)

    async def _post(self, url: str, **how: Any) -> None:
        async with self._session.post(url, **how) as response:
            await response.read()
            response.raise_for_status()


async def measure(bench: Bench, plan: PausePlan) -> dict[str, Any]:
    """Measures both DP groups; returns the JSON output's fields: medians in ms, and differences.

    Raises:
        BenchFailed: a process died.
    """
    folder, checkpoint = bench.folder(), bench.folder()
    save_network(Network(PolicyConfig(experts=EXPERTS)), checkpoint)
    address = await bench.broker(heartbeat_ms=_HEARTBEAT_MS)
    # The direct group ends before the pauses, which it would only slow down.
    parts = {"direct": await bench.part(), "bus": bench}
    say(f"starting two DP groups of {plan.dp_size} {plan.engine} engines")
    for name, part in parts.items():
        launch = _launch_plan(plan, name, address, checkpoint)
        log = part.enter_context((folder / f"{name}.log").open("w+b"))
        await part.enter_async_context(_running(launch, log))
    connector = aiohttp.TCPConnector(force_close=True)  # as a sidecar
    session = await bench.enter_async_context(aiohttp.ClientSession(connector=connector))
    groups: dict[str, RestingDpGroup] = {}
    for name, part in parts.items():
        trainer, said = await part.start(
            "pausing_trainer", broker=address, group=name, engines=plan.dp_size, answer_s=_BOOT_S
        )
        groups[name] = RestingDpGroup(session, trainer, said["endpoints"])
    say("measuring first requests")
    requests = {name: group.first_request for name, group in groups.items()}
    rounds = partial(in_turn, rounds=plan.rounds, warm=_WARM_ROUNDS)
    figures: dict[str, Any] = {**asdict(plan), **_compared("first_request", await rounds(requests))}
    await parts["direct"].aclose()
    if plan.engine == "vllm":
        say("measuring pauses")
        group = groups["bus"]
        pauses = await rounds({"direct": group.posted_pause, "bus": group.bus_pause})
        # The time of the bus's pause beyond that of its slowest engine.
        beyond_ms = median(each["beyond_ms"] for each in pauses["bus"])
        figures |= {**_compared("pause", pauses), "pause_beyond_engines_ms": beyond_ms}
    return figures


def _compared(name: str, found: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    direct_ms, bus_ms = (medians(found[way])["took_ms"] for way in ("direct", "bus"))
    more_ms = round(bus_ms - direct_ms, 3)
    return {f"{name}_direct_ms": direct_ms, f"{name}_bus_ms": bus_ms, f"{name}_more_ms": more_ms}


def _launch_plan(plan: PausePlan, name: str, address: str, checkpoint: Path) -> RankLaunchPlan:
    vllm, model = plan.engine == "vllm", ("--model", str(checkpoint))
    coordinator = ("--dp-coordinator", "bus" if name == "bus" else "vllm")
    return RankLaunchPlan(
        dp_group=name,
        size=plan.dp_size,
        options=(
            *("--broker", address, "--group", name, "--log-format", "json", *coordinator),
            *(() if vllm else ("--engine", "embedded", *model)),
        ),
        command=tuple(server_argv(*_SERVER, *model)) if vllm else (),
    )


@contextlib.asynccontextmanager
async def _running(plan: RankLaunchPlan, log: IO[bytes]) -> AsyncIterator[None]:
    """Runs a DP group during a block, which is cancelled if a rank dies."""
    stop = asyncio.Event()
    this = asyncio.current_task()
    assert this is not None
    env = {**VLLM_ON_CPU, **os.environ}  # the user's own variables win
    run = asyncio.create_task(RankSupervisor(plan, restarts=0, output=log, env=env).run(stop))
    run.add_done_callback(lambda _: None if stop.is_set() else this.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if not run.done():
            raise
        log.seek(0)
        tail = log.read()[-6000:].decode(errors="replace")
        raise BenchFailed(f"DP group {plan.dp_group}: {run.exception()}\n{tail}") from None
    finally:
        stop.set()
        with contextlib.suppress(Exception):
            await run
