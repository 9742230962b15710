"""The trainer agent, with which a trainer pauses engines and updates their weights."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Self, Unpack

import anyio
import anyio.to_thread

from bus._ids import check_name
from bus._keys import security
from bus._runtime.peer import default_name
from bus._settings import DEFAULT_BROKER
from bus._weight_transfer.cuda import current_gpu
from bus._weight_transfer.registry import make_sender
from bus.errors import UsageError
from bus.messages import (
    EngineView,
    Escalation,
    GroupView,
    PauseMode,
    Status,
    Target,
    Verify,
    WaitEngines,
)
from trainer_agent._adapters import Adapters
from trainer_agent._connection import Connection
from trainer_agent._options import LEASE_MS, WAIT_S, PauseOptions, UpdateOptions, check_weights
from trainer_agent._pauses import Pauses
from trainer_agent._update.catch_up import CatchUp
from trainer_agent._update.chunk_stream import ChunkStream, do_nothing, open_source, send_stream
from trainer_agent._update.rank_sync import follow_rank_zero
from trainer_agent._update.steps import Steps
from trainer_agent._update.transport import Transport
from trainer_agent._update.update import Updates, cancel_and_wait, wait_until_sent
from trainer_agent._vllm.api import VllmApi
from trainer_agent._vllm.session import TrainerEngineSession
from trainer_agent._weights.any_source import as_source
from trainer_agent._weights.cast import CastSource
from trainer_agent._weights.snapshot import Snapshot
from trainer_agent._weights.source import Weights, copy_source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bus._net import Broker
    from bus._protocol.core.link import LinkConfig
    from bus._runtime.interfaces import ClientTransport
    from trainer_agent._canary import Canary
    from trainer_agent._options import How, Quorum, SentDtype, UpdateArguments
    from trainer_agent._report import UpdateReport


class TrainerAgent(Pauses, Adapters, VllmApi):
    """Connects a trainer to the bus, where it owns one group of engines.

    ::

        async with TrainerAgent("tcp://127.0.0.1:7710", group="policy") as agent:
            await agent.wait_for_engines(2, timeout_s=60)
            version = await agent.update_weights(model, label=f"step {step}")

    The event loop must stay free while you train, or the broker takes the trainer for dead. Run
    training steps in a thread, or use :class:`trainer_agent.SyncTrainerAgent`.

    Args:
        broker: the broker's address; if it may move, several separated by commas, or a function
            that returns the present one (docs/operations.md).
        group: the group of engines; it has one trainer at a time.
        name: this trainer's name on the bus. Default: from host and pid.
        rank: this process's rank, if the trainer has several processes (FSDP). Every rank has an
            agent, and all ranks call :meth:`update_weights` with their part of the same model.
            Rank 0 owns the group and sends.
        ranks: how many processes the trainer has.
        backend: the transport of tensors: ``shm`` (one host), ``gloo`` (TCP), ``nccl`` (from GPU
            to GPU), ``ipc`` (engines on the trainer's GPU), or one of your own (docs/extending.md).
        chunk_bytes: the most bytes in one chunk. A larger tensor gets a chunk of its own.
        buffers: how many chunks may be in flight, with memory for each. Default: two; three for
            ``nccl``; or as your own backend says.
        packed: whether tensors are copied into buffers first. ``nccl``, ``ipc``, and ``shm`` with
            weights in shared memory (:func:`trainer_agent.share_memory`) can send them in place:
            they must then not change until the update ends.
        device: the GPU that ``nccl`` and ``ipc`` send from. Default: the current GPU of the thread
            that makes the agent if that thread already uses one, else the first.
        ports: the two TCP ports of this host at which engines meet a ``gloo`` or ``nccl`` sender of
            this agent, such as a firewall lets through; 0: any free port.
        keep_last: whether rank 0 keeps the weights of the last committed update of the model in CPU
            memory. Engines that join late, restart, or were quarantined then load these weights
            in the background. Takes the size of the weights twice, from the second update on.
        verify: how many words of each tensor are verified by checksum before engines load it:
            ``sample`` 4,096, ``full`` all (about one second per 2 GB and core), ``off`` none.
        lease_ms: how long engines stay paused if trainer and broker are both gone. Default: 30 s.
        timeout_s: the longest time, in seconds, for one step of all engines, for one tensor of the
            source, and without a frame from the broker. Choose more than the broker's
            ``--step-timeout-ms`` (300 s), after which it excludes engines that have not answered.
        key: file with this trainer's secret key (`wavebus keygen`). Default: $WAVEBUS_KEY, or none.
        broker_key: file with the broker's public key. Default: $WAVEBUS_BROKER_KEY, or none.
        insecure: whether to connect beyond loopback without keys. Default: $WAVEBUS_INSECURE.
        transport: replaces the ZeroMQ connection to ``broker``, in tests.
        link_config: timeouts of the link to the broker.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        broker: Broker = DEFAULT_BROKER,
        *,
        group: str = "policy",
        name: str | None = None,
        rank: int = 0,
        ranks: int = 1,
        backend: str = "shm",
        chunk_bytes: int = 64 * 1024 * 1024,
        buffers: int | None = None,
        packed: bool = True,
        device: str = "",
        ports: tuple[int, int] = (0, 0),
        keep_last: bool = False,
        verify: Verify = "sample",
        lease_ms: int | None = None,
        timeout_s: float = 360.0,
        key: Path | str | None = None,
        broker_key: Path | str | None = None,
        insecure: bool = False,
        transport: ClientTransport | None = None,
        link_config: LinkConfig | None = None,
    ) -> None:
        if chunk_bytes <= 0:
            raise UsageError(f"chunk_bytes={chunk_bytes}: must be positive")
        if verify not in ("off", "sample", "full"):
            raise UsageError(f"verify={verify!r}: choose one of off, sample, full")
        if timeout_s <= 0:
            raise UsageError(f"timeout_s={timeout_s}: must be positive")
        self.broker = broker
        self.group = check_name(group, "group")
        self.name = check_name(name or default_name("trainer"), "name")
        if not 0 <= rank < ranks:
            raise UsageError(f"rank={rank}: of {ranks} ranks")
        self.rank = rank
        self.ranks = ranks
        self.backend = backend
        self.chunk_bytes = chunk_bytes
        self.buffers = buffers
        self.packed = packed
        self.device = device or current_gpu()
        self.verify: Verify = verify
        self.lease_ms = lease_ms
        self.timeout_s = timeout_s
        self._snapshot = Snapshot() if keep_last and not rank else None
        self._connection = Connection(
            broker,
            role="follower" if rank else "trainer",
            name=self.name,
            group=self.group,
            timeout_s=timeout_s,
            security=security(key, broker_key, insecure=insecure),
            transport=transport,
            link_config=link_config,
        )
        self._steps = Steps(self._connection, lease_ms=lease_ms or LEASE_MS, timeout_s=timeout_s)
        self._connection.on_pause_ended = self._steps.window.on_no_engines
        make = functools.partial(make_sender, backend, buffers=buffers, device=self.device)
        self._transport = Transport(backend, make(packed=packed), self._steps, ports=ports)
        self._updates = Updates(self._steps, alone=ranks == 1, snapshot=self._snapshot)
        self._sending: asyncio.Task[int] | None = None
        self._catch_up: CatchUp | None = None
        if self._snapshot is not None:
            self._catch_up = CatchUp(
                self._snapshot,
                self._steps.fork(),
                self._transport,
                is_idle=self._is_idle,
                make_sender=functools.partial(make, packed=True),
                chunk_bytes=chunk_bytes,
                verify=verify,
            )
        self._engine_session = TrainerEngineSession(
            self._connection,
            self._steps,
            self._updates,
            self._transport,
            rank=rank,
            ranks=ranks,
            chunk_bytes=chunk_bytes,
            timeout_s=timeout_s,
            suspend_catch_up=self._suspend_catch_up,
            update_weights=self.update_weights,
        )

    def _is_idle(self) -> bool:
        return not (self._updates.is_busy or self._steps.holds_pause or self._transport.is_foreign)

    # -- connection -------------------------------------------------------------

    async def connect(self) -> Self:
        """Joins the bus, and becomes the owner of the group.

        Raises:
            BusTimeout: no broker answers within ``timeout_s``.
            Refused: the name is taken, or another trainer owns the group.
            UsageError: ``lease_ms`` is less than twice the broker's ``--peer-timeout-ms``.
        """
        await self._connection.open(self.lease_ms)
        self._engine_session.loop = asyncio.get_running_loop()
        return self

    async def close(self) -> None:
        """Leaves the bus.

        The broker ends a pause that is still held. An update under way is aborted.
        """
        try:
            if self._sending is not None:
                await cancel_and_wait(self._sending)
            if self._catch_up is not None:
                await self._catch_up.stop()
        finally:
            self._connection.close()
            self._transport.close()

    async def close_transport(self) -> None:
        """Closes the transport and frees its memory; the next update opens the transport again.

        Raises:
            UsageError: an update is under way.
        """
        self._updates.require_idle()
        await self._transport.discard()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- updates ----------------------------------------------------------------

    async def wait_for_engines(self, count: int, timeout_s: float = 60.0) -> list[EngineView]:
        """Waits until ``count`` engines have joined the group.

        Args:
            count: how many engines; at least one.
            timeout_s: how long to wait, in seconds.

        Returns:
            All engines of the group.

        Raises:
            Refused: code ``timeout``: too few have joined in time; the text names those that have.
        """
        if count < 1:
            raise UsageError(f"count={count}: wait for one engine at least")
        view = await self._connection.ask(
            WaitEngines(count, int(timeout_s * 1000)), GroupView, timeout_s=timeout_s + 10
        )
        self._steps.version = max(self._steps.version, view.version)
        return list(view.engines)

    async def status(self) -> Status:
        """Returns the broker's view of all groups and engines."""
        return await self._connection.status()

    async def update_weights(
        self,
        source: Weights,
        *,
        config: Any = None,
        dtype: SentDtype = "source",
        target: Target = "model",
        label: str = "",
        mode: PauseMode = "keep",
        clear_cache: bool = True,
        wait_s: float = WAIT_S,
        escalate: Escalation = "keep",
        canary: Canary | None = None,
        quorum: Quorum = None,
        how: How = "auto",
        staging_bytes: int | None = None,
        keep_staging: bool = False,
        check_finite: bool = False,
        on_sent: Callable[[], None] = do_nothing,
    ) -> int:
        """Sends weights to every engine of the group, which then serve them.

        A staged update loads the weights into spare memory while engines serve; each engine swaps
        them between two steps at the commit. Before the swap they serve the old weights. A paused
        update pauses all engines, loads the weights in place, and resumes; it takes no extra
        memory. Inside :meth:`paused` the update uses that pause. Inside :meth:`asleep` it first
        wakes the engines' weights.

        Args:
            source: an ``nn.Module``, a state dict, ``(name, tensor)`` pairs, or a
                :class:`trainer_agent._weights.source.WeightSource`: all weights of the model, by
                their Hugging Face names.
            config: the model's configuration, if ``source`` is a state dict of transformers.
                Models, and state dicts with a configuration, are sent as ``save_pretrained`` would
                write them: fused experts are split into one tensor per expert, without a copy.
            dtype: ``engine`` casts floating-point tensors to the dtypes of the engines' parameters,
                chunk by chunk on the tensors' own device; checksums are of the cast tensors.
                ``source`` sends tensors as they are.
            target: ``draft`` updates the draft model of the engines' speculative decoding. Tensors
                that the draft shares with the model (embeddings, output head) are refused.
            label: your own name for these weights, in logs and status.
            mode: as :meth:`paused`.
            clear_cache: as :meth:`paused`. Staged: whether requests recompute keys and values
                after the swap, or continue with those they have.
            wait_s: as :meth:`paused`.
            escalate: as :meth:`paused`.
            canary: fixed prompts (probes) that every engine runs before it serves the weights.
                Engines that fail it are quarantined, and named in :attr:`last_update`. On vLLM it
                needs ``mode="abort"``, or ``mode="wait"`` with ``escalate="abort"``.
            quorum: how many DP groups must have all weights for the update to be committed; an
                engine alone is a DP group of one. The other DP groups are quarantined. ``all``: all
                DP groups that are present when the update begins. If too few are left, the update
                fails at once. Default: one; or all, if the group has prefill and decode engines
                (`wavebus sidecar --role`).
            how: ``staged``, ``paused``, or ``auto``: staged if every engine has the memory and
                nothing needs a pause (a canary, a ``mode`` that ends requests, a pause that is
                held). :attr:`last_update` says which it was, and why.
            staging_bytes: the most memory that staging may take in each worker of an engine, in
                bytes. Default: 90% of the memory that is free there.
            keep_staging: whether the memory for staging stays allocated for the next update.
            check_finite: whether to search all weights for NaN and Inf, and to fail the update if
                there are any. Default: only the values that ``verify`` reads for checksums are
                searched, and NaN or Inf among them logs the warning ``weights_not_finite``.
            on_sent: called as soon as you may modify the source's tensors again; see
                :meth:`send_weights`, which returns then.

        Returns:
            The version that the bus assigned. :attr:`last_update` has the details.

        Raises:
            ManifestRefused: an engine's model doesn't take these tensors. Nothing was loaded, but
                if a tied head differs from the embeddings, engines are as after UpdateFailed.
            Refused: code ``draft_missing`` if an engine has no draft model; ``staging_refused`` if
                staging is required and impossible.
            PauseFailed: as :meth:`paused`.
            CanaryFailed: no engine passed the canary; all are quarantined.
            NonFiniteWeights: ``check_finite`` found NaN or Inf; engines are as after UpdateFailed.
            UpdateFailed: the update failed. Engines that had loaded a part are quarantined until
                the next whole update; a staged update quarantines none. Code
                ``quorum_missing``: too few DP groups were left.
            BusTimeout: a peer did not answer in time; the error has ``peer``, ``step``, ``chunk``
                and ``heard_s``. If the peer is the broker, the update is undone once it is back.
        """
        self._require_no_other()
        check_weights(label, dtype, target)
        pause = PauseOptions(mode, clear_cache=clear_cache, wait_s=wait_s, escalate=escalate)
        ask = UpdateOptions(pause, canary, quorum, how, staging_bytes, keep_staging)
        read = await open_source(source, config)
        if self.rank:
            with self._updates.as_follower() as number:
                return await follow_rank_zero(self._connection, read, number)
        async with self._suspend_catch_up(), self._updates.begin(ask, target) as update:
            engine_dtype = await self._connection.engine_dtype() if dtype == "engine" else ""
            if engine_dtype:
                read = CastSource(read, engine_dtype, self._steps.kept_dtypes)
            sender = self._transport.sender_for(None)
            stream = ChunkStream(read, sender, chunk_bytes=self.chunk_bytes, verify=self.verify)
            update.on_end = stream.close
            stream.plan.check_finite = check_finite
            stream.on_released = on_sent
            if self._snapshot is not None and target == "model":
                stream.make_copy = self._snapshot.begin
            return (await send_stream(update, stream, self._transport, self._steps, label)).version

    async def send_weights(
        self, source: Weights, *, snapshot: bool = False, **options: Unpack[UpdateArguments]
    ) -> asyncio.Task[int]:
        """Starts an update, and returns as soon as you may modify your tensors again.

        ::

            update = await agent.send_weights(model, snapshot=True)
            ...  # the next step
            version = await update

        You may modify them when the last tensor is in the sender's buffers; without buffers
        (``packed=False``), when engines have received it. An agent makes one update at a time:
        await one before the next. Cancelling the returned task aborts the update.

        Args:
            source: as :meth:`update_weights`.
            snapshot: whether to copy the tensors first, each on its device, and to send the copy.
                Takes the size of the weights until all are sent.
            options: as :meth:`update_weights`.

        Returns:
            A task that returns the version.

        Raises:
            UsageError: ``snapshot`` is set, and the trainer has several ranks, each with a part of
                the tensors.
        """
        self._require_no_other()
        if snapshot:
            if self.ranks > 1:
                raise UsageError("snapshot: several ranks gather their tensors as they are sent")
            source = await anyio.to_thread.run_sync(copy_source, as_source(source))
        begun = functools.partial(self.update_weights, source, **options)
        self._sending = await wait_until_sent(begun, at_once=snapshot)
        return self._sending

    @property
    def last_update(self) -> UpdateReport | None:
        """The report of the last committed update; None before the first."""
        return self._updates.last

    def commits_since(self, version: int) -> int:
        """Returns how many versions newer than ``version`` this agent has committed.

        Versions have gaps, because an update that is refused or fails uses up its number. Adapters
        and draft models count as well. Commits of earlier trainers are not known.

        Args:
            version: a version, such as the one of a rollout's tokens.
        """
        return self._updates.count_after(version)

    def _require_no_other(self) -> None:
        """Raises ``UsageError`` if an update is under way that :meth:`send_weights` has begun."""
        sending = self._sending
        if sending is not None and not sending.done() and sending is not asyncio.current_task():
            raise UsageError("an update is under way; await it first")
