"""Sends the weights of the last commit to stale engines, in the background.

The broker reports stale engines (see :mod:`bus._protocol.group.catch_up`). A catch-up is an update
of these engines alone, over its own transport, while the others serve and the trainer trains. The
trainer's own requests take priority: they first abort a catch-up that is under way. A catch-up that
fails is repeated with growing delays, one DP group at a time, so that the others don't wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import anyio.to_thread

import bus.log
from bus.messages import StaleEngines
from trainer_agent._options import PauseOptions, UpdateOptions
from trainer_agent._update.chunk_stream import ChunkStream, send_stream
from trainer_agent._update.transport import Transport
from trainer_agent._update.update import Updates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from bus._weight_transfer.base import Sender
    from bus.messages import Verify
    from trainer_agent._update.steps import Steps
    from trainer_agent._weights.snapshot import Snapshot

FIRST_RETRY_S: Final = 1.0
LAST_RETRY_S: Final = 60.0
_OPTIONS: Final = UpdateOptions(PauseOptions())


class _Retry(NamedTuple):
    delay_s: float  # after the last failure
    at_s: float  # on the event loop's clock


class CatchUp:
    """Runs the catch-ups of one trainer, on rank 0.

    Args:
        snapshot: the weights to send.
        steps: sends the requests of catch-ups only.
        transport: the trainer's transport, which engines close to open that of a catch-up.
        is_idle: returns whether the trainer has no update or pause under way.
        chunk_bytes: as :class:`trainer_agent.TrainerAgent`.
        verify: as :class:`trainer_agent.TrainerAgent`.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        steps: Steps,
        transport: Transport,
        *,
        is_idle: Callable[[], bool],
        make_sender: Callable[[], Sender],
        chunk_bytes: int,
        verify: Verify,
    ) -> None:
        self._snapshot = snapshot
        self._steps = steps
        self._updates = Updates(steps, alone=True)
        self._transport = transport
        self._is_idle = is_idle
        self._make_sender = make_sender
        self._chunk_bytes = chunk_bytes
        self._verify: Verify = verify
        self._log = bus.log.logger()
        self._suspensions = 0
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._retries: dict[str, _Retry] = {}  # of each DP group whose last catch-up failed
        steps.connection.kept_version = lambda: snapshot.version
        steps.connection.on_stale = self.on_stale

    @contextlib.asynccontextmanager
    async def suspend(self) -> AsyncIterator[None]:
        """Aborts a catch-up under way, and starts none for the length of a block."""
        self._suspensions += 1
        try:
            await self.stop()
            yield
        finally:
            self._suspensions -= 1

    async def stop(self) -> None:
        """Aborts the catch-up under way, if any, and waits for its end."""
        task = self._task
        if task is None or task.done():
            return
        if not self._stopping:  # a second cancel would interrupt the undo
            self._stopping = True
            task.cancel()
        await asyncio.wait([task])

    def on_stale(self, stale: StaleEngines) -> None:
        """Starts a catch-up if none runs and the trainer is idle; the broker repeats reports."""
        if stale.version != self._snapshot.version or self._suspensions or not self._is_idle():
            return
        if self._task is not None and not self._task.done():
            return
        scope = self._due(stale.dp_groups)
        if scope:
            self._stopping = False
            self._task = asyncio.create_task(self._catch_up(StaleEngines(stale.version, scope)))

    def _due(self, dp_groups: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the DP groups to update now: those without a failure, else one to retry."""
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
        except Exception as error:  # noqa: BLE001 - it must not disturb training
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
        for name in stale.dp_groups:
            last = self._retries.get(name)
            delay_s = min(2 * last.delay_s, LAST_RETRY_S) if last else FIRST_RETRY_S
            self._retries[name] = _Retry(delay_s, now_s + delay_s)
        self._log.warning(
            "catch_up_failed",
            dp_groups=list(stale.dp_groups),
            version=stale.version,
            detail=detail,
            retry_s=min(self._retries[name].delay_s for name in stale.dp_groups),
        )

    async def _send(self, stale: StaleEngines) -> tuple[str, ...]:
        """Sends the snapshot to these DP groups, and returns the engines that dropped out."""
        kept = self._snapshot.kept
        assert kept is not None
        sender = self._make_sender()
        backend = self._transport.own_backend
        ports = self._transport.ports
        transport = Transport(backend, sender, self._steps, stale.dp_groups, ports)
        stream = ChunkStream(kept, sender, chunk_bytes=self._chunk_bytes, verify=self._verify)
        await self._transport.discard()  # also its ports
        try:
            async with self._updates.begin(_OPTIONS, catch_up=stale) as update:
                report = await send_stream(update, stream, transport, self._steps, "")
                return report.excluded
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(transport.close)
