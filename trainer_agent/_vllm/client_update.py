"""Tracks a vLLM trainer engine's update on rank 0, and how its source is read."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import anyio

from bus.errors import UsageError, refusal
from trainer_agent._failures import nack_of
from trainer_agent._update.plan import UpdatePlan
from trainer_agent._weights.source import as_described

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future
    from collections.abc import AsyncIterator, Iterator, Sequence

    import torch

    from bus._manifest import TensorMeta
    from trainer_agent._update.update import Update
    from trainer_agent._weights.source import WeightSource


class ClientUpdate:
    """Tracks an update that a trainer engine has started on rank 0.

    Args:
        update: the update on the bus.
        plan: the tensors to send.
        inner: the source, which other threads read; None for a patch.
        loop: the agent's event loop.

    Attributes:
        chunks_announced: how many chunks the trainer engine has announced.
        is_in_chunk: whether engines may have been told of a chunk that not all have applied.
        tensors_left: how many tensors the current pass has left.
        starting: the task that pauses and starts the engines.
    """

    def __init__(
        self,
        update: Update,
        plan: UpdatePlan,
        inner: WeightSource | None,
        loop: AbstractEventLoop | None,
    ) -> None:
        self.update = update
        self.plan = plan
        self.started = anyio.Event()  # set too if the update fails
        self.undone = anyio.Event()
        self.failure: BaseException | None = None
        self.is_over = False
        self.chunks_announced = 0
        self.is_in_chunk = False
        self.tensors_left = 0 if inner is None else len(plan.metas)
        self.starting: Future[None] | None = None
        self._loop = loop
        self._awaited = 0
        self._reached = anyio.Event()
        self._inner = inner
        self._remaining: Iterator[tuple[str, torch.Tensor]] | None = None
        self._take_lock = threading.Lock()

    def begin_pass(
        self, tensors: Iterator[tuple[str, torch.Tensor]], metas: Sequence[TensorMeta]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Starts a pass over the source, and returns the tensors to yield.

        Args:
            tensors: the source's tensors.
            metas: names, dtypes and shapes of these tensors, which are compared with them.

        Raises:
            UsageError: the update is a patch.
        """
        if self._inner is None:
            raise UsageError("the update under way is a patch, which reads no source")
        with self._take_lock:
            self._remaining = tensors
            self.tensors_left = len(self.plan.metas)
        return as_described(metas, self._remaining)

    def take(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor] | None:
        """Returns the next tensor of a pass, from :meth:`begin_pass`; None at the end.

        Raises:
            WavebusError: the update has failed; this is its error.
        """
        with self._take_lock:
            self.raise_failure()
            pair = next(tensors, None)
            self.tensors_left -= pair is not None
            if self._awaited and self._tensors_sent >= self._awaited:
                self._awaited = 0
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._reached.set)
            return pair

    @contextlib.asynccontextmanager
    async def chunk(self) -> AsyncIterator[None]:
        """Runs a block that announces a chunk and awaits it, once every engine is paused.

        Raises:
            WavebusError: the update has failed; this is its error.
        """
        await self.update.paused.wait()
        self.raise_failure()
        self.is_in_chunk = True
        yield
        self.is_in_chunk = False

    async def extend(self, metas: Sequence[TensorMeta]) -> None:
        """Has every engine check further tensors of an update that was armed open.

        Args:
            metas: the tensors of the next chunk.

        Raises:
            ManifestRefused: an engine's model doesn't take these tensors. No engine has entered a
                collective for them.
        """
        await self.started.wait()
        self.raise_failure()
        part = UpdatePlan.of_parts([metas], is_open=True)
        plan = self.plan.join(part)
        await self.update.extend(plan, part)
        self.plan = plan

    def is_last(self, seq: int) -> bool:
        """Returns whether no chunk can follow this one."""
        return seq + 1 == self.plan.chunks and not self.plan.manifest.is_open

    def may_be_in_broadcast(self, *, patches: bool) -> bool:
        """Returns whether an engine, or the trainer engine, may have left a broadcast or be in it.

        A trainer engine in this process may have entered one that was not announced. An HTTP
        client's (:mod:`trainer_agent._gateway`) is ended by engines that have not entered it.

        Args:
            patches: whether the trainer engine sends patches, and so reads no source.
        """
        is_here = patches or self._inner is not None
        return self.is_in_chunk or (is_here and self.started.is_set())

    async def wait_until_taken(self, seq: int) -> None:
        """Waits until the trainer engine has read every tensor of a chunk.

        Raises:
            WavebusError: the update has failed; this is its error.
        """
        self._reached = anyio.Event()
        self._awaited = 0 if self._inner is None else self.plan.manifest.chunk_ends[seq]
        if self.failure is None and self._tensors_sent < self._awaited:
            await self._reached.wait()
        self._awaited = 0
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises a copy of the update's error, if it has failed.

        It is a copy because several tasks and threads may raise it.
        """
        if self.failure is not None:
            raise refusal(nack_of(self.failure))

    def on_failed(self, error: BaseException) -> None:
        """Records the update's error, and wakes all tasks that wait for the update."""
        self.failure = error
        self.started.set()
        self._reached.set()

    @property
    def _tensors_sent(self) -> int:
        return len(self.plan.metas) - self.tensors_left

    def drain(self) -> None:
        """Reads the rest of the source, so that other ranks don't hang in its collectives."""
        if self._inner is None:
            return
        with self._take_lock:
            for _ in iter(self._inner) if self._remaining is None else self._remaining:
                pass
