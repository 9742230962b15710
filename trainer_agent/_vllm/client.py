"""The ``client`` of vLLM's trainer engines, which sends their calls over the bus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bus.messages import Target
    from trainer_agent._options import UpdateOptions
    from trainer_agent._update.plan import UpdatePlan
    from trainer_agent._update.transport import Leave
    from trainer_agent._vllm.session import TrainerEngineSession
    from trainer_agent._vllm.source import BusWeightSource


class BusWeightSyncClient:
    """Sends a vLLM trainer engine's calls over the bus, as its ``client``.

    Replaces vLLM's ``VLLMWeightSyncClient``, which calls engines over HTTP;
    :meth:`TrainerAgent.client` makes it. Its methods block. Call them from any thread except that
    of the agent's event loop. They raise

    - :class:`bus.errors.UsageError`: the engines were not started with the worker engine of the
      ``init_info``, the bus can't carry an argument, or calls are out of order;
    - the errors of :meth:`TrainerAgent.update_weights`: the update is aborted, and engines resume;
    - :class:`bus.errors.BusClosed`: the agent is not connected.
    """

    def __init__(
        self,
        session: TrainerEngineSession,
        options: UpdateOptions,
        chunk_bytes: int | None = None,
        target: Target = "model",
    ) -> None:
        self._session = session
        self._options = options
        self._target: Target = target
        self._chunk_bytes = chunk_bytes
        self._leave: Leave = None

    def on_trainer_engine(self, leave: Leave) -> None:
        """Notes how the trainer engine leaves a broadcast, if an update fails while it is in one.

        The trainer engines of :meth:`TrainerAgent.init_info` call this.

        Args:
            leave: makes the trainer engine leave its broadcast; called from any thread.
        """
        self._leave = leave

    def open(self, source: BusWeightSource) -> None:
        """Opens the agent's own transport at every engine, for wavebus's trainer engine."""
        self._session.call(lambda: self._session.open(source))

    def send(self, source: BusWeightSource) -> None:
        """Sends one update over the agent's own transport; returns when engines serve it."""
        self._session.call(lambda: self._session.send(source, self._options, self._target))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Makes every engine open its end of the trainer engine's transport."""
        self._session.call(lambda: self._session.init(init_info, self._chunk_bytes, self._leave))

    def shutdown_weight_transfer_engine(self) -> None:
        """Aborts an update that was not finished, and stops using the transport.

        Engines close the transport when the next one is opened, or the trainer leaves.
        """
        self._session.call(self._session.shutdown)

    def start_weight_update(self) -> None:
        """Starts an update; first aborts an update that was not finished.

        Returns when every engine is armed with the metadata of the source, or of the patches that
        were read. The pause, or the allocation of staging memory, follows in the background; if it
        fails, the source and :meth:`update_weights` raise the error.
        """
        self._session.require_rank_zero()
        if self._session.is_patching:
            patch = self._session.next_patch.take()
            self._start(patch, reads_source=False)
            return
        try:
            plan = self._session.source_plan()
        except Exception as error:  # the other ranks wait for this update, even if it is refused
            refused = error
            self._session.call(lambda: self._session.refuse(refused, self._options))
            raise
        self._start(plan, reads_source=True)

    def _start(self, plan: UpdatePlan, *, reads_source: bool) -> None:
        session, options, target = self._session, self._options, self._target
        session.call(lambda: session.start(plan, options, target, reads_source=reads_source))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Announces the chunk that ``update_info`` describes.

        Returns when every engine has applied the chunk.
        """
        self._session.call(lambda: self._session.update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Makes every engine serve the new weights, and resume.

        The bus assigns the version; ``weight_version`` becomes the update's label.
        """
        self._session.call(lambda: self._session.finish(weight_version or ""))
