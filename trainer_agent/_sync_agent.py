"""The trainer agent for trainers without an event loop.

A background thread keeps the connection to the bus alive, so a training step may take any time.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, Unpack

from bus._weight_transfer.cuda import current_gpu
from trainer_agent._agent import TrainerAgent
from trainer_agent._bus_thread import BusThread
from trainer_agent._options import WAIT_S
from trainer_agent._update.chunk_stream import do_nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Future

    from bus.messages import EngineView, Escalation, GroupAck, PauseMode, SleepLevel, Status
    from trainer_agent._options import ClientArguments, PauseArguments, UpdateArguments
    from trainer_agent._report import UpdateReport
    from trainer_agent._vllm.client import BusWeightSyncClient
    from trainer_agent._vllm.patches import AnyPatch, BusPatches
    from trainer_agent._vllm.source import BusWeightSource
    from trainer_agent._weights.source import Weights


class SyncTrainerAgent(BusThread[TrainerAgent]):
    """Blocks where :class:`trainer_agent.TrainerAgent` awaits; arguments and errors are the same.

    ::

        with SyncTrainerAgent("tcp://127.0.0.1:7710", group="policy") as agent:
            agent.wait_for_engines(2, timeout_s=60)
            version = agent.update_weights(model, label=f"step {step}")

    Use it from one thread at a time.

    Args:
        args: as :class:`trainer_agent.TrainerAgent`.
        kwargs: as :class:`trainer_agent.TrainerAgent`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The caller's current GPU: the agent itself is made in the bus's thread.
        inspect.signature(TrainerAgent).bind(*args, **kwargs)  # raises here, not in the thread
        self._kwargs = {"device": current_gpu(), **kwargs}
        super().__init__(functools.partial(TrainerAgent, *args, **self._kwargs))

    def wait_for_engines(self, count: int, timeout_s: float = 60.0) -> list[EngineView]:
        """Waits until ``count`` engines have joined. See :meth:`TrainerAgent.wait_for_engines`."""
        return self._call(lambda: self._async.wait_for_engines(count, timeout_s))

    def update_weights(
        self,
        source: Weights,
        *,
        on_sent: Callable[[], None] = do_nothing,
        **options: Unpack[UpdateArguments],
    ) -> int:
        """Sends weights to every engine, as :meth:`TrainerAgent.update_weights` does.

        ``on_sent`` is called in the background thread.
        """
        return self._call(lambda: self._async.update_weights(source, on_sent=on_sent, **options))

    def send_weights(
        self, source: Weights, *, snapshot: bool = False, **options: Unpack[UpdateArguments]
    ) -> Future[int]:
        """Starts an update, as :meth:`TrainerAgent.send_weights` does.

        Returns:
            A future, whose result is the version. Cancelling it aborts the update.
        """
        portal, agent = self._connected()
        update = self._call(lambda: agent.send_weights(source, snapshot=snapshot, **options))

        async def version() -> int:
            return await update

        return portal.start_task_soon(version)

    def update_adapter(
        self,
        adapter: str,
        source: Weights,
        *,
        config: Mapping[str, Any],
        label: str = "",
        **options: Unpack[PauseArguments],
    ) -> int:
        """Sends a LoRA adapter to every engine, as :meth:`TrainerAgent.update_adapter` does."""
        return self._call(
            lambda: self._async.update_adapter(
                adapter, source, config=config, label=label, **options
            )
        )

    def remove_adapter(
        self, adapter: str, *, label: str = "", **options: Unpack[PauseArguments]
    ) -> int:
        """Removes a LoRA adapter from every engine, as :meth:`TrainerAgent.remove_adapter` does."""
        return self._call(lambda: self._async.remove_adapter(adapter, label=label, **options))

    @contextlib.contextmanager
    def paused(self, **options: Unpack[PauseArguments]) -> Iterator[GroupAck]:
        """Keeps the group paused for the length of a block, as :meth:`TrainerAgent.paused` does."""
        with self._block(self._async.paused(**options)) as ack:
            yield ack

    @contextlib.contextmanager
    def asleep(
        self,
        *,
        level: SleepLevel = 1,
        mode: PauseMode = "keep",
        wait_s: float = WAIT_S,
        escalate: Escalation = "keep",
    ) -> Iterator[GroupAck]:
        """Keeps the group asleep for the length of a block, as :meth:`TrainerAgent.asleep` does."""
        sleep = self._async.asleep(level=level, mode=mode, wait_s=wait_s, escalate=escalate)
        with self._block(sleep) as ack:
            yield ack

    def init_info(self, engine: str = "wavebus", **fields: Any) -> Any:
        """Returns the ``init_info`` with which vLLM makes a trainer engine.

        See :meth:`TrainerAgent.init_info`; ``engine`` is the trainer engine's name.
        """
        portal, agent = self._connected()
        return portal.call(functools.partial(agent.init_info, engine, **fields))

    def client(
        self, *, chunk_bytes: int | None = None, **options: Unpack[ClientArguments]
    ) -> BusWeightSyncClient:
        """Returns the ``client`` of a vLLM trainer engine. See :meth:`TrainerAgent.client`."""
        return self._async.client(chunk_bytes=chunk_bytes, **options)

    def source(self, weights: Weights) -> BusWeightSource:
        """Wraps weights as a vLLM trainer engine's source. See :meth:`TrainerAgent.source`."""
        return self._async.source(weights)

    def patches(self, patches: Iterable[AnyPatch], *, base: int | None = None) -> BusPatches:
        """Wraps patches for a ``sparse_nccl`` trainer engine. See :meth:`TrainerAgent.patches`."""
        return self._async.patches(patches, base=base)

    def close_transport(self) -> None:
        """Closes the transport and frees its memory, as :meth:`TrainerAgent.close_transport`."""
        self._call(self._async.close_transport)

    def commits_since(self, version: int) -> int:
        """Returns how many versions newer than ``version`` this agent has committed.

        See :meth:`TrainerAgent.commits_since`.
        """
        return self._async.commits_since(version)

    def status(self) -> Status:
        """Returns the broker's view of all groups and engines."""
        return self._call(self._async.status)

    @property
    def last_update(self) -> UpdateReport | None:
        """The report of the last committed update; None before the first."""
        return self._async.last_update
