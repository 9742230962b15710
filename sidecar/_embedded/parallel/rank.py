"""Connects one rank of the embedded engine to the other ranks and the DP coordinator.

The coordinator publishes the current wave to the front end. When a request comes while no wave
runs, the front end sends FIRST_REQ, so that the coordinator starts a wave at the other ranks.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, TypeVar

import bus.log
from bus._runtime.zmq_dp import DpSockets
from bus.errors import EngineError
from sidecar._dp_coordinator import frames
from sidecar._dp_coordinator.process import (
    DpCoordinatorAddresses,
    DpCoordinatorFailed,
    DpCoordinatorProcess,
)
from sidecar._embedded.parallel.core import LockstepCore
from sidecar._embedded.parallel.group import GroupExchange, Rendezvous
from sidecar._embedded.parallel.lease import EmbeddedLease
from sidecar._embedded.parallel.liveness import RankLiveness
from sidecar._embedded.parallel.waves import RankWaves

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from sidecar._embedded.model import ModelRunner
    from sidecar._embedded.parallel.options import DataParallel
    from sidecar._embedded.requests import Publish
    from sidecar._embedded.update import Updater
    from sidecar._shared_pages.core_status import CoreStatusPage

T = TypeVar("T")
# How long to wait, after a broken step, for the news that another rank has ended. Rank 0 sends the
# news, and may get no processor for some seconds.
_NOTICE_S: Final = 10.0


class DpRank:
    """Makes an embedded engine one rank of a DP group, from :meth:`join` to :meth:`close`.

    Args:
        options: the rank's options.
        lost: called once, with the reason, when the DP group can't continue: another rank or the DP
            coordinator is gone.
    """

    def __init__(self, options: DataParallel, lost: Callable[[str], None]) -> None:
        self.options = options
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._log = bus.log.logger(dp_group=options.group, dp_rank=options.rank)
        self._liveness = RankLiveness(options.group, options.rank, options.size, lost)
        self._coordinator: DpCoordinatorProcess | None = None
        self._sockets: DpSockets | None = None
        self._core: LockstepCore | None = None
        self._lease: EmbeddedLease | None = None
        self._ready = asyncio.Event()
        # What the coordinator published last, or what FIRST_REQ will start.
        self._wave = 0
        self._running = False

    async def join(self, facts: dict[str, object]) -> GroupExchange:
        """Connects this rank to the others.

        Args:
            facts: what must be equal on all ranks, by name, such as the network's sizes.

        Returns:
            The exchange that connects the model to the experts on other ranks.

        Raises:
            EngineError: the others did not come, or differ.
        """
        options = self.options
        alike = {**facts, "dp_size": options.size, "sync_interval": options.sync_interval}
        meeting = await _blocking(lambda: Rendezvous(options))
        await _blocking(lambda: meeting.check(alike))
        addresses = await self._meet(meeting)
        self._sockets = DpSockets.of_rank(options.rank, **asdict(addresses))
        self._group = await _blocking(meeting.join)
        self._store = await _blocking(meeting.lease_store)
        return GroupExchange(self._group)

    def make_core(
        self,
        model: ModelRunner,
        *,
        slots: int,
        publish: Publish,
        died: Callable[[str], None],
        page: CoreStatusPage,
    ) -> LockstepCore:
        """Makes the engine core of this rank, after :meth:`join`.

        The arguments are those of :class:`LockstepCore`.
        """
        options = self.options
        self._core = LockstepCore(
            model,
            slots=slots,
            publish=publish,
            died=died,
            page=page,
            group=self._group,
            waves=RankWaves(options.rank, options.size, options.sync_interval),
            report=self._report,
        )
        return self._core

    def watch_lease(self, updater: Updater) -> EmbeddedLease:
        """Begins to watch the lease of this rank's pause, after :meth:`make_core`.

        Args:
            updater: carries out the core's updates.
        """
        assert self._core is not None
        self._lease = EmbeddedLease(self.options, self._core, updater, self._store)
        return self._lease

    async def ready(self) -> None:
        """Subscribes this rank to the coordinator, and waits until all ranks have subscribed.

        Raises:
            EngineError: some ranks have not subscribed in time.
        """
        assert self._sockets is not None
        self._sockets.front.listen(self._on_front)
        self._sockets.core_in.listen(self._on_core)
        self._sockets.front.send(frames.SUBSCRIBE)
        self._sockets.core_in.send(frames.SUBSCRIBE)
        await self._bounded(self._ready.wait(), "the DP coordinator is not ready")

    def on_request(self) -> int:
        """Wakes the other ranks for a new request, if no wave runs.

        Returns:
            The wave that the request belongs to.
        """
        wave = self._wave
        if not self._running and self._sockets is not None:
            self._running = True
            asked = frames.FirstRequest(self.options.rank, wave)
            self._sockets.front.send(frames.encode_first_request(asked))
        return wave

    async def explain(self, reason: str) -> str | None:
        """Finds out whether this rank's core died by itself, and if so, announces that.

        A core also dies when another rank is gone; ``lost`` is then called with that reason.

        Args:
            reason: how the core died.

        Returns:
            ``reason`` if the core died by itself; None if another rank is gone.
        """
        try:
            await asyncio.wait_for(self._liveness.noticed.wait(), _NOTICE_S)
        except TimeoutError:
            self._liveness.announce_crash()
            return reason
        return None

    def leave(self) -> None:
        """Announces to the other ranks that this rank closes, and is not dead."""
        self._liveness.leave()

    async def close(self) -> None:
        """Leaves the group; the other ranks can't continue without this one."""
        if self._lease is not None:
            await asyncio.to_thread(self._lease.close)
        await self._liveness.close()
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None
        if self._coordinator is not None:
            await asyncio.to_thread(self._coordinator.stop)

    # Inside

    async def _meet(self, meeting: Rendezvous) -> DpCoordinatorAddresses:
        """Exchanges addresses with the other ranks, and connects :class:`RankLiveness`."""
        options = self.options
        if options.rank == 0:
            addresses = options.coordinator or await self._start_coordinator()
            host, port = await self._liveness.listen(options.address[0])
            shared = {"coordinator": asdict(addresses), "host": host, "port": port}
            await _blocking(lambda: meeting.publish("addresses", shared))
            await self._bounded(self._liveness.all_here.wait(), "not all ranks have connected")
            return addresses
        found = await _blocking(lambda: meeting.wait_for("addresses"))
        await self._liveness.connect(found["host"], found["port"])
        return DpCoordinatorAddresses(**found["coordinator"])

    async def _bounded(self, work: Coroutine[Any, Any, T], complaint: str) -> T:
        options = self.options
        try:
            return await asyncio.wait_for(work, options.join_timeout_s)
        except TimeoutError as error:
            raise EngineError(
                f"rank {options.rank} of DP group {options.group}: {complaint} "
                f"after {options.join_timeout_s:g} s"
            ) from error

    async def _start_coordinator(self) -> DpCoordinatorAddresses:
        options = self.options
        try:
            self._coordinator = await asyncio.to_thread(
                DpCoordinatorProcess,
                dp_group=options.group,
                size=options.size,
                host=options.address[0],
                broker=options.broker,
                group=options.bus_group,
                on_death=self._on_coordinator_died,
            )
        except DpCoordinatorFailed as error:
            raise EngineError(str(error)) from error
        return self._coordinator.addresses

    def _on_coordinator_died(self, code: int) -> None:
        """Reports that the coordinator has died: idle ranks would not wake. Safe in any thread."""
        reason = (
            f"the DP coordinator of DP group {self.options.group} has ended with exit code {code}"
        )
        self._in_loop(lambda: self._lost(reason))

    def _on_front(self, parts: list[bytes]) -> None:
        with frames.bad_frames_logged(self._log):
            status = frames.decode_frame_to_front(parts)
            self._wave, self._running = status.wave, status.running

    def _on_core(self, parts: list[bytes]) -> None:
        with frames.bad_frames_logged(self._log):
            message = frames.decode_frame_to_core(parts)
            if message is None:
                self._ready.set()
            elif self._core is not None:
                self._core.start_wave(message.wave, message.excluded)

    def _report(self, report: frames.CoreReport) -> None:
        """Sends a report of the core; called in the core's thread."""

        def send() -> None:
            if self._sockets is not None:
                self._sockets.core_out.send(frames.encode_core_report(report))

        self._in_loop(send)

    def _in_loop(self, action: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)


async def _blocking(action: Callable[[], T]) -> T:
    """Runs ``action``, which may block, in a thread that does not delay the process's end."""
    loop = asyncio.get_running_loop()
    answer: Future[T] = Future()

    def run() -> None:
        try:
            result = action()
        except BaseException as error:  # noqa: BLE001 - the waiting task raises it
            answer.set_exception(error)
        else:
            answer.set_result(result)

    threading.Thread(target=run, name="wavebus-meet", daemon=True).start()
    return await asyncio.shield(asyncio.wrap_future(answer, loop=loop))
