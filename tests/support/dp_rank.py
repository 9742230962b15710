"""One rank of a data parallel group, as a process that does what its stdin says.

Run as ``python -m tests.support.dp_rank '<JSON of Spec>'``. Each line of stdin is a call,
``{"id": 1, "do": "pause", ...}``; each line of stdout is ``{"id": 1, ...}``, an answer, or,
for a request that streams, first any number of ``{"id": 1, "token": t}``. Calls run beside
each other. It ends with its stdin.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch

import bus.log
from bus._manifest import Manifest
from bus.errors import EngineError
from bus.operations import UpdateOperation
from sidecar._dp_coordinator.process import DpCoordinatorAddresses
from sidecar._embedded.engine import EmbeddedEngine
from sidecar._embedded.parallel.options import DataParallel
from sidecar._embedded.sampling import SamplingParams
from tests.support.one_phase import pause_in_one_phase

_OPERATIONS: msgspec.msgpack.Decoder[UpdateOperation] = msgspec.msgpack.Decoder(UpdateOperation)


class Rank:
    """The engine, and what a call does with it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        if spec.pop("one_phase_pause", False):
            pause_in_one_phase()
        coordinator = spec.pop("coordinator", None)
        options = {key: spec.pop(key) for key in ("model", "max_num_seqs") if key in spec}
        page = spec.pop("core_page", None)
        dp = DataParallel(
            **spec, coordinator=DpCoordinatorAddresses(**coordinator) if coordinator else None
        )
        self.engine = EmbeddedEngine(
            **options, host=None, dp=dp, core_page=Path(page) if page else None
        )
        self._released = threading.Event()
        self._generations: dict[int, Any] = {}

    async def do(self, call: dict[str, Any]) -> object:
        name, number = call.pop("do"), call.pop("id")
        if name == "generate":
            return await self._generate(number, **call)
        return await getattr(self, f"_{name}")(**call)

    async def _generate(self, number: int, prompt: list[int], max_tokens: int) -> object:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        generation = self.engine.generate(prompt, params)
        self._generations[number] = generation
        tokens: list[int] = []
        async for delta in generation:
            tokens += delta.token_ids
            for token in delta.token_ids:
                say({"id": number, "token": token})
        spans = [(span.version, span.start, span.end) for span in delta.weight_versions]
        return {"tokens": tokens, "finish_reason": delta.finish_reason, "spans": spans}

    async def _abort(self, number: int) -> None:
        """End a request that was asked for under this id."""
        self._generations[number].abort()

    async def _pause(self, mode: Any, *, clear_cache: bool) -> None:
        await self.engine.pause(mode, clear_cache=clear_cache)

    async def _resume(self) -> None:
        await self.engine.resume()

    async def _sleep(self, level: Any) -> None:
        await self.engine.sleep(level)

    async def _wake_weights(self) -> None:
        await self.engine.wake_weights()

    async def _wake(self) -> None:
        await self.engine.wake()

    async def _admit(self, *, open: bool) -> None:  # noqa: A002 - as in the protocol
        await self.engine.admit(open=open)

    async def _abort_requests(self) -> int:
        return await self.engine.abort_requests()

    async def _clear_cache(self) -> None:
        await self.engine.clear_cache()

    async def _in_flight(self) -> int:
        return await self.engine.in_flight()

    async def _version(self) -> int:
        return await self.engine.version()

    async def _perform(self, operation: str) -> object:
        decoded = _OPERATIONS.decode(base64.b64decode(operation))
        return msgspec.to_builtins(await self.engine.perform(decoded))

    async def _probe(self, prompts: list[list[int]], **how: Any) -> list[Any]:
        results = await self.engine.probe(tuple(map(tuple, prompts)), **how)
        return [(each.tokens, each.logprobs) for each in results]

    async def _commit(self, version: int) -> None:
        await self.engine.commit(version)

    async def _call_off(self) -> None:
        await self.engine.call_off()

    async def _died(self) -> str:
        return await self.engine.died()

    async def _view(self) -> object:
        view = self.engine.core_view()
        assert view is not None
        return asdict(view)

    async def _hold(self) -> None:
        """Keep the core busy between two steps; what comes meanwhile queues up before it."""
        self._released.clear()
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def hold() -> None:
            loop.call_soon_threadsafe(begun.set)
            self._released.wait()

        assert self.engine._core is not None
        self.engine._core.call(hold)
        await begun.wait()

    async def _queued(self) -> int:
        """How much waits in the core's inbox."""
        assert self.engine._core is not None
        return self.engine._core._actions.qsize()

    async def _release(self) -> None:
        self._released.set()


def _manifest(names: Any, dtypes: Any, shapes: Any, *others: Any) -> Manifest:
    """Of its fields, as JSON has them."""
    ends, counts, *flags = others
    columns = tuple(names), tuple(dtypes), tuple(map(tuple, shapes))
    return Manifest(*columns, tuple(ends), tuple(counts), *flags)


def say(line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def answer(rank: Rank, call: dict[str, Any]) -> None:
    number = call["id"]
    try:
        result = await rank.do(call)
    except EngineError as error:
        failed = {"error": str(error), "code": error.code, "tensor": error.tensor}
        say({"id": number, "failed": failed})
    else:
        say({"id": number, "result": result})


async def main() -> None:
    torch.set_num_threads(1)
    bus.log.configure(level="debug", json=True)
    rank = Rank(json.loads(sys.argv[1]))
    say({"id": 0, "result": msgspec.to_builtins(await rank.engine.start())})
    lines = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    tasks: set[asyncio.Task[None]] = set()
    while line := await lines.readline():
        task = asyncio.create_task(answer(rank, json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await rank.engine.close()


if __name__ == "__main__":
    asyncio.run(main())
    os._exit(0)  # as a killed process would: nothing waits for a core that is blocked
