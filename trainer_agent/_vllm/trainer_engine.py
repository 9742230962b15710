"""wavebus's own trainer engine for vLLM's factory, over any backend of the trainer agent.

Importing this module registers the trainer engine as ``wavebus`` in
``WeightTransferTrainerFactory``; :meth:`TrainerAgent.init_info` does so. Unlike vLLM's own trainer
engines it sends no tensors itself: its client has the agent send them, as the agent's own updates
are sent.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from bus.errors import BusClosed, UsageError

if TYPE_CHECKING:
    from trainer_agent._vllm.client import BusWeightSyncClient
    from trainer_agent._vllm.source import BusWeightSource

BACKEND = "wavebus"


@dataclass
class WavebusTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The init info that :meth:`TrainerAgent.init_info` returns."""

    backend: ClassVar[str] = BACKEND


class WavebusTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Sends a source over the agent's backend, with the agent's options.

    Every rank of the trainer makes one. Rank 0 sends, and the others gather tensors with it.
    """

    init_info_cls = WavebusTrainerInitInfo

    @classmethod
    def trainer_init(
        cls,
        init_info: WavebusTrainerInitInfo,
        *,
        client: BusWeightSyncClient,
        source: BusWeightSource | None = None,
    ) -> Self:
        """Makes the trainer engine, and opens the transport at every engine.

        Args:
            init_info: what :meth:`TrainerAgent.init_info` returned.
            client: what :meth:`TrainerAgent.client` returned.
            source: what :meth:`TrainerAgent.source` returned.

        Raises:
            UsageError: there is no source, or its metadata is contradictory.
            Refused: an engine can't open its end of the transport, and is named.
        """
        if source is None:
            raise UsageError("source=None: give it agent.source(model)")
        source.describe()  # on every rank, because it may be a collective
        if init_info.is_sender:
            client.open(source)
        return cls(client=client, source=source, is_sender=init_info.is_sender)

    def send_weights(self) -> None:
        """Sends one update; call it on every rank.

        Returns on rank 0 when engines serve the weights.

        Raises:
            Refused, BusTimeout, UsageError: see :meth:`TrainerAgent.update_weights`.
        """
        self.source.describe()
        if self.is_sender:
            self.client.send(self.source)
        else:
            for _ in self.source:
                pass

    def shutdown(self) -> None:
        """Closes the trainer's end of the transport, unless the agent has done so."""
        if self.is_sender:
            with contextlib.suppress(BusClosed):
                self.client.shutdown_weight_transfer_engine()


# The factory is global and raises if this module is loaded again.
with contextlib.suppress(ValueError):
    WeightTransferTrainerFactory.register_engine(BACKEND, WavebusTrainerEngine)
