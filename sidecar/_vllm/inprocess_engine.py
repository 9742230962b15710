"""The adapter of a vLLM engine in the same process: an ``AsyncLLM``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bus.errors import UsageError
from sidecar._vllm.connection_inprocess import InProcessConnection
from sidecar._vllm.engine import VllmAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar._vllm.plugin.environment import DpCoordinator

__all__ = ["VllmEngine"]


class VllmEngine(VllmAdapter):
    """Connects an ``AsyncLLM`` of this process to a :class:`sidecar._sidecar.Sidecar`.

    The caller builds the ``AsyncLLM`` with ``weight_transfer_config`` backend ``wavebus`` (or one
    of vLLM's own, such as ``nccl``) and keeps it: requests go to it directly, and closing the
    adapter leaves it running.

    Args:
        async_llm: the engine; the caller keeps ownership.
        serve: options of vLLM's API server, such as ``("--port", "8000")``. Its data routes are
            then served from this process, for rollout clients. None: no routes are served.
        dp_coordinator: ``bus`` requires that the bus coordinates the engine's DP group; see
            :mod:`sidecar._vllm.plugin.environment` for how to boot vLLM for that.
    """

    def __init__(
        self,
        async_llm: Any,
        *,
        serve: Sequence[str] | None = None,
        dp_coordinator: DpCoordinator = "vllm",
    ) -> None:
        self._llm = InProcessConnection(async_llm, serve)
        super().__init__(self._llm, dp_coordinator)

    def lora_request(self, adapter: str) -> Any:
        """Returns vLLM's ``LoRARequest`` for an adapter that came over the bus.

        Pass it to ``AsyncLLM.generate(..., lora_request=...)``. Get a new one for every request:
        each version of the adapter has its own, which shares no prefix cache with other versions.

        Args:
            adapter: the adapter's name.

        Returns:
            vLLM's ``LoRARequest``.

        Raises:
            UsageError: no update of this adapter was committed in this engine.
        """
        settled = self._llm.settled
        if adapter not in settled:
            have = ", ".join(sorted(settled)) or "none"
            raise UsageError(
                f"adapter={adapter!r}: no update of this adapter was committed (known adapters: "
                f"{have})"
            )
        return settled[adapter]
