"""An update's operations as methods of one engine, for tests that make them by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import msgspec

from bus._weight_transfer.allocation import StagingCapacity
from bus.operations import (
    ArmManifest,
    Done,
    Drain,
    Extend,
    Finish,
    LoadChunk,
    Open,
    ReceiveChunk,
    Restore,
    Start,
    SwapStaged,
)

if TYPE_CHECKING:
    from bus._manifest import Manifest
    from bus._weight_transfer.allocation import RankAssignment
    from bus.messages import Staging, Target, Verify
    from bus.operations import UpdateOperation


class ByStep:
    """What an engine of a test does itself, by operation: ``on_arm`` takes :class:`ArmManifest`.

    A method is named by the operation's tag, and may return nothing. All other operations are its
    base class's.
    """

    async def perform(self, operation: UpdateOperation) -> Done:
        own = getattr(self, f"on_{operation.__struct_config__.tag}", None)
        if own is None:
            return await self.proceed(operation)
        return await own(operation) or Done()

    async def proceed(self, operation: UpdateOperation) -> Done:
        """As the base class does."""
        done: Done = await super().perform(operation)  # type: ignore[misc]
        return done


class Performs(Protocol):
    async def perform(self, operation: UpdateOperation) -> Done: ...


class Steps:
    """One engine's; remembers whether the update is staged, as the engine machine does."""

    def __init__(self, engine: Performs) -> None:
        self._perform = engine.perform
        self._staged = False

    async def open_transfer(self, backend: str, params: bytes, place: RankAssignment) -> int:
        numbers = place.communicator, place.world_size, place.rank
        return (await self._perform(Open("o1", backend, params, *numbers))).ahead

    async def drain_transfer(self, backend: str, handle: bytes, timeout_s: float) -> None:
        await self._perform(Drain("d1", backend, handle, int(timeout_s * 1000)))

    async def arm(
        self,
        manifest: Manifest,
        target: Target = "model",
        staging: Staging | None = None,
        *,
        drops_adapters: bool = False,
    ) -> StagingCapacity:
        self._staged = False
        arm = ArmManifest(manifest, target, staging, drops_adapters, manifest.digest)
        return (await self._perform(arm)).room or StagingCapacity()

    async def extend(self, part: Manifest) -> None:
        await self._perform(Extend(part))

    async def start_update(
        self, *, recover: bool, target: Target = "model", staged: bool = False
    ) -> None:
        self._staged = staged
        await self._perform(Start(target, recover, staged=staged))

    async def receive(self, chunk: ReceiveChunk) -> None:
        await self._perform(msgspec.structs.replace(chunk, staged=self._staged))

    async def load(self, seq: int, verify: Verify = "off", sums: tuple[int, ...] = ()) -> None:
        await self._perform(LoadChunk(seq, verify, sums, staged=self._staged))

    async def restore(self, target: Target = "model") -> None:
        await self._perform(Restore(target, self._staged))

    async def finish_update(self) -> None:
        await self._perform(Finish(staged=self._staged))

    async def swap(self, version: int, *, clear_cache: bool) -> int:
        return (await self._perform(SwapStaged(version, clear_cache))).in_flight


_KNOWN: WeakKeyDictionary[Performs, Steps] = WeakKeyDictionary()


def steps(engine: Performs) -> Steps:
    """Always the same of the same engine."""
    if engine not in _KNOWN:
        _KNOWN[engine] = Steps(engine)
    return _KNOWN[engine]
