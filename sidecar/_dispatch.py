"""Makes the engine calls that the session machine requests.

The session machine (:mod:`bus._protocol.engine.session`) describes each call as a data class. This
module turns the description into a call of :class:`sidecar.engine.Engine`. Operations of an update
(:mod:`bus.operations`) are passed on as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus._protocol.engine.calls import (
    Call,
    CallAbortRequests,
    CallAdmit,
    CallCommit,
    CallPause,
    CallProbe,
    CallResult,
    CallResume,
    CallSleep,
    CallStrengthenPause,
    CallWakeWeights,
)

if TYPE_CHECKING:
    from sidecar.engine import Engine


async def dispatch(engine: Engine, call: Call) -> CallResult:
    """Makes one call to an engine, and returns its result.

    Returns:
        For a pause, the number of requests in the engine; for a canary, the probes' results; for an
            operation, its answer; otherwise None.

    Raises:
        EngineError: the call failed. An adapter may raise other exceptions, too.
    """
    match call:
        case CallPause(mode, clear_cache):
            return await engine.pause(mode, clear_cache=clear_cache)
        case CallStrengthenPause(aborts, clears):
            if aborts:
                await engine.abort_requests()
            if clears:
                await engine.clear_cache()
        case CallResume(asleep, opens):
            if opens:
                await engine.admit(open=True)
            await (engine.wake() if asleep else engine.resume())
        case CallSleep(level, clears):
            if clears:
                await engine.clear_cache()
            await engine.sleep(level)
        case CallWakeWeights():
            await engine.wake_weights()
        case CallProbe(prompts, max_tokens, salt, mode, clear_cache):
            return await engine.probe(prompts, max_tokens, salt, mode=mode, clear_cache=clear_cache)
        case CallCommit(version):
            await engine.commit(version)
        case CallAbortRequests():
            await engine.admit(open=False)
            await engine.abort_requests()
        case CallAdmit():
            await engine.admit(open=True)
        case _:
            return await engine.perform(call)
    return None
