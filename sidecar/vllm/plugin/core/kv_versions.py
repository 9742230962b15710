"""Keys and values of one version are never found, or fetched, by a request of another.

**Salts.** vLLM finds keys and values, in its prefix cache and in what offloads it, by hashes of
blocks. A request's salt is a part of them, and begins with the run and the version that its keys
and values are of: ``wavebus:<run>:<version>:``. Engines of one run so share what they store, and
those of two runs never do.

What becomes of a request when a new version is put in force:

============================= ============================== =======================================
the request                   caches are cleared             caches are kept
============================= ============================== =======================================
has not begun                 new salt                       new salt
has keys and values           computes all anew, new salt    goes on with them, old salt
waits for some that are on    as one whose load has failed:  goes on with them, old salt
their way                     computes all, new salt
has ended, and a decode       they stay until it has fetched them, or its lease is over: memory that
engine is to fetch from it    is held, which stands in the way of no swap and no pause
============================= ============================== =======================================

A request that gets a new salt is announced to the KV connector again, which may remember the hashes
of before.

**Between prefill and decode engines.** A prefill engine adds the salt to what it hands over (the
*tag*), and routers pass it on. A decode engine whose own salt is another one

- fetches nothing, if caches were cleared at its last version: vLLM then tells the prefill engine
  that the blocks are free, and computes the prompt;
- fetches all the same, if they were kept, under a salt of both, so that no later request finds it.

No tag is the tag of another version, but for engines that no bus has given a salt. Nothing is
fetched either whose lease has not been renewed in time, since the prefill engine may have given the
blocks away: a decode engine in a pause renews none.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from sidecar.vllm.plugin.kv_connectors import is_keyed_by_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger("vllm.wavebus")
_SALT: Final = "wavebus:"
# In vLLM's ``kv_transfer_params``: the salt of what is handed over.
TAG: Final = "wavebus_salt"


# -- salts -------------------------------------------------------------------------------


def join_run(core: Any, run: str) -> list[bool]:
    """Answer :data:`sidecar.vllm.plugin.worker_rpc.JOIN_RUN`."""
    if run != core.wavebus_run:
        core.wavebus_run = run
        _set_salt(core)
        _resalt(core, begun=False)
    return [True]


def set_weight_version(original: Callable[..., Any], core: Any, weight_version: str) -> None:
    """Set the served version, and salt requests anew if it has changed."""
    changed = weight_version != core.get_weight_version()
    original(core, weight_version)
    if changed:
        core.wavebus_adopts, core.wavebus_keeps_kv = core.wavebus_keeps_kv, True
        _set_salt(core)
        _resalt(core, begun=not core.wavebus_adopts)


def _set_salt(core: Any) -> None:
    core.wavebus_salt = f"{_SALT}{core.wavebus_run}:{core.get_weight_version()}:"


def preprocess_add_request(original: Callable[..., Any], core: Any, request: Any) -> Any:
    """Hash a request's blocks with the salt of the version that serves."""
    own, salt = request.cache_salt, core.wavebus_salt
    if salt:
        request.cache_salt = salt + (own or "")
    made, wave = original(core, request)
    made.wavebus_own_salt, made.wavebus_salt = own, salt
    return made, wave


def add_request(
    original: Callable[..., Any], core: Any, request: Any, request_wave: int = 0
) -> Any:
    """Salt the request again if its salt is out of date, or names what it is to fetch.

    Requests are hashed before their turn, and a new version may have come between.
    """
    _salt(core, request)
    note_untagged(core, request.kv_transfer_params)
    request.wavebus_renewed_s = time.perf_counter()
    return original(core, request, request_wave)


def note_untagged(core: Any, params: Any) -> None:
    """Count requests whose keys and values name no version, and warn of the first."""
    if core.wavebus_salt and params and params.get("do_remote_prefill") and TAG not in params:
        core.wavebus_untagged += 1
        if core.wavebus_untagged == 1:
            _log.warning(
                "wavebus: a request came with keys and values that name no version (%s is missing "
                "in kv_transfer_params): its prefill engine is not on the bus, or the router "
                "drops that field. They count as of another version",
                TAG,
            )


def _salt_of(core: Any, served: str, params: Any) -> tuple[str, bool]:
    """Return a new request's salt, and whether it may fetch what it is offered."""
    if not (params and params.get("do_remote_prefill")):
        return served, True
    tag = str(params.get(TAG, ""))
    if tag == served:
        return served, True
    return (f"{tag}{served}", True) if core.wavebus_adopts else (served, False)


def _resalt(core: Any, *, begun: bool) -> None:
    """Give requests the salt that their keys and values are of.

    ``begun``: requests that have keys and values compute them anew.
    """
    for request in core.scheduler.requests.values():
        has_begun = (
            request.num_computed_tokens or request.num_output_tokens or request.num_preemptions
        )
        keeps = has_begun and (not begun or request.status.name == "RUNNING")
        if not keeps and _salt(core, request) and core.scheduler.connector:
            core.scheduler.connector.on_new_request(request)


def _salt(core: Any, request: Any) -> bool:
    """Give the request its salt; return whether that is another one."""
    before = getattr(request, "wavebus_salt", None)
    if before is None or request.is_finished():
        return False
    salt, request.wavebus_fetches = _salt_of(core, core.wavebus_salt, request.kv_transfer_params)
    if salt == before:
        return False
    request.wavebus_salt = salt
    request.cache_salt = salt + (request.wavebus_own_salt or "")
    request.block_hashes.clear()
    request.update_block_hashes()
    return True


# -- what is cleared ---------------------------------------------------------------------


def clear(core: Any) -> list[bool]:
    """Answer :data:`sidecar.vllm.plugin.worker_rpc.CLEAR_CACHES`: requests compute all anew.

    What can't be freed now is found by no request once requests have a new salt. What is remembered
    of images as they came stays: front ends remember it, too, and send it once.

    Raises:
        RuntimeError: something that salts don't keep apart is not cleared.
    """
    scheduler = core.scheduler
    salted = hasattr(core, "wavebus_salt")
    core.wavebus_keeps_kv = False
    try:
        cleared = core.reset_prefix_cache(reset_running_requests=True)
    except RuntimeError:
        cleared = False
    if not (cleared or salted):
        raise RuntimeError("some keys and values are held, and have no salt")
    for each in _connectors(scheduler.connector):
        said = each.reset_cache()
        if said is False and not salted:
            raise RuntimeError(f"{type(each).__name__} can't be cleared")
        if is_keyed_by_tokens(type(each).__name__) and said is not True:
            raise RuntimeError(f"{type(each).__name__} does not say that its cache is cleared")
    for request in list(scheduler.requests.values()) if scheduler.connector else ():
        _drop_loaded(scheduler, request)
    core.reset_encoder_cache()
    return [True]


def _connectors(connector: Any) -> Iterator[Any]:
    """Yield the connectors inside a ``MultiConnector``, which may hold others like it."""
    inside = getattr(connector, "_connectors", None)
    if inside is not None:
        for each in inside:
            yield from _connectors(each)
    elif connector is not None:
        yield connector


def _drop_loaded(scheduler: Any, request: Any) -> None:
    """Have a request compute the keys and values that it has loaded, or waits for.

    vLLM does that with a request whose load has failed, so the request is made to look like one.
    """
    status, name = type(request.status), request.request_id
    loads = request.status is status.WAITING_FOR_REMOTE_KVS
    waits = request.status in (status.WAITING, status.PREEMPTED)
    if loads or (waits and request.num_computed_tokens):
        request.num_computed_tokens = 0
        request.status = status.WAITING_FOR_REMOTE_KVS
        scheduler.failed_recving_kv_req_ids.add(name)
        if not loads:
            scheduler.finished_recving_kv_req_ids.add(name)


def reset_caches(_original: Callable[..., Any], core: Any, *_args: Any, **_kwargs: Any) -> None:
    """Clear what a pause clears when it is made; blocks that are held don't fail it."""
    clear(core)
    core.reset_mm_cache()


# -- pauses ------------------------------------------------------------------------------


def finish_pause(original: Callable[..., Any], core: Any, clear_cache: bool) -> None:
    """Note whether a version that is loaded in this pause keeps keys and values."""
    core.wavebus_keeps_kv = not clear_cache
    original(core, clear_cache)


def pause_scheduler(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    """Wait for steps and requests, but not for decode engines that have yet to fetch.

    Blocks that are held for decode engines are no work. A sleep must wait for them, because it
    takes the memory.
    """
    before = len(core._idle_state_callbacks)  # noqa: SLF001
    made = original(core, *args, **kwargs)
    if made is not None and not core.wavebus_sleeps:
        callbacks = core._idle_state_callbacks  # noqa: SLF001
        core.wavebus_pauses = (*core.wavebus_pauses, *callbacks[before:])
        del callbacks[before:]
    return made


def sleep(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    """Mark the pause inside a sleep, which waits for held blocks."""
    core.wavebus_sleeps = True
    try:
        return original(core, *args, **kwargs)
    finally:
        core.wavebus_sleeps = False


def process_input_queue(original: Callable[..., Any], core: Any) -> None:
    """Complete the pauses that wait only for blocks to be fetched."""
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


# -- between prefill and decode engines --------------------------------------------------


def connector_finished(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Tag what is handed over with its salt."""
    delayed, params = original(scheduler, request)
    salt = getattr(request, "wavebus_salt", "")
    if params and salt:
        params[TAG] = salt
    return delayed, params


def matched_tokens(
    original: Callable[..., Any], nixl: Any, request: Any, num_computed_tokens: int
) -> Any:
    """Fetch nothing of another version, and nothing that may be gone."""
    params = request.kv_transfer_params
    if params and params.get("do_remote_prefill") and hasattr(request, "wavebus_fetches"):
        if not request.wavebus_fetches:
            _log.debug("wavebus: %s computes what is of %s", request.request_id, params.get(TAG))
            return 0, False
        if _is_lost(nixl, request):
            return 0, False
        request.wavebus_lender = nixl
    return original(nixl, request, num_computed_tokens)


def build_connector_meta(original: Callable[..., Any], nixl: Any, scheduler_output: Any) -> Any:
    """Note which requests' leases were not renewed in time."""
    before = nixl._last_heartbeat_time  # noqa: SLF001
    made = original(nixl, scheduler_output)
    now = nixl._last_heartbeat_time  # noqa: SLF001
    if now - before > _patience_s(nixl):
        nixl.wavebus_lost_s = now - _patience_s(nixl)
    return made


def update_waiting(original: Callable[..., Any], scheduler: Any, request: Any) -> None:
    """Compute anew what was fetched after its lease, or may have been."""
    lender = getattr(request, "wavebus_lender", None)
    if lender is not None and _is_lost(lender, request):
        request.num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids.add(request.request_id)
    request.wavebus_lender = None
    original(scheduler, request)


def _is_lost(nixl: Any, request: Any) -> bool:
    """Return whether the lease was not renewed, at some time, for longer than it runs.

    The lease began no later than the request came here, and heartbeats renew it.
    """
    since = request.wavebus_renewed_s
    last = max(since, nixl._last_heartbeat_time)  # noqa: SLF001
    lost_s = getattr(nixl, "wavebus_lost_s", 0.0)
    lost: bool = since <= lost_s or time.perf_counter() - last > _patience_s(nixl)
    return lost


def _patience_s(nixl: Any) -> float:
    """Return the lease in seconds, less what a heartbeat may take to come."""
    return float(nixl._kv_lease_duration - nixl._heartbeat_interval)  # noqa: SLF001


def release(core: Any, request: Any) -> None:
    """Tell the prefill engine of a request that is turned away: it holds blocks for it."""
    params = request.kv_transfer_params
    if params and params.get("do_remote_prefill"):
        core.scheduler.add_request(request)
        core.scheduler.finish_requests(request.request_id, core.wavebus_aborted)
