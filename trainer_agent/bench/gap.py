"""The trainer of ``bench gap --engine embedded``: a process that sends a model in three ways.

``python -m trainer_agent.bench.gap SETTINGS LOOP``, until stdin ends; SETTINGS is a
:class:`Settings` in JSON. It writes a checkpoint of the same shape, but of other weights, into the
folder, and says the model's size. With the first line it is told the ports of the engines that have
no bus, as a JSON list; it waits for those of the others, and says so. After that each line is
answered: ``memcpy`` with how long a copy of as many bytes took, and a way's name with what one
update took, and when it was, in seconds on ``time.monotonic()``'s clock, which all processes of a
host share:

- ``native``: the calls of the engines' own library, asked for over a connection to each, one after
  the other: arm, pause, then each chunk is put, received and loaded; finish, resume.
- ``paused``, ``staged``: the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast

import msgspec
import torch

import bus.log
from bus.errors import WavebusError
from bus.runtime import event_loop
from bus.runtime.json_lines import read_commands, write_answer
from bus.weight_transfer.allocation import ALONE, NO_RANK, RankAssignment, World
from bus.weight_transfer.registry import make_sender
from trainer_agent.bench.transfer import BOOT_S, MeasuredAgent, MemoryCopy, TimedSender, bus_update
from trainer_agent.demo.policy import Policy, PolicyConfig, save_checkpoint
from trainer_agent.update.plan import UpdatePlan
from trainer_agent.weights.any_source import as_source
from trainer_agent.weights.shared_memory import share_memory
from trainer_agent.weights.source import tensor_metas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.runtime.event_loop import LoopChoice
    from bus.weight_transfer.base import Sender
    from trainer_agent.options import How

_FLOAT_BYTES: Final = 4
_LAYERS: Final = 4
_EXPERTS: Final = 16
_HIDDEN: Final = 256
_HOST: Final = "127.0.0.1"


@dataclass(frozen=True)
class GapSettings:
    """What to send, and how. ``group`` is that of the engines on the bus, ``engines`` how many
    there are in it, and as many without."""

    broker: str
    group: str
    engines: int
    folder: str
    backend: str
    megabytes: int
    chunk_bytes: int
    clear_cache: bool


def mixture(megabytes: int) -> PolicyConfig:
    """A mixture of 16 experts of about so many megabytes, in float32, nearly all of them in the
    experts: of these a token needs two, so it is quick for its size."""
    floats = megabytes * 1_000_000 / _FLOAT_BYTES
    inner = max(8, round(floats / (_LAYERS * _EXPERTS * 3 * _HIDDEN)))
    return PolicyConfig(
        vocab_size=512,
        hidden_size=_HIDDEN,
        num_layers=_LAYERS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_positions=2048,
        head_std=0.2,
        experts=_EXPERTS,
        expert_size=inner,
    )


class DirectTrainer:
    """Engines without a bus: their library's calls, over a connection to each."""

    def __init__(
        self, ends: Sequence[tuple[asyncio.StreamReader, asyncio.StreamWriter]], sender: Sender
    ) -> None:
        self._ends = ends
        self._timed = TimedSender(sender)
        self._version = 0

    @classmethod
    async def connect(cls, ports: Sequence[int], backend: str, *, packed: bool) -> Self:
        ends = [await asyncio.open_connection(_HOST, port) for port in ports]
        return cls(ends, make_sender(backend, packed=packed))

    async def open(self, backend: str, plan: UpdatePlan) -> None:
        """Open both ends of the transport."""
        sender = self._timed
        count = len(self._ends)
        world = World(1, 1 + count, _HOST) if sender.is_collective else ALONE
        params = await asyncio.to_thread(sender.open, plan.buffer_bytes(sender.inner), world)
        places = [
            RankAssignment(1, world.size, 1 + index) if sender.is_collective else NO_RANK
            for index in range(count)
        ]
        opening = [
            self._ask(index, "open", backend=backend, params=params.hex(), place=_plain(place))
            for index, place in enumerate(places)
        ]
        await asyncio.gather(*opening, asyncio.to_thread(sender.meet))
        sender.on_opened()

    async def update(
        self, backend: str, plan: UpdatePlan, tensors: Sequence[torch.Tensor], *, clear_cache: bool
    ) -> dict[str, Any]:
        """One."""
        self._version += 1
        timed = self._timed
        timed.begin()
        since_s = time.monotonic()
        await self._all("arm", manifest=_plain(plan.manifest))
        await self._all("pause", clear_cache=clear_cache)
        await self._all("start")
        left = iter(tensors)
        for seq in range(plan.chunks):
            handle = timed.put(seq, list(itertools.islice(left, plan.tensor_count(seq))))
            receiving = self._all("receive", seq=seq, backend=backend, handle=handle.hex())
            await asyncio.gather(receiving, asyncio.to_thread(timed.transfer, seq))
            await self._all("load", seq=seq)
            timed.on_taken(seq)
        await self._all("finish", version=self._version)
        await self._all("resume")
        return {
            "since_s": since_s,
            "until_s": time.monotonic(),
            "receive_ms": timed.receive_ms(),
            "commit_ms": 0.0,
        }

    def close(self) -> None:
        for _, writer in self._ends:
            writer.close()
        self._timed.close()

    async def _all(self, call: str, **arguments: object) -> None:
        """Of all engines at once."""
        await asyncio.gather(
            *(self._ask(index, call, **arguments) for index in range(len(self._ends)))
        )

    async def _ask(self, index: int, call: str, **arguments: object) -> None:
        reader, writer = self._ends[index]
        writer.write(json.dumps({"call": call, **arguments}).encode() + b"\n")
        said = json.loads(await reader.readline() or b'{"error": "it is gone"}')
        if said:
            raise WavebusError(f"engine {index}, {call}: {said['error']}")


def _plain(fields: object) -> Any:
    return msgspec.to_builtins(fields)


async def drive(settings: GapSettings) -> None:
    """Make the model, hold the group and do what is asked, until stdin ends."""
    config = mixture(settings.megabytes)
    save_checkpoint(Policy(config, seed=1), Path(settings.folder))
    model = Policy(config, seed=2)
    # Where memory can be lent, it is, in all ways.
    packed = settings.backend != "shm"
    if not packed:
        share_memory(model)
    source = as_source(model)
    plan = UpdatePlan.of_source(tensor_metas(source.metadata()), chunk_bytes=settings.chunk_bytes)
    copy = MemoryCopy(plan.size_bytes)
    write_answer(size_bytes=plan.size_bytes, tensors=len(plan.metas), chunks=plan.chunks)
    lines = read_commands()
    ports = json.loads(await anext(lines))
    agent = MeasuredAgent(
        settings.broker,
        group=settings.group,
        backend=settings.backend,
        chunk_bytes=settings.chunk_bytes,
        packed=packed,
    )
    async with agent:
        await agent.wait_for_engines(settings.engines, timeout_s=BOOT_S)
        direct = await DirectTrainer.connect(ports, settings.backend, packed=packed)
        with contextlib.closing(direct):
            await direct.open(settings.backend, plan)
            write_answer(ready=True)
            tensors = [tensor.detach() for _, tensor in source]
            clear_cache = settings.clear_cache
            async for line in lines:
                if line == "memcpy":
                    write_answer(memcpy_ms=copy.took_ms())
                elif line == "native":
                    write_answer(
                        **await direct.update(
                            settings.backend, plan, tensors, clear_cache=clear_cache
                        )
                    )
                else:
                    how = cast("How", line)
                    write_answer(**await bus_update(agent, model, how=how, clear_cache=clear_cache))


if __name__ == "__main__":
    text, kind = sys.argv[1:]
    bus.log.configure(json=True)
    torch.set_num_threads(1)  # a core for the trainer, one for the engine
    event_loop.run(drive(GapSettings(**json.loads(text))), loop=cast("LoopChoice", kind))
