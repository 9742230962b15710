"""What the bus adds to a DP group: to its first request, and to its pause.

Two DP groups of the same model stand side by side and are asked in turn, so that whatever
else the host does falls on both alike:

- **direct**: woken by a coordinator that asks nobody (vLLM's own; embedded: a DP coordinator
  without a broker), and paused by concurrent posts to the engines themselves.
- **bus**: woken by a DP coordinator that asks the broker first, and paused over the bus.

The posts go to the same engines as the bus's pauses, again in turn. Embedded engines have
no route for a pause, so for them only the first request is compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal, TypeAlias

import aiohttp

from sidecar.bench.processes import VLLM_ON_CPU, BenchFailed, Worker, run_module, worker
from sidecar.supervision.ranks import RankLaunchPlan, RankSupervisor
from sidecar.vllm.connection_http import KEEP_ALIVE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from bus.runtime.event_loop import LoopChoice

    Progress = Callable[[str], None]

EngineKind: TypeAlias = Literal["embedded", "vllm"]
EXPERTS: Final = 4
_WARM_ROUNDS: Final = 5
# How soon it is seen that ranks rest.
_HEARTBEAT_MS: Final = 200
# After its last step a worker of vLLM spins for a second before it sleeps (0.32).
_SPIN_S: Final = 1.1
_BOOT_S: Final = 600.0
_REQUEST: Final = {
    "token_ids": [1, 3, 4, 5],
    "sampling_params": {"max_tokens": 1, "temperature": 0.0},
}
_SERVER: Final = (
    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
    *("--skip-tokenizer-init", "--enforce-eager", "--max-num-seqs=8", "--max-model-len=256"),
)


async def measure(
    kind: EngineKind,
    dp_size: int,
    rounds: int,
    loop: LoopChoice,
    say: Progress,
    *,
    server_options: Sequence[str] = (),
) -> dict[str, Any]:
    """Medians, in ms, and what the bus adds.

    Args:
        server_options: for vLLM servers, such as ``--dtype=float32`` on a CPU.

    Raises:
        BenchFailed: a process died.
    """
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wavebus-bench-")))
        checkpoint = folder / "checkpoint"
        # By name: the two roles never import each other.
        await run_module("trainer_agent.demo.policy", checkpoint, EXPERTS)
        broker = await stack.enter_async_context(
            worker("sidecar.bench.broker", loop, _HEARTBEAT_MS)
        )
        address = (await broker.answer())["address"]
        # The direct group ends when it has served: beside pauses it would only take time.
        direct = await stack.enter_async_context(contextlib.AsyncExitStack())
        stacks = {"direct": direct, "bus": stack}
        say(f"starting two DP groups of {dp_size} {kind} engines")
        for name, own in stacks.items():
            plan = RankLaunchPlan(
                dp_group=name,
                size=dp_size,
                options=_options(kind, name, address, checkpoint),
                command=(*_SERVER, "--model", str(checkpoint), *server_options)
                if kind == "vllm"
                else (),
            )
            log = own.enter_context((folder / f"{name}.log").open("w+b"))
            await own.enter_async_context(_running(plan, log))
        groups: dict[str, Worker] = {}
        endpoints: dict[str, list[str]] = {}
        for name, own in stacks.items():
            trainer = worker("trainer_agent.bench.pause", address, name, dp_size, loop)
            groups[name] = await own.enter_async_context(trainer)
            endpoints[name] = (await groups[name].answer())["endpoints"]
        connector = aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_S)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        say("measuring first requests")
        found = await _first_requests(session, groups, endpoints, rounds)
        await direct.aclose()
        if kind == "vllm":
            say("measuring pauses")
            found |= await _pauses(session, groups["bus"], endpoints["bus"], rounds)
        return {"engine": kind, "dp_size": dp_size, "rounds": rounds, **found}


async def _first_requests(
    session: aiohttp.ClientSession,
    groups: dict[str, Worker],
    endpoints: dict[str, list[str]],
    rounds: int,
) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in endpoints}
    for index in range(-_WARM_ROUNDS, rounds):
        for name, urls in endpoints.items():
            await _warm(session, urls)
            since_s = time.monotonic()
            await _post(session, urls[index % len(urls)] + "/inference/v1/generate", json=_REQUEST)
            if index >= 0:
                times[name].append((time.monotonic() - since_s) * 1000)
            await _idle(groups[name], since_s)
    direct, bus = statistics.median(times["direct"]), statistics.median(times["bus"])
    return {
        "first_request_direct_ms": round(direct, 3),
        "first_request_bus_ms": round(bus, 3),
        "first_request_more_ms": round(bus - direct, 3),
    }


async def _pauses(
    session: aiohttp.ClientSession, trainer: Worker, endpoints: list[str], rounds: int
) -> dict[str, float]:
    direct: list[float] = []
    bus: list[float] = []
    beyond: list[float] = []  # of the bus's, what no engine took
    for index in range(-_WARM_ROUNDS, rounds):
        await _warm(session, endpoints)
        since_s = time.monotonic()
        await _all(session, endpoints, "/pause", {"mode": "keep", "clear_cache": "true"})
        took_ms = (time.monotonic() - since_s) * 1000
        await _all(session, endpoints, "/resume", {})
        await _idle(trainer, since_s)
        since_s = time.monotonic()
        answer = await trainer.ask("round")
        await _idle(trainer, since_s)
        if index >= 0:
            direct.append(took_ms)
            bus.append(answer["pause_ms"])
            beyond.append(answer["pause_ms"] - answer["engines_ms"])
    direct_ms, bus_ms = statistics.median(direct), statistics.median(bus)
    return {
        "pause_direct_ms": round(direct_ms, 3),
        "pause_bus_ms": round(bus_ms, 3),
        "pause_more_ms": round(bus_ms - direct_ms, 3),
        "pause_beyond_engines_ms": round(statistics.median(beyond), 3),
    }


async def _idle(trainer: Worker, since_s: float) -> None:
    """Return when its DP group has come to rest from what was asked at ``since_s``.

    Ranks step on until they next look around, and their workers spin still longer: on two
    processors, whoever is measured meanwhile is measured against them.
    """
    await trainer.ask(f"idle {since_s}")
    await asyncio.sleep(_SPIN_S)


async def _warm(session: aiohttp.ClientSession, endpoints: list[str]) -> None:
    """Open connections, as a sidecar has them: servers close those that were quiet for long."""
    for url in endpoints:
        async with session.get(url + "/health") as response:
            await response.read()


async def _all(
    session: aiohttp.ClientSession, endpoints: list[str], route: str, params: dict[str, str]
) -> None:
    await asyncio.gather(*(_post(session, url + route, params=params) for url in endpoints))


async def _post(session: aiohttp.ClientSession, url: str, **how: Any) -> None:
    async with session.post(url, **how) as response:
        await response.read()
        response.raise_for_status()


def _options(kind: EngineKind, name: str, address: str, checkpoint: Path) -> tuple[str, ...]:
    coordinator = "bus" if name == "bus" else "vllm"
    common = ("--broker", address, "--group", name, "--log-format", "json")
    engine = () if kind == "vllm" else ("--engine", "embedded", "--model", str(checkpoint))
    return (*common, "--dp-coordinator", coordinator, *engine)


@contextlib.asynccontextmanager
async def _running(plan: RankLaunchPlan, log: IO[bytes]) -> AsyncIterator[None]:
    """The DP group, for the length of a block; a rank that dies ends it."""
    stop = asyncio.Event()
    this = asyncio.current_task()
    assert this is not None
    env = {**VLLM_ON_CPU, **os.environ}  # unless the user knows better
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
