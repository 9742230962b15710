"""``bench transfer`` of an embedded engine: what an update costs, compared with plain copies.

A broker, a trainer and an embedded engine with its sidecar run, each in a process of its own. The
first model has few large tensors. Rounds of three kinds alternate in one run:

- **memcpy**: the trainer's process copies as many bytes between two buffers, with one thread.
- **two at once**: the trainer's and the engine's process each make such a copy at the same time. A
  transfer by shared memory consists of these two copies: one process writes, the other loads.
- **update**: the trainer sends the model over the bus. Its *transfer* is the time from the start
  of the first chunk's put to the last chunk's ack.

Over ``shm`` both ways to send are measured. A model in the trainer's ordinary memory is packed into
the ring. A model in shared memory (``trainer_agent.share_memory``) is lent.

The second model has many small tensors. It measures the control plane: names, shapes and checks.
That is the time of an update in which neither the sender puts nor the engine receives or loads. A
moment in which both work counts once.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lab.bench.harness import gb_per_s, in_turn, median, medians, say

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lab.bench.harness import Bench, Worker
    from lab.bench.plans import TransferBenchPlan

_GROUP: Final = "bench"
_WARM_ROUNDS: Final = 2
# The figures with large tensors that differ if the tensors are lent.
_COMPARED: Final = (
    *("memcpy_gb_per_s", "transfer_gb_per_s", "ratio_memcpy"),
    *("update_ms", "pause_ms", "paused_ms", "control_share"),
)


@dataclass(frozen=True, slots=True)
class TransferRun:
    """A running trainer with one engine, and what ``bench transfer`` measures with them.

    Each method measures one round. The model has ``size_bytes`` bytes in ``tensors`` tensors.
    """

    trainer: Worker
    engine: Worker
    size_bytes: int
    tensors: int

    async def memcpy(self) -> dict[str, float]:
        """Times one copy of the model's bytes in the trainer's process."""
        return {"took_ms": await self.trainer.ask("memcpy_ms")}

    async def two_memcpy(self) -> dict[str, float]:
        """Times two copies of the model's bytes at once: the trainer's and the engine's.

        A transfer over shared memory takes the same two copies. The time is that of the slower one.
        """
        engine = self.engine.ask("memcpy_ms", size_bytes=self.size_bytes)
        return {"took_ms": max(await asyncio.gather(self.trainer.ask("memcpy_ms"), engine))}

    async def update(self) -> dict[str, float]:
        """Times one update over the bus, in a pause.

        Returns:
            Times in ms. ``control_ms`` is the update's time while neither the trainer puts nor the
                engine receives or loads, and ``control_share`` its share of the update.
        """
        answer = await self.trainer.ask("update", how="paused")
        calls = [*answer["calls"], *await self.engine.ask("taken_calls")]
        update_ms = (answer["until_s"] - answer["since_s"]) * 1000
        moving_s = covered_s((since, until) for name, since, until in calls if name != "send")
        control_ms = update_ms - moving_s * 1000
        return {
            "update_ms": update_ms,
            "transfer_ms": answer["transfer_ms"],
            "pause_ms": answer["pause_ms"],
            "paused_ms": answer["window_ms"],
            "control_ms": control_ms,
            "control_share": control_ms / update_ms,
        }


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the time that at least one of some spans (begin, end) covers, in seconds."""
    total_s = end_s = 0.0
    for since_s, until_s in sorted(spans):
        total_s += max(0.0, until_s - max(since_s, end_s))
        end_s = max(end_s, until_s)
    return total_s


async def measure(bench: Bench, plan: TransferBenchPlan) -> dict[str, Any]:
    """Measures both models; returns the fields of the JSON output: medians and ratios.

    Raises:
        BenchFailed: a process died.
    """
    say(f"few large tensors: {plan.megabytes} MB")
    figures = await _large(bench, plan, lent=False)
    if plan.over == "shm":
        say(f"the same, lent: {plan.megabytes} MB")
        lent = await _large(bench, plan, lent=True)
        figures |= {f"lent_{name}": lent[name] for name in _COMPARED}
    say(f"many small tensors: {plan.tensors}")
    async with await bench.part() as part:
        run = await started(part, plan.over, "small", plan.tensors)
        found = await in_turn({"update": run.update}, plan.rounds, warm=_WARM_ROUNDS)
    small = medians(found["update"])
    return {
        "engine": "embedded",
        "backend": plan.over,
        "rounds": plan.rounds,
        **figures,
        "tensors": run.tensors,
        **{f"small_{name}": small[name] for name in ("update_ms", "control_ms", "control_share")},
    }


async def _large(bench: Bench, plan: TransferBenchPlan, *, lent: bool) -> dict[str, float]:
    """Runs rounds of all three kinds with few large tensors."""
    async with await bench.part() as part:
        run = await started(part, plan.over, "large", plan.megabytes, lent=lent)
        ways = {"memcpy": run.memcpy, "two_memcpy": run.two_memcpy, "update": run.update}
        found = await in_turn(ways, plan.rounds, warm=_WARM_ROUNDS)
    memcpy, two_memcpy = (
        gb_per_s(run.size_bytes, median(each["took_ms"] for each in found[way]))
        for way in ("memcpy", "two_memcpy")
    )
    updates = medians(found["update"])
    transfer = gb_per_s(run.size_bytes, updates["transfer_ms"])
    return {
        "megabytes": round(run.size_bytes / 1e6, 1),
        "memcpy_gb_per_s": memcpy,
        "two_memcpy_gb_per_s": two_memcpy,
        "transfer_gb_per_s": transfer,
        "ratio_memcpy": round(transfer / memcpy, 3),
        **{name: updates[name] for name in ("update_ms", "pause_ms", "paused_ms", "control_share")},
    }


async def started(
    bench: Bench, backend: str, shape: str, amount: int, *, lent: bool = False
) -> TransferRun:
    """Starts a broker, a trainer and an engine, each as a process.

    The model is as :func:`lab.bench.programs.embedded_trainer.embedded_trainer` has it.
    """
    checkpoint = bench.folder() / "checkpoint"
    group = {"broker": await bench.broker(), "group": _GROUP, "folder": str(checkpoint)}
    trainer, made = await bench.start(
        "embedded_trainer", **group, shape=shape, amount=amount, backend=backend, lent=lent
    )
    engine, _ = await bench.start("embedded_engine", **group, host=None, max_num_seqs=1)
    shutil.rmtree(checkpoint)  # the engine has it in memory
    await trainer.ask("open", engines=1)
    return TransferRun(trainer, engine, **made)
