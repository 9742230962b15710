"""The agent's methods for vLLM's trainer engines: init info, client, source and patches."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from bus import vllm_payloads
from bus.errors import UsageError
from bus.weight_transfer.allocation import ALONE, World
from trainer_agent.options import WAIT_S, PauseOptions, UpdateOptions
from trainer_agent.update.rank_sync import wait_for_rank_zero
from trainer_agent.vllm.client import BusWeightSyncClient
from trainer_agent.vllm.patches import BusPatches
from trainer_agent.weights.any_source import as_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bus.messages import Escalation, PauseMode, Target, Verify
    from trainer_agent.canary import Canary
    from trainer_agent.connection import Connection
    from trainer_agent.options import Quorum
    from trainer_agent.update.update import Updates
    from trainer_agent.vllm.patches import AnyPatch
    from trainer_agent.vllm.session import TrainerEngineSession
    from trainer_agent.vllm.source import BusWeightSource
    from trainer_agent.weights.source import Weights


class VllmApi:
    """A part of :class:`trainer_agent.TrainerAgent`, which has all that is named here."""

    rank: int
    ranks: int
    backend: str
    chunk_bytes: int
    buffers: int | None
    packed: bool
    device: str
    verify: Verify
    _connection: Connection
    _engine_session: TrainerEngineSession
    _updates: Updates

    async def init_info(self, engine: str = "wavebus", **fields: Any) -> Any:
        """Arms the rendezvous: what ``WeightTransferTrainerFactory.trainer_init`` takes.

        ::

            trainer = WeightTransferTrainerFactory.trainer_init(
                agent.init_info(), client=agent.client(), source=agent.source(model)
            )
            trainer.send_weights()

        (That is with :class:`trainer_agent.SyncTrainerAgent`. With an event loop, await this,
        and call ``trainer_init`` and ``send_weights`` in a thread.)

        Args:
            engine: ``wavebus`` sends over this agent's backend; ``nccl``, ``ipc``,
                ``sparse_nccl`` and ``nccl_m2n`` are vLLM's own, and need engines that were booted
                with their worker side. For ``nccl_m2n`` every rank awaits this: rank 0 tells the
                others where they meet.
            fields: of that engine's init info, such as ``packed``. Who meets, and where, is
                filled in: make a new info, and a trainer engine of it, when engines come or go.

        Raises:
            UsageError: there is no vLLM here, or one without such a trainer engine; or an
                engine was not booted with its worker side, and is named.
        """
        trainer_engine = await self._import("trainer_agent.vllm.trainer_engine")
        if engine == trainer_engine.BACKEND:
            return trainer_engine.WavebusTrainerInitInfo(
                rank=self.rank,
                transport=self.backend,
                chunk_bytes=self.chunk_bytes,
                buffers=self.buffers,
                packed=self.packed,
                device=self.device,
                verify=self.verify,
                plan=self._engine_session.new_world,
                **fields,
            )
        init_info = await self._import("trainer_agent.vllm.init_info")
        if engine in vllm_payloads.SHARDING:
            make = functools.partial(init_info.native_info, engine, fields, rank=self.rank)
            return await rendezvous_info(
                engine,
                make,
                self._connection,
                self._updates,
                self._engine_session,
                self.rank,
                self.ranks,
            )
        world = ALONE if self.rank else await self._engine_session.plan_native_world(engine)
        info = init_info.native_info(engine, fields, rank=self.rank, world=world)
        self._engine_session.packed_bytes = init_info.packed_bytes(engine, info)
        return info

    async def _import(self, module: str) -> Any:
        """Import a module that needs vLLM, in a thread: that takes seconds, and the bus goes on."""
        try:
            return await anyio.to_thread.run_sync(importlib.import_module, module)
        except ImportError as error:
            raise UsageError(
                f"vLLM's trainer engines can't be imported ({error}): install vllm 0.28 or later "
                "where the trainer runs, or use update_weights(), which needs none"
            ) from error

    def client(
        self,
        *,
        mode: PauseMode = "keep",
        clear_cache: bool = True,
        wait_s: float = WAIT_S,
        escalate: Escalation = "keep",
        chunk_bytes: int | None = None,
        target: Target = "model",
        canary: Canary | None = None,
        quorum: Quorum = None,
    ) -> BusWeightSyncClient:
        """Returns the ``client`` of vLLM's trainer engines, whose updates become the bus's.

        Args:
            mode: as :meth:`paused` has it.
            clear_cache: as :meth:`paused` has it.
            wait_s: as :meth:`paused` has it.
            escalate: as :meth:`paused` has it.
            chunk_bytes: for a trainer engine of your own that calls ``update_weights`` more than
                once: at most so much it puts into one call, or a larger tensor alone. vLLM's own
                need none.
            target: as :meth:`update_weights` has it.
            canary: as :meth:`update_weights` has it.
            quorum: as :meth:`update_weights` has it.
        """
        pause = PauseOptions(mode, clear_cache=clear_cache, wait_s=wait_s, escalate=escalate)
        options = UpdateOptions(pause, canary, quorum)
        return BusWeightSyncClient(self._engine_session, options, chunk_bytes, target)

    def source(self, weights: Weights) -> BusWeightSource:
        """Returns ``weights`` as the ``source`` of vLLM's trainer engines.

        Nobody reads it before every engine is armed, on any rank. An agent has one source at a
        time, its last.
        """
        return self._engine_session.wrap(as_source(weights))

    def patches(self, patches: Iterable[AnyPatch], *, base: int | None = None) -> BusPatches:
        """Returns what vLLM's ``sparse_nccl`` trainer engine sends: patches.

        Every engine is armed with them before any leaves. An agent has one such update at a time,
        its last.

        ::

            trainer.send_weights(agent.patches(patches))

        Args:
            patches: each of another tensor.
            base: the version whose weights they are a difference from: engines that serve another
                one refuse them. Default: the last that this agent has committed.
        """
        if base is None:
            last = self._updates.last
            base = 0 if last is None else last.version
        return BusPatches(patches, base, self._engine_session.next_patch)


_RENDEZVOUS = ("master_address", "master_port", "world_size")


async def rendezvous_info(
    engine: str,
    make: Callable[..., Any],
    connection: Connection,
    updates: Updates,
    session: TrainerEngineSession,
    rank: int,
    ranks: int,
) -> Any:
    """Returns an init info for vLLM's ``engine``, every rank's own, of one communicator.

    Args:
        engine: the trainer engine's name in vLLM.
        make: makes the info of a world, and of where rank 0 has said that they meet.
        connection: the agent's.
        updates: the agent's.
        session: the agent's.
        rank: this rank of the trainer.
        ranks: how many ranks the trainer has.

    Raises:
        UsageError: an engine was not booted with the worker side, and is named.
        Refused: on the other ranks, what rank 0 raised.
    """
    if rank:
        with updates.as_follower() as number:
            step = await wait_for_rank_zero(connection, number, "go")
        elsewhere = World(0, 0, "", ranks)
        return make(world=elsewhere, meeting=vllm_payloads.decode_info(step.meeting))
    async with updates.with_all_ranks() as rank_zero:
        info = make(world=await session.plan_native_world(engine))
        meeting = {name: getattr(info, name) for name in _RENDEZVOUS}
        await rank_zero.share_rendezvous(vllm_payloads.encode_info(meeting))
    session.packed_bytes = None
    return info
