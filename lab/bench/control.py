"""``bench control``: a group's pause and resume over the bus, HTTP and bare ZeroMQ.

``docs/bench.md`` describes each way. All processes with an event loop have the same kind of loop.
Stub engines run in several processes, so that none of them is busier than the broker. CPU time is
measured afterwards, over blocks of rounds of one way. The broker reports its own CPU time (STATUS);
those of HTTP and of bare ZeroMQ are the CPU time of this process, which is the client, or the
ROUTER. Heartbeats within a block count as CPU time of the bus.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from bus._keys import AUTHORIZED, BROKER_KEY_VARIABLE, KEY_VARIABLE, Key, write_pair
from bus._runtime.zmq_curve import new_pair
from lab.bench.harness import in_turn, median, raise_file_limit, say
from lab.bench.programs.raw_zmq import RawRouter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from pathlib import Path

    from bus._keys import FileRole
    from lab.bench.harness import Bench, Worker
    from lab.bench.plans import ControlPlan

SCALE: Final = (8, 64, 256, 1024)
IDLE_ENGINES: Final = 1024
_GROUP: Final = "bench"
_STUBS_PER_PROCESS: Final = 128
_MIN_STUB_PROCESSES: Final = 2
_ROLES: Final[tuple[FileRole, ...]] = ("engine", "trainer")
_IDLE_S: Final = 10.0
_CALM_S: Final = 2.0
_WARM_ROUNDS: Final = 10
_BLOCK_ROUNDS: Final = 10
_SAY_EVERY: Final = 20


class HttpGroup:
    """Pauses and resumes a group by HTTP posts to all engines at once.

    As the HTTP clients of RL frameworks do, it keeps connections open, makes each URL per call,
    sends arguments as query parameters, reads each answer's JSON, and checks its status.

    Attributes:
        cpu_s: CPU time of this process in all rounds, in seconds.
    """

    def __init__(self, session: aiohttp.ClientSession, ports: Iterable[int]) -> None:
        self._servers = [f"http://127.0.0.1:{port}" for port in ports]
        self._session = session
        self.cpu_s = 0.0

    async def round_ms(self) -> float:
        """Pauses and resumes all engines once; returns how long that took, in ms."""
        since_cpu_s, since_s = time.process_time(), time.perf_counter()
        # What PAUSE_LOCAL carries, too.
        await self._post_all("/pause", {"mode": "keep", "clear_cache": "true"})
        await self._post_all("/resume", None)
        took_ms = (time.perf_counter() - since_s) * 1000
        self.cpu_s += time.process_time() - since_cpu_s
        return took_ms

    async def _post_all(self, route: str, params: dict[str, str] | None) -> dict[str, object]:
        calls = [self._post(server, route, params) for server in self._servers]
        return dict(await asyncio.gather(*calls))

    async def _post(
        self, server: str, route: str, params: dict[str, str] | None
    ) -> tuple[str, object]:
        async with self._session.post(f"{server}{route}", params=params) as response:
            body = await response.json()
            response.raise_for_status()
            return server, body


async def measure(bench: Bench, plan: ControlPlan) -> dict[str, Any]:
    """Measures a pause and resume over each way, and returns the JSON output's fields.

    Raises:
        UsageError: the system allows too few open files.
        BenchFailed: a process died.
    """
    figures = {**await compare(bench, plan), "loop": bench.loop}
    if plan.scale:
        figures["growth"] = {str(n): await grown(bench, n, plan.rounds) for n in SCALE}
    if plan.idle:
        figures |= await idle(bench)
    return figures


async def compare(bench: Bench, plan: ControlPlan) -> dict[str, Any]:
    """Measures all ways with the group's engines; returns round times and CPU times.

    Rounds of all ways alternate. Afterwards the CPU times are measured, in blocks of rounds of one
    way.
    """
    raise_file_limit((2 + plan.plain) * plan.engines)
    say(f"{plan.engines} engines: starting")
    async with await bench.part() as part:
        trainer = await bus(part, plan.engines)
        http, http_log = [
            await _http(part, plan.engines, access_log=access_log) for access_log in (False, True)
        ]
        raw = part.enter_context(RawRouter())
        await part.start("raw_zmq", address=raw.address, engines=plan.engines)
        raw.welcome(plan.engines)
        ways: dict[str, Callable[[], Awaitable[float]]] = {
            "bus": partial(round_ms, trainer),
            "http": http.round_ms,
            "raw": raw.round_ms,
            "http_log": http_log.round_ms,
        }
        if plan.plain:
            ways["plain"] = partial(round_ms, await bus(part, plan.engines, plain=True))

        def tell(number: int, way: str, _: float) -> None:
            if way == "bus" and number > 0 and number % _SAY_EVERY == 0:
                say(f"{plan.engines} engines: round {number} of {plan.rounds}")

        found = await in_turn(ways, plan.rounds, warm=_WARM_ROUNDS, swing=True, on_round=tell)
        http.cpu_s = raw.cpu_s = broker_cpu_s = 0.0
        blocks = -(-plan.rounds // _BLOCK_ROUNDS)
        for _ in range(blocks):
            before = await trainer.ask("status")
            for _ in range(_BLOCK_ROUNDS):
                await round_ms(trainer)
            broker_cpu_s += (await trainer.ask("status"))["cpu_s"] - before["cpu_s"]
            for _ in range(_BLOCK_ROUNDS):
                await http.round_ms()
            for _ in range(_BLOCK_ROUNDS):
                await raw.round_ms()
    cpu_s = {"broker": broker_cpu_s, "http": http.cpu_s, "raw": raw.cpu_s}
    return figures_of(found, plan.engines, blocks * _BLOCK_ROUNDS, cpu_s)


def figures_of(
    found: Mapping[str, list[float]],
    engines: int,
    cpu_rounds: int,
    cpu_s: Mapping[str, float],
) -> dict[str, Any]:
    """Computes the results of :func:`compare` from round times in ms and CPU times.

    The CPU times are those of the broker, the HTTP client and the bare ROUTER in ``cpu_rounds``
    rounds of each, in seconds.
    """
    medians = {way: median(took_ms) for way, took_ms in found.items()}
    per_round_us = 1e6 / (engines * cpu_rounds)
    return {
        "engines": engines,
        "rounds": len(found["bus"]),
        **{f"{way}_p50_ms": took_ms for way, took_ms in medians.items()},
        **{
            f"ratio_{way}": round(medians["bus"] / took_ms, 3)
            for way, took_ms in medians.items()
            if way != "bus"
        },
        **{
            f"{process}_cpu_us_per_engine_round": round(spent_s * per_round_us, 1)
            for process, spent_s in cpu_s.items()
        },
        "ratio_cpu_raw": round(cpu_s["broker"] / cpu_s["raw"], 3),
    }


async def grown(bench: Bench, engines: int, rounds: int) -> float:
    """Returns the bus's median time to pause and resume that many engines, in ms."""
    raise_file_limit(engines)
    say(f"scale: {engines} engines")
    async with await bench.part() as part:
        trainer = await bus(part, engines)
        found = await in_turn({"bus": partial(round_ms, trainer)}, rounds, warm=_WARM_ROUNDS)
    return median(found["bus"])


async def idle(bench: Bench) -> dict[str, float]:
    """Returns what 1,024 engines cost the broker: their joins, then their heartbeats.

    Each has one heartbeat per second. The time of the joins includes the start of all processes.
    """
    raise_file_limit(IDLE_ENGINES)
    say(f"idle: {IDLE_ENGINES} engines")
    async with await bench.part() as part:
        since_s = time.monotonic()
        trainer = await bus(part, IDLE_ENGINES)
        joined_s = time.monotonic() - since_s
        await asyncio.sleep(_CALM_S)
        before, since_s = await trainer.ask("status"), time.monotonic()
        await asyncio.sleep(_IDLE_S)
        took_s = time.monotonic() - since_s
        after = await trainer.ask("status")
    return {
        "join_s_1024": round(joined_s, 1),
        "broker_rss_mb_1024": round(after["rss_bytes"] / 1e6, 1),
        "heartbeat_core_share_1024": round((after["cpu_s"] - before["cpu_s"]) / took_s, 4),
    }


async def bus(bench: Bench, engines: int, *, plain: bool = False) -> Worker:
    """Starts a broker, sidecars with stub engines, and their trainer; returns the trainer.

    If ``plain``, no process has keys, and the broker has no journal.
    """
    variables = {} if plain else curve_keys(bench.folder())
    journal = "" if plain else str(bench.folder())
    broker = await bench.broker(env=variables.get("broker"), journal=journal)
    count = max(_MIN_STUB_PROCESSES, -(-engines // _STUBS_PER_PROCESS))
    starts = [engines * number // count for number in range(count + 1)]
    stubs = [
        await bench.launch(
            "stub_engines",
            name=f"stub_engines-{first}",
            env=variables.get("engine"),
            broker=broker,
            group=_GROUP,
            engines=end - first,
            first=first,
        )
        for first, end in itertools.pairwise(starts)
        if end > first
    ]
    for each in stubs:
        await each.hello()
    trainer, _ = await bench.start(
        "pausing_trainer",
        env=variables.get("trainer"),
        broker=broker,
        group=_GROUP,
        engines=engines,
    )
    return trainer


def curve_keys(folder: Path) -> dict[str, dict[str, str]]:
    """Makes keys for a broker, its engines and its trainer in a folder.

    Returns:
        By role, the environment variables that make a process use its key.
    """
    authorized = folder / AUTHORIZED
    authorized.mkdir()
    _, broker_key = write_pair(folder, Key("broker", "broker", *new_pair()))
    variables = {"broker": {"WAVEBUS_CURVE_KEYS": str(folder)}}
    for role in _ROLES:
        secret, public = write_pair(folder, Key(role, role, *new_pair()))
        shutil.copy(public, authorized)
        variables[role] = {KEY_VARIABLE: str(secret), BROKER_KEY_VARIABLE: str(broker_key)}
    return variables


async def _http(bench: Bench, engines: int, *, access_log: bool) -> HttpGroup:
    _, said = await bench.start("http_endpoints", engines=engines, access_log=access_log)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3600)
    session = await bench.enter_async_context(aiohttp.ClientSession(connector=connector))
    return HttpGroup(session, said["ports"])


async def round_ms(trainer: Worker) -> float:
    """Pauses and resumes the trainer's group once; returns how long that took, in ms."""
    took_ms: float = (await trainer.ask("round"))["round_ms"]
    return took_ms
