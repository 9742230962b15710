"""What an update's transfer costs, beside a plain copy of as many bytes.

A broker, a trainer and an embedded engine under its sidecar, each in a process of its own.
First a model of few large tensors; rounds of three kinds alternate in one run, so that whatever
else the host does falls on both alike:

- **memcpy**: the trainer's process copies as many bytes between two buffers, with one thread.
- **two at once**: the trainer's and the engine's process each do so at the same time. That is what
  a transfer by shared memory does (one writes, the other loads), with nothing around it.
- **update**: the trainer sends the model over the bus. Of that, *transfer* is the time from the
  start of the first chunk's put to the last chunk's ack: written, told, read and loaded.

Over ``shm`` all that is done twice: with a model in memory of the trainer's own, which is packed
into the ring, and with one in shared memory (``trainer_agent.share_memory``), which is lent: the
engine loads from there, and nothing is written. These are two ways to use wavebus, with figures of
their own.

Then a model of many small tensors, where what counts is the control plane: names, shapes and
checks. Its time is the update's whole time without the moments in which the sender put, or the
engine received or loaded. These overlap, so they are counted as moments and not added up: time
in which both worked is taken off once, and time in which none did is all the control plane's.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from sidecar.bench.processes import Worker, worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from bus.runtime.event_loop import LoopChoice

    Progress = Callable[[str], None]

Span: TypeAlias = "tuple[float, float]"

GROUP: Final = "bench"
_WARM_ROUNDS: Final = 2
# Of the figures with large tensors, what differs where they are lent.
_COMPARED: Final = (
    *("memcpy_gb_per_s", "transfer_gb_per_s", "ratio_memcpy"),
    *("update_ms", "pause_ms", "paused_ms", "control_share"),
)


@dataclass(frozen=True, slots=True)
class TransferRound:
    """One update, in ms. ``control_ms``: nobody put, received or loaded."""

    update_ms: float
    transfer_ms: float
    pause_ms: float
    paused_ms: float
    control_ms: float


@dataclass(frozen=True, slots=True)
class TransferRun:
    """A trainer and its engine, and what they send."""

    trainer: Worker
    engine: Worker
    size_bytes: int
    tensors: int

    async def memcpy_ms(self) -> float:
        took_ms: float = (await self.trainer.ask("memcpy"))["memcpy_ms"]
        return took_ms

    async def two_memcpy_ms(self) -> float:
        """Until both have copied all of it."""
        both = await asyncio.gather(*(who.ask("memcpy") for who in (self.trainer, self.engine)))
        return max(float(answer["memcpy_ms"]) for answer in both)

    async def update(self) -> TransferRound:
        answer = await self.trainer.ask("update")
        spans = [*answer["puts"], *(await self.engine.ask("spans"))["spans"]]
        update_ms = (answer["until_s"] - answer["since_s"]) * 1000
        return TransferRound(
            update_ms,
            answer["transfer_ms"],
            answer["pause_ms"],
            answer["paused_ms"],
            update_ms - covered_s(spans) * 1000,
        )


def covered_s(spans: Iterable[Span]) -> float:
    """How long at least one of ``spans`` was."""
    total_s = end_s = 0.0
    for since_s, until_s in sorted(spans):
        total_s += max(0.0, until_s - max(since_s, end_s))
        end_s = max(end_s, until_s)
    return total_s


async def measure(
    backend: str, megabytes: int, tensors: int, rounds: int, loop: LoopChoice, say: Progress
) -> dict[str, Any]:
    """The JSON's fields: medians, and ratios of just these.

    Raises:
        BenchFailed: a process died.
    """
    say(f"few large tensors: {megabytes} MB")
    large = await _large(backend, megabytes, rounds, loop, lent=False)
    if backend == "shm":
        say(f"the same, lent: {megabytes} MB")
        lent = await _large(backend, megabytes, rounds, loop, lent=True)
        large |= {f"lent_{name}": lent[name] for name in _COMPARED}
    say(f"many small tensors: {tensors}")
    async with _running(backend, "tensors", tensors, loop) as running:
        sent = running.tensors
        small = [await running.update() for _ in range(_WARM_ROUNDS + rounds)][_WARM_ROUNDS:]
    return {
        "engine": "embedded",
        "backend": backend,
        "rounds": rounds,
        **large,
        "tensors": sent,
        "small_update_ms": _median(update.update_ms for update in small),
        "small_control_ms": _median(update.control_ms for update in small),
        "small_control_share": _median(update.control_ms / update.update_ms for update in small),
    }


async def _large(
    backend: str, megabytes: int, rounds: int, loop: LoopChoice, *, lent: bool
) -> dict[str, float]:
    """Rounds of all three kinds with few large tensors."""
    copies: list[float] = []
    twos: list[float] = []
    updates: list[TransferRound] = []
    async with _running(backend, "megabytes", megabytes, loop, lent=lent) as running:
        size_bytes = running.size_bytes
        for index in range(-_WARM_ROUNDS, rounds):
            copy_ms, two_ms = await running.memcpy_ms(), await running.two_memcpy_ms()
            update = await running.update()
            if index >= 0:
                copies.append(copy_ms)
                twos.append(two_ms)
                updates.append(update)
    memcpy, two, transfer = (
        round(size_bytes / statistics.median(times_ms) / 1e6, 3)
        for times_ms in (copies, twos, [update.transfer_ms for update in updates])
    )
    return {
        "megabytes": round(size_bytes / 1e6, 1),
        "memcpy_gb_per_s": memcpy,
        "two_memcpy_gb_per_s": two,
        "transfer_gb_per_s": transfer,
        "ratio_memcpy": round(transfer / memcpy, 3),
        "update_ms": _median(update.update_ms for update in updates),
        "pause_ms": _median(update.pause_ms for update in updates),
        "paused_ms": _median(update.paused_ms for update in updates),
        "control_share": _median(update.control_ms / update.update_ms for update in updates),
    }


@contextlib.asynccontextmanager
async def _running(
    backend: str,
    shape: Literal["megabytes", "tensors"],
    amount: int,
    loop: LoopChoice,
    *,
    lent: bool = False,
) -> AsyncIterator[TransferRun]:
    """Broker, trainer and engine, for the length of a block."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wavebus-bench-")))
        checkpoint = folder / "checkpoint"
        broker = await stack.enter_async_context(worker("sidecar.bench.broker", loop))
        address = (await broker.answer())["address"]
        # By name: the two roles never import each other.
        trainer = await stack.enter_async_context(
            worker(
                "trainer_agent.bench.transfer",
                *(address, GROUP, backend, checkpoint, shape, amount),
                *("lent" if lent else "packed", loop),
            )
        )
        made = await trainer.answer()
        engine = await stack.enter_async_context(
            worker(
                "sidecar.bench.transfer.loading_engine",
                address,
                GROUP,
                checkpoint,
                made["size_bytes"],
                loop,
            )
        )
        await engine.answer()
        shutil.rmtree(checkpoint)  # the engine has it in memory
        await trainer.answer()
        yield TransferRun(trainer, engine, made["size_bytes"], made["tensors"])


def _median(times_ms: Iterable[float]) -> float:
    return round(statistics.median(times_ms), 3)
