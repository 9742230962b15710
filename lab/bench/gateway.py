"""``bench transfer --gateway`` with embedded engines: what an update through a gateway takes.

Two groups of equal engines get the same tensors, all staged, and no requests:

- **agent**: one group by ``agent.update_weights``.
- **gateway**: the other one by a client of vLLM's routes, through ``wavebus gateway``.

Both send over wavebus's gloo, and in one chunk, because a client of vLLM's ``nccl`` sends all
tensors in one call. So the difference is what the gateway and HTTP add. A large model shows how
long users wait, a small one what each update costs beside its transfer, and one of many small
tensors what names and shapes cost.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bus.errors import UsageError
from lab.bench.fleet import AGENT, GATEWAY
from lab.bench.harness import BenchFailed, in_turn, median, medians, say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lab.bench.harness import Bench, Worker
    from lab.bench.plans import TransferBenchPlan

_ENGINES: Final = 2
_SMALL_MB: Final = 1
_WARM_ROUNDS: Final = 2
_ALL_BYTES: Final = 1 << 40  # in one chunk


async def measure(bench: Bench, plan: TransferBenchPlan) -> dict[str, Any]:
    """Measures all three models; returns the fields of the JSON output: medians and ratios.

    Raises:
        UsageError: the backend is not gloo.
        BenchFailed: a process died, or an update was not staged.
    """
    if plan.over != "gloo":
        raise UsageError(f"--backend {plan.over}: with --gateway embedded engines take gloo")
    models = {
        "": ("large", plan.megabytes),
        "small_": ("large", _SMALL_MB),
        "many_": ("small", plan.tensors),
    }
    found: dict[str, Any] = {}
    arrived = True
    for prefix, model in models.items():
        made, rounds = await updates_of(bench, plan, *model)
        arrived &= made.pop("weights_arrived")
        figures = {**made, **figures_of(rounds)}
        found |= {f"{prefix}{name}": value for name, value in figures.items()}
    return {
        "engine": plan.engine,
        "rounds": plan.rounds,
        "backend": plan.over,
        "engines": _ENGINES,
        "weights_arrived": arrived,
        **found,
    }


async def updates_of(
    bench: Bench, plan: TransferBenchPlan, shape: str, amount: int
) -> tuple[dict[str, Any], dict[str, list[dict[str, float]]]]:
    """Alternates updates of both groups.

    Args:
        bench: starts the processes, and ends them before this returns.
        plan: the options.
        shape: the kind of model, as in :mod:`lab.bench.programs.embedded_trainer`.
        amount: its size, as there.

    Returns:
        The model's size, and whether all engines serve what was sent last; and by way, the figures
            of its updates.

    Raises:
        BenchFailed: a process died, or an update was not staged.
    """
    what = f"{amount} MB" if shape == "large" else f"{amount} small tensors"
    say(f"{what}, {_ENGINES} engines each by the agent and through a gateway")
    async with await bench.part() as part:
        folder = part.folder() / "checkpoint"
        address = await part.broker()
        trainer, made = await part.start(
            "embedded_trainer",
            broker=address,
            group=AGENT,
            folder=str(folder),
            shape=shape,
            amount=amount,
            backend=plan.over,
            lent=False,
            chunk_bytes=_ALL_BYTES,
            buffers=1,
        )
        engines = {
            group: [
                await part.launch(
                    "embedded_engine",
                    name=f"{group}-{rank}",
                    folder=str(folder),
                    group=group,
                    broker=address,
                    rank=rank,
                    host=None,
                    max_num_seqs=1,
                )
                for rank in range(_ENGINES)
            ]
            for group in (AGENT, GATEWAY)
        }
        all_engines = [each for group in engines.values() for each in group]
        await asyncio.gather(*(each.hello() for each in all_engines))
        shutil.rmtree(folder)  # the engines have it in memory
        url, _ = await part.gateway(address, GATEWAY)
        await trainer.ask("open", engines=_ENGINES, gateway=url)
        before = await all_engines[0].ask("sums")
        hows = {AGENT: "staged", GATEWAY: "gateway"}
        ways = {way: partial(_update, trainer, engines[way], how) for way, how in hows.items()}
        found = await in_turn(ways, plan.rounds, warm=_WARM_ROUNDS, swing=True)
        after = [await each.ask("sums") for each in all_engines]
    described = {
        "megabytes": round(made["size_bytes"] / 1e6, 1),
        "tensors": made["tensors"],
        "weights_arrived": all(each == after[0] for each in after) and after[0] != before,
    }
    return described, found


async def _update(trainer: Worker, engines: Sequence[Worker], how: str) -> dict[str, float]:
    """Makes one update, and returns times in ms.

    ``update_ms`` is its length. By name of a call, the time is from the begin of the first such
    call to the end of the last, of all engines.
    """
    for each in engines:
        await each.ask("taken_calls")
    answer = await trainer.ask("update", how=how)
    of_engines = [await each.ask("taken_calls") for each in engines]
    if not all("swap" in {name for name, *_ in calls} for calls in of_engines):
        raise BenchFailed(f"{how}: an update was not staged")
    found = {"update_ms": (answer["until_s"] - answer["since_s"]) * 1000}
    spans: dict[str, tuple[float, float]] = {}
    for name, since_s, until_s in (*answer["calls"], *itertools.chain(*of_engines)):
        first_s, last_s = spans.get(name, (since_s, until_s))
        spans[name] = min(first_s, since_s), max(last_s, until_s)
    return found | {f"{name}_ms": (last - first) * 1000 for name, (first, last) in spans.items()}


def figures_of(rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Returns each way's medians, and what a gateway adds.

    Args:
        rounds: by way, the figures of its updates, in turn.
    """
    ways = {way: medians(done) for way, done in rounds.items()}
    return {**ways, **compared(*([each["update_ms"] for each in done] for done in rounds.values()))}


def compared(agent_ms: Sequence[float], gateway_ms: Sequence[float]) -> dict[str, float]:
    """Returns how much longer an update through a gateway takes.

    Each turn is compared by itself, because other load of the host affects both its updates.

    Args:
        agent_ms: the length of each update by the agent.
        gateway_ms: the length of the update through a gateway in the same turn.

    Returns:
        The medians over all turns: of ``ratio_update_gateway``, and of ``gateway_adds_ms``.
    """
    turns = list(zip(agent_ms, gateway_ms, strict=True))
    return {
        "ratio_update_gateway": median(through / agent for agent, through in turns),
        "gateway_adds_ms": median(through - agent for agent, through in turns),
    }
