"""An update's operations in their order, the same in process and over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from bus.errors import EngineError
from bus.lora import adapter_of
from bus.messages import NackCode
from bus.vllm_payloads import is_loaded_on_receipt
from bus.weight_transfer.allocation import StagingCapacity, combine, require_capacity
from sidecar.vllm.cache_control import CacheControl
from sidecar.vllm.plugin import operations, worker_rpc
from sidecar.vllm.plugin.staging import channel_messages
from sidecar.vllm.staging_channel import StagingChannels

if TYPE_CHECKING:
    from bus.manifest import Manifest
    from bus.messages import Staging, Target, Verify
    from bus.weight_transfer.allocation import RankAssignment
    from sidecar.engine import Chunk


class WorkerConnection(Protocol):
    """Makes the calls of vLLM that an update needs; they raise :class:`EngineError`."""

    async def ask(self, method: str, kwargs: dict[str, Any] | None = None) -> Any:
        """Call vLLM's ``collective_rpc``; return each worker's answer, or the core's.

        Args:
            method: one of :mod:`sidecar.vllm.plugin.worker_rpc`, or of vLLM's own.
            kwargs: the method's arguments.
        """

    async def load_adapter(self, name: str) -> None:
        """Load a LoRA adapter in place by vLLM's own call; workers take what they have staged."""

    async def drop_adapter(self, name: str) -> None:
        """Undo :meth:`load_adapter`."""


class WorkerClient:
    """Drives the plugin of one engine; the update half of :class:`sidecar.engine.Engine`.

    Each step is one call of vLLM's; the load of a LoRA adapter is two, and that of what has been
    loaded when it was received, is none. It remembers nothing of an update but how it comes:
    whether an update session is open the workers know, so that a restarted sidecar, or one whose
    call was cancelled, recovers as well.

    What is staged goes by the workers' staging channels, up to the swap, and in as few words as may
    be: each takes its time from steps. A manifest that was armed before is not sent again. Of
    chunks that are received where they are staged, workers are told together, when all were sent:
    so the ack of one of them means that its sender is done with it, and that of the last one, that
    all have come, and are what was sent.
    """

    def __init__(self, connection: WorkerConnection) -> None:
        self._connection = connection
        self._caches = CacheControl(connection.ask)
        self._adapter = ""
        self._load_comes_with_receive = False
        self._staged = False
        self._armed: Manifest | None = None  # what was armed last, if it was of the whole model
        self._chunks = 0
        self._in_place = False
        self._sent: list[channel_messages.SentChunk] = []  # of which workers have not been told
        self._channels = StagingChannels()
        self._no_channels_reason = ""
        self._cannot_stage = ""
        self._is_one_core = True

    async def _hello(self, facts: worker_rpc.WorkerFacts, *, cores: int) -> None:
        """Does the plugin speak our protocol? What a sidecar before us has staged, or loaded of a
        LoRA adapter, and not committed, goes.

        Args:
            facts: what the plugin says of this vLLM.
            cores: how many engine cores stand behind the one client; workers of different cores
                can't agree on anything.
        """
        self._is_one_core = cores == 1
        why = facts.features.get("staged_updates", "")
        self._cannot_stage = f"this vLLM takes no staged updates: {why}" if why else ""
        self._caches.learn(facts)
        await self._perform(operations.Hello(operations.PROTOCOL))
        await self._perform(operations.UndoAdapter(settled=False))
        if await self._cancel_swap() is None and not why:
            self._cannot_stage = "its cores can't swap between steps (their log says why)"
        # Whoever came before us is not heard by the staging channels from here on.
        await self._open_channels()
        await self._perform(operations.ReleaseStaging())

    def _close_channels(self) -> None:
        """Close the connections to the workers' staging channels."""
        self._channels.close()

    async def open_transfer(self, backend: str, params: bytes, place: RankAssignment) -> int:
        """By the staging channels, where they are: who opens a transport, may wait for others.
        vLLM's own transports, and what takes their place, are the core's to open."""
        opened = operations.Open(backend, params, place.communicator, place.world_size, place.rank)
        theirs, adapter = is_loaded_on_receipt(backend), adapter_of(backend)
        self._adapter = ""
        if not self._has_channels or theirs or adapter or self._load_comes_with_receive:
            prefetch_depth = await self._perform(opened)
        else:
            prefetch_depth = min(each.ahead for each in await self._channels.perform(opened))
        self._adapter, self._load_comes_with_receive = adapter, theirs
        return prefetch_depth

    async def arm(
        self, manifest: Manifest, target: Target = "model", staging: Staging | None = None
    ) -> StagingCapacity:
        self._caches.require_updatable()
        arm = operations.ArmManifest(
            manifest.names,
            manifest.dtypes,
            manifest.shapes,
            manifest.chunk_ends,
            target,
            manifest.counts,
            staging,
        )
        of_model = target == "model" and not self._adapter
        before, self._armed = self._armed, None
        digest = manifest.digest() if of_model and staging and before == manifest else ""
        room = await self._arm_for(staging, arm, digest)
        self._armed = manifest if of_model else None
        return room if staging is None else require_capacity(staging, room)

    async def start_update(
        self, *, recover: bool, target: Target = "model", staged: bool = False
    ) -> None:
        """See :class:`wire.Start`. LoRA adapters need none."""
        self._staged = staged
        self._sent.clear()
        if staged:
            started = await self._channels.perform(channel_messages.StartStaging())
            self._in_place = all(each.in_place for each in started)
        elif not self._adapter:
            await self._perform(operations.Start(target, recover))

    async def receive(self, chunk: Chunk) -> None:
        """Fetch a chunk. vLLM's own worker engines load it as well: in an update session, and
        without a second look at what has arrived."""
        if self._staged:
            await self._channels.perform(
                channel_messages.ReceiveStaged(chunk.seq, chunk.backend, chunk.handle)
            )
            return
        await self._perform(
            operations.ReceiveChunk(
                chunk.seq,
                chunk.backend,
                tuple(meta.name for meta in chunk.tensors),
                tuple(meta.dtype for meta in chunk.tensors),
                tuple(meta.shape for meta in chunk.tensors),
                chunk.handle,
            )
        )

    async def load(self, seq: int, verify: Verify = "off", sums: tuple[int, ...] = ()) -> None:
        """Verify and load in one call, if all workers can agree between the two."""
        if self._load_comes_with_receive:
            return
        if self._staged:
            self._sent.append(channel_messages.SentChunk(seq, verify, sums))
            if not self._in_place or seq + 1 == self._chunks:
                sent = tuple(self._sent)
                self._sent.clear()
                await self._channels.perform(channel_messages.Stage(sent))
            return
        if sums and not self._is_one_core:
            await self._perform(operations.VerifyChunk(seq, verify, sums))
            verify, sums = "off", ()
        if self._adapter:
            await self._perform(operations.LoadAdapter(seq, verify, sums))
            await self._connection.load_adapter(self._adapter)
        else:
            await self._perform(operations.LoadChunk(seq, verify, sums))

    async def restore(self, target: Target = "model") -> None:
        """See :class:`wire.Restore`. Or the LoRA adapter before takes its place again."""
        if self._staged:
            await self._perform(operations.ReleaseStaging())
        elif self._adapter:
            await self._perform(operations.UndoAdapter(settled=True))
            await self._connection.drop_adapter(self._adapter)
        else:
            await self._perform(operations.Restore(target))

    async def finish_update(self) -> None:
        if self._staged:
            await self._channels.perform(channel_messages.Seal())
        elif not self._adapter:
            await self._perform(operations.Finish())

    async def swap(self, version: int, *, clear_cache: bool) -> None:
        """See :class:`wire.Swap`: the core does it where no step runs."""
        kwargs = {
            "version": version,
            "check": operations.encode(operations.CheckReady()),
            "operation": operations.encode(operations.SwapStaged()),
            "clear_cache": self._caches.clears(clear_cache),
        }
        await self._connection.ask(worker_rpc.SWAP, kwargs)

    async def call_off(self) -> None:
        """A swap that is not made yet, will not be."""
        await self._cancel_swap()

    async def _release_staging(self) -> None:
        """A sleep is about to begin, in which nothing is to be kept beside the weights."""
        if self._has_channels:
            await self._perform(operations.ReleaseStaging())

    async def _settle(self) -> None:
        """What was loaded is about to be committed: a sidecar after us leaves a LoRA adapter."""
        if self._adapter:
            await self._perform(operations.SettleAdapter())

    @property
    def _has_channels(self) -> bool:
        return self._is_one_core and bool(len(self._channels)) and not self._no_channels_reason

    def _unstageable_reason(self) -> str:
        """Why nothing can be staged in this engine, whatever it is."""
        if self._cannot_stage:
            return self._cannot_stage
        if not self._is_one_core:
            return "it has several cores behind one client"
        return self._no_channels_reason

    async def _arm_for(
        self, staging: Staging | None, arm: operations.ArmManifest, digest: str
    ) -> StagingCapacity:
        """For an update in a pause, or one that may be staged; the digest is of what workers know
        from the update before."""
        if staging is None:
            await self._perform(arm)
            return StagingCapacity()
        why_not = self._unstageable_reason()
        if why_not:
            await self._perform(arm)
            return StagingCapacity(why_not=why_not)
        self._chunks = len(arm.chunk_ends)
        room = await self._rearm(digest, staging) if digest else None
        return await self._arm(arm) if room is None else room

    async def _arm(self, arm: operations.ArmManifest) -> StagingCapacity:
        """By the staging channel, where it can be. Workers that have peers ask each other, which
        they can't by the staging channels."""
        if len(self._channels) == 1 and arm.target == "model" and not arm.counts:
            try:
                [armed] = await self._channels.perform(arm)
            except EngineError as error:
                if error.code is not NackCode.WRONG_STATE:
                    raise
            else:
                return armed.room or StagingCapacity(
                    why_not="its worker does not say whether it has room"
                )
        asked = {"operation": operations.encode(arm)}
        return worker_rpc.read_room(await self._connection.ask(worker_rpc.ARM, asked))

    async def _rearm(self, digest: str, staging: Staging) -> StagingCapacity | None:
        """Arm what was armed before; None: the workers must see all of it."""
        try:
            armed = await self._channels.perform(channel_messages.Rearm(digest, staging))
        except EngineError:
            return None
        rooms = [each.room for each in armed if each.room is not None]
        return combine(rooms) if len(rooms) == len(armed) else None

    async def _open_channels(self) -> None:
        self._no_channels_reason = ""
        if not self._is_one_core:
            return
        try:
            answer = await self._connection.ask(worker_rpc.ASK_STAGING_CHANNEL, {})
            await self._channels.open(worker_rpc.read_staging_channels(answer))
        except EngineError as error:
            self._no_channels_reason = error.detail

    async def _cancel_swap(self) -> bool | None:
        """Whether one was; None: the core knows of no swaps."""
        return worker_rpc.read_called_off(await self._connection.ask(worker_rpc.CALL_OFF, {}))

    async def _perform(self, operation: operations.Operation) -> int:
        """Have all workers carry it out; how many chunks may be received ahead."""
        asked = {"operation": operations.encode(operation)}
        return worker_rpc.read_prefetch_depth(await self._connection.ask(operations.PERFORM, asked))


def engine_error(text: str) -> EngineError:
    """The error inside the text of a failed vLLM call."""
    failure = operations.find_failure(text)
    if failure is not None:
        return EngineError(failure.detail, code=failure.code, tensor=failure.tensor)
    return EngineError(text)
