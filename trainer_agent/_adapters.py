"""The trainer agent's methods that update and remove a LoRA adapter alone."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from bus._lora import removal_backend
from bus._manifest import NO_TENSORS
from bus.errors import UsageError
from trainer_agent._options import WAIT_S, PauseOptions, UpdateOptions, check_weights
from trainer_agent._update.chunk_stream import ChunkStream, do_nothing, send_stream
from trainer_agent._update.lora import Adapter
from trainer_agent._update.plan import UpdatePlan

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Mapping

    from bus.messages import Escalation, PauseMode, Verify
    from trainer_agent._update.steps import Steps
    from trainer_agent._update.transport import Transport
    from trainer_agent._update.update import Updates
    from trainer_agent._weights.source import Weights


class Adapters:
    """Adds the methods for adapters to :class:`trainer_agent.TrainerAgent`.

    The agent defines the attributes that are used here.
    """

    ranks: int
    chunk_bytes: int
    verify: Verify
    _steps: Steps
    _transport: Transport
    _updates: Updates
    _require_no_other: Callable[[], None]
    _suspend_catch_up: Callable[[], contextlib.AbstractAsyncContextManager[None]]

    async def update_adapter(
        self,
        adapter: str,
        source: Weights,
        *,
        config: Mapping[str, Any],
        label: str = "",
        mode: PauseMode = "keep",
        clear_cache: bool = True,
        wait_s: float = WAIT_S,
        escalate: Escalation = "keep",
    ) -> int:
        """Sends a LoRA adapter to every engine, where it replaces its previous version.

        The model's weights stay as they are. The adapter travels over the agent's backend, so it
        reaches the engines that :meth:`update_weights` reaches.

        Args:
            adapter: the adapter's name. HTTP clients send it as ``model``, and
                :meth:`sidecar._vllm.inprocess_engine.VllmEngine.lora_request` takes it.
            source: all tensors of the adapter, by the names that PEFT gives them in a checkpoint
                (``base_model.model.….lora_A.weight``); or a module with LoRA parameters.
            config: PEFT's ``adapter_config``, such as ``LoraConfig.to_dict()`` returns: ``r``,
                ``lora_alpha``, ``target_modules`` and any other keys.
            label: as :meth:`update_weights`.
            mode: as :meth:`paused`.
            clear_cache: as :meth:`paused`.
            wait_s: as :meth:`paused`.
            escalate: as :meth:`paused`.

        Returns:
            The version that the bus assigned; the model's weights and adapters share one count.

        Raises:
            ManifestRefused: an engine's model doesn't take these tensors, or its
                ``max_lora_rank`` is too low.
            UpdateFailed: the update failed, and engines serve the previous adapter. Code
                ``backend_missing``: LoRA is not enabled in an engine, and nothing has changed.
            Refused: as :meth:`update_weights`.
            BusTimeout: as :meth:`update_weights`.
            UsageError: ``adapter``, ``source`` or ``config`` is invalid; or the trainer has several
                ranks: gather the adapter first, and give rank 0 an agent of its own for it.
        """
        if self.ranks != 1:
            raise UsageError(
                f"update_adapter: this agent is one of {self.ranks} ranks: gather the adapter, and "
                "send it with an agent of rank=0, ranks=1"
            )
        fresh = Adapter(adapter, source, config)
        self._require_no_other()
        check_weights(label)
        pause = PauseOptions(mode, clear_cache=clear_cache, wait_s=wait_s, escalate=escalate)
        async with self._suspend_catch_up(), self._updates.begin(UpdateOptions(pause)) as update:
            stream = ChunkStream(
                fresh.source,
                self._transport.sender_for(fresh),
                chunk_bytes=self.chunk_bytes,
                verify=self.verify,
                of_model=False,
            )
            update.on_end = stream.close
            return (await send_stream(update, stream, self._transport, self._steps, label)).version

    async def remove_adapter(
        self,
        adapter: str,
        *,
        label: str = "",
        mode: PauseMode = "keep",
        clear_cache: bool = True,
        wait_s: float = WAIT_S,
        escalate: Escalation = "keep",
    ) -> int:
        """Removes a LoRA adapter from every engine, by an update of the group.

        Engines refuse new requests for it, as for an unknown one. Requests that an engine has go on
        with it, unless ``mode`` ends them; then their engine frees the adapter's memory. An engine
        without this adapter takes part, and changes nothing.

        Args:
            label: as :meth:`update_weights`.
            mode: as :meth:`paused`.
            clear_cache: as :meth:`paused`.
            wait_s: as :meth:`paused`.
            escalate: as :meth:`paused`.

        Returns:
            The version that the bus assigned, as :meth:`update_adapter`.

        Raises:
            UpdateFailed: the update failed, and engines serve the adapter. Code
                ``backend_missing``: LoRA is not enabled in an engine, and nothing has changed.
            Refused: as :meth:`update_weights`.
            BusTimeout: as :meth:`update_weights`.
            UsageError: ``adapter`` is no valid name; or the trainer has several ranks: use an agent
                of ``rank=0, ranks=1``.
        """
        if self.ranks != 1:
            raise UsageError(
                f"remove_adapter: this agent is one of {self.ranks} ranks: use one of rank=0, "
                "ranks=1"
            )
        backend = removal_backend(adapter)
        self._require_no_other()
        check_weights(label)
        pause = PauseOptions(mode, clear_cache=clear_cache, wait_s=wait_s, escalate=escalate)
        transport, plan = self._transport, UpdatePlan((), NO_TENSORS)
        open_removal = functools.partial(transport.open_removal, backend)
        async with self._suspend_catch_up(), self._updates.begin(UpdateOptions(pause)) as update:
            await open_removal()
            await transport.arm(update, plan, label, open_removal)
            await update.release_ranks(do_nothing)
            await update.start()
            return (await update.commit(label, "off")).version
