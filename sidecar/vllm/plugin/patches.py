"""Lists all code inside vLLM that wavebus's sidecar and plugin wrap or call.

Each such place is a *seam* (see :mod:`bus.seams`), and has one entry in :data:`REGISTRY`. Only
:mod:`sidecar.vllm.plugin.installation` installs seams. If several seams wrap one method,
:data:`NESTING` defines in which order their functions are called.

To support a new version of vLLM:

1. Run ``wavebus doctor --vllm PATH`` on its wheel.
2. Add a form to each seam that does not fit: what the new version's code looks like there.
3. Run the tests on it, then add the version to :data:`bus.vllm_versions.TESTED`.

Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

from typing import Final

from bus.seams import Fields, Form, Has, Ref, Registry, Says, SaysNot, Seam, Takes
from sidecar.vllm.plugin.environment import CORE_GUARD
from sidecar.vllm.plugin.kv_patches import KV_SEAMS
from sidecar.vllm.plugin.vllm_calls import CALLED, FRONT_ENDS
from sidecar.vllm.plugin.vllm_names import (
    BASE_CORE,
    CLEARS_PREFIXES,
    COORDINATOR_MODULE,
    CORE_MODULE,
    FEATURES,
    LOCKSTEP_CORE,
    LORA_MANAGER,
    PARALLEL_CONFIG,
    PLAIN_CORE,
    PLUGIN,
    REQUEST_TYPES,
    START_WAVE,
    TAKES_ABORTS,
    TAKES_RPC,
    TELLS_VERSION,
    TRANSFER_PACKAGE,
    WAVES_BY_CORES,
    WAVES_BY_FRONT_ENDS,
    WORKER_MODULE,
    wraps,
)

_RESUMES_AT_ONCE: Final = (
    "self.ignore_start_dp_wave = False\n"
    "    has_global_unfinished = ParallelConfig.has_unfinished_dp("
)
_WORKER_METHODS: Final = ("facts", "requests", "draft", "loading", "perform")
# Engine cores answer these; workers do where the cores have no handler.
_CORE_METHODS: Final = ("admission", "swap", "call_off", "run", "clear_caches")
_PUBLISH_CACHES: Final = f"{BASE_CORE}._set_kv_connector_handshake_metadata"

# From vLLM's own method outwards. A class's methods are wrapped after those that it inherits.
# Methods of ``collective_rpc`` that cores answer by themselves reach no other wrap.
NESTING: Final = {
    # The status page shows all that the core does, also the end of a held pause; the lease guard
    # starts before all of it.
    f"{PLAIN_CORE}._process_input_queue": ("held keys and values", "core status", "pause lease"),
    # A rejected request reaches nothing else. The lease guard's wake-up is not a request, and does
    # not count as work of the core.
    f"{PLAIN_CORE}._handle_client_request": ("core status", "pause lease", "admission"),
    # What the lease guard refuses reaches no worker.
    f"{PLAIN_CORE}.collective_rpc": ("pause lease", "lora requests"),
    # A resume that the fix skips enters no barrier, and so shows none.
    f"{LOCKSTEP_CORE}.resume_scheduler": ("lockstep core status", "lockstep pause fixes"),
    # The swap's time counts as part of a step, and not of the all-reduce that the page shows.
    f"{LOCKSTEP_CORE}._has_global_unfinished_reqs": ("lockstep core status", "lockstep swap"),
}

_SEAMS: Final = (
    Seam(
        "weight transfer engine",
        ("weight_updates", "staged_updates", "lockstep_staged_updates"),
        (
            Takes(
                f"{TRANSFER_PACKAGE}.factory:WeightTransferEngineFactory.register_engine",
                "cls, name, module_path_or_cls, class_name",
            ),
            Takes(
                f"{TRANSFER_PACKAGE}.base:WeightTransferEngine.__init__",
                "self, config, vllm_config, device, model",
            ),
            Has(
                f"{TRANSFER_PACKAGE}.base:WeightTransferEngine",
                (
                    "parse_init_info",
                    "init_transfer_engine",
                    "start_weight_update",
                    "update_weights",
                    "finish_weight_update",
                    "shutdown",
                ),
            ),
            Has(f"{TRANSFER_PACKAGE}.base", ("WeightTransferInitInfo", "WeightTransferUpdateInfo")),
        ),
        process="any",
        install=f"{PLUGIN}.worker.native_factory:register",
    ),
    Seam(
        "worker methods",
        ("weight_updates", "staged_updates", "lockstep_staged_updates"),
        (Has(WORKER_MODULE, ("WorkerBase", "WorkerWrapperBase")),),
        process="worker",
        sets=(
            *(
                (
                    f"{WORKER_MODULE}:WorkerBase",
                    f"wavebus_{name}",
                    Ref(f"{PLUGIN}.worker_rpc:{name}"),
                )
                for name in (*_WORKER_METHODS, *_CORE_METHODS)
            ),
            (f"{WORKER_MODULE}:WorkerWrapperBase", "__str__", Ref(f"{PLUGIN}.worker_rpc:presence")),
        ),
    ),
    Seam(
        "worker engines",
        ("vllm_worker_engines",),
        (Has(f"{TRANSFER_PACKAGE}.factory:WeightTransferEngineFactory._registry"),),
        process="any",
        wraps=wraps(
            "worker.native_factory",
            (
                f"{TRANSFER_PACKAGE}.factory:WeightTransferEngineFactory.create_engine",
                "cls, config, vllm_config, device, model",
            ),
        ),
    ),
    Seam(
        "core status",
        ("core_status", "lockstep_core_status", "pause_lease", "lockstep_pause_lease"),
        (Takes(f"{PLAIN_CORE}.has_work", "self"),),
        process="core",
        wraps=wraps(
            "core.status",
            (f"{PLAIN_CORE}._process_input_queue", "self", "input_queue"),
            (
                f"{PLAIN_CORE}._handle_client_request",
                "self, request_type, request",
                "client_request",
            ),
            (f"{PLAIN_CORE}._process_engine_step", "self", "engine_step"),
            (f"{PLAIN_CORE}.step", "self", "outputs_made"),
            (f"{PLAIN_CORE}.step_with_batch_queue", "self", "outputs_made"),
            (
                f"{PLAIN_CORE}._send_abort_outputs_to_client",
                "self, req_ids, client_index",
                "abort_outputs",
            ),
        ),
    ),
    Seam(
        "lockstep core status",
        ("lockstep_core_status", "lockstep_pause_lease"),
        process="core",
        needs=("core status",),
        sets=(
            (LOCKSTEP_CORE, "wavebus_resumes", 0),
            (LOCKSTEP_CORE, "wavebus_resuming", False),
        ),
        wraps=wraps(
            "core.status",
            (f"{LOCKSTEP_CORE}.execute_dummy_batch", "self", "dummy_batch"),
            (f"{LOCKSTEP_CORE}._has_global_unfinished_reqs", "self, local_unfinished", "agreement"),
            (f"{LOCKSTEP_CORE}.resume_scheduler", "self", "barrier"),
        ),
    ),
    Seam(
        "pause lease",
        ("pause_lease", "lockstep_pause_lease"),
        (
            Takes(f"{PLAIN_CORE}._send_abort_outputs", "self, aborted_reqs"),
            Takes(f"{PLAIN_CORE}.pause_scheduler", "self, mode, clear_cache"),
            Takes(f"{PLAIN_CORE}.resume_scheduler", "self"),
            Takes(f"{PLAIN_CORE}.has_work", "self"),
            Has(REQUEST_TYPES, ("WAKEUP",)),
            Has(f"{CORE_MODULE}:RequestStatus", ("FINISHED_ABORTED",)),
        ),
        process="core",
        needs=("core status",),
        sets=(
            (PLAIN_CORE, "wavebus_wakeup", Ref(f"{REQUEST_TYPES}.WAKEUP")),
            (PLAIN_CORE, "wavebus_aborted", Ref(f"{CORE_MODULE}:RequestStatus.FINISHED_ABORTED")),
        ),
        wraps=wraps(
            "core.lease_guard",
            (f"{PLAIN_CORE}._process_input_queue", "self"),
            (f"{PLAIN_CORE}._handle_client_request", "self, request_type, request"),
            (f"{PLAIN_CORE}.collective_rpc", "self, method, timeout, args, kwargs"),
        ),
    ),
    Seam(
        "lockstep pause fixes",
        ("lockstep_pause_fixes",),
        (
            Says(
                f"{LOCKSTEP_CORE}._handle_client_request",
                ("new_wave, exclude_eng_index = request",),
            ),
            Says(
                f"{LOCKSTEP_CORE}._has_global_unfinished_reqs",
                ("self.ignore_start_dp_wave = True", "self.pending_pause = False"),
            ),
            Says(f"{LOCKSTEP_CORE}.resume_scheduler", ("ParallelConfig.has_unfinished_dp(",)),
            Has(REQUEST_TYPES, ("START_DP_WAVE",)),
        ),
        process="core",
        off=CORE_GUARD,
        sets=(
            (LOCKSTEP_CORE, "wavebus_pending_wave", None),
            (LOCKSTEP_CORE, "wavebus_alone", False),
            (LOCKSTEP_CORE, "wavebus_complete_alone", Ref(f"{PLAIN_CORE}._pause_complete")),
        ),
        wraps=wraps(
            "core.lockstep_fixes",
            (f"{LOCKSTEP_CORE}.resume_scheduler", "self"),
            (f"{LOCKSTEP_CORE}._handle_client_request", "self, request_type, request"),
            (f"{LOCKSTEP_CORE}.pause_scheduler", "self, mode, clear_cache"),
            (f"{LOCKSTEP_CORE}._pause_complete", "self"),
        ),
    ),
    Seam(
        "admission",
        ("admission", "lockstep_admission"),
        (
            TAKES_RPC,
            TAKES_ABORTS,
            Says(f"{PLAIN_CORE}._handle_client_request", ("req, request_wave = request",)),
            Has(REQUEST_TYPES, ("ADD",)),
            Has("vllm.v1.request:Request", ("num_output_tokens",)),
        ),
        process="core",
        wraps=wraps(
            "core.admission",
            (f"{PLAIN_CORE}._handle_client_request", "self, request_type, request"),
        ),
        answers=(("wavebus_admission", f"{PLUGIN}.core.admission:set_admission"),),
    ),
    Seam(
        "lockstep admission",
        ("lockstep_admission",),
        (Says(f"{LOCKSTEP_CORE}._handle_client_request", ("self.ignore_start_dp_wave",)),),
        forms=(WAVES_BY_FRONT_ENDS, WAVES_BY_CORES),
        process="core",
        needs=("admission",),
    ),
    Seam(
        "version labels",
        ("version_labels",),
        (
            TELLS_VERSION,
            Says(f"{BASE_CORE}.step_with_batch_queue", ("batch_queue.appendleft(",)),
        ),
        process="core",
        sets=((BASE_CORE, "wavebus_labels_steps", True),),
        wraps=wraps("core.swap", (f"{BASE_CORE}._attach_weight_version", "self, outputs")),
    ),
    Seam(
        "swap",
        ("staged_updates", "lockstep_staged_updates"),
        (
            TAKES_RPC,
            CLEARS_PREFIXES,
            Takes(f"{PLAIN_CORE}.reset_encoder_cache", "self"),
            Takes(f"{BASE_CORE}.set_weight_version", "self, weight_version"),
            TELLS_VERSION,
            Says(f"{PLAIN_CORE}._invoke_utility_method", ("isinstance(result, Future)",)),
            Says(f"{BASE_CORE}.step_with_batch_queue", ("batch_queue.appendleft(",)),
        ),
        process="core",
        answers=(
            ("wavebus_swap", f"{PLUGIN}.core.swap:swap"),
            ("wavebus_call_off", f"{PLUGIN}.core.swap:call_off"),
        ),
        sets=((PLAIN_CORE, "wavebus_ready", None),),
    ),
    Seam(
        "lockstep swap",
        ("lockstep_staged_updates",),
        (
            Says(
                f"{PARALLEL_CONFIG}.sync_dp_state",
                (
                    "[int(has_unfinished), int(pending_pause)], dtype=torch.int32",
                    "tensor[0].item() > 0 or pause_count % dp_size != 0",
                    "return (has_unfinished_global, pause_count == dp_size)",
                ),
            ),
            Says(f"{LOCKSTEP_CORE}.run_busy_loop", (START_WAVE, "self.step_counter = 0")),
        ),
        forms=(
            Form(
                "torch adds up",
                (Says(f"{PARALLEL_CONFIG}.sync_dp_state", ("distributed.all_reduce(tensor",)),),
                wraps=wraps(
                    "core.swap",
                    (
                        f"{PARALLEL_CONFIG}.sync_dp_state",
                        "dp_group, has_unfinished, pending_pause",
                        "sum_by_torch",
                    ),
                ),
            ),
            Form(
                "vLLM adds up",
                (
                    Says(
                        f"{PARALLEL_CONFIG}.sync_dp_state",
                        ("cpu_all_reduce_(tensor, dp_group, timeout=",),
                    ),
                    Takes("vllm.distributed.utils:cpu_all_reduce_", "tensor, group, timeout"),
                ),
                wraps=wraps(
                    "core.swap",
                    (
                        f"{PARALLEL_CONFIG}.sync_dp_state",
                        "self, dp_group, has_unfinished, pending_pause",
                        "sum_by_vllm",
                    ),
                ),
            ),
        ),
        process="core",
        needs=("swap",),
        sets=(
            (LOCKSTEP_CORE, "wavebus_swaps_together", True),
            (LOCKSTEP_CORE, "wavebus_outputs", Ref(f"{CORE_MODULE}:EngineCoreOutputs")),
        ),
        wraps=wraps(
            "core.swap", (f"{LOCKSTEP_CORE}._has_global_unfinished_reqs", "self, local_unfinished")
        ),
    ),
    Seam(
        "wake",
        ("sleep",),
        (
            Takes(f"{BASE_CORE}.wake_up", "self, tags"),
            Says(
                f"{BASE_CORE}.wake_up",
                ("self.model_executor.wake_up(tags)", "self.resume_scheduler()"),
            ),
        ),
        forms=(
            Form(
                "caches stay known to peers", (SaysNot(f"{BASE_CORE}.wake_up", ("kv_connector",)),)
            ),
            Form(
                "caches are published again",
                (
                    Takes(_PUBLISH_CACHES, "self"),
                    Says(f"{BASE_CORE}.wake_up", ("self._set_kv_connector_handshake_metadata()",)),
                ),
                sets=((BASE_CORE, "wavebus_publish_caches", Ref(_PUBLISH_CACHES)),),
            ),
        ),
        process="core",
    ),
    Seam(
        "dp coordinator",
        ("dp_coordinator",),
        (
            Has(f"{COORDINATOR_MODULE}:DPCoordinator"),
            Has("vllm.v1.engine.utils:DPCoordinator"),
            Takes(
                f"{COORDINATOR_MODULE}:DPCoordinator.__init__",
                "self, parallel_config, enable_wave_coordination, logging_config",
            ),
            Takes(f"{COORDINATOR_MODULE}:DPCoordinator.get_engine_socket_addresses", "self"),
            Takes(f"{COORDINATOR_MODULE}:DPCoordinator.get_stats_publish_address", "self"),
            Takes(f"{COORDINATOR_MODULE}:DPCoordinator.shutdown", "self, timeout"),
            Fields(
                "vllm.v1.engine:EngineCoreOutputs",
                ((0, "engine_index"), (6, "wave_complete"), (7, "start_wave")),
            ),
            Says("vllm.v1.engine:EngineCoreRequestType", ("START_DP_WAVE = b'\\x02'",)),
            Says(
                f"{COORDINATOR_MODULE}:DPCoordinatorProc",
                (
                    "send(b'READY')",
                    "outputs.wave_complete",
                    "outputs.start_wave",
                    "msgspec.msgpack.encode((wave, exclude_engine_index))",
                ),
            ),
            Says(f"{LOCKSTEP_CORE}.run_busy_loop", (START_WAVE, "not self.pending_pause")),
            # A rank that resumes accepts a START before it waits for the others (docs/waves.md).
            Says(
                f"{LOCKSTEP_CORE}.resume_scheduler",
                (_RESUMES_AT_ONCE,),
            ),
            # A core that has received READY ignores a second one.
            Says(f"{PLAIN_CORE}.process_input_sockets", ("type_frame.buffer == b'READY'",)),
        ),
        forms=(WAVES_BY_FRONT_ENDS, WAVES_BY_CORES),
        process="coordinator",
        needs=("lockstep pause fixes",),
        sets=(
            (
                "vllm.v1.engine.utils",
                "DPCoordinator",
                Ref(f"{PLUGIN}.core.dp_coordinator:BusCoordinator"),
            ),
        ),
    ),
    Seam(
        "lora adapters",
        ("lora_updates",),
        (
            Takes(
                "vllm.lora.lora_model:LoRAModel.from_lora_tensors",
                "cls, lora_model_id, tensors, peft_helper, device, dtype, model_vocab_size, "
                "weights_mapper, skip_prefixes",
            ),
            Has("vllm.lora.peft_helper:PEFTHelper"),
            Has("vllm.lora.utils:parse_fine_tuned_lora_name"),
        ),
        wraps=wraps(
            "worker.lora",
            (f"{LORA_MANAGER}._load_adapter", "self, lora_request"),
            (f"{LORA_MANAGER}._apply_adapters", "self, lora_requests"),
        ),
    ),
    Seam(
        "lora requests",
        ("lora_updates",),
        (Says("vllm.v1.request:Request.__init__", ("self.lora_request = lora_request",)),),
        process="core",
        wraps=wraps(
            "core.adapters",
            (f"{PLAIN_CORE}.collective_rpc", "self, method, timeout, args, kwargs"),
        ),
    ),
    Seam(
        "CPU communicator",
        ("cpu_experts",),
        (
            Has(
                "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator",
                ("all_gather",),
            ),
        ),
        process="any",
        install=f"{PLUGIN}.loading.cpu:install",
    ),
)


REGISTRY: Final = Registry(FEATURES, (*KV_SEAMS, *_SEAMS, *FRONT_ENDS, *CALLED), NESTING)
