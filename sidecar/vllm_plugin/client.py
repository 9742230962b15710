"""The order of vLLM's calls in an update, the same in process and over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from bus.errors import EngineError
from bus.lora import adapter_of
from bus.messages import NackCode
from bus.native import loads_when_received
from sidecar.vllm_plugin import wire

if TYPE_CHECKING:
    from bus.manifest import Manifest
    from bus.messages import Target, Verify
    from bus.transfer import Place
    from sidecar.engine import Chunk


class Doors(Protocol):
    """vLLM's calls for weight transfer, raising :class:`EngineError` when they fail."""

    async def init_weight_transfer(self, info: dict[str, Any]) -> None: ...

    async def start_weight_update(self, target: Target) -> None: ...

    async def update_weights(self, info: dict[str, Any]) -> None: ...

    async def finish_weight_update(self) -> None: ...

    async def load_adapter(self, name: str) -> None:
        """vLLM's own in-place load of a LoRA adapter; workers take what they have staged."""

    async def drop_adapter(self, name: str) -> None:
        """The same undone."""


class PluginClient:
    """Drives the plugin of one engine; the update half of :class:`sidecar.engine.Engine`.

    It remembers nothing but whether a LoRA adapter is what comes: whether an update session is
    open is asked of the workers, so that a restarted sidecar, or one whose call was cancelled,
    recovers as well.
    And it asks before every call that vLLM would refuse, because a refusal by all
    workers at once spoils the executor's later answers (:mod:`sidecar.vllm_plugin.ranks`).
    """

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._adapter = ""

    async def hello(self) -> None:
        """Is the plugin there, and does it speak our protocol? A LoRA adapter that a sidecar
        before us has loaded, and not committed, goes."""
        await self._perform(wire.Hello(wire.PROTOCOL))
        await self._perform(wire.UndoAdapter(settled=False))

    async def open_transfer(self, backend: str, params: bytes, place: Place) -> int:
        self._adapter = ""
        await self._perform(
            wire.Open(backend, params, place.communicator, place.world_size, place.rank)
        )
        self._adapter = adapter_of(backend)
        return 1

    async def arm(self, manifest: Manifest, target: Target) -> None:
        await self._perform(
            wire.ArmManifest(
                manifest.names,
                manifest.dtypes,
                manifest.shapes,
                manifest.chunk_ends,
                target,
                manifest.counts,
            )
        )

    async def start_update(self, *, recover: bool, target: Target) -> None:
        """Open a session of the target. ``recover``: the one that an update left open, of
        whichever target, is closed first; and the target goes through a whole one, which puts
        vLLM's own bookkeeping in order after a load that broke off (its weights are then
        undefined until every chunk is loaded). LoRA adapters need none."""
        if self._adapter:
            return
        if recover:
            if await self._active():
                await self._close()
            await self.restore(target)
        await self._expect(active=False)
        await self._doors.start_weight_update(target)
        await self._perform(wire.Settle())

    async def receive(self, chunk: Chunk) -> None:
        """Fetch a chunk. vLLM's own worker engines load it as well: in an update session, and
        without a second look at what has arrived."""
        operation = wire.Receive(
            chunk.seq,
            chunk.backend,
            tuple(meta.name for meta in chunk.tensors),
            tuple(meta.dtype for meta in chunk.tensors),
            tuple(meta.shape for meta in chunk.tensors),
            chunk.handle,
        )
        if loads_when_received(chunk.backend):
            await self._update(operation)
        else:
            await self._perform(operation)

    async def load(self, seq: int, verify: Verify = "off", sums: tuple[int, ...] = ()) -> None:
        if sums:
            await self._perform(wire.Verify(seq, verify, sums))
        if self._adapter:
            await self._perform(wire.LoadAdapter(seq))
            await self._doors.load_adapter(self._adapter)
            return
        await self._update(wire.Load(seq))

    async def restore(self, target: Target) -> None:
        """Close the session; one of the target is opened first if none is. Layers that are not
        complete get their old weights back: without a load, all of them. Or the LoRA adapter
        before takes its place again."""
        if self._adapter:
            await self._perform(wire.UndoAdapter(settled=True))
            await self._doors.drop_adapter(self._adapter)
            return
        if not await self._active():
            await self._doors.start_weight_update(target)
        await self._close()

    async def _close(self) -> None:
        await self._perform(wire.Discard())
        await self.finish_update()

    async def finish_update(self) -> None:
        if self._adapter:
            return
        await self._expect(active=True)
        await self._doors.finish_weight_update()
        await self._perform(wire.Settle())

    async def settle(self) -> None:
        """What was loaded is about to be committed: a sidecar after us leaves a LoRA adapter."""
        if self._adapter:
            await self._perform(wire.SettleAdapter())

    async def _update(self, operation: wire.UpdateOp) -> None:
        await self._expect(active=True)
        await self._doors.update_weights(wire.encode(operation))
        await self._perform(wire.Settle())

    async def _active(self) -> bool:
        try:
            await self._expect(active=True)
        except EngineError as error:
            if error.code is NackCode.WRONG_STATE:
                return False
            raise
        return True

    async def _expect(self, *, active: bool) -> None:
        await self._perform(wire.Expect(active))

    async def _perform(self, operation: wire.InitOp) -> None:
        await self._doors.init_weight_transfer(wire.encode(operation))


def engine_error(text: str) -> EngineError:
    """The error inside the text of a failed vLLM call."""
    failure = wire.find_failure(text)
    if failure is not None:
        return EngineError(failure.detail, code=failure.code, tensor=failure.tensor)
    return EngineError(text)
