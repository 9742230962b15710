"""The program of a vLLM server, with a sidecar if there is a broker."""

from __future__ import annotations

import asyncio
import os
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import bus.log
from bus import operations as ops
from bus._vllm.payloads import is_loaded_on_receipt
from bus.errors import WavebusError
from lab.bench.programs.call_times import CallTimes
from sidecar._sidecar import Sidecar
from sidecar._supervision.server import SupervisedServer
from sidecar._vllm.connection_http import HttpConnection
from sidecar._vllm.engine import VllmAdapter
from sidecar._vllm.plugin import operations, worker_rpc

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from contextlib import AsyncExitStack

_BOOT_S: Final = 300.0
_PLUGINS: Final = "VLLM_PLUGINS"
_OURS: Final = "sidecar._vllm.plugin"


class TimedConnection(HttpConnection):
    """A sidecar's connection to a vLLM server that records the times of its HTTP posts."""

    def __init__(self, server: SupervisedServer) -> None:
        super().__init__(server=server, ready_timeout_s=_BOOT_S)
        self.hello: dict[str, Any] = {}
        self._calls = CallTimes()
        self.taken_calls = self._calls.take

    async def post(
        self, path: str, body: Any = None, *, query: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Sends one POST request, and records the call; see :meth:`VllmHttpClient.post`."""
        with self._calls.record(called(path, body)):
            return await super().post(path, body, query=query)

    async def swap_ms(self) -> float:
        """Returns how long the slowest worker could not step in the last swap, in ms."""
        facts = await self.ask(worker_rpc.ASK_LOADING)
        return max(float(each["swap_ms"]) for each in facts)


def called(path: str, body: Any) -> str:
    """Returns the name under which a post to vLLM is recorded.

    An operation of the plugin is named by the body, not by the route.
    """
    if path == "/update_weight_version":
        return "commit"
    if path == "/collective_rpc" and body["method"] == worker_rpc.SWAP:
        return "swap"
    if path != "/collective_rpc" or body["method"] != operations.PERFORM:
        return path.removeprefix("/")
    operation = operations.decode(body["kwargs"]["operation"])
    # vLLM's own worker engines load in the call that receives.
    if isinstance(operation, ops.ReceiveChunk) and is_loaded_on_receipt(operation.backend):
        return "update"
    return str(operation.__struct_config__.tag)


async def vllm_server(
    stack: AsyncExitStack,
    argv: Sequence[str],
    variables: dict[str, str],
    *,
    broker: str = "",
    group: str = "",
    dp_rank: int | None = None,
    server: str = "",
) -> object:
    """Runs a vLLM server; the process's first answer has the server's ``url``.

    The answer comes when the server takes requests.

    Args:
        stack: ends the server.
        argv: the server's command.
        variables: environment variables in addition to those of this process.
        broker: the broker's address; empty: vLLM alone, as if there were no wavebus.
        group: the server's group; only the ranks of its DP group are in it.
        dp_rank: the server's rank in its DP group; None: it is alone.
        server: the server's name on the bus; empty: a name made of the group's.
    """
    bus.log.configure(level="warning", json=True)
    own = {} if broker else {_PLUGINS: ",".join(foreign_plugins())}
    process = SupervisedServer(
        argv, env={**os.environ, **own, **variables}, ready_timeout_s=_BOOT_S
    )
    if not broker:
        alone = HttpConnection(server=process)
        stack.push_async_callback(alone.close)
        hello = {"url": await process.start()}
        end_with(stack, alone.died(lambda: None))
        return SimpleNamespace(hello=hello)
    name = server or f"engine-{group}"
    connection = TimedConnection(process)
    sidecar = await stack.enter_async_context(
        Sidecar(
            VllmAdapter(connection),
            broker=broker,
            group=group,
            name=name if dp_rank is None else f"{name}-{dp_rank}",
            dp_group=None if dp_rank is None else group,
        )
    )
    await sidecar.joined()
    assert sidecar.info is not None
    connection.hello = {"url": sidecar.info.endpoint}
    end_with(stack, sidecar.run())
    return connection


def end_with(stack: AsyncExitStack, death: Coroutine[Any, Any, object]) -> None:
    """Ends this program when its engine dies, so that the bench does not wait for the engine.

    Args:
        stack: ends the watch.
        death: returns, or raises, when the engine has died.
    """
    program = asyncio.current_task()
    assert program is not None

    async def watch() -> None:
        try:
            reason = str(await death)
        except WavebusError as error:
            reason = str(error)
        bus.log.logger().error("engine_died", reason=reason)
        program.cancel()

    stack.callback(asyncio.create_task(watch()).cancel)


def foreign_plugins() -> list[str]:
    """Returns the names of all vLLM plugins on this host but wavebus's."""
    found = entry_points()
    groups = [group for group in found.groups if group.startswith("vllm.")]
    plugins = [point for group in groups for point in found.select(group=group)]
    ours = {point.name for point in plugins if point.value.startswith(_OURS)}
    return sorted({point.name for point in plugins} - ours)
