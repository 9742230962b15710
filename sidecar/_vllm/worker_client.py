"""Makes an engine's workers carry out the steps of an update.

The sidecar's adapter of vLLM (:mod:`sidecar._vllm.engine`) inherits from the class here.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from bus import operations as ops
from bus._lora import adapter_of, removes_adapter
from bus._vllm.payloads import is_loaded_on_receipt
from bus._weight_transfer.allocation import StagingCapacity, combine, require_capacity
from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._vllm.cache_control import CacheControl
from sidecar._vllm.plugin import operations, worker_rpc
from sidecar._vllm.plugin.compat import BACKEND
from sidecar._vllm.plugin.vllm_names import ADAPTER_PATHS
from sidecar._vllm.staging_channel import StagingChannels

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bus._manifest import Manifest
    from bus.operations import UpdateOperation
    from sidecar._vllm.connection_http import HttpConnection
    from sidecar._vllm.connection_inprocess import InProcessConnection

    VllmConnection: TypeAlias = HttpConnection | InProcessConnection
    Perform: TypeAlias = Callable[[operations.WorkerOperation], Awaitable[list[ops.Done]]]


class AdapterFrontEnd:
    """Keeps the adapters' names in vLLM's front end consistent with the workers' adapters.

    Args:
        connection: calls vLLM.
        perform: carries out an operation in all workers.

    Attributes:
        name: the adapter of the open transport; empty if the transport is for a model.
        removes: whether the update removes the adapter.
        path: the adapter's path for vLLM; it differs from version to version.
    """

    def __init__(self, connection: VllmConnection, perform: Perform) -> None:
        self.name = self.path = ""
        self.removes = False
        self._connection = connection
        self._perform = perform

    async def settle(self) -> None:
        """Marks the load or the removal as committed, so that a later sidecar keeps it.

        A removal starts with the front end. If this sidecar dies in between, the next one undoes
        the removal in the workers, and no request names an adapter that they lack.
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
    """The update half of a vLLM adapter: carries operations to one engine's workers.

    Each operation is passed on by its carrier, unread, with these exceptions. vLLM's front end has
    the names of LoRA adapters. Workers of several cores verify a chunk before any of them loads it.
    A staged update sends as few messages as possible, because each delays steps: a manifest that
    was armed before is not sent again, and chunks that are received directly into staging memory
    are reported together, after the last one. The ack of a chunk then means that its sender may
    reuse its buffer. The ack of the last chunk means that all chunks have arrived and match their
    checksums.

    The client keeps little state of an update: the workers know whether an update session is open,
    so a restarted sidecar can recover it.
    """

    def __init__(self, connection: VllmConnection) -> None:
        self._vllm = connection
        self._caches = CacheControl(connection.ask)
        self._adapter = AdapterFrontEnd(connection, self._perform)
        self._is_vllms_engine = False
        self._running: UpdateOperation | None = None
        self._staged = False
        self._manifest: Manifest | None = None  # the manifest that was armed last
        self._armed: Manifest | None = None  # the same, if it was for the served model's weights
        self._in_place = False
        self._sent: list[ops.LoadChunk] = []  # staged ones, not yet reported to the workers
        self._channels = StagingChannels()
        self._cannot_stage = ""
        self._is_one_core = True
        self._is_in_lockstep = False

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
        called_off = await self._vllm.ask(worker_rpc.CALL_OFF, {})
        if worker_rpc.read_yes(called_off) is None and not why:
            self._cannot_stage = "the engine's cores can't swap between steps; their log says why"
        self._is_in_lockstep = not self._cannot_stage and await self._expect_swap(expected=False)
        # From here on the staging channels ignore an earlier sidecar.
        with contextlib.suppress(EngineError):  # the channels keep the reason
            await self._channels.open([each.channel for each in workers], cores=cores)
        await self._perform(ops.Restore(staged=True))

    async def perform(self, operation: UpdateOperation) -> ops.Done:
        """Carries out an operation in all workers; see :meth:`sidecar.engine.Engine.perform`.

        Raises:
            EngineError: also as :meth:`HttpConnection.check_adapter`.
        """
        self._running = operation
        try:
            return await self._run(operation)
        finally:
            self._running = None

    async def _run(self, operation: UpdateOperation) -> ops.Done:
        match operation:
            case ops.ArmManifest():
                return ops.Done(room=await self._arm(operation))
            case ops.SwapStaged():
                return ops.Done(in_flight=await self._swap(operation))
            case ops.LoadChunk(staged=True):
                await self._stage(operation)
                return ops.Done()
            case ops.LoadChunk() if operation.sums and not self._is_one_core:
                verified = operation.seq, operation.verify, operation.sums
                await self._perform(operations.VerifyChunk(*verified))
                operation = ops.LoadChunk(operation.seq)
            case ops.Open(backend=backend):
                self._adapter.name, self._adapter.removes = "", removes_adapter(backend)
            case ops.Start(staged=staged):
                self._staged = staged
                self._sent.clear()
                if staged and self._is_in_lockstep:
                    await self._expect_swap(expected=True)
            case ops.ReceiveChunk(update_id=update_id):
                self._adapter.path = ADAPTER_PATHS + update_id
        carry = self._channels.perform if self._goes_by_channel(operation) else self._perform
        done = await carry(operation)
        await self._on_done(operation, done)
        return ops.Done(ahead=min(each.ahead for each in done))

    async def _on_done(self, operation: UpdateOperation, done: list[ops.Done]) -> None:
        """Records the operation's results; makes vLLM's front end follow for an adapter."""
        match operation:
            case ops.Open(backend=backend):
                self._adapter.name = adapter_of(backend)
            case ops.Extend(part=part):
                assert self._manifest is not None
                self._manifest, self._armed = self._manifest.join(part), None
            case ops.Start():
                self._in_place = all(each.in_place for each in done)
            case ops.LoadChunk(seq=seq) if self._adapter.name and self._is_last(seq):
                await self._vllm.load_adapter(self._adapter.name, self._adapter.path)
            case ops.Restore(staged=False) if self._adapter.name:
                await self._vllm.undo_adapter(self._adapter.name)
            case ops.Restore(staged=True) if self._is_in_lockstep:
                await self._expect_swap(expected=False)

    async def _expect_swap(self, *, expected: bool) -> bool:
        """Sends the core whether a swap is expected; returns whether the core is in lockstep."""
        answer = await self._vllm.ask(worker_rpc.EXPECT_SWAP, {"expected": expected})
        return worker_rpc.read_yes(answer) is True

    def _goes_by_channel(self, operation: UpdateOperation) -> bool:
        """Returns whether the staging channels carry an operation, and not the core.

        Opening a transport may wait for other engines, and steps must not wait for it. An engine
        that was booted with a worker engine of vLLM's own opens transports through the core.
        Checking a part is a collective of peer workers, which can't run on the channels.
        """
        usable = not self._channels.unusable_reason
        match operation:
            case ops.Open(backend=backend):
                return usable and not (self._is_vllms_engine or is_loaded_on_receipt(backend))
            case ops.Drain():
                return usable
            case ops.Extend():
                return self._staged and len(self._channels) == 1
        return operation.carrier == "channel"

    def _is_last(self, seq: int) -> bool:
        return self._manifest is not None and seq + 1 == self._manifest.chunks

    async def _stage(self, chunk: ops.LoadChunk) -> None:
        """Stages a chunk; chunks that are received in place are staged with the last one."""
        self._sent.append(chunk)
        if not self._in_place or self._is_last(chunk.seq):
            sent = tuple(self._sent)
            self._sent.clear()
            await self._channels.perform(operations.Stage(sent))

    async def _swap(self, swap: ops.SwapStaged) -> int:
        """Makes the core swap to the staged weights between two steps; returns its requests."""
        clears = self._caches.clears(swap.clear_cache)
        swap = msgspec.structs.replace(swap, clear_cache=clears)
        await self._vllm.ask(worker_rpc.SWAP, {"operation": operations.encode(swap)})
        return 0  # the adapter counts them

    async def call_off(self) -> None:
        """Cancels a swap that waits for ranks, or a staged receive that waits for its sender.

        A request of the core interrupts what the staging channels do.
        """
        if isinstance(self._running, ops.ReceiveChunk):
            await self._perform(ops.Restore(staged=True))
        else:
            await self._vllm.ask(worker_rpc.CALL_OFF, {})

    async def _arm(self, arm: ops.ArmManifest) -> StagingCapacity:
        """Checks an update in all workers; returns how much memory staging needs."""
        if arm.drops_adapters:
            await self._adapter.drop_all()
        self._caches.require_updatable()
        if self._adapter.name:
            await self._vllm.check_adapter(self._adapter.name)
        of_model = arm.target == "model" and not self._adapter.name
        before, self._armed = self._armed, None
        room = await self._arm_for(arm, known=of_model and before == arm.manifest)
        self._armed = arm.manifest if of_model else None
        self._manifest = arm.manifest
        return room if arm.staging is None else require_capacity(arm.staging, room)

    async def _arm_for(self, arm: ops.ArmManifest, *, known: bool) -> StagingCapacity:
        """Arms an update for a pause, or for staging; ``known``: the workers armed it last.

        Staging channels arm where possible. Checking a manifest is a collective of peer workers,
        which can't run on the channels.
        """
        if arm.staging is None:
            await self._perform(arm)
            return StagingCapacity()
        if why_not := self._cannot_stage or self._channels.unusable_reason:
            await self._perform(arm)
            return StagingCapacity(why_not=why_not)
        if known:
            again = msgspec.structs.replace(arm, manifest=None)
            with contextlib.suppress(EngineError):  # some workers need the whole manifest
                return _room(await self._channels.perform(again))
        patches = arm.manifest is not None and arm.manifest.counts
        if len(self._channels) == 1 and arm.target == "model" and not patches:
            try:
                return _room(await self._channels.perform(arm))
            except EngineError as error:
                if error.code is not NackCode.WRONG_STATE:
                    raise
        return _room(await self._perform(arm))

    async def _perform(self, operation: operations.WorkerOperation) -> list[ops.Done]:
        """Carries out an operation in all workers through the core; returns their answers."""
        asked = {"operation": operations.encode(operation)}
        return worker_rpc.read_done(await self._vllm.ask(operations.PERFORM, asked))


def _room(armed: list[ops.Done]) -> StagingCapacity:
    """Returns the largest need of any worker, or why a worker can't stage."""
    unknown = StagingCapacity(why_not="a worker has not reported whether it has memory for staging")
    return combine([each.room or unknown for each in armed])
