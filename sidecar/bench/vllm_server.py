"""A vLLM server of the benches: a process that starts it, and stops it at its end.

``python -m sidecar.bench.vllm_server SETTINGS LOOP``, until stdin ends; SETTINGS is a
:class:`Settings` in JSON. Says the server's ``url`` when it takes requests. With a broker the
server has a sidecar, and ``calls`` answers with what that has called since it was last asked:
``[name, since, until]``, in seconds on ``time.monotonic()``'s clock, which all processes of a host
share; and ``swap`` with how long its last swap kept a worker from steps. Without one, it is vLLM
alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, cast

import bus.log
from bus.runtime import event_loop
from bus.runtime.json_lines import read_commands, write_answer
from bus.vllm_payloads import is_loaded_on_receipt
from sidecar.sidecar import Sidecar
from sidecar.supervision.server import SupervisedServer
from sidecar.vllm.http_engine import VllmHttpEngine
from sidecar.vllm.plugin import operations, worker_rpc

if TYPE_CHECKING:
    from bus.runtime.event_loop import LoopChoice
    from sidecar.bench.transfer.window import Call

_BOOT_S: Final = 300.0
_PLUGINS: Final = "VLLM_PLUGINS"
_OURS: Final = "sidecar.vllm.plugin"


@dataclass(frozen=True)
class VllmServerSettings:
    """What to start. ``group``: the one that the engine is alone in, or with the other ranks of its
    DP group; empty without a broker. ``dp_rank``: which one it is of those. ``name``: its own."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    broker: str = ""
    group: str = ""
    dp_rank: int | None = None
    name: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class TimedVllmEngine(VllmHttpEngine):
    """An engine that notes each call of an update."""

    def __init__(self, server: SupervisedServer) -> None:
        super().__init__(server=server, ready_timeout_s=_BOOT_S)
        self.calls: list[Call] = []

    async def post(
        self, path: str, body: Any = None, *, query: dict[str, str] | None = None
    ) -> dict[str, Any]:
        since_s = time.monotonic()
        try:
            return await super().post(path, body, query=query)
        finally:
            self.calls.append((called(path, body), since_s, time.monotonic()))

    async def swap_ms(self) -> float:
        """Of the slowest worker."""
        return max(
            float(each["swap_ms"]) for each in await self._ask_workers(worker_rpc.ASK_LOADING)
        )


def called(path: str, body: Any) -> str:
    """What a post is, in the words of :mod:`sidecar.bench.transfer.window`: an operation by its
    name."""
    if path == "/update_weight_version":
        return "commit"
    if path == "/collective_rpc" and body["method"] == worker_rpc.SWAP:
        return "swap"
    if path != "/collective_rpc" or body["method"] != operations.PERFORM:
        return path.removeprefix("/")
    operation = operations.decode(body["kwargs"]["operation"])
    # What vLLM's own worker engines receive, they load in the same call.
    if isinstance(operation, operations.ReceiveChunk) and is_loaded_on_receipt(operation.backend):
        return "update"
    return str(operation.__struct_config__.tag)


async def on_the_bus(settings: VllmServerSettings) -> None:
    """Serve with a sidecar, and tell what it called."""
    env = {**os.environ, **settings.env}
    engine = TimedVllmEngine(SupervisedServer(settings.argv, env=env, ready_timeout_s=_BOOT_S))
    name, dp_group = settings.name or f"engine-{settings.group}", None
    if settings.dp_rank is not None:
        name, dp_group = f"{name}-{settings.dp_rank}", settings.group
    async with Sidecar(
        engine, broker=settings.broker, group=settings.group, name=name, dp_group=dp_group
    ) as sidecar:
        await sidecar.joined()
        assert sidecar.info is not None
        write_answer(url=sidecar.info.endpoint)
        async for command in read_commands():
            if command == "swap":
                write_answer(swap_ms=await engine.swap_ms())
                continue
            write_answer(calls=engine.calls)
            engine.calls = []


async def alone(settings: VllmServerSettings) -> None:
    """Serve, as if there were no wavebus."""
    env = {**os.environ, _PLUGINS: ",".join(foreign_plugins()), **settings.env}
    server = SupervisedServer(settings.argv, env=env, ready_timeout_s=_BOOT_S)
    try:
        write_answer(url=await server.start())
        async for _ in read_commands():
            pass
    finally:
        await server.stop()


def foreign_plugins() -> list[str]:
    """vLLM's plugins here that are not wavebus's, by name."""
    found = entry_points()
    groups = [group for group in found.groups if group.startswith("vllm.")]
    plugins = [point for group in groups for point in found.select(group=group)]
    ours = {point.name for point in plugins if point.value.startswith(_OURS)}
    return sorted({point.name for point in plugins} - ours)


if __name__ == "__main__":
    text, kind = sys.argv[1:]
    chosen = VllmServerSettings(**json.loads(text))
    bus.log.configure(level="warning", json=True)
    serving = on_the_bus(chosen) if chosen.broker else alone(chosen)
    with contextlib.suppress(KeyboardInterrupt):
        event_loop.run(serving, loop=cast("LoopChoice", kind))
