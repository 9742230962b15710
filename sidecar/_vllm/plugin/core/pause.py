"""Pauses an engine core beside keys and values that it holds for decode engines.

vLLM counts such blocks as work, and cached blocks that can't be freed as an error. Here they delay
no pause, and their salts (:mod:`sidecar._vllm.plugin.core.kv_versions`) keep them from later
requests. Only a sleep waits for them, because it frees their memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bus._vllm.seams import Says, Seam, Takes
from sidecar._vllm.plugin.core.kv_versions import clear
from sidecar._vllm.plugin.vllm_names import BASE_CORE, CONNECTORS, PLAIN_CORE, SCHEDULER

if TYPE_CHECKING:
    from collections.abc import Callable

HELD_KV: Final = Seam(
    "held keys and values",
    ("held_kv",),
    (
        Says(f"{PLAIN_CORE}.pause_scheduler", "self._idle_state_callbacks.append("),
        Says(f"{SCHEDULER}.has_finished_requests", "if self.finished_req_ids:"),
        Says(
            f"{SCHEDULER}._update_waiting_for_remote_kv",
            "request.request_id in self.failed_recving_kv_req_ids",
            "self.kv_cache_manager.free(request)",
            "self.finished_recving_kv_req_ids.remove(request.request_id)",
        ),
        Says(
            f"{SCHEDULER}._handle_blocked_waiting_request",
            "if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:",
        ),
        Takes(f"{SCHEDULER}._handle_blocked_waiting_request", "self, request"),
        Says(f"{SCHEDULER}._preempt_request", "self._inflight_prefills.discard(request)"),
        Takes(f"{SCHEDULER}.get_num_unfinished_requests", "self"),
        Says(f"{CONNECTORS}.v1.multi_connector:MultiConnector.__init__", "self._connectors"),
    ),
    process="core",
    needs=("prefix cache versions",),
    sets=((PLAIN_CORE, "wavebus_sleeps", False), (PLAIN_CORE, "wavebus_pauses", ())),
)


@HELD_KV.wrap(f"{BASE_CORE}._finish_pause", "self, clear_cache")
def finish_pause(original: Callable[..., Any], core: Any, clear_cache: bool) -> None:
    """Records whether requests keep their keys and values over the pause.

    If weights are loaded in the pause, that decides which salts requests get.
    """
    core.wavebus_keeps_kv = not clear_cache
    original(core, clear_cache)


@HELD_KV.wrap(f"{PLAIN_CORE}.pause_scheduler", "self, mode, clear_cache")
def pause_scheduler(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    """Pauses without waiting until decode engines have fetched their blocks.

    Blocks that are held for decode engines are not work. Only a sleep waits for the blocks, because
    it frees their memory.
    """
    before = len(core._idle_state_callbacks)  # noqa: SLF001
    made = original(core, *args, **kwargs)
    if made is not None and not core.wavebus_sleeps:
        callbacks = core._idle_state_callbacks  # noqa: SLF001
        core.wavebus_pauses = (*core.wavebus_pauses, *callbacks[before:])
        del callbacks[before:]
    return made


@HELD_KV.wrap(f"{BASE_CORE}.sleep", "self, level, mode")
def sleep(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    """Marks the core as going to sleep, so that :func:`pause_scheduler` waits for held blocks."""
    core.wavebus_sleeps = True
    try:
        return original(core, *args, **kwargs)
    finally:
        core.wavebus_sleeps = False


@HELD_KV.wrap(f"{PLAIN_CORE}._process_input_queue", "self")
def process_input_queue(original: Callable[..., Any], core: Any) -> None:
    """Completes pauses when the core has no work left but blocks held for decode engines.

    Also frees the blocks of failed loads. The core calls this at every turn of its loop.
    """
    _free_failed_loads(core.scheduler)
    if core.wavebus_pauses and _is_quiet(core):
        pauses, core.wavebus_pauses = core.wavebus_pauses, ()
        for complete in reversed(pauses):
            complete(core)
    original(core)


def _is_quiet(core: Any) -> bool:
    scheduler = core.scheduler
    return not (
        core.engines_running
        or core.batch_queue
        or scheduler.get_num_unfinished_requests()
        or scheduler.finished_req_ids
        or (scheduler.connector and scheduler.connector.has_pending_push_work())
    )


def _free_failed_loads(scheduler: Any) -> None:
    """Frees the blocks of requests after their load of keys and values has failed.

    vLLM frees these blocks only when the request's turn comes. If the request needs further blocks,
    and a request behind it holds them, both would wait forever.
    """
    failed = scheduler.failed_recving_kv_req_ids
    for name in failed & scheduler.finished_recving_kv_req_ids if failed else ():
        if (request := scheduler.requests.get(name)) is not None:
            scheduler._handle_blocked_waiting_request(request)  # noqa: SLF001
            scheduler._inflight_prefills.discard(request)  # noqa: SLF001 - it is to load no more


@HELD_KV.wrap(f"{BASE_CORE}._reset_caches", "self, reset_running_requests, reset_connector")
def reset_caches(_original: Callable[..., Any], core: Any, *_args: Any, **_kwargs: Any) -> None:
    """Clears the caches when a pause begins, with the function :func:`clear`.

    Replaces vLLM's ``EngineCore._reset_caches``, for which blocks that are held for decode engines
    are an error.
    """
    clear(core)
    core.reset_mm_cache()
