"""The trainer's library: pause engines, send weights, resume; all in one call."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Self, Unpack

import anyio
import anyio.to_thread

from bus.errors import UsageError
from bus.ids import check_name
from bus.keys import security
from bus.messages import (
    EngineView,
    Escalation,
    GroupView,
    PauseMode,
    StaleEngines,
    Status,
    Target,
    Verify,
    WaitEngines,
)
from bus.runtime.peer import default_name
from bus.settings import DEFAULT_BROKER
from bus.weight_transfer.cuda import current_gpu
from bus.weight_transfer.registry import make_sender
from trainer_agent.adapters import Adapters
from trainer_agent.connection import Connection
from trainer_agent.options import WAIT_S, PauseOptions, UpdateOptions
from trainer_agent.pauses import Pauses
from trainer_agent.update.catch_up import CatchUp
from trainer_agent.update.chunk_stream import ChunkStream, do_nothing, open_source, send_stream
from trainer_agent.update.rank_sync import follow_rank_zero
from trainer_agent.update.steps import Steps
from trainer_agent.update.transport import Transport
from trainer_agent.update.update import Updates, cancel_and_wait, wait_until_sent
from trainer_agent.vllm.api import VllmApi
from trainer_agent.vllm.session import TrainerEngineSession
from trainer_agent.weights.any_source import as_source
from trainer_agent.weights.cast import CastSource
from trainer_agent.weights.snapshot import Snapshot
from trainer_agent.weights.source import Weights, copy_source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from bus.protocol.core.link import LinkConfig
    from bus.runtime.interfaces import ClientTransport
    from trainer_agent.canary import Canary
    from trainer_agent.options import How, Quorum, SentDtype, UpdateArguments
    from trainer_agent.report import UpdateReport


class TrainerAgent(Pauses, Adapters, VllmApi):
    """A trainer on the bus: holds one group of engines.

    ::

        async with TrainerAgent("tcp://127.0.0.1:7710", group="policy") as agent:
            await agent.wait_for_engines(2, timeout_s=60)
            version = await agent.update_weights(model, label=f"step {step}")

    The event loop must stay free while you train, or the bus takes you for dead
    after some seconds: run training steps in a thread, or use
    :class:`trainer_agent.SyncTrainerAgent`, which keeps a thread for the bus.

    Args:
        broker: the broker's address.
        group: the engines to hold; one trainer holds a group at a time.
        name: this trainer's name on the bus. Default: from host and pid.
        rank: this process's rank in a trainer of several processes (FSDP). Every rank has an
            agent, and all call :meth:`update_weights` with their part of the same model. Rank 0
            holds the group and sends.
        ranks: how many processes the trainer has.
        backend: how tensors travel: ``shm`` (one host), ``gloo`` (TCP, any number of hosts),
            ``nccl`` (from GPU to GPU), ``ipc`` (engines on the trainer's GPU), or one of your own
            (:func:`bus.weight_transfer.registry.register_sender`).
        chunk_bytes: at most so much is in one chunk. A larger tensor gets a chunk of its own.
        buffers: how many chunks are under way at a time, with memory for each. Default: two, of
            ``nccl`` three, or what a backend of your own says.
        packed: chunks go through buffers. ``nccl``, ``ipc``, and ``shm`` with weights in shared
            memory (:func:`trainer_agent.share_memory`) can do without: tensors are then sent
            from where they are, and must stay as they are until the update ends.
        device: the GPU that ``nccl`` and ``ipc`` send from. Default: the current one of the
            thread that makes the agent, if it uses one already, or else the first.
        keep_last: keep the model's weights of the last update that was committed, in CPU memory.
            Engines that join late, restart, or were quarantined are brought to the group's version
            from there, in the background, while the others serve. Takes the weights' size twice,
            from the second update on; of a trainer of several ranks, rank 0 alone keeps any.
        verify: how chunks are checked before engines load them: ``sample`` looks at 4,096 words
            of each tensor, ``full`` at all (about a second per 2 GB and core), ``off`` at none.
        lease_ms: how long engines stay paused when trainer and broker are both gone.
        timeout_s: how long a step (a pause, an ack of all engines) may take, from when the one
            before was done; and the source, for one tensor. A broker that is not heard for so long
            fails it, too. More than its ``--step-timeout-ms`` (300 s), after which it leaves out
            who has not answered, and the others go on.
        key: file with this trainer's secret key (`wavebus keygen`). Default: WAVEBUS_KEY, or none.
        broker_key: file with the broker's public key. Default: WAVEBUS_BROKER_KEY, or none.
        insecure: go beyond loopback without keys. Default: as WAVEBUS_INSECURE says.
    """

    def __init__(
        self,
        broker: str = DEFAULT_BROKER,
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
        keep_last: bool = False,
        verify: Verify = "sample",
        lease_ms: int = 30_000,
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
            kept_version=lambda: self._snapshot.version if self._snapshot else 0,
            on_stale=self._on_stale,
        )
        self._steps = Steps(self._connection, lease_ms=lease_ms, timeout_s=timeout_s)
        sender = make_sender(backend, buffers=buffers, packed=packed, device=self.device)
        self._transport = Transport(backend, sender, self._connection, self._steps)
        self._updates = Updates(
            self._connection, self._steps, alone=ranks == 1, snapshot=self._snapshot
        )
        self._sending: asyncio.Task[int] | None = None
        self._catch_up = self._make_catch_up()
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
        )

    def _make_catch_up(self) -> CatchUp | None:
        if self._snapshot is None:
            return None
        return CatchUp(
            self._snapshot,
            self._connection,
            Steps(
                self._connection,
                lease_ms=self.lease_ms,
                timeout_s=self.timeout_s,
                ids=self._steps.ids,
            ),
            self._transport,
            is_idle=lambda: (
                not (self._updates.is_busy or self._steps.holds_pause or self._transport.is_foreign)
            ),
            make_sender=lambda: make_sender(
                self.backend, buffers=self.buffers, packed=True, device=self.device
            ),
            chunk_bytes=self.chunk_bytes,
            verify=self.verify,
        )

    def _on_stale(self, stale: StaleEngines) -> None:
        if self._catch_up is not None:
            self._catch_up.on_stale(stale)

    # -- coming and going -------------------------------------------------------

    async def connect(self) -> Self:
        """Join the bus and take the group.

        Raises:
            BusTimeout: no broker answers at the address within ``timeout_s``.
            Refused: the name is taken, or another trainer holds the group.
        """
        await self._connection.open()
        self._engine_session.loop = asyncio.get_running_loop()
        return self

    async def close(self) -> None:
        """Leave the bus. A pause that is still held is resumed by the broker; an update that was
        not awaited, is given up."""
        if self._sending is not None:
            await cancel_and_wait(self._sending)
        if self._catch_up is not None:
            await self._catch_up.stop()
        self._connection.close()
        self._transport.close()

    async def close_transport(self) -> None:
        """Destroy the transport's sending end and free its memory. The next update opens it anew.

        Raises:
            UsageError: an update is under way.
        """
        self._updates.require_idle()
        await self._transport.discard()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # -- what trainers call -----------------------------------------------------

    async def wait_for_engines(self, count: int, timeout_s: float = 60.0) -> list[EngineView]:
        """Wait until ``count`` engines have joined the group; return all that have.

        Raises:
            Refused: with code ``timeout`` and the names of those that are there.
        """
        if count < 1:
            raise UsageError(f"count={count}: wait for one engine at least")
        view = await self._connection.ask(
            WaitEngines(count, int(timeout_s * 1000)), GroupView, timeout_s=timeout_s + 10
        )
        self._steps.version = max(self._steps.version, view.version)
        return list(view.engines)

    async def status(self) -> Status:
        """The broker's whole view."""
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
        """Send weights to every engine and have them serve them.

        ``staged``, engines receive them beside those that they serve, and go on serving: arm, send,
        commit, at which each swaps between two of its steps. Nothing stops, and nothing has
        changed before the swap. ``paused``: arm, pause, send, commit, resume; it takes no memory.
        The pause's arguments are those of :meth:`paused`; inside one, the pause is that one, and
        inside :meth:`asleep`, weights wake first.

        Args:
            source: an ``nn.Module``, a state dict, ``(name, tensor)`` pairs, or a
                :class:`trainer_agent.weights.source.WeightSource`; all weights of the model,
                by their Hugging Face names.
            config: of a state dict of transformers, the model's configuration. Models, and state
                dicts with one, are sent as ``save_pretrained`` would write them: experts that
                transformers fuses are sent one by one, in views.
            dtype: ``engine`` casts floating-point tensors to the dtype of the engines' model, chunk
                by chunk on their own device, before checksums: what engines get is what they
                would load from the cast checkpoint. ``source`` sends tensors as they are.
            target: ``draft`` updates the draft model of the engines' speculative decoding. What
                it shares with the model that it drafts for (embeddings, output head) is not
                part of it, and is refused.
            label: your own name of these weights, for logs and status.
            canary: fixed probes that every engine runs before it serves the weights; who differs
                is quarantined, and named in :attr:`last_update`. On vLLM it needs
                ``mode="abort"``.
            quorum: how many DP groups (an engine alone is one) must have all weights, for those to
                serve them; the others are quarantined. ``all``: all that are there when it begins.
                With fewer the update is given up, as soon as that is known. Default: one; or all,
                if some engines prefill for others that decode (`wavebus sidecar --role`).
            how: ``auto`` stages it where every engine has the memory, and nothing else asks for a
                pause (a canary, a ``mode`` that ends requests, a pause that is held);
                :attr:`last_update` says which it was, and why.
            clear_cache: staged: requests compute keys and values anew after the swap; or go on with
                those that they have.
            staging_bytes: at most so much may staging take, in each worker of an engine. Default:
                what is free there.
            keep_staging: that memory stays, for the next update.
            check_finite: search all weights for NaN and Inf, and give the update up if there are
                any. Default: a warning (``weights_not_finite``) if what ``verify`` looks at has.
            on_sent: called as soon as the source's tensors may change; see :meth:`send_weights`,
                which waits for that.

        Returns:
            The version the bus gave. :attr:`last_update` tells the rest.

        Raises:
            ManifestRefused: an engine's model doesn't take these tensors; nothing was
                loaded, and the old weights serve on.
            Refused: with code ``draft_missing``, if an engine has no draft model.
            PauseFailed: see :meth:`paused`.
            CanaryFailed: the canary has proven no engine; all are quarantined.
            Refused: with code ``staging_refused``, if it must be staged and can't.
            NonFiniteWeights: ``check_finite`` has found one; engines are as after UpdateFailed.
            UpdateFailed: it was given up; engines that had loaded a part are quarantined
                until the next whole update (staged, none has). With code ``quorum_missing``: too
                few were left.
            BusTimeout: somebody did not answer in time: it has ``peer``, ``step``, ``chunk`` and
                ``heard_s``. If that is the broker, what was begun is undone once it is back.
        """
        self._require_no_other()
        if dtype not in ("source", "engine"):
            raise UsageError(f'dtype={dtype!r}: choose "source" or "engine"')
        pause = PauseOptions(mode, clear_cache=clear_cache, wait_s=wait_s, escalate=escalate)
        ask = UpdateOptions(pause, canary, quorum, how, staging_bytes, keep_staging)
        read = await open_source(source, config)
        if self.rank:
            with self._updates.as_follower() as number:
                return await follow_rank_zero(self._connection, read, number)
        async with self._suspend_catch_up(), self._updates.begin(ask, target) as update:
            engine_dtype = await self._connection.engine_dtype() if dtype == "engine" else ""
            stream = ChunkStream(
                CastSource(read, engine_dtype) if engine_dtype else read,
                self._transport.sender,
                chunk_bytes=self.chunk_bytes,
                verify=self.verify,
            )
            stream.plan.check_finite = check_finite
            stream.on_released = on_sent
            if self._snapshot is not None and target == "model":
                begin = self._snapshot.begin
                update.copy = stream.copy = await anyio.to_thread.run_sync(begin, stream.plan.metas)
            report = await send_stream(update, stream, self._transport, self._steps, label)
        return report.version

    async def send_weights(
        self, source: Weights, *, snapshot: bool = False, **options: Unpack[UpdateArguments]
    ) -> asyncio.Task[int]:
        """As :meth:`update_weights`, for a trainer that goes on meanwhile: returns as soon as the
        source's tensors may change, and what it returns is awaited for the version.

        ::

            update = await agent.send_weights(model, snapshot=True)
            ...  # the next step
            version = await update

        That is when the last of them is in the sender's buffers; without these (``packed=False``),
        when engines have taken it. An agent makes one update at a time: await one before the next.
        To cancel it gives the update up.

        Args:
            snapshot: copy the tensors, each where it lies, and send the copy: returns when they are
                copied. Takes as much memory once more, until all are sent.
            options: as :meth:`update_weights` has them.

        Raises:
            UsageError: a snapshot, with several ranks, each of which has a part of the tensors.
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
        """The last update that was committed, by whichever way."""
        return self._updates.last

    def commits_since(self, version: int) -> int:
        """Returns how many versions newer than ``version`` this agent has committed: its age.

        Versions have gaps, since an update that is refused or fails uses up its number.
        Adapters and draft models count as well. Commits of earlier trainers are not known.
        """
        return self._updates.count_after(version)

    def _require_no_other(self) -> None:
        """None that was sent is still under way; it may not even have begun."""
        sending = self._sending
        if sending is not None and not sending.done() and sending is not asyncio.current_task():
            raise UsageError("an update is under way; await it first")
