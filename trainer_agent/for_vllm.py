"""What vLLM's trainer engines take of an agent: their init info, client and source."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from bus import vllm_payloads
from bus.errors import UsageError
from bus.weight_transfer.allocation import ALONE
from trainer_agent.how import WAIT_S, PauseHow, UpdateHow
from trainer_agent.meeting import meeting_info
from trainer_agent.patches import BusPatches
from trainer_agent.sources import Weights, as_source
from trainer_agent.weight_sync import BusWeightSyncClient, WeightSync

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus.messages import Escalation, PauseMode, Target, Verify
    from trainer_agent.bus_source import BusWeightSource
    from trainer_agent.canary import Canary
    from trainer_agent.connection import Connection
    from trainer_agent.how import Quorum
    from trainer_agent.patches import AnyPatch
    from trainer_agent.updating import Updates


class ForVllm:
    """A part of :class:`trainer_agent.TrainerAgent`, which has all that is named here."""

    rank: int
    ranks: int
    backend: str
    chunk_bytes: int
    buffers: int | None
    packed: bool
    device: str
    verify: Verify
    _line: Connection
    _sync: WeightSync
    _updates: Updates

    async def init_info(self, engine: str = "wavebus", **fields: Any) -> Any:
        """Arm the rendezvous: what ``WeightTransferTrainerFactory.trainer_init`` takes.

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
        vllm_trainer = await self._import("trainer_agent.vllm_trainer")
        if engine == vllm_trainer.BACKEND:
            return vllm_trainer.WavebusTrainerInitInfo(
                rank=self.rank,
                transport=self.backend,
                chunk_bytes=self.chunk_bytes,
                buffers=self.buffers,
                packed=self.packed,
                device=self.device,
                verify=self.verify,
                plan=self._sync.who_meets,
                **fields,
            )
        infos = await self._import("trainer_agent.vllm_infos")
        if engine in vllm_payloads.SHARDING:
            make = functools.partial(infos.native_info, engine, fields, rank=self.rank)
            return await meeting_info(
                engine, make, self._line, self._updates, self._sync, self.rank, self.ranks
            )
        world = ALONE if self.rank else await self._sync.meet_native(engine)
        info = infos.native_info(engine, fields, rank=self.rank, world=world)
        self._sync.promise(infos.packed_bytes(engine, info))
        return info

    async def _import(self, module: str) -> Any:
        """What needs vLLM; in a thread, since it takes seconds, and the bus must hear from us."""
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
        quorum: Quorum = 1,
    ) -> BusWeightSyncClient:
        """The ``client`` of vLLM's trainer engines: each of their updates is one of the bus's.

        Args:
            mode, clear_cache, wait_s, escalate: as :meth:`paused` has them.
            chunk_bytes: for a trainer engine of your own that calls ``update_weights`` more than
                once: at most so much it puts into one call, or a larger tensor alone. vLLM's own
                need none.
            target, canary, quorum: as :meth:`update_weights` has them.
        """
        pause = PauseHow(mode, clear_cache=clear_cache, wait_s=wait_s, escalate=escalate)
        how = UpdateHow(pause, canary, quorum)
        return BusWeightSyncClient(self._sync, how, chunk_bytes, target)

    def source(self, weights: Weights) -> BusWeightSource:
        """The ``source`` of vLLM's trainer engines: ``weights``, which nobody reads before
        every engine is armed, on any rank. An agent has one at a time, its last."""
        return self._sync.wrap(as_source(weights))

    def patches(self, patches: Iterable[AnyPatch], *, base: int | None = None) -> BusPatches:
        """What vLLM's ``sparse_nccl`` trainer engine sends: patches, with which every engine is
        armed before any leaves. An agent has one such update at a time, its last.

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
        return BusPatches(patches, base, self._sync.next_patch)
