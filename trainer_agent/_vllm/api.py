"""The trainer agent's methods for vLLM's trainer engines."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from bus._vllm import payloads as vllm_payloads
from bus._weight_transfer.allocation import ALONE, World
from bus.errors import UsageError
from trainer_agent._options import WAIT_S, PauseOptions, UpdateOptions
from trainer_agent._update.rank_sync import wait_for_rank_zero
from trainer_agent._vllm.client import BusWeightSyncClient
from trainer_agent._vllm.patches import BusPatches
from trainer_agent._weights.any_source import as_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bus.messages import Escalation, PauseMode, Target
    from trainer_agent._canary import Canary
    from trainer_agent._connection import Connection
    from trainer_agent._options import How, Quorum
    from trainer_agent._update.update import Updates
    from trainer_agent._vllm.patches import AnyPatch
    from trainer_agent._vllm.session import TrainerEngineSession
    from trainer_agent._vllm.source import BusWeightSource
    from trainer_agent._weights.source import Weights

_RENDEZVOUS = ("master_address", "master_port", "world_size")


class VllmApi:
    """Adds the methods for vLLM's trainer engines to :class:`trainer_agent.TrainerAgent`.

    The agent defines the attributes that are used here.
    """

    rank: int
    ranks: int
    _connection: Connection
    _engine_session: TrainerEngineSession
    _updates: Updates

    async def init_info(self, engine: str = "wavebus", **fields: Any) -> Any:
        """Returns the ``init_info`` with which vLLM makes a trainer engine.

        ::

            trainer = WeightTransferTrainerFactory.trainer_init(
                agent.init_info(), client=agent.client(), source=agent.source(model)
            )
            trainer.send_weights()

        (This example uses :class:`trainer_agent.SyncTrainerAgent`. With an event loop, await this
        method, and call ``trainer_init`` and ``send_weights`` in a thread.)

        Args:
            engine: the trainer engine. ``wavebus`` sends over this agent's backend. ``nccl``,
                ``ipc``, ``sparse_nccl`` and ``nccl_m2n`` are vLLM's own, and need engines that were
                started with the worker engine of that name. For ``nccl_m2n`` every rank must await
                this method, because rank 0 sends the rendezvous to the others.
            fields: other fields of the ``init_info``, such as ``packed``. Size and address of the
                communicator are filled in. When engines join or leave, make a new ``init_info`` and
                a new trainer engine.

        Raises:
            UsageError: vLLM is not installed, or lacks this trainer engine; or an engine was
                started with another worker engine, and is named.
        """
        trainer_engine = await self._import("trainer_agent._vllm.trainer_engine")
        if engine == trainer_engine.BACKEND:
            return trainer_engine.WavebusTrainerInitInfo(rank=self.rank, **fields)
        init_info = await self._import("trainer_agent._vllm.init_info")
        if engine in vllm_payloads.SHARDING:
            make = functools.partial(init_info.native_info, engine, fields, rank=self.rank)
            return await self._info_of_all_ranks(engine, make)
        world = ALONE if self.rank else await self._engine_session.plan_native_world(engine)
        info = init_info.native_info(engine, fields, rank=self.rank, world=world)
        self._engine_session.packed_bytes = init_info.packed_bytes(engine, info)
        return info

    async def _info_of_all_ranks(self, engine: str, make: Callable[..., Any]) -> Any:
        """Returns this rank's ``init_info`` for a trainer engine with which every rank sends.

        ``make`` makes it from the communicator's members and, on other ranks, rank 0's rendezvous.
        """
        if self.rank:
            with self._updates.as_follower() as number:
                step = await wait_for_rank_zero(self._connection, number, "go")
            elsewhere = World(0, 0, "", self.ranks)
            return make(world=elsewhere, meeting=vllm_payloads.decode_info(step.meeting))
        async with self._updates.with_all_ranks() as rank_zero:
            info = make(world=await self._engine_session.plan_native_world(engine))
            meeting = {name: getattr(info, name) for name in _RENDEZVOUS}
            await rank_zero.share_rendezvous(vllm_payloads.encode_info(meeting))
        self._engine_session.packed_bytes = None
        return info

    async def _import(self, module: str) -> Any:
        """Imports a module that needs vLLM, in a thread, because the import takes seconds."""
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
        how: How = "auto",
        staging_bytes: int | None = None,
        keep_staging: bool = False,
    ) -> BusWeightSyncClient:
        """Returns the ``client`` of a vLLM trainer engine, which sends its updates over the bus.

        Args:
            mode: as :meth:`paused`.
            clear_cache: as :meth:`paused`.
            wait_s: as :meth:`paused`.
            escalate: as :meth:`paused`.
            chunk_bytes: needed only for your own trainer engine, if it calls ``update_weights``
                more than once: the most bytes that it puts into one call. A larger tensor gets a
                call of its own.
            target: as :meth:`update_weights`.
            canary: as :meth:`update_weights`.
            quorum: as :meth:`update_weights`.
            how: as :meth:`update_weights`.
            staging_bytes: as :meth:`update_weights`.
            keep_staging: as :meth:`update_weights`.
        """
        pause = PauseOptions(mode, clear_cache=clear_cache, wait_s=wait_s, escalate=escalate)
        options = UpdateOptions(pause, canary, quorum, how, staging_bytes, keep_staging)
        return BusWeightSyncClient(self._engine_session, options, chunk_bytes, target)

    def source(self, weights: Weights) -> BusWeightSource:
        """Wraps ``weights`` as the ``source`` of a vLLM trainer engine.

        On every rank, the source yields no tensor until every engine is armed. A new source
        replaces the agent's previous one.
        """
        return self._engine_session.wrap(as_source(weights))

    def patches(self, patches: Iterable[AnyPatch], *, base: int | None = None) -> BusPatches:
        """Wraps patches for vLLM's ``sparse_nccl`` trainer engine.

        Every engine is armed with the patches' metadata before the first patch is sent. New patches
        replace the agent's previous ones.

        ::

            trainer.send_weights(agent.patches(patches))

        Args:
            patches: the patches, at most one per tensor.
            base: the version to which they are applied; engines that serve another version refuse
                them. Default: the last version that this agent has committed.
        """
        if base is None:
            last = self._updates.last
            base = 0 if last is None else last.version
        return BusPatches(patches, base, self._engine_session.next_patch)
