"""Makes the engine calls that the session machine requests.

The session machine (:mod:`bus.protocol.engine.session`) describes each call as a data class. This
module turns the description into a call of :class:`sidecar.engine.Engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.errors import EngineError
from bus.messages import NackCode
from bus.protocol.engine.calls import (
    Call,
    CallAbortRequests,
    CallAdmit,
    CallArm,
    CallCommit,
    CallDrain,
    CallExtend,
    CallFinish,
    CallLoad,
    CallOpenTransfer,
    CallPause,
    CallProbe,
    CallReceive,
    CallRestore,
    CallResult,
    CallResume,
    CallSleep,
    CallStart,
    CallStrengthenPause,
    CallSwap,
    CallWakeWeights,
)
from sidecar.engine import AdapterEngine, DrainableEngine, ExtendableEngine

if TYPE_CHECKING:
    from sidecar.engine import Engine


async def dispatch(engine: Engine, call: Call) -> CallResult:
    """Makes one call to an engine, and returns its result.

    Args:
        engine: the engine's adapter.
        call: describes the call.

    Returns:
        For a pause and a swap, the number of requests in the engine; for ARM, the staging capacity;
            for a canary, the probes' results; for an opened transfer, how many chunks may be
            received before the first is loaded; otherwise None.

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
        case CallReceive():
            await engine.receive(call)
        case CallLoad(seq, verify, sums):
            await engine.load(seq, verify, sums)
        case CallArm():
            return await _arm(engine, call)
        case CallExtend(part):
            if not isinstance(engine, ExtendableEngine):
                text = "this engine takes all tensors of an update at once"
                raise EngineError(text, code=NackCode.MANIFEST_REFUSED)
            await engine.extend(part)
        case CallStart(recover, target, staged):
            await engine.start_update(recover=recover, target=target, staged=staged)
        case CallFinish():
            await engine.finish_update()
        case CallProbe(prompts, max_tokens, salt, mode, clear_cache):
            return await engine.probe(prompts, max_tokens, salt, mode=mode, clear_cache=clear_cache)
        case CallCommit(version):
            await engine.commit(version)
        case CallSwap(version, clear_cache):
            return await engine.swap(version, clear_cache=clear_cache)
        case CallOpenTransfer(backend=backend, params=params, assignment=place):
            return await engine.open_transfer(backend, params, place)
        case CallDrain(backend=backend, handle=handle, timeout_ms=timeout_ms):
            if not isinstance(engine, DrainableEngine):
                text = f"this engine has no {backend} transport to drain"
                raise EngineError(text, code=NackCode.TRANSFER_FAILED)
            await engine.drain_transfer(backend, handle, timeout_ms / 1000)
        case CallRestore(target):
            await engine.restore(target)
        case CallAbortRequests():
            await engine.admit(open=False)
            await engine.abort_requests()
        case CallAdmit():
            await engine.admit(open=True)
    return None


async def _arm(engine: Engine, call: CallArm) -> CallResult:
    if call.drops_adapters and isinstance(engine, AdapterEngine):
        await engine.drop_adapters()
    return await engine.arm(call.manifest, call.target, call.staging)
