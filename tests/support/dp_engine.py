"""A trainer's side of an update of a whole group, and a group seen as one engine."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING

from sidecar.engine import Chunk, EngineInfo
from tests.contract.engine_suite import manifest_of
from trainer_agent.transfer import make_sender

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from bus.manifest import Manifest
    from bus.messages import PauseMode
    from sidecar.corepage import CoreView
    from tests.support.dp_group import DpGroup


class GroupEngine:
    """Implements :class:`sidecar.engine.Engine` for all ranks at once, as the bus asks them."""

    def __init__(self, group: DpGroup) -> None:
        self.group = group

    async def start(self) -> EngineInfo:
        await self.group.__aenter__()
        info = self.group.ranks[0].info
        return EngineInfo(**{**info, "backends": tuple(info["backends"])})

    async def close(self) -> None:
        await self.group.__aexit__()

    async def died(self) -> str:
        reason: str = await self.group.ranks[0].call("died")
        return reason

    async def in_flight(self) -> int:
        return sum(await self.group.all("in_flight"))

    async def request_ids(self) -> tuple[str, ...]:
        return ()

    def core_view(self) -> CoreView | None:
        return self.group.ranks[0].view()

    async def version(self) -> int:
        versions = set(await self.group.all("version"))
        assert len(versions) == 1
        version: int = versions.pop()
        return version

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        await self.group.all("pause", mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        await self.group.all("resume")

    async def abort_requests(self) -> int:
        return sum(await self.group.all("abort_requests"))

    async def open_transfer(self, backend: str, params: bytes) -> None:
        await self._all("open_transfer", backend=backend, params=_text(params))

    async def arm(self, manifest: Manifest) -> None:
        fields = (manifest.names, manifest.dtypes, manifest.shapes, manifest.chunk_ends)
        await self._all("arm", manifest=fields)

    async def start_update(self, *, recover: bool) -> None:
        await self._all("start_update", recover=recover)

    async def receive(self, chunk: Chunk) -> None:
        tensors = [(meta.name, meta.dtype, meta.shape) for meta in chunk.tensors]
        handle = _text(chunk.handle)
        await self._all(
            "receive", seq=chunk.seq, backend=chunk.backend, tensors=tensors, handle=handle
        )

    async def load(self, seq: int) -> None:
        await self._all("load", seq=seq)

    async def restore(self) -> None:
        await self._all("restore")

    async def finish_update(self) -> None:
        await self._all("finish_update")

    async def commit(self, version: int) -> None:
        await self._all("commit", version=version)

    async def _all(self, do: str, **arguments: object) -> None:
        """All ranks say the same of a call; the first one's error is raised."""
        calls = [rank.begin(do, **arguments) for rank in self.group.ranks]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if failed:
            assert len(failed) == len(answers), f"{do}: ranks disagree: {answers}"
            raise failed[0]


class GroupPush:
    """Weights for all ranks, in one chunk."""

    def __init__(self, group: DpGroup, weights: Mapping[str, Tensor]) -> None:
        self._engine = GroupEngine(group)
        self._weights = weights
        self._manifest = manifest_of(weights)
        self._sender = make_sender("shm")

    async def open(self) -> None:
        """Open the transport, and arm."""
        sizes = [meta.size_bytes for meta in self._manifest.tensors()]
        params = self._sender.open(self._sender.packed_bytes(sizes))
        await self._engine.open_transfer("shm", params)
        self._sender.opened()
        await self._engine.arm(self._manifest)

    async def whole(self, version: int) -> None:
        """From the opening to the commit, of a paused group."""
        await self.open()
        await self._engine.start_update(recover=False)
        tensors = self._manifest.chunk(0)
        handle = self._sender.put(0, [self._weights[meta.name] for meta in tensors])
        await self._engine.receive(Chunk(0, "shm", tensors, handle))
        await self._engine.load(0)
        await self._engine.finish_update()
        await self._engine.commit(version)
        self.close()

    def close(self) -> None:
        self._sender.close()


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
