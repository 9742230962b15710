"""Makes an engine's workers carry out the steps of an update.

The sidecar's adapter of vLLM (:mod:`sidecar.vllm.engine`) inherits from the class here.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from bus.errors import EngineError
from bus.lora import adapter_of, removes_adapter
from bus.messages import NackCode
from bus.vllm_payloads import is_loaded_on_receipt
from bus.weight_transfer.allocation import StagingCapacity, combine, require_capacity
from sidecar.vllm.cache_control import CacheControl
from sidecar.vllm.plugin import operations, worker_rpc
from sidecar.vllm.plugin.compat import BACKEND
from sidecar.vllm.plugin.vllm_names import ADAPTER_PATHS
from sidecar.vllm.staging_channel import StagingChannels

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bus.manifest import Manifest
    from bus.messages import Staging, Target, Verify
    from bus.weight_transfer.allocation import RankAssignment
    from sidecar.engine import Chunk

    Perform: TypeAlias = Callable[[operations.Operation], Awaitable[list[operations.Done]]]


class WorkerConnection(Protocol):
    """The calls of vLLM that an update needs, over HTTP or in process.

    The calls raise :class:`EngineError`.
    """

    async def ask(self, method: str, kwargs: dict[str, Any] | None = None) -> Any:
        """Calls a method of the workers or the core, by vLLM's ``collective_rpc``.

        Args:
            method: one of :mod:`sidecar.vllm.plugin.worker_rpc`, or of vLLM's own.
            kwargs: the method's arguments.

        Returns:
            A list with each worker's answer; for methods that the core answers, with the core's.
        """

    async def check_adapter(self, name: str) -> None:
        """Checks that vLLM can have a LoRA adapter of this name, before each update of it."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Makes vLLM load a LoRA adapter again, from the tensors that workers received.

        Args:
            name: the adapter's name.
            path: the path by which vLLM tells this version from others.
        """

    async def undo_adapter(self, name: str) -> None:
        """Undoes the last load or removal in vLLM, after the workers have undone theirs."""

    async def remove_adapter(self, name: str) -> None:
        """Makes vLLM refuse new requests for a LoRA adapter, if it has one of that name."""


class AdapterSteps:
    """The steps of an update that differ for a LoRA adapter: vLLM's front end knows its name.

    Args:
        connection: vLLM.
        perform: carries out an operation in all workers.

    Attributes:
        name: the adapter of the open transport; empty: that is for a model.
        removes: whether the update removes the adapter.
        path: the path by which vLLM tells the version under way from others.
    """

    def __init__(self, connection: WorkerConnection, perform: Perform) -> None:
        self.name = self.path = ""
        self.removes = False
        self._connection = connection
        self._perform = perform

    async def load(self) -> None:
        """Makes vLLM load the adapter, whose last chunk the workers have."""
        await self._connection.load_adapter(self.name, self.path)

    async def undo(self) -> None:
        """Undoes the load or the removal, in the workers first."""
        await self._perform(operations.UndoAdapter(settled=True))
        await self._connection.undo_adapter(self.name)

    async def settle(self) -> None:
        """Marks the load or the removal as being committed, so that a later sidecar keeps it.

        Of a removal, the front end is first: if this sidecar dies in between, the next one undoes
        the removal in the workers, and no request names what they lack.
        """
        if self.removes:
            await self._connection.remove_adapter(self.name)
        if self.name:
            await self._perform(operations.SettleAdapter())

    async def drop_all(self) -> None:
        """Removes all adapters that came over the bus, first from vLLM's front end."""
        held = (await self._perform(operations.UndoAdapter(settled=False)))[0].adapters
        for name in held or ():
            await self._connection.remove_adapter(name)
        if held:
            await self._perform(operations.DropAdapters())


class WorkerClient:
    """The update half of a vLLM adapter: calls the plugin in one engine's workers.

    It has the update's methods of :class:`sidecar.engine.Engine`. Each is one call of vLLM, but
    loading the last chunk of a LoRA adapter takes two, and loading what was loaded on receipt takes
    none. The client keeps little state of an update: the workers know whether an update session is
    open, so a restarted sidecar can recover it.

    A staged update uses the workers' staging channels up to the swap, with as few messages as
    possible, because each message delays steps. A manifest that was armed before is not sent again.
    Chunks that are received directly into staging memory are reported together, after the last one.
    The ack of a chunk then means that its sender may reuse its buffer. The ack of the last chunk
    means that all chunks have arrived and match their checksums.
    """

    def __init__(self, connection: WorkerConnection) -> None:
        self._connection = connection
        self._caches = CacheControl(connection.ask)
        self._adapter = AdapterSteps(connection, self._perform)
        self.drop_adapters = self._adapter.drop_all
        self._load_comes_with_receive = False
        self._is_vllms_engine = False
        self._is_receiving = False  # a staged chunk, over a transport of vLLM's own
        self._staged = False
        self._manifest: Manifest | None = None  # the manifest that was armed last
        self._armed: Manifest | None = None  # the same, if it was for the served model's weights
        self._in_place = False
        self._sent: list[operations.SentChunk] = []  # not yet reported to the workers
        self._channels = StagingChannels()
        self._cannot_stage = ""
        self._is_one_core = True

    async def _hello(
        self, facts: worker_rpc.WorkerFacts, *, cores: int, backend: str = BACKEND
    ) -> None:
        """Checks the plugin's protocol, and undoes uncommitted work of an earlier sidecar.

        That work is a staged update or a loaded LoRA adapter.

        Args:
            facts: the plugin's facts about this vLLM.
            cores: how many engine cores are behind the one client; workers of different cores can't
                agree on anything.
            backend: the weight transfer backend that was chosen at boot.
        """
        self._is_vllms_engine = backend != BACKEND
        self._is_one_core = cores == 1
        why = facts.features.get("staged_updates", "")
        self._cannot_stage = f"this vLLM can't stage updates: {why}" if why else ""
        self._caches.learn(facts)
        workers = await self._perform(operations.Hello(operations.PROTOCOL))
        await self._perform(operations.UndoAdapter(settled=False))
        called_off = await self._connection.ask(worker_rpc.CALL_OFF, {})
        if worker_rpc.read_called_off(called_off) is None and not why:
            self._cannot_stage = "its cores can't swap between steps (their log says why)"
        # From here on the staging channels ignore an earlier sidecar.
        with contextlib.suppress(EngineError):  # the channels keep the reason
            await self._channels.open([each.channel for each in workers], cores=cores)
        await self._perform(operations.ReleaseStaging())

    async def open_transfer(self, backend: str, params: bytes, place: RankAssignment) -> int:
        """Connects all workers to the sender; returns how many chunks may be received ahead.

        The staging channels are used where they exist, because opening a transport may wait for
        other engines, and steps must not wait for that. In an engine that was booted with a worker
        engine of vLLM's own, transports are opened through the core.
        """
        opened = operations.Open(backend, params, place.communicator, place.world_size, place.rank)
        theirs, adapter = is_loaded_on_receipt(backend), adapter_of(backend)
        self._adapter.name, self._adapter.removes = "", removes_adapter(backend)
        by_core = bool(self._channels.unusable_reason) or theirs or self._is_vllms_engine
        done = await (self._perform if by_core else self._channels.perform)(opened)
        self._adapter.name, self._load_comes_with_receive = adapter, theirs
        return min(each.ahead for each in done)

    async def drain_transfer(self, backend: str, handle: bytes, timeout_s: float) -> None:
        """Makes all workers receive over vLLM's own transport, and discard what comes.

        The engine steps on, if its workers have staging channels.
        """
        perform = self._perform if self._channels.unusable_reason else self._channels.perform
        await perform(operations.Drain(backend, handle, int(timeout_s * 1000)))

    async def arm(
        self, manifest: Manifest, target: Target = "model", staging: Staging | None = None
    ) -> StagingCapacity:
        """Checks an update in all workers; returns how much memory staging needs.

        Raises:
            EngineError: code ``manifest_refused``, ``draft_missing``, ``kv_connector_refused`` or
                ``staging_refused``; for an adapter also as :meth:`WorkerConnection.check_adapter`.
        """
        self._caches.require_updatable()
        if self._adapter.name:
            await self._connection.check_adapter(self._adapter.name)
        described = manifest.names, manifest.dtypes, manifest.shapes, manifest.chunk_ends
        asked = target, manifest.counts, staging
        flags = manifest.is_cast, manifest.is_open
        arm = operations.ArmManifest(*described, *asked, *flags)
        of_model = target == "model" and not self._adapter.name
        before, self._armed = self._armed, None
        digest = manifest.digest() if of_model and staging and before == manifest else ""
        room = await self._arm_for(staging, arm, digest)
        self._armed = manifest if of_model else None
        self._manifest = manifest
        return room if staging is None else require_capacity(staging, room)

    async def extend(self, part: Manifest) -> None:
        """Checks further tensors in all workers: a lone one's staging channel can, as in arming."""
        assert self._manifest is not None
        by_channel = self._staged and len(self._channels) == 1
        described = part.names, part.dtypes, part.shapes, part.chunk_ends
        perform = self._channels.perform if by_channel else self._perform
        await perform(operations.Extend(*described))
        self._manifest, self._armed = self._manifest.join(part), None

    async def start_update(
        self, *, recover: bool, target: Target = "model", staged: bool = False
    ) -> None:
        """Opens an update session, or allocates staging memory; a LoRA adapter needs neither."""
        self._staged = staged
        self._sent.clear()
        if staged:
            started = await self._channels.perform(operations.StartStaging())
            self._in_place = all(each.in_place for each in started)
        elif not self._adapter.name:
            await self._perform(operations.Start(target, recover))

    async def receive(self, chunk: Chunk) -> None:
        """Makes all workers begin to receive a chunk.

        vLLM's own worker engines also load or stage the chunk in this call, and compare no
        checksums.
        """
        armed, seq = self._manifest, chunk.seq
        if armed is not None and (seq >= armed.chunks or chunk.tensors != armed.chunk(seq)):
            raise EngineError(
                f"chunk {seq} is not the armed manifest's",
                code=NackCode.TRANSFER_FAILED,
            )
        self._adapter.path = ADAPTER_PATHS + chunk.update_id
        receive = operations.ReceiveChunk(seq, chunk.backend, chunk.handle)
        self._is_receiving = self._staged and self._load_comes_with_receive
        try:
            await (self._channels.perform if self._staged else self._perform)(receive)
        finally:
            self._is_receiving = False

    async def load(self, seq: int, verify: Verify = "off", sums: tuple[int, ...] = ()) -> None:
        """Loads a received chunk; if it has checksums, all workers first compare them.

        Comparing and loading are one call, unless workers of several cores have to agree in
        between.
        """
        if self._load_comes_with_receive:
            return
        if self._staged:
            self._sent.append(operations.SentChunk(seq, verify, sums))
            assert self._manifest is not None
            if not self._in_place or seq + 1 == self._manifest.chunks:
                sent = tuple(self._sent)
                self._sent.clear()
                await self._channels.perform(operations.Stage(sent))
            return
        if sums and not self._is_one_core:
            await self._perform(operations.VerifyChunk(seq, verify, sums))
            verify, sums = "off", ()
        if self._adapter.name:
            await self._perform(operations.LoadAdapter(seq, verify, sums))
            assert self._manifest is not None
            if seq + 1 == self._manifest.chunks:
                await self._adapter.load()
        else:
            await self._perform(operations.LoadChunk(seq, verify, sums))

    async def restore(self, target: Target = "model") -> None:
        """Ends an update before it changes served weights; drops what was staged or loaded."""
        if self._staged:
            await self._perform(operations.ReleaseStaging())
        elif self._adapter.name:
            await self._adapter.undo()
        else:
            await self._perform(operations.Restore(target))

    async def finish_update(self) -> None:
        """Post-processes loaded weights, or checks that an update is staged completely."""
        if self._staged:
            await self._channels.perform(operations.Seal())
        elif self._adapter.removes:
            await self._perform(operations.RemoveAdapter())
        elif not self._adapter.name:
            await self._perform(operations.Finish())

    async def swap_staged(self, version: int, *, clear_cache: bool) -> None:
        """Makes the core swap to the staged weights between two steps."""
        kwargs = {
            "version": version,
            "check": operations.encode(operations.CheckReady()),
            "operation": operations.encode(operations.SwapStaged()),
            "clear_cache": self._caches.clears(clear_cache),
        }
        await self._connection.ask(worker_rpc.SWAP, kwargs)

    async def call_off(self) -> None:
        """Cancels a swap that waits for other ranks, or a staged receive that waits for its sender.

        A request of the core interrupts what the staging channels do.
        """
        if self._is_receiving:
            await self._perform(operations.ReleaseStaging())
        else:
            await self._connection.ask(worker_rpc.CALL_OFF, {})

    async def _arm_for(
        self, staging: Staging | None, arm: operations.ArmManifest, digest: str
    ) -> StagingCapacity:
        """Arms an update for a pause, or for staging.

        ``digest`` is the manifest's if the workers armed the same manifest last, else empty.
        """
        if staging is None:
            await self._perform(arm)
            return StagingCapacity()
        if why_not := self._cannot_stage or self._channels.unusable_reason:
            await self._perform(arm)
            return StagingCapacity(why_not=why_not)
        if digest:
            with contextlib.suppress(EngineError):  # workers that need the whole manifest
                return _room(await self._channels.perform(operations.Rearm(digest, staging)))
        return await self._arm(arm)

    async def _arm(self, arm: operations.ArmManifest) -> StagingCapacity:
        """Arms by the staging channel where possible, else through the core.

        Checking a manifest is a collective of peer workers, which can't run on the staging
        channels.
        """
        if len(self._channels) == 1 and arm.target == "model" and not arm.counts:
            try:
                return _room(await self._channels.perform(arm))
            except EngineError as error:
                if error.code is not NackCode.WRONG_STATE:
                    raise
        return _room(await self._perform(arm))

    async def _perform(self, operation: operations.Operation) -> list[operations.Done]:
        """Carries out an operation in all workers through the core; returns their answers."""
        asked = {"operation": operations.encode(operation)}
        return worker_rpc.read_done(await self._connection.ask(operations.PERFORM, asked))


def _room(armed: list[operations.Done]) -> StagingCapacity:
    """Returns the largest need of any worker, or why a worker can't stage."""
    unknown = StagingCapacity(why_not="its worker does not say whether it has room")
    return combine([each.room or unknown for each in armed])


def engine_error(text: str) -> EngineError:
    """Returns the exception for a failed vLLM call, by the text of vLLM's error.

    If the plugin put a failure in the text, the exception has that failure's code and tensor.
    """
    failure = operations.find_failure(text)
    return EngineError(text) if failure is None else failure.to_error()
