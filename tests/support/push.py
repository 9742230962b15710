"""The trainer's side of an update, by hand: one step of an engine at a time."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from bus._manifest import Manifest, TensorMeta
from bus._weight_transfer.allocation import ALONE, NO_RANK, RankAssignment, World
from bus._weight_transfer.checksum import checksums
from bus._weight_transfer.registry import make_sender
from bus.operations import ReceiveChunk
from tests.support.steps import steps
from trainer_agent._weights.source import meta_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from bus.messages import Staging, Target, Verify
    from sidecar.engine import Engine

COMMUNICATOR = 7


def metas_of(weights: Mapping[str, torch.Tensor]) -> list[TensorMeta]:
    """What a manifest says of these tensors, in their order."""
    return [meta_of(name, tensor) for name, tensor in weights.items()]


def plan(weights: Mapping[str, torch.Tensor], chunk_bytes: int = 1 << 16) -> Manifest:
    """The manifest of an update; small chunks, so that layers are cut in the middle."""
    return Manifest.plan(metas_of(weights), chunk_bytes=chunk_bytes)


def parts_of(
    weights: Mapping[str, torch.Tensor], *first: str, chunk_bytes: int = 1 << 16
) -> list[Manifest]:
    """The manifests of an update in parts; each but the first begins with one of these tensors."""
    names = list(weights)
    cuts = [0, *map(names.index, first), len(names)]
    return [
        plan({name: weights[name] for name in names[begin:end]}, chunk_bytes)
        for begin, end in itertools.pairwise(cuts)
    ]


def manifest_of(weights: Mapping[str, torch.Tensor], *, chunks: int = 1) -> Manifest:
    """A manifest of these tensors, in ``chunks`` chunks of about as many tensors."""
    count = len(weights)
    ends = tuple(count * (chunk + 1) // chunks for chunk in range(chunks))
    whole = plan(weights, 1 << 40)
    return Manifest(whole.names, whole.dtypes, whole.shapes, ends)


class Push:
    """Weights on their way to one engine.

    Args:
        manifest: how it is cut. Default: into ``chunks`` of about as many tensors.
        backend: what sends.
        packed: through buffers, and not from where the weights are.
        received_by: the receiver's backend, where a test has one of its own.
        workers: how many receivers the engine has.
        verify: which checksums are sent along.
        target: which of the engine's models they are for.
        staging: they are staged so, and not loaded in a pause.
        rest: parts that follow those of ``manifest``, which then is open.
    """

    def __init__(
        self,
        engine: Engine,
        weights: Mapping[str, torch.Tensor],
        manifest: Manifest | None = None,
        *,
        chunks: int = 1,
        backend: str = "shm",
        packed: bool = True,
        received_by: str = "",
        workers: int = 1,
        verify: Verify = "full",
        target: Target = "model",
        staging: Staging | None = None,
        rest: Sequence[Manifest] = (),
    ) -> None:
        self.engine = engine
        self.weights = weights
        self.manifest = manifest or manifest_of(weights, chunks=chunks)
        self.rest = list(rest)
        if rest:
            self.manifest = replace(self.manifest, is_open=True)
        self._received_by = received_by or backend
        self._workers = workers
        self._verify: Verify = verify
        self._target: Target = target
        self.staging = staging
        self._sender = make_sender(backend, packed=packed)

    async def open(self) -> None:
        """Open both ends."""
        parts = (self.manifest, *self.rest)
        sizes = [part.sizes_bytes(seq) for part in parts for seq in range(part.chunks)]
        room_bytes = max(map(self._sender.packed_bytes, sizes))
        world, place = ALONE, NO_RANK
        if self._sender.is_collective:
            world = World(COMMUNICATOR, 1 + self._workers, "127.0.0.1")
            place = RankAssignment(COMMUNICATOR, world.size, 1)
        params = self._sender.open(room_bytes, world)
        opening = steps(self.engine).open_transfer(self._received_by, params, place)
        await asyncio.gather(opening, asyncio.to_thread(self._sender.meet))
        self._sender.on_opened()

    async def begin(self, *, recover: bool = False) -> None:
        """Open, arm and start; the engine must be paused, unless the update is staged."""
        await self.open()
        room = await steps(self.engine).arm(self.manifest, self._target, self.staging)
        assert not room.why_not, room.why_not
        staged = self.staging is not None
        await steps(self.engine).start_update(recover=recover, target=self._target, staged=staged)

    async def part(self) -> None:
        """Have the engine check the next part, and send it."""
        part = self.rest.pop(0)
        await steps(self.engine).extend(part)
        sent = self.manifest.chunks
        self.manifest = self.manifest.join(part)
        for seq in range(sent, self.manifest.chunks):
            await self.chunk(seq)

    def offer(self, seq: int) -> ReceiveChunk:
        """Put one chunk where the engine can fetch it."""
        handle = self._sender.put(seq, self._tensors(seq))
        return ReceiveChunk(seq, self._received_by, handle)

    async def send(self, seq: int) -> None:
        """Send one chunk into the engine's staging."""
        receiving = steps(self.engine).receive(self.offer(seq))
        await asyncio.gather(receiving, asyncio.to_thread(self._sender.transfer, seq))

    async def load(self, seq: int) -> None:
        """Verify and load the chunk that was sent."""
        sums = checksums(self._tensors(seq), self._verify)
        await steps(self.engine).load(seq, self._verify, sums)
        self._sender.on_taken(seq)

    async def chunk(self, seq: int) -> None:
        await self.send(seq)
        await self.load(seq)

    async def end(self, version: int) -> None:
        """Finish, and commit or swap."""
        await steps(self.engine).finish_update()
        if self.staging is not None:
            await steps(self.engine).swap(version, clear_cache=self.staging.clear_cache)
        else:
            await self.engine.commit(version)

    async def whole(self, version: int, *, recover: bool = False) -> None:
        """A whole update."""
        await self.begin(recover=recover)
        for seq in range(self.manifest.chunks):
            await self.chunk(seq)
        while self.rest:
            await self.part()
        await self.end(version)
        self.close()

    def close(self) -> None:
        self._sender.close()

    def _tensors(self, seq: int) -> list[torch.Tensor]:
        return [self.weights[name] for name in self.manifest.names[self.manifest.part(seq)]]
