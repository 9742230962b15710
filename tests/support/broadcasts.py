"""Embedded engines that receive as vLLM's ``nccl`` does, over gloo, and a client that sends so.

Each tensor is one broadcast. An engine or a client that is alone in one waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import torch

from bus._vllm import payloads as vllm_payloads
from bus._weight_transfer import registry
from bus._weight_transfer.base import Receiver
from bus.errors import EngineError
from bus.messages import NackCode
from bus.operations import ArmManifest, Done, Drain, Extend, LoadChunk, ReceiveChunk
from sidecar._embedded.engine import EmbeddedEngine
from tests.support.gloo_group import broadcast, join
from tests.support.steps import ByStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from bus._manifest import TensorMeta
    from bus._weight_transfer.allocation import RankAssignment
    from bus._weight_transfer.packing import Tensors
    from bus.messages import PauseMode

BACKEND = "vllm:nccl"


class Broadcasts(Receiver):
    """The engine's end."""

    is_owned = True

    def __init__(self) -> None:
        self._group: Any = None

    def open(self, params: bytes, place: RankAssignment) -> None:
        info = vllm_payloads.decode_info(params)
        address, port = info["master_address"], info["master_port"]
        self._group = join(address, port, place.rank, place.world_size)

    def receive(self, tensors: tuple[TensorMeta, ...], handle: bytes) -> Tensors:
        del handle
        return [(each.name, self._next(each.dtype, each.shape)) for each in tensors]

    def drain(self, handle: bytes) -> None:
        info = vllm_payloads.decode_info(handle)
        dtypes = info["dtype_names"]
        if unknown := [each for each in dtypes if not hasattr(torch, each)]:
            raise EngineError(f"dtype {unknown[0]} is unknown", code=NackCode.TRANSFER_FAILED)
        for dtype, shape in zip(dtypes, info["shapes"], strict=True):
            self._next(dtype, shape)

    def _next(self, dtype: str, shape: Sequence[int]) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype))
        broadcast(self._group, tensor)
        return tensor

    def close(self) -> None:
        self._group = None


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Engines that start in the block receive so, too."""
    receivers = registry._receivers._registered
    receivers[BACKEND] = Broadcasts
    try:
        yield
    finally:
        del receivers[BACKEND]


class BroadcastEngine(ByStep, EmbeddedEngine):
    """An embedded engine that can drain. It loads what it receives, as vLLM's do.

    Attributes:
        reached: set when the call of :meth:`hold` has come.
        may_go: that call waits for it.
        breaks_at: the number of a chunk that it can't load, once ``may_go`` is set; -1: none.
        refuses_at: the number of a chunk whose broadcast it does not enter; -1: none.
        loaded: is called with the number of each chunk that was loaded.
        extended: how many parts it was asked to check, but those of ARM.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, step_ms=2.0)
        self._held = ""
        self.extended = 0
        self.reached, self.may_go = asyncio.Event(), asyncio.Event()
        self.breaks_at = self.refuses_at = -1
        self.loaded: Callable[[int], object] = lambda _: None

    def hold(self, call: str) -> None:
        """Makes the next such call wait: ``pause``, ``arm``, ``commit`` or ``resume``."""
        self._held = call

    @property
    def is_partial(self) -> bool:
        """Whether its weights are not those of its version."""
        return self._update()._foreign

    async def _wait(self, call: str) -> None:
        if call == self._held:
            self._held = ""
            self.reached.set()
            await self.may_go.wait()

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:
        await self._wait("pause")
        return await super().pause(mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        await self._wait("resume")
        await super().resume()

    async def commit(self, version: int) -> None:
        await self._wait("commit")
        await super().commit(version)

    async def on_arm(self, arm: ArmManifest) -> Done:
        await self._wait("arm")
        return await self.proceed(arm)

    async def on_extend(self, part: Extend) -> None:
        self.extended += 1
        await self.proceed(part)

    async def on_receive(self, chunk: ReceiveChunk) -> None:
        if chunk.seq == self.refuses_at:
            raise EngineError("refused on purpose", code=NackCode.TRANSFER_FAILED)
        await self.proceed(chunk)
        if chunk.backend == BACKEND:
            if chunk.seq == self.breaks_at:
                await self.may_go.wait()
                raise EngineError("broken on purpose", code=NackCode.ENGINE_FAILED)
            await self.proceed(LoadChunk(chunk.seq, staged=chunk.staged))
            self.loaded(chunk.seq)

    async def on_drain(self, drain: Drain) -> None:
        receiver = self._update()._chunks.receiver
        assert drain.backend == BACKEND
        assert isinstance(receiver, Broadcasts)
        try:
            await asyncio.wait_for(
                asyncio.to_thread(receiver.drain, drain.handle), drain.timeout_ms / 1000
            )
        except TimeoutError:
            raise EngineError("nothing comes", code=NackCode.TRANSFER_FAILED) from None


class BroadcastClient:
    """Calls a gateway as TRL's client does; its broadcast ends if all engines take part."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http = aiohttp.ClientSession()
        self._group: Any = None

    async def close(self) -> None:
        await self._http.close()

    async def call(self, path: str, body: Any = None) -> tuple[int, str]:
        """The status, and the answer's text."""
        async with self._http.post(self._url + path, json=body) as answer:
            return answer.status, await answer.text()

    async def init(self) -> tuple[int, str]:
        """Makes a communicator with all engines; returns the answer."""
        async with self._http.get(self._url + "/get_world_size") as answer:
            size = 1 + (await answer.json())["world_size"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        place = {"master_address": "127.0.0.1", "master_port": port}
        info = {**place, "rank_offset": 1, "world_size": size}
        joins = asyncio.create_task(asyncio.to_thread(join, "127.0.0.1", port, 0, size))
        status, text = await self.call("/init_weight_transfer_engine", {"init_info": info})
        if status == 200:
            self._group = await joins
        return status, text

    async def send(self, weights: Mapping[str, Tensor]) -> None:
        """Broadcasts all tensors; returns when all engines have had them."""
        for tensor in weights.values():
            await asyncio.to_thread(broadcast, self._group, tensor.clone())

    async def update(self, weights: Mapping[str, Tensor]) -> tuple[int, str]:
        """Calls and sends at once, as TRL does: the answer, once the broadcast has ended."""
        asked = self.call("/update_weights", {"update_info": described(weights)})
        answer, _ = await asyncio.gather(asked, self.send(weights))
        return answer


def described(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The ``update_info`` of these weights."""
    return {
        "names": list(weights),
        "dtype_names": [str(each.dtype).removeprefix("torch.") for each in weights.values()],
        "shapes": [list(each.shape) for each in weights.values()],
    }
