"""How fast the bus pauses and resumes a group, beside what peers do and what is possible.

Rounds of three kinds alternate in one run, so that whatever else the host does falls
on all of them alike:

- **bus**: a trainer's ``async with agent.paused(mode="keep")`` over a broker process and
  a process of N real sidecars: PAUSE_LOCAL, PAUSE_GLOBAL, RESUME, each acked by all. As it is to
  be run: with CURVE keys on all connections, a journal, and limits of what a peer may send.
- **http**: concurrent posts to ``/pause``, then ``/resume``, of N endpoints in a process, which
  log no request.
- **http_log**: the same, of endpoints that log each request, as vLLM's do by default.
- **raw**: bare ZeroMQ with as many messages of the same size as the bus sends, and no keys.
- **plain**, if asked for: a bus without keys and journal, with sidecars of its own.

All processes that have an event loop have the same kind. CPU is taken afterwards, over
blocks of rounds of one kind: the broker's by its own word (STATUS before and after the
block), HTTP's as the client's process spends it. Heartbeats that fall into a block count
against the bus; they are one in a hundred of its messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bus.keys import AUTHORIZED, BROKER_KEY_VARIABLE, KEY_VARIABLE, Key, write_pair
from bus.protocol.broker.config import BrokerConfig
from bus.runtime.zmq_curve import new_pair
from sidecar.bench.control.http_client import HttpGroup
from sidecar.bench.control.raw_zmq import RawRouter
from sidecar.bench.processes import Worker, raise_file_limit, worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

    from bus.keys import FileRole
    from bus.runtime.event_loop import LoopChoice


BROKER, ENGINE, TRAINER = "broker", "engine", "trainer"


@contextlib.contextmanager
def curve_keys() -> Iterator[dict[str, dict[str, str]]]:
    """The variables that a broker, engines and a trainer get for the length of a block."""
    with tempfile.TemporaryDirectory(prefix="wavebus-bench-") as name:
        folder = Path(name)
        authorized = folder / AUTHORIZED
        authorized.mkdir()

        def make(role: FileRole) -> tuple[Path, Path]:
            return write_pair(folder, Key(role, role, *new_pair()))

        _, public = make("broker")
        variables = {BROKER: {"WAVEBUS_CURVE_KEYS": name}}
        for role in (ENGINE, TRAINER):
            secret, own = make("engine" if role == ENGINE else "trainer")
            shutil.copy(own, authorized)
            variables[role] = {KEY_VARIABLE: str(secret), BROKER_KEY_VARIABLE: str(public)}
        yield variables


if TYPE_CHECKING:
    Progress = Callable[[str], None]


GROUP: Final = "bench"

SCALE: Final = (8, 64, 256, 1024)

IDLE_ENGINES: Final = 1024

IDLE_S: Final = 10.0

_CALM_S: Final = 2.0

_WARM_ROUNDS: Final = 10

_BLOCK_ROUNDS: Final = 10

_SAY_EVERY: Final = 20


@dataclass(frozen=True, slots=True)
class Samples:
    """Durations of all rounds by their kind, in ms, and CPU seconds of all of a kind."""

    engines: int
    rounds_ms: dict[str, list[float]]
    cpu_rounds: int
    broker_cpu_s: float
    http_cpu_s: float


def figures(samples: Samples) -> dict[str, Any]:
    """The JSON's fields: medians, and the bus's ratio to each of them."""
    medians = {kind: round(statistics.median(ms), 3) for kind, ms in samples.rounds_ms.items()}
    engine_rounds = samples.engines * samples.cpu_rounds
    return {
        "engines": samples.engines,
        "rounds": len(samples.rounds_ms["bus"]),
        **{f"{kind}_p50_ms": took_ms for kind, took_ms in medians.items()},
        **{
            f"ratio_{kind}": round(medians["bus"] / took_ms, 3)
            for kind, took_ms in medians.items()
            if kind != "bus"
        },
        "broker_cpu_us_per_engine_round": round(samples.broker_cpu_s / engine_rounds * 1e6, 1),
        "http_cpu_us_per_engine_round": round(samples.http_cpu_s / engine_rounds * 1e6, 1),
    }


async def compare(
    engines: int, rounds: int, loop: LoopChoice, say: Progress, *, plain: bool = False
) -> Samples:
    """Alternate rounds of all kinds. ``plain``: also of a bus without keys and journal.

    Raises:
        UsageError: the system allows too few open files.
        BenchFailed: a process died.
    """
    raise_file_limit((2 + plain) * engines)
    say(f"{engines} engines: starting")
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        trainer = await enter(_bus(engines, loop))
        endpoints: list[HttpGroup] = []
        for log in (0, 1):
            process = await enter(
                worker("sidecar.bench.control.http_endpoints", engines, loop, log)
            )
            endpoints.append(await enter(HttpGroup((await process.answer())["ports"])))
        http, http_log = endpoints
        raw = stack.enter_context(RawRouter())
        dealers = await enter(worker("sidecar.bench.control.raw_zmq", raw.address, engines))
        await dealers.answer()
        raw.welcome(engines)
        kinds: dict[str, Callable[[], Awaitable[float]]] = {
            "bus": partial(_bus_round, trainer),
            "http": http.round_ms,
            "raw": raw.round_ms,
            "http_log": http_log.round_ms,
        }
        if plain:
            kinds["plain"] = partial(_bus_round, await enter(_bus(engines, loop, plain=True)))
        for _ in range(_WARM_ROUNDS):
            for one_round in kinds.values():
                await one_round()
        rounds_ms: dict[str, list[float]] = {kind: [] for kind in kinds}
        for index in range(1, rounds + 1):
            # None follows the same kind of round each time.
            for kind in list(kinds)[:: -1 if index % 2 else 1]:
                rounds_ms[kind].append(await kinds[kind]())
            if index % _SAY_EVERY == 0:
                say(f"{engines} engines: round {index} of {rounds}")
        http.cpu_s = broker_cpu_s = 0.0
        blocks = -(-rounds // _BLOCK_ROUNDS)
        for _ in range(blocks):
            broker_cpu_s += await _block_cpu_s(trainer)
            for _ in range(_BLOCK_ROUNDS):
                await http.round_ms()
    return Samples(engines, rounds_ms, blocks * _BLOCK_ROUNDS, broker_cpu_s, http.cpu_s)


async def scale(rounds: int, loop: LoopChoice, say: Progress) -> dict[str, float]:
    """The bus's median round in ms, by the number of engines."""
    raise_file_limit(max(SCALE))
    growth: dict[str, float] = {}
    for engines in SCALE:
        say(f"scale: {engines} engines")
        async with _bus(engines, loop) as trainer:
            for _ in range(_WARM_ROUNDS):
                await _bus_round(trainer)
            times = [await _bus_round(trainer) for _ in range(rounds)]
        growth[str(engines)] = round(statistics.median(times), 3)
    return growth


async def idle(loop: LoopChoice, say: Progress) -> dict[str, float]:
    """What the broker takes when nothing happens but heartbeats, one per second and engine."""
    raise_file_limit(IDLE_ENGINES)
    say(f"idle: {IDLE_ENGINES} engines")
    async with _bus(IDLE_ENGINES, loop) as trainer:
        await asyncio.sleep(_CALM_S)
        share = await _idle_share(trainer, IDLE_S)
        status = await trainer.ask("status")
    return {
        "broker_rss_mb_1024": round(status["rss_bytes"] / 1e6, 1),
        "heartbeat_core_share_1024": round(share, 4),
    }


@contextlib.asynccontextmanager
async def _bus(engines: int, loop: LoopChoice, *, plain: bool = False) -> AsyncIterator[Worker]:
    """A broker, N sidecars that have joined, and the trainer that holds them. ``plain``: they have
    no keys, and the broker no journal."""
    async with contextlib.AsyncExitStack() as stack:
        env: Mapping[str, Mapping[str, str]] = {}
        kept: tuple[object, ...] = ()
        if not plain:
            env = stack.enter_context(curve_keys())
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wavebus-bench-"))
            kept = (BrokerConfig().heartbeat_ms, folder)
        broker = await stack.enter_async_context(
            worker("sidecar.bench.broker", loop, *kept, env=env.get(BROKER))
        )
        address = (await broker.answer())["address"]
        agents = await stack.enter_async_context(
            worker(
                "sidecar.bench.control.sidecars", address, GROUP, engines, loop, env=env.get(ENGINE)
            )
        )
        await agents.answer()
        # By name: the two roles never import each other.
        trainer = await stack.enter_async_context(
            worker("trainer_agent.bench.pause", address, GROUP, engines, loop, env=env.get(TRAINER))
        )
        await trainer.answer()
        yield trainer


async def _bus_round(trainer: Worker) -> float:
    took_ms: float = (await trainer.ask("round"))["round_ms"]
    return took_ms


async def _block_cpu_s(trainer: Worker) -> float:
    """What the broker takes for a block of rounds, in CPU seconds, by its own word."""
    before = await trainer.ask("status")
    for _ in range(_BLOCK_ROUNDS):
        await _bus_round(trainer)
    took_s: float = (await trainer.ask("status"))["cpu_s"] - before["cpu_s"]
    return took_s


async def _idle_share(trainer: Worker, for_s: float) -> float:
    """How much of a core the broker takes while nothing is asked of it."""
    before = await trainer.ask("status")
    since_s = time.monotonic()
    await asyncio.sleep(for_s)
    took_s = time.monotonic() - since_s
    after = await trainer.ask("status")
    share: float = (after["cpu_s"] - before["cpu_s"]) / took_s
    return share
