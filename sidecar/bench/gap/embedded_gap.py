"""``bench gap`` of embedded engines: a broker, a trainer and two groups of them, each engine in a
process of its own. One group is on the bus, the other one's engines are called directly."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sidecar.bench.gap.engine_process import GapEngineSettings
from sidecar.bench.gap.gap_rounds import GapRun, Measured, report
from sidecar.bench.processes import Worker, worker
from sidecar.bench.streams import greedy
from sidecar.bench.transfer.broadcast_ends import ends
from sidecar.supervision.launch import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from bus.runtime.event_loop import LoopChoice
    from sidecar.bench.gap.gap_rounds import Way

    Progress = Callable[[str], None]

_GROUPS: Final[dict[Way, str]] = {"native": "direct", "paused": "bus", "staged": "bus"}
_GREEDY_TOKENS: Final = 24


@dataclass(frozen=True)
class EmbeddedGapPlan:
    """What is to be measured.

    Attributes:
        backend: of wavebus's; ``shm`` lends the trainer's memory. The same in all ways.
        tokens: of each request.
        clear_cache: requests compute their keys and values anew after an update; in all ways.
        dp_size: ranks in lockstep of each group; 1: an engine alone.
    """

    backend: str
    megabytes: int
    chunk_bytes: int
    rounds: int
    requests: int
    tokens: int
    clear_cache: bool
    dp_size: int


async def bench(
    plan: EmbeddedGapPlan, loop: LoopChoice, say: Progress, *, logs: Path | None = None
) -> tuple[dict[str, Any], Measured]:
    """The JSON's fields, and the rounds that they are of.

    Args:
        logs: a folder that keeps what all processes log.

    Raises:
        BenchFailed: a process died, or a request ended without all its tokens.
    """
    async with _running(plan, loop, logs) as running:
        return await report("embedded", plan, running, say)


@contextlib.asynccontextmanager
async def _running(
    plan: EmbeddedGapPlan, loop: LoopChoice, logs: Path | None
) -> AsyncIterator[GapRun]:
    """Everything, for the length of a block."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(name: str, module: str, *args: object) -> Worker:
            log_path = None if logs is None else logs / f"{name}.log"
            return await stack.enter_async_context(worker(module, *args, loop, log_path=log_path))

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wavebus-bench-")))
        checkpoint = folder / "checkpoint"
        broker = await start("broker", "sidecar.bench.broker")
        address = (await broker.answer())["address"]
        # By name: the two roles never import each other.
        trainer = await start(
            "trainer",
            "trainer_agent.bench.gap",
            json.dumps(
                {
                    "broker": address,
                    "group": "bus",
                    "engines": plan.dp_size,
                    "folder": str(checkpoint),
                    "backend": plan.backend,
                    "megabytes": plan.megabytes,
                    "chunk_bytes": plan.chunk_bytes,
                    "clear_cache": plan.clear_cache,
                }
            ),
        )
        made = await trainer.answer()
        engines: dict[str, list[Worker]] = {}
        answers: dict[str, list[dict[str, Any]]] = {}
        for group, on in (("direct", ""), ("bus", address)):
            engines[group] = [
                await start(
                    f"{group}-{each.dp_rank}", "sidecar.bench.gap.engine_process", each.to_json()
                )
                for each in _ranks(plan, group, on, checkpoint)
            ]
            answers[group] = [await engine.answer() for engine in engines[group]]
        shutil.rmtree(checkpoint)  # the engines have it in memory
        await trainer.ask(json.dumps([each["port"] for each in answers["direct"]]))

        async def memcpy_ms() -> float:
            return float((await trainer.ask("memcpy"))["memcpy_ms"])

        raw_ms = memcpy_ms
        if plan.backend != "shm":
            both = await stack.enter_async_context(ends("cpu", made["size_bytes"], loop, logs))
            raw_ms = both.raw_ms

        async def serves(way: Way) -> object:
            group = _GROUPS[way]
            return [
                (await greedy(each["url"], _GREEDY_TOKENS), await engine.ask("sums"))
                for each, engine in zip(answers[group], engines[group], strict=True)
            ]

        yield GapRun(
            trainer,
            {way: [each["url"] for each in answers[group]] for way, group in _GROUPS.items()},
            {way: engines[group] for way, group in _GROUPS.items()},
            raw_ms,
            memcpy_ms,
            serves,
            made["size_bytes"],
            made["tensors"],
        )


def _ranks(
    plan: EmbeddedGapPlan, group: str, broker: str, checkpoint: Path
) -> list[GapEngineSettings]:
    master = f"127.0.0.1:{free_port()}"
    return [
        GapEngineSettings(
            folder=str(checkpoint),
            group=group,
            max_num_seqs=-(-plan.requests // plan.dp_size),
            broker=broker,
            dp_rank=rank,
            dp_size=plan.dp_size,
            master=master,
        )
        for rank in range(plan.dp_size)
    ]
