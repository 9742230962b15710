"""The registry's entries for keys and values.

The modules :mod:`sidecar.vllm.plugin.core.kv_versions` and :mod:`sidecar.vllm.plugin.kv_connectors`
need these seams. Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

from typing import Final

from bus.seams import Has, Says, Seam, Takes
from sidecar.vllm.plugin.vllm_names import (
    BASE_CORE,
    CLEARS_PREFIXES,
    CONNECTORS,
    NIXL,
    NIXL_BASE,
    PLAIN_CORE,
    PLUGIN,
    SCHEDULER,
    TAKES_RPC,
    TELLS_VERSION,
    wraps,
)

KV_SEAMS: Final = (
    Seam(
        "prefix cache versions",
        ("prefix_cache_versions",),
        (
            TELLS_VERSION,
            Says("vllm.v1.core.kv_cache_utils", ("request.cache_salt",)),
            Has("vllm.v1.request:Request", ("update_block_hashes",)),
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
        wraps=wraps(
            "core.kv_versions",
            (f"{PLAIN_CORE}.preprocess_add_request", "self, request"),
            (f"{BASE_CORE}.add_request", "self, request, request_wave"),
            (f"{BASE_CORE}.set_weight_version", "self, weight_version"),
        ),
        answers=(
            ("wavebus_run", f"{PLUGIN}.core.kv_versions:join_run"),
            ("wavebus_clear_caches", f"{PLUGIN}.core.kv_versions:clear"),
        ),
    ),
    Seam(
        "KV connectors",
        ("prefix_cache_versions",),
        (
            Has(f"{CONNECTORS}.factory:KVConnectorFactory", ("get_connector_class",)),
            Has(f"{CONNECTORS}.v1.base:KVConnectorBase_V1", ("reset_cache",)),
        ),
    ),
    Seam(
        "held keys and values",
        ("held_kv",),
        (
            Says(f"{PLAIN_CORE}.pause_scheduler", ("self._idle_state_callbacks.append(",)),
            Says(f"{SCHEDULER}.has_finished_requests", ("if self.finished_req_ids:",)),
            Says(
                f"{SCHEDULER}._update_waiting_for_remote_kv",
                (
                    "request.request_id in self.failed_recving_kv_req_ids",
                    "self.kv_cache_manager.free(request)",
                    "self.finished_recving_kv_req_ids.remove(request.request_id)",
                ),
            ),
            Says(
                f"{SCHEDULER}._handle_blocked_waiting_request",
                ("if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:",),
            ),
            Takes(f"{SCHEDULER}._handle_blocked_waiting_request", "self, request"),
            Says(f"{SCHEDULER}._preempt_request", ("self._inflight_prefills.discard(request)",)),
            Takes(f"{SCHEDULER}.get_num_unfinished_requests", "self"),
            Says(f"{CONNECTORS}.v1.multi_connector:MultiConnector.__init__", ("self._connectors",)),
        ),
        process="core",
        needs=("prefix cache versions",),
        sets=((PLAIN_CORE, "wavebus_sleeps", False), (PLAIN_CORE, "wavebus_pauses", ())),
        wraps=wraps(
            "core.kv_versions",
            (f"{PLAIN_CORE}.pause_scheduler", "self, mode, clear_cache"),
            (f"{PLAIN_CORE}._process_input_queue", "self"),
            (f"{BASE_CORE}._finish_pause", "self, clear_cache"),
            (f"{BASE_CORE}._reset_caches", "self, reset_running_requests, reset_connector"),
            (f"{BASE_CORE}.sleep", "self, level, mode"),
        ),
    ),
    Seam(
        "KV hand-over",
        ("kv_handover",),
        (
            Says(
                f"{NIXL}.update_state_after_alloc",
                ("if num_external_tokens > 0 else ()", "params['do_remote_prefill'] = False"),
            ),
            Says(f"{NIXL}.request_finished", ("if params.get('do_remote_prefill'):",)),
            Says(
                f"{NIXL_BASE}.build_connector_meta",
                (
                    "now = time.perf_counter()",
                    "if now - self._last_heartbeat_time >= self._heartbeat_interval:",
                ),
            ),
            Says(f"{NIXL_BASE}.__init__", ("self._kv_lease_duration",)),
        ),
        process="core",
        needs=("held keys and values",),
        wraps=wraps(
            "core.kv_versions",
            (f"{SCHEDULER}._connector_finished", "self, request"),
            (f"{SCHEDULER}._update_waiting_for_remote_kv", "self, request", "update_waiting"),
            (
                f"{NIXL}.get_num_new_matched_tokens",
                "self, request, num_computed_tokens",
                "matched_tokens",
            ),
            (f"{NIXL_BASE}.build_connector_meta", "self, scheduler_output"),
        ),
    ),
)
