"""Engines that are behind are brought to the group's version, by themselves, from the snapshot.

The broker tells who is behind (see :mod:`bus.protocol.group.catch_up`). Each catch-up is an update
of those alone, over a transport of its own, beside engines that go on serving and a trainer that
trains. Whatever the trainer asks for goes first: a catch-up under way is undone, and waited for.
One that fails is tried again, after a second at first, then less and less often; who has failed,
alone, so that nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

import bus.log
from bus.messages import StaleEngines
from trainer_agent.options import PauseOptions, UpdateOptions
from trainer_agent.update.chunk_stream import ChunkStream, send_stream
from trainer_agent.update.transport import Transport
from trainer_agent.update.update import Updates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from bus.messages import Verify
    from bus.weight_transfer.base import Sender
    from trainer_agent.connection import Connection
    from trainer_agent.update.steps import Steps
    from trainer_agent.weights.snapshot import Snapshot

FIRST_RETRY_S: Final = 1.0
LAST_RETRY_S: Final = 60.0
_OPTIONS: Final = UpdateOptions(PauseOptions())


class CatchUp:
    """One trainer's, of rank 0.

    Args:
        snapshot: where from.
        steps: of its own, beside the trainer's.
        is_idle: whether the trainer itself has nothing under way.
        transport: the trainer's, which engines let go when they open this one.
        make_sender: a new sending end.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        connection: Connection,
        steps: Steps,
        transport: Transport,
        *,
        is_idle: Callable[[], bool],
        make_sender: Callable[[], Sender],
        chunk_bytes: int,
        verify: Verify,
    ) -> None:
        self._snapshot = snapshot
        self._connection = connection
        self._steps = steps
        self._updates = Updates(connection, steps, alone=True)
        self._transport = transport
        self._is_idle = is_idle
        self._make_sender = make_sender
        self._chunk_bytes = chunk_bytes
        self._verify: Verify = verify
        self._log = bus.log.logger()
        self._suspensions = 0  # who goes first, and is under way
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._retries: dict[str, _Retry] = {}  # of DP groups that have failed

    @contextlib.asynccontextmanager
    async def suspend(self) -> AsyncIterator[None]:
        """For the length of a block nobody catches up: what is under way is undone first."""
        self._suspensions += 1
        try:
            await self.stop()
            yield
        finally:
            self._suspensions -= 1

    async def stop(self) -> None:
        """Undo what is under way; return when it is."""
        task = self._task
        if task is None or task.done():
            return
        if not self._stopping:  # a second time would break off what the first one has it undo
            self._stopping = True
            task.cancel()
        await asyncio.wait([task])

    def on_stale(self, stale: StaleEngines) -> None:
        """The broker's word. It comes again for as long as it is so."""
        if stale.version != self._snapshot.version or self._suspensions or not self._is_idle():
            return
        if self._task is not None and not self._task.done():
            return
        scope = self._due(stale.dp_groups)
        if scope:
            self._stopping = False
            self._task = asyncio.create_task(self._catch_up(StaleEngines(stale.version, scope)))

    def _due(self, dp_groups: tuple[str, ...]) -> tuple[str, ...]:
        """Those that have not failed, together; or one of those that have, when it is time."""
        self._retries = {name: self._retries[name] for name in dp_groups if name in self._retries}
        fresh = tuple(name for name in dp_groups if name not in self._retries)
        if fresh:
            return fresh
        now_s = asyncio.get_running_loop().time()
        due = (name for name in dp_groups if self._retries[name].at_s <= now_s)
        return tuple(due)[:1]

    async def _catch_up(self, stale: StaleEngines) -> None:
        names = list(stale.dp_groups)
        self._log.info("catch_up_started", dp_groups=names, version=stale.version)
        try:
            excluded = await self._send(stale)
        except asyncio.CancelledError:
            self._log.info("catch_up_gave_way", dp_groups=names, version=stale.version)
            raise
        except Exception as error:  # noqa: BLE001 - a trainer that trains is not to hear of it
            self._on_failed(stale, str(error))
            return
        if excluded:
            self._on_failed(stale, f"fell out: {', '.join(excluded)}")
            return
        for name in names:
            self._retries.pop(name, None)
        self._log.info("caught_up", dp_groups=names, version=stale.version)

    def _on_failed(self, stale: StaleEngines, detail: str) -> None:
        now_s = asyncio.get_running_loop().time()
        retries = [_Retry.after(self._retries.get(name), now_s) for name in stale.dp_groups]
        self._retries.update(zip(stale.dp_groups, retries, strict=True))
        self._log.warning(
            "catch_up_failed",
            dp_groups=list(stale.dp_groups),
            version=stale.version,
            detail=detail,
            retry_s=min(retry.wait_s for retry in retries),
        )

    async def _send(self, stale: StaleEngines) -> tuple[str, ...]:
        """All of the snapshot, to these; returns who fell out on the way."""
        kept = self._snapshot.kept
        assert kept is not None
        sender = self._make_sender()
        backend = self._transport.own_backend
        transport = Transport(backend, sender, self._connection, self._steps, stale.dp_groups)
        stream = ChunkStream(kept, sender, chunk_bytes=self._chunk_bytes, verify=self._verify)
        self._transport.invalidate()
        try:
            async with self._updates.begin(_OPTIONS, catch_up=stale) as update:
                report = await send_stream(update, stream, transport, self._steps, "")
                return report.excluded
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(transport.close)


class _Retry:
    """When a DP group that has failed is tried again."""

    def __init__(self, wait_s: float, now_s: float) -> None:
        self.wait_s = wait_s
        self.at_s = now_s + wait_s

    @classmethod
    def after(cls, last: _Retry | None, now_s: float) -> _Retry:
        wait_s = FIRST_RETRY_S if last is None else min(2 * last.wait_s, LAST_RETRY_S)
        return cls(wait_s, now_s)
