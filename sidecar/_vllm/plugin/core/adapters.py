"""Tracks which LoRA adapters a core's requests use, and which ones its workers hold.

A worker that gets a request for an adapter that it doesn't hold fails, and with it the engine. Only
the core has all requests, also those that wait. So when an adapter is removed, the core names the
adapters in use; and it rejects later requests for an adapter that the workers no longer hold. Both
happen on the core's own thread, so no request comes in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from bus._vllm.seams import Says, Seam
from sidecar._vllm.plugin import operations
from sidecar._vllm.plugin.vllm_names import ADAPTER_PATHS, PLAIN_CORE

if TYPE_CHECKING:
    from collections.abc import Callable

LORA_REQUESTS: Final = Seam(
    "lora requests",
    ("lora_updates",),
    (Says("vllm.v1.request:Request.__init__", "self.lora_request = lora_request"),),
    process="core",
)
_FREEING: Final = (operations.SettleAdapter, operations.DropAdapters)
_MOST_CHARS: Final = 1024  # of an operation that frees adapters, in base64


@LORA_REQUESTS.wrap(f"{PLAIN_CORE}.collective_rpc", "self, method, timeout, args, kwargs")
def collective_rpc(
    original: Callable[..., Any],
    core: Any,
    method: Any,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Adds the adapters in use to operations that free adapters; records the workers' adapters."""
    if method != operations.PERFORM or not kwargs:
        return original(core, method, timeout, args, kwargs)
    freeing = _freeing(kwargs.get("operation", ""))
    if freeing is not None:
        used = msgspec.structs.replace(freeing, in_use=_in_use(core))
        kwargs = {**kwargs, "operation": operations.encode(used)}
    done = original(core, method, timeout, args, kwargs)
    held = done[0].get("adapters") if done else None
    if held is not None:
        core.wavebus_adapters = frozenset(held)
    return done


def perform(core: Any, operation: operations.WorkerOperation) -> None:
    """Makes a core's workers carry out an operation that the core itself requests."""
    encoded = {"operation": operations.encode(operation)}
    core.collective_rpc(operations.PERFORM, None, (), encoded)


def missing(core: Any, request: Any) -> str:
    """Returns why the workers lack the adapter of a request; empty if they don't."""
    held = getattr(core, "wavebus_adapters", None)
    lora = None if held is None else request.lora_request
    if held is None or lora is None or lora.lora_name in held:
        return ""
    ours = lora.lora_path.startswith(ADAPTER_PATHS)
    return f"the adapter {lora.lora_name} was removed" if ours else ""


def _freeing(text: str) -> operations.SettleAdapter | operations.DropAdapters | None:
    """Returns the operation in a text if it frees adapters; workers refuse any other text."""
    if len(text) > _MOST_CHARS:
        return None
    try:
        operation = operations.decode(text)
    except (ValueError, msgspec.MsgspecError):
        return None
    return operation if isinstance(operation, _FREEING) else None


def _in_use(core: Any) -> tuple[str, ...]:
    used = (request.lora_request for request in core.scheduler.requests.values())
    return tuple(sorted({lora.lora_name for lora in used if lora is not None}))
