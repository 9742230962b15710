"""Opens and closes the admission of vLLM's engine cores, for a sidecar.

The cores themselves accept or reject requests: :mod:`sidecar._vllm.plugin.core.admission`. While a
canary's probes run, admission is closed to all other requests.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from bus.errors import EngineError, wrong_state
from bus.messages import NackCode
from sidecar._vllm.plugin.core.admission import SET_ADMISSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bus.messages import PauseMode


class AdmissionControl:
    """Opens and closes the admission of one vLLM engine, in all its cores.

    Args:
        ask: calls vLLM's ``collective_rpc`` with a method and its arguments.
        served: whether clients reach the engine through an API server, which answers rejected
            requests with HTTP 503.

    Attributes:
        is_supported: whether the engine's cores have admission control; False before :meth:`look`.
        found_closed: whether :meth:`look` found admission closed, or open only to probes.
        booted_closed: whether :meth:`look` found admission closed since the cores booted.
    """

    def __init__(
        self, ask: Callable[[str, dict[str, Any]], Awaitable[Any]], *, served: bool = True
    ) -> None:
        self._ask = ask
        self._served = served
        self.is_supported = False
        self.found_closed = self.booted_closed = False
        self._passes_probes = False

    async def look(self) -> None:
        """Reads the cores' admission state into the attributes.

        If an earlier sidecar died while probes were running, the call closes admission for all.
        """
        answer = await self._ask(SET_ADMISSION, {"served": self._served})
        state = answer[0] if isinstance(answer, list) and answer else None
        self.is_supported = isinstance(state, dict) and "admits" in state
        if isinstance(state, dict) and self.is_supported:
            self.found_closed = state["admits"] is False or bool(state["passes"])
            self.booted_closed = state["admits"] is None
            if state["passes"]:
                await self._set(admits=False, passes="")

    async def admit(self, *, open: bool) -> None:  # noqa: A002 - as in the protocol
        """Opens or closes admission; see :meth:`sidecar.engine.Engine.admit`."""
        await self._set(admits=open, why="its weights are not those that its group serves")

    async def end_requests(self) -> int | None:
        """Ends all requests of the cores, with the tokens they have.

        Returns:
            How many requests the first core had; None if the cores have no admission control, and
                nothing was ended.
        """
        if not self.is_supported:
            return None
        [state, *_] = await self._ask(SET_ADMISSION, {"ends": True})
        ended: int | None = state.get("ended")
        return ended

    async def pass_probes(self, mode: PauseMode) -> str:
        """Closes admission to all requests but probes.

        Args:
            mode: how the engine was paused.

        Returns:
            The text with which the ids of the probes' requests must begin.

        Raises:
            EngineError: code ``wrong_state``: the pause keeps requests, which would run beside the
                probes.
        """
        if mode == "keep":
            raise wrong_state("the pause keeps requests, and these would run beside the probes")
        passes = f"wavebus-probe-{secrets.token_hex(8)}"
        self._passes_probes = self.is_supported
        await self._set(passes=passes, why="it runs the probes of a canary")
        return passes

    async def end_probes(self) -> None:
        """Undoes :meth:`pass_probes`, so that admission is as before; else does nothing."""
        if self._passes_probes:
            await self._set(passes="")
            self._passes_probes = False

    async def _set(self, **how: Any) -> None:
        if not self.is_supported:
            raise EngineError(
                "this vLLM's engine cores have no admission control; their log says why",
                code=NackCode.ENGINE_FAILED,
            )
        await self._ask(SET_ADMISSION, how)
