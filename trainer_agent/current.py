"""The update that a trainer engine has begun through its client, and the pass over its source."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import anyio

from bus.errors import UsageError, refusal
from trainer_agent.refusals import nack_of
from trainer_agent.sources import as_announced

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future
    from collections.abc import Iterator, Sequence

    import torch

    from bus.manifest import TensorMeta
    from bus.messages import Verify
    from trainer_agent.plan import Plan
    from trainer_agent.sources import WeightSource
    from trainer_agent.updating import Update


class CurrentUpdate:
    """One of rank 0's. ``loop``: the agent's; tensors are taken in other threads, from ``inner``,
    which a patch has none of.

    Attributes:
        told: how many chunks the trainer engine has told of.
        untaken: how many tensors the pass that is under way has left.
        starting: engines are being paused and started.
    """

    def __init__(
        self,
        update: Update,
        plan: Plan,
        inner: WeightSource | None,
        loop: AbstractEventLoop | None,
    ) -> None:
        self.update = update
        self.plan = plan
        self.verified: Verify = "off"
        self.started = anyio.Event()  # or failed
        self.undone = anyio.Event()
        self.failure: BaseException | None = None
        self.over = False
        self.told = 0
        self.untaken = 0 if inner is None else len(plan.metas)
        self.starting: Future[None] | None = None
        self._loop = loop
        self._awaited = 0
        self._reached = anyio.Event()
        self._inner = inner
        self._left: Iterator[tuple[str, torch.Tensor]] | None = None
        self._taking = threading.Lock()

    def begin_pass(
        self, tensors: Iterator[tuple[str, torch.Tensor]], metas: Sequence[TensorMeta]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Begins a pass over ``tensors``, which ``metas`` describe.

        Raises:
            UsageError: the update is a patch.
        """
        if self._inner is None:
            raise UsageError("the update under way is a patch, which reads no source")
        with self._taking:
            self._left = tensors
            self.untaken = len(self.plan.metas)
        return as_announced(metas, self._left)

    def take(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor] | None:
        """The next one; None at the end. Once the update has failed, nobody takes any more."""
        with self._taking:
            if self.failure is not None:
                raise once_more(self.failure)
            pair = next(tensors, None)
            self.untaken -= pair is not None
            if self._awaited and self._taken >= self._awaited:
                self._wake()
            return pair

    async def until_paused(self) -> None:
        """Wait until every engine is.

        Raises:
            what the update has failed with, if it has.
        """
        await self.update.paused.wait()
        if self.failure is not None:
            raise once_more(self.failure)

    async def until_taken(self, seq: int) -> None:
        """Wait until every tensor of a chunk was taken, or the update has failed.

        Raises:
            what it failed with.
        """
        self._reached = anyio.Event()
        self._awaited = 0 if self._inner is None else self.plan.manifest.chunk_ends[seq]
        if self.failure is None and self._taken < self._awaited:
            await self._reached.wait()
        self._awaited = 0
        if self.failure is not None:
            raise once_more(self.failure)

    def failed(self, error: BaseException) -> None:
        """Whoever waits for it, hears of it."""
        self.failure = error
        self.started.set()
        self._reached.set()

    @property
    def _taken(self) -> int:
        return len(self.plan.metas) - self.untaken

    def _wake(self) -> None:
        self._awaited = 0
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._reached.set)

    def drain(self) -> None:
        """Take what is left of the source, for those who gather it with us."""
        if self._inner is None:
            return
        with self._taking:
            for _ in iter(self._inner) if self._left is None else self._left:
                pass


def once_more(error: BaseException) -> BaseException:
    """What an update failed with, to be raised once more, elsewhere."""
    return refusal(nack_of(error))
