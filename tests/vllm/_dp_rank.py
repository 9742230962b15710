"""One rank of a data parallel group: an ``AsyncLLM`` behind its adapter, told what to do.

    python -m tests.vllm._dp_rank RANK SIZE RPC_PORT MODEL COORDINATOR ARGS

ARGS are further arguments of the engine, in JSON.

Orders are JSON lines on stdin, ``{"call": 3, "verb": "pause", "args": {…}}``; answers are
JSON lines on descriptor 3, in the order in which things are done. Call 0 is the boot.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from sidecar import Sidecar
from sidecar._shared_pages.pause_lease import PauseLease, deadline_ns
from sidecar._vllm.core_state import parse_version
from sidecar._vllm.inprocess_engine import VllmEngine
from tests.vllm._vllm import AGAIN_S, PROMPT, engine_args

ANSWERS = 3
NOBODY = 2**22 + 1  # no process has this number


class Rank:
    """Does what it is told; several things at once."""

    def __init__(self, llm: Any, engine: VllmEngine, answers: IO[str]) -> None:
        self._llm = llm
        self._engine = engine
        self._answers = answers
        self._tokens: dict[str, list[int]] = {}
        self._spans: dict[str, list[tuple[int, int, int]]] = {}
        self._rejected: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def say(self, call: int, began_s: float, *, ok: bool, out: object) -> None:
        took_s = time.monotonic() - began_s
        self._answers.write(json.dumps({"call": call, "ok": ok, "out": out, "took_s": took_s}))
        self._answers.write("\n")

    async def obey(self, call: int, verb: str, args: dict[str, Any]) -> None:
        began_s = time.monotonic()
        try:
            out = await getattr(self, f"do_{verb}")(**args)
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver hears of it
            self.say(call, began_s, ok=False, out=f"{type(error).__name__}: {error}")
        else:
            self.say(call, began_s, ok=True, out=out)

    async def do_generate(
        self, name: str, count: int, prompt: list[int] | None = None, adapter: str = ""
    ) -> None:
        """Begin a request, which is on its way when this returns; see ``tokens``, ``count``."""
        self._tokens[name] = []
        task = asyncio.create_task(self._generate(name, count, prompt or PROMPT, adapter))
        self._tasks[name] = task
        while not task.done() and name not in await self._engine.request_ids():  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def _generate(self, name: str, count: int, prompt: list[int], adapter: str) -> None:
        from vllm import SamplingParams  # noqa: PLC0415 - after the environment is set
        from vllm.exceptions import RetryableRequestError  # noqa: PLC0415

        params = SamplingParams(
            temperature=0.0, max_tokens=count, detokenize=False, ignore_eos=True
        )
        asked = {"prompt_token_ids": prompt}
        lora = self._engine.lora_request(adapter) if adapter else None
        while True:
            try:
                async for output in self._llm.generate(asked, params, name, lora_request=lora):
                    last = output.outputs[0]
                    self._tokens[name] = list(last.token_ids)
                    self._spans[name] = [
                        (parse_version(each.version), each.start, each.end)
                        for each in last.weight_versions
                    ]
            except RetryableRequestError:  # a pause has rejected it: it is sent again
                self._rejected.add(name)
                await asyncio.sleep(AGAIN_S)
            else:
                return

    async def do_count(self, name: str) -> int:
        return len(self._tokens[name])

    async def do_rejected(self, name: str) -> bool:
        """Whether a pause has ever rejected it."""
        return name in self._rejected

    async def do_tokens(self, name: str) -> list[int]:
        """All its tokens, once it has ended."""
        await self._tasks[name]
        return self._tokens[name]

    async def do_spans(self, name: str) -> list[tuple[int, int, int]]:
        """Which version each of its tokens is of, once it has ended."""
        await self._tasks[name]
        return self._spans[name]

    async def do_give_up(self, name: str) -> None:
        await self._llm.abort(name)

    async def do_pause(self, mode: str, clear_cache: bool = False) -> None:
        await self._engine.pause(mode, clear_cache=clear_cache)  # type: ignore[arg-type]

    async def do_resume(self) -> None:
        await self._engine.resume()

    async def do_join(self, broker: str, dp_group: str, name: str) -> None:
        """Put this rank on a bus, by a sidecar in this process."""
        self._sidecar = Sidecar(self._engine, broker=broker, name=name, dp_group=dp_group)
        await self._sidecar.start()
        await self._sidecar.joined()

    async def do_leave(self) -> None:
        await self._sidecar.close()
        await self._engine.start()

    async def do_admit(self, let_in: bool) -> None:
        await self._engine.start()  # it looks at its admission
        await self._engine.admit(open=let_in)

    async def do_probe(self, prompt: list[int], count: int) -> list[int]:
        await self._engine.start()
        (found,) = await self._engine.probe(
            (tuple(prompt),), count, "salt", mode="abort", clear_cache=True
        )
        return list(found.tokens)

    async def do_sleep(self, level: int) -> None:
        await self._engine.sleep(level)  # type: ignore[arg-type]

    async def do_wake(self) -> None:
        await self._engine.wake()

    async def do_request_ids(self) -> list[str]:
        return list(await self._engine.request_ids())

    async def do_hold(
        self,
        serial: int,
        left_ms: float = 0.0,
        version: int = 0,
        broken: list[str] | None = None,
    ) -> None:
        """As a sidecar that is dead now has held it."""
        left = deadline_ns(left_ms), NOBODY, "moe", version, "", tuple(broken or ())
        hold = PauseLease(serial, "u1", *left, asleep=False, resuming=False)  # type: ignore[arg-type]
        self._engine.write_pause_lease(hold)

    async def do_let_go(self) -> None:
        self._engine.write_pause_lease(None)

    async def do_end(self, serial: int) -> dict[str, Any] | None:
        """What its core has made of that hold."""
        (page,) = self._engine._core._lease_pages
        end = page.outcome()
        return dataclasses.asdict(end) if end is not None and end.serial == serial else None

    async def do_view(self) -> dict[str, Any] | None:
        view = self._engine.core_view()
        return None if view is None else {**dataclasses.asdict(view), "age_ms": view.age_ms()}

    async def do_knows_running(self) -> bool:
        return bool(self._llm.engine_core.engines_running)

    async def do_info(self) -> dict[str, Any]:
        coordinator = self._llm.engine_core.resources.coordinator
        return {
            **msgspec.to_builtins(await self._engine.start()),
            "coordinator": type(coordinator).__name__,
            "coordinator_pid": coordinator.proc.pid if coordinator else 0,
        }


async def main(
    rank: int, size: int, rpc_port: int, model: str, coordinator: str, extra: str
) -> None:
    from vllm.config import WeightTransferConfig  # noqa: PLC0415 - slow, and not the driver's
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    began_s = time.monotonic()
    args = {
        **engine_args(Path(model), **json.loads(extra)),
        "weight_transfer_config": WeightTransferConfig(backend="wavebus"),
        "data_parallel_size": size,
        "data_parallel_rank": rank,
        "data_parallel_external_lb": True,
        "data_parallel_address": "127.0.0.1",
        "data_parallel_rpc_port": rpc_port,
    }
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
    engine = VllmEngine(llm, dp_coordinator=coordinator)  # type: ignore[arg-type]
    with os.fdopen(ANSWERS, "w", buffering=1) as answers:
        told = Rank(llm, engine, answers)
        info = msgspec.to_builtins(await engine.start())
        deaths = asyncio.create_task(engine.died())
        told.say(0, began_s, ok=True, out=info)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        orders = set()
        while line := await reader.readline():
            order = json.loads(line)
            task = asyncio.create_task(told.obey(order["call"], order["verb"], order["args"]))
            orders.add(task)
            task.add_done_callback(orders.discard)
        deaths.cancel()
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:4]), *sys.argv[4:7]))  # type: ignore[arg-type]
