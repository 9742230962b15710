"""Keeps the keys and values of different weight versions apart.

**Salts.** vLLM looks up keys and values, in its prefix cache and in offloading connectors, by
hashes of blocks. A request's cache salt is part of these hashes. Here it begins with the run and
the version of its keys and values: ``wavebus:<run>:<version>:``. So engines of one run share what
they store, and engines of different runs never do.

What happens to a request when a new version takes effect:

============================= ============================== =======================================
the request                   caches are cleared             caches are kept
============================= ============================== =======================================
has not begun                 new salt                       new salt
has keys and values           recomputes all, new salt       continues with them, old salt
waits for keys and values     treated as a failed load:      continues with them, old salt
being loaded                  recomputes all, new salt
has ended, and a decode       its blocks stay until they are fetched, or their lease is over. They
engine is to fetch from it    occupy memory, but delay no swap and no pause
============================= ============================== =======================================

A request that gets a new salt is announced to the KV connector again, because the connector may
have stored its old hashes.

**Between prefill and decode engines.** A prefill engine adds its salt (the *tag*) to the parameters
that it hands over, and routers pass them on. If a decode engine's own salt differs,

- and caches were cleared at its last version: it fetches nothing. vLLM then reports to the prefill
  engine that the blocks are free, and computes the prompt;
- and caches were kept: it fetches, under a salt made of both, so that no later request finds the
  blocks.

A missing tag counts as another version, except in an engine that has no salt from a bus. A request
also fetches nothing if its lease was not renewed in time, because the prefill engine may have
reused the blocks: a decode engine in a pause renews no leases.

:mod:`sidecar._vllm.plugin.core.pause` makes pauses beside keys and values that are held.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from bus._vllm.seams import Has, Says, Seam
from sidecar._vllm.plugin.kv_connectors import is_keyed_by_tokens
from sidecar._vllm.plugin.vllm_names import (
    BASE_CORE,
    CLEARS_PREFIXES,
    NIXL,
    NIXL_BASE,
    PLAIN_CORE,
    SCHEDULER,
    TAKES_RPC,
    TELLS_VERSION,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger("vllm.wavebus")
_SALT: Final = "wavebus:"
_UNTAGGED: Final = "wavebus-untagged:"
# The key in vLLM's ``kv_transfer_params`` for the prefill engine's salt.
TAG: Final = "wavebus_salt"

PREFIX_CACHE_VERSIONS: Final = Seam(
    "prefix cache versions",
    ("prefix_cache_versions",),
    (
        TELLS_VERSION,
        Says("vllm.v1.core.kv_cache_utils", "request.cache_salt"),
        Has("vllm.v1.request:Request", "update_block_hashes"),
        TAKES_RPC,
        CLEARS_PREFIXES,
        Has(f"{PLAIN_CORE}.reset_encoder_cache"),
    ),
    process="core",
    sets=(
        (PLAIN_CORE, "wavebus_salt", ""),
        (PLAIN_CORE, "wavebus_run", ""),
        (PLAIN_CORE, "wavebus_keeps_kv", True),
        (PLAIN_CORE, "wavebus_adopts", False),
        (PLAIN_CORE, "wavebus_untagged", 0),
    ),
)
HAND_OVER: Final = Seam(
    "KV hand-over",
    ("kv_handover",),
    (
        Says(
            f"{NIXL}.update_state_after_alloc",
            "if num_external_tokens > 0 else ()",
            "params['do_remote_prefill'] = False",
        ),
        Says(f"{NIXL}.request_finished", "if params.get('do_remote_prefill'):"),
        Says(
            f"{NIXL_BASE}.build_connector_meta",
            "now = time.perf_counter()",
            "if now - self._last_heartbeat_time >= self._heartbeat_interval:",
        ),
        Says(f"{NIXL_BASE}.__init__", "self._kv_lease_duration"),
    ),
    process="core",
    needs=("held keys and values",),
)


# -- salts -------------------------------------------------------------------------------


@PREFIX_CACHE_VERSIONS.answer("wavebus_run")
def join_run(core: Any, run: str) -> list[bool]:
    """Salts the core's caches with the id of a run.

    The core answers :data:`sidecar._vllm.plugin.worker_rpc.JOIN_RUN` with this function.
    """
    if run != core.wavebus_run:
        core.wavebus_run = run
        _set_salt(core)
        _resalt(core, begun=False)
    return [True]


@PREFIX_CACHE_VERSIONS.wrap(f"{BASE_CORE}.set_weight_version", "self, weight_version")
def set_weight_version(original: Callable[..., Any], core: Any, weight_version: str) -> None:
    """Gives requests the salt of a new version when the core begins to serve it."""
    changed = weight_version != core.get_weight_version()
    original(core, weight_version)
    if changed:
        core.wavebus_adopts, core.wavebus_keeps_kv = core.wavebus_keeps_kv, True
        _set_salt(core)
        _resalt(core, begun=not core.wavebus_adopts)


def _set_salt(core: Any) -> None:
    core.wavebus_salt = f"{_SALT}{core.wavebus_run}:{core.get_weight_version()}:"


@PREFIX_CACHE_VERSIONS.wrap(f"{PLAIN_CORE}.preprocess_add_request", "self, request")
def preprocess_add_request(original: Callable[..., Any], core: Any, request: Any) -> Any:
    """Adds the served version's salt to a new request, before its blocks are hashed."""
    own, salt = request.cache_salt, core.wavebus_salt
    if salt:
        request.cache_salt = salt + (own or "")
    made, wave = original(core, request)
    made.wavebus_own_salt, made.wavebus_salt = own, salt
    return made, wave


@PREFIX_CACHE_VERSIONS.wrap(f"{BASE_CORE}.add_request", "self, request, request_wave")
def add_request(
    original: Callable[..., Any], core: Any, request: Any, request_wave: int = 0
) -> Any:
    """Corrects the salt of a request that was hashed before a new version came.

    vLLM hashes requests in another thread, before the core adds them.
    """
    _salt(core, request)
    note_untagged(core, request.kv_transfer_params)
    request.wavebus_renewed_s = time.perf_counter()
    return original(core, request, request_wave)


def note_untagged(core: Any, params: Any) -> None:
    """Counts a request if it brings keys and values of an unknown version.

    Such a request comes from a prefill engine outside the bus, or through a router that drops the
    tag. The first one is logged as a warning.

    Args:
        core: the engine core.
        params: the request's ``kv_transfer_params``; None without any.
    """
    if core.wavebus_salt and params and params.get("do_remote_prefill") and TAG not in params:
        core.wavebus_untagged += 1
        if core.wavebus_untagged == 1:
            _log.warning(
                "wavebus: a request came with keys and values that name no version (%s is missing "
                "in kv_transfer_params): its prefill engine is not on the bus, or the router "
                "drops that field. The request computes its prompt again, or keeps the fetched "
                "blocks apart from other requests",
                TAG,
            )


def _salt_of(core: Any, request: Any) -> tuple[str, bool]:
    """Returns a new request's salt, and whether it may fetch the offered keys and values.

    Keys and values without a version count as another version, which no other request shares.
    """
    served, params = core.wavebus_salt, request.kv_transfer_params
    if not (params and params.get("do_remote_prefill")):
        return served, True
    tag = str(params.get(TAG, ""))
    if tag == served:
        return served, True
    origin = tag or f"{_UNTAGGED}{request.request_id}:"
    return (f"{origin}{served}", True) if core.wavebus_adopts else (served, False)


def _resalt(core: Any, *, begun: bool) -> None:
    """Gives the current salt to requests that have not begun.

    ``begun``: also to requests that have begun but don't run. They compute their keys and values
    again.
    """
    for request in core.scheduler.requests.values():
        has_begun = (
            request.num_computed_tokens or request.num_output_tokens or request.num_preemptions
        )
        keeps = has_begun and (not begun or request.status.name == "RUNNING")
        if not keeps and _salt(core, request) and core.scheduler.connector:
            core.scheduler.connector.on_new_request(request)


def _salt(core: Any, request: Any) -> bool:
    """Sets the request's salt; returns whether the salt has changed."""
    before = getattr(request, "wavebus_salt", None)
    if before is None or request.is_finished():
        return False
    salt, request.wavebus_fetches = _salt_of(core, request)
    if salt == before:
        return False
    request.wavebus_salt = salt
    request.cache_salt = salt + (request.wavebus_own_salt or "")
    request.block_hashes.clear()
    request.update_block_hashes()
    return True


# -- what is cleared ---------------------------------------------------------------------


@PREFIX_CACHE_VERSIONS.answer("wavebus_clear_caches")
def clear(core: Any) -> list[bool]:
    """Drops keys and values, so that all requests compute theirs again.

    The core answers :data:`sidecar._vllm.plugin.worker_rpc.CLEAR_CACHES` with this function. Blocks
    that can't be freed now stay, but no request with a new salt finds them. Preprocessed images
    stay cached, because front ends cache them too and send them once; encoder outputs are dropped.

    Raises:
        RuntimeError: a cache could not be cleared, and no salt keeps its entries from later
            requests.
    """
    scheduler = core.scheduler
    salted = hasattr(core, "wavebus_salt")
    core.wavebus_keeps_kv = False
    try:
        cleared = core.reset_prefix_cache(reset_running_requests=True)
    except RuntimeError:
        cleared = False
    if not (cleared or salted):
        raise RuntimeError(
            "the prefix cache can't be cleared, because requests hold blocks; and cache salts are "
            "off, so later requests could find keys and values of the old weights"
        )
    for each in _connectors(scheduler.connector):
        said = each.reset_cache()
        if said is False and not salted:
            raise RuntimeError(f"the KV connector {type(each).__name__} could not clear its cache")
        if is_keyed_by_tokens(type(each).__name__) and said is not True:
            raise RuntimeError(f"the KV connector {type(each).__name__} did not confirm a clear")
    for request in list(scheduler.requests.values()) if scheduler.connector else ():
        _drop_loaded(scheduler, request)
    core.reset_encoder_cache()
    return [True]


def _connectors(connector: Any) -> Iterator[Any]:
    """Yields the connectors inside a ``MultiConnector``, also inside nested ones."""
    inside = getattr(connector, "_connectors", None)
    if inside is not None:
        for each in inside:
            yield from _connectors(each)
    elif connector is not None:
        yield connector


def _drop_loaded(scheduler: Any, request: Any) -> None:
    """Makes a request recompute the keys and values that it has loaded, or waits for.

    vLLM does that for a request whose load has failed, so the request is marked as one.
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


# -- between prefill and decode engines --------------------------------------------------


@HAND_OVER.wrap(f"{SCHEDULER}._connector_finished", "self, request")
def connector_finished(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Adds a prefill engine's salt to the parameters that the decode engine will get."""
    delayed, params = original(scheduler, request)
    salt = getattr(request, "wavebus_salt", "")
    if params and salt:
        params[TAG] = salt
    return delayed, params


@HAND_OVER.wrap(f"{NIXL}.get_num_new_matched_tokens", "self, request, num_computed_tokens")
def matched_tokens(
    original: Callable[..., Any], nixl: Any, request: Any, num_computed_tokens: int
) -> Any:
    """Makes a decode engine compute a prompt if it must not fetch the keys and values.

    These are of another version, or the prefill engine may have reused their blocks. Wraps
    ``get_num_new_matched_tokens``, by which the connector says how many tokens it can fetch.
    """
    params = request.kv_transfer_params
    if params and params.get("do_remote_prefill") and hasattr(request, "wavebus_fetches"):
        if not request.wavebus_fetches:
            _log.debug(
                "wavebus: request %s computes its prompt, because the offered keys and values have "
                "another version's salt, %s",
                request.request_id,
                params.get(TAG),
            )
            return 0, False
        if _is_lost(nixl, request):
            return 0, False
        request.wavebus_lender = nixl
    return original(nixl, request, num_computed_tokens)


@HAND_OVER.wrap(f"{NIXL_BASE}.build_connector_meta", "self, scheduler_output")
def build_connector_meta(original: Callable[..., Any], nixl: Any, scheduler_output: Any) -> Any:
    """Records when this decode engine failed to renew its leases of blocks in time.

    ``original`` sends the renewals.
    """
    before = nixl._last_heartbeat_time  # noqa: SLF001
    made = original(nixl, scheduler_output)
    now = nixl._last_heartbeat_time  # noqa: SLF001
    if now - before > _patience_s(nixl):
        nixl.wavebus_lost_s = now - _patience_s(nixl)
    return made


@HAND_OVER.wrap(f"{SCHEDULER}._update_waiting_for_remote_kv", "self, request")
def update_waiting(original: Callable[..., Any], scheduler: Any, request: Any) -> None:
    """Makes a request compute its prompt if its blocks' lease may have run out.

    The prefill engine may then have reused the blocks before this engine had fetched them. Wraps
    ``_update_waiting_for_remote_kv``, which runs when a request's blocks have arrived.
    """
    lender = getattr(request, "wavebus_lender", None)
    if lender is not None and _is_lost(lender, request):
        request.num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids.add(request.request_id)
    request.wavebus_lender = None
    original(scheduler, request)


def _is_lost(nixl: Any, request: Any) -> bool:
    """Returns whether the lease on a request's blocks may have run out unrenewed.

    The lease began no later than the request arrived here, and heartbeats renew it.
    """
    since = request.wavebus_renewed_s
    last = max(since, nixl._last_heartbeat_time)  # noqa: SLF001
    lost_s = getattr(nixl, "wavebus_lost_s", 0.0)
    lost: bool = since <= lost_s or time.perf_counter() - last > _patience_s(nixl)
    return lost


def _patience_s(nixl: Any) -> float:
    """Returns the duration of a lease, less the interval of heartbeats, in seconds."""
    return float(nixl._kv_lease_duration - nixl._heartbeat_interval)  # noqa: SLF001


def release(core: Any, request: Any) -> None:
    """Frees the blocks that a prefill engine holds for a request that this core rejects.

    Adding the request and ending it at once makes vLLM's connector tell the prefill engine.
    """
    params = request.kv_transfer_params
    if params and params.get("do_remote_prefill"):
        core.scheduler.add_request(request)
        core.scheduler.finish_requests(request.request_id, core.wavebus_aborted)
