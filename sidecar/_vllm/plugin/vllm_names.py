"""Names inside vLLM that the registry's entries share, and the features that depend on them.

Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

from typing import Final

from bus._vllm.seams import Form, Says, Takes

# Features that begin with "lockstep" concern ranks that step together (mixtures of experts with
# data parallelism), and no other engine.
FEATURES: Final = {
    "weight_updates": "load weights in a pause",
    "staged_updates": "load weights without a pause",
    "lockstep_staged_updates": "load weights without a pause in ranks that step in lockstep",
    "version_labels": "label each token with the version that produced it",
    "prefix_cache_versions": "keep prefix caches of different versions apart",
    "held_kv": "pause and swap while keys and values are held for a decode engine",
    "kv_handover": "keep keys and values that prefill engines hand over with their version",
    "admission": "close an engine to requests; run canary probes",
    "lockstep_admission": "close ranks that step in lockstep to requests",
    "closed_answer": "have a closed API server answer with HTTP 503 and the reason",
    "streamed_versions": "label each streamed token with its version at once",
    "token_checks": "refuse token ids beyond the vocabulary",
    "request_limits": "tell clients what requests an engine takes",
    "exact_seeds": "continue requests with a seed exactly, on the V2 model runner",
    "pause_lease": "end a pause whose sidecar has died",
    "lockstep_pause_lease": "end a pause of lockstep ranks whose sidecars have died",
    "core_status": "show what each engine core does, and where it hangs",
    "lockstep_core_status": "show what lockstep ranks do, and which one hangs",
    "lockstep_pause_fixes": "keep repeated pauses and resumes of lockstep ranks from hanging",
    "dp_coordinator": "coordinate data parallel ranks by the bus",
    "vllm_worker_engines": "drive vLLM's own worker engines, such as nccl",
    "staged_worker_engines": "load weights without a pause over vLLM's own nccl and ipc",
    "lora_updates": "update LoRA adapters",
    "draft_updates": "update draft models",
    "sleep": "have engines sleep and wake, also with a KV connector",
    "in_process": "drive an AsyncLLM in its own process",
    "in_process_routes": "serve an AsyncLLM's data routes from its own process",
    "over_http": "drive an API server through its RL routes",
    "cpu_experts": "run mixtures of experts in lockstep on CPUs",
}

PLUGIN: Final = "sidecar._vllm.plugin"

CORE_MODULE: Final = "vllm.v1.engine.core"
BASE_CORE: Final = f"{CORE_MODULE}:EngineCore"
PLAIN_CORE: Final = f"{CORE_MODULE}:EngineCoreProc"
LOCKSTEP_CORE: Final = f"{CORE_MODULE}:DPEngineCoreProc"
REQUEST_TYPES: Final = f"{CORE_MODULE}:EngineCoreRequestType"
SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
PARALLEL_CONFIG: Final = "vllm.config.parallel:ParallelConfig"
COORDINATOR_MODULE: Final = "vllm.v1.engine.coordinator"
CONNECTORS: Final = "vllm.distributed.kv_transfer.kv_connector"
NIXL: Final = f"{CONNECTORS}.v1.nixl.pull_scheduler:NixlPullConnectorScheduler"
NIXL_BASE: Final = f"{CONNECTORS}.v1.nixl.base_scheduler:NixlBaseConnectorScheduler"
TRANSFER_PACKAGE: Final = "vllm.distributed.weight_transfer"
NCCL_ENGINE: Final = f"{TRANSFER_PACKAGE}.nccl_engine:NCCLWeightTransferEngine"
IPC_ENGINE: Final = f"{TRANSFER_PACKAGE}.ipc_engine:IPCWeightTransferEngine"
PYNCCL: Final = "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator"
OUTPUTS: Final = "vllm.v1.engine.output_processor"
WORKER_MODULE: Final = "vllm.v1.worker.worker_base"
LORA_MANAGER: Final = "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager"
# The path of an adapter of the bus begins so, and ends with the update's id. Workers read no file
# there, and none can exist. The id keeps two versions of an adapter from sharing a prefix cache.
ADAPTER_PATHS: Final = "/dev/null/wavebus-lora-"

TAKES_RPC: Final = Takes(f"{PLAIN_CORE}.collective_rpc", "self, method, timeout, args, kwargs")
TAKES_ABORTS: Final = Takes(
    f"{PLAIN_CORE}._send_abort_outputs_to_client", "self, req_ids, client_index"
)
CLEARS_PREFIXES: Final = Takes(
    f"{PLAIN_CORE}.reset_prefix_cache", "self, reset_running_requests, reset_connector"
)
TELLS_VERSION: Final = Takes(f"{PLAIN_CORE}.get_weight_version", "self")

START_WAVE: Final = "EngineCoreOutputs(start_wave=self.current_wave)"

# How an idle DP group starts a wave for a new request: either the front end sends FIRST_REQ to the
# coordinator, or the engine core starts the wave itself and reports that.
WAVES_BY_FRONT_ENDS: Final = Form(
    "front ends start waves",
    (
        Says("vllm.v1.engine.core_client:DPAsyncMPClient", "'FIRST_REQ'"),
        Says(f"{LOCKSTEP_CORE}.add_request", "request_wave != self.current_wave"),
    ),
    sets=((LOCKSTEP_CORE, "wavebus_joins_asked_waves", True),),
)

WAVES_BY_CORES: Final = Form(
    "engine cores start waves",
    (
        Says(
            f"{LOCKSTEP_CORE}.add_request",
            "if self.has_coordinator:\n        if request_wave > self.current_wave:",
            "self.scheduler.pause_state == PauseState.UNPAUSED",
            START_WAVE,
        ),
    ),
    sets=((LOCKSTEP_CORE, "wavebus_joins_asked_waves", False),),
)
