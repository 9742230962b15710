"""How the sidecar sets the admission of its vLLM (:mod:`sidecar.vllm.plugin.core.admission`), and
the probes that pass it.

A paused vLLM runs no probe. So it is resumed with its admission closed to all but them, and paused
again. Its clients talk to it by themselves: what it would make for requests that a pause keeps
can't be held back, so there must be none, and those that come meanwhile are ended.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Protocol

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar.vllm.plugin.core.admission import SET_ADMISSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bus.messages import PauseMode
    from sidecar.engine import ProbeResult


class Probing(Protocol):
    """What probes need of an adapter: part of :class:`sidecar.engine.Engine`, and one request."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None: ...

    async def resume(self) -> None: ...

    async def abort_requests(self) -> int: ...

    async def probe_one(
        self, request_id: str, prompt: tuple[int, ...], max_tokens: int, salt: str
    ) -> ProbeResult: ...


class AdmissionControl:
    """One engine's.

    Args:
        ask: makes vLLM's ``collective_rpc``.
        served: clients reach it through an API server.

    Attributes:
        there: its cores have admission control.
        found_closed: it was closed, or a probe was under way, when :meth:`look` looked.
        booted_closed: it was closed since its cores have booted.
    """

    def __init__(
        self, ask: Callable[[str, dict[str, Any]], Awaitable[Any]], *, served: bool = True
    ) -> None:
        self._ask = ask
        self._served = served
        self.is_supported = False
        self.found_closed = self.booted_closed = False

    async def look(self) -> None:
        """How it stands. Who left it with a probe under way has not committed: it is closed."""
        answer = await self._ask(SET_ADMISSION, {"served": self._served})
        state = answer[0] if isinstance(answer, list) and answer else None
        self.is_supported = isinstance(state, dict) and "admits" in state
        if isinstance(state, dict) and self.is_supported:
            self.found_closed = state["admits"] is False or bool(state["passes"])
            self.booted_closed = state["admits"] is None
            if state["passes"]:
                await self._set(admits=False, passes="")

    async def admit(self, *, open: bool) -> None:  # noqa: A002 - as in the protocol
        """See :meth:`sidecar.engine.Engine.admit`."""
        await self._set(admits=open, why="its weights are not those that its group serves")

    async def end_requests(self) -> int | None:
        """End all requests that the cores have; return how many (of the first core), or None where
        cores can't."""
        if not self.is_supported:
            return None
        [state, *_] = await self._ask(SET_ADMISSION, {"ends": True})
        ended: int | None = state.get("ended")
        return ended

    async def probe(
        self,
        engine: Probing,
        prompts: tuple[tuple[int, ...], ...],
        max_tokens: int,
        salt: str,
        *,
        mode: PauseMode,
        clear_cache: bool,
    ) -> tuple[ProbeResult, ...]:
        """See :meth:`sidecar.engine.Engine.probe`.

        Raises:
            EngineError: code ``wrong_state``, for a pause that keeps requests.
        """
        if mode == "keep":
            raise EngineError("a pause that keeps requests", code=NackCode.WRONG_STATE)
        passes = f"wavebus-probe-{secrets.token_hex(8)}"
        await self._set(passes=passes, why="it runs the probes of a canary")
        await engine.abort_requests()
        await engine.resume()
        try:
            results = await asyncio.gather(
                *(
                    engine.probe_one(f"{passes}-{number}", prompt, max_tokens, salt)
                    for number, prompt in enumerate(prompts)
                )
            )
        finally:
            await engine.pause(mode, clear_cache=clear_cache)
            await self._set(passes="")
        return tuple(results)

    async def _set(self, **how: Any) -> None:
        if not self.is_supported:
            raise EngineError(
                "this vLLM's engine cores have no admission control; their log says why",
                code=NackCode.ENGINE_FAILED,
            )
        await self._ask(SET_ADMISSION, how)
