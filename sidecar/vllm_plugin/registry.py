"""Everything inside vLLM that the sidecar and its plugin depend on, in one list.

:data:`REGISTRY` has one entry per seam, in the order of installation; :mod:`bus.seams` says what
an entry is. Only :mod:`sidecar.vllm_plugin.installation` installs them.

To port wavebus to a new vLLM: run ``wavebus doctor --vllm PATH`` on its wheel, add a form to each
seam that does not fit, and its number to :data:`bus.vllm_versions.TESTED` when the tests have run
on it.

Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

from typing import Final

from bus.seams import Fields, Form, Has, Ref, Registry, Says, SaysNot, Seam, Takes, Wrap
from sidecar.vllm_plugin.called import CALLED

# Those that begin with "lockstep" concern ranks that step together (mixtures of experts with data
# parallelism), and no other engine.
_FEATURES: Final = {
    "weight_updates": "load weights in a pause",
    "staged_updates": "load weights without a pause",
    "lockstep_staged_updates": "load weights without a pause in ranks that step in lockstep",
    "version_labels": "label each token with the version that produced it",
    "prefix_cache_versions": "keep prefix caches of different versions apart",
    "admission": "close an engine to requests; run canary probes",
    "lockstep_admission": "close ranks that step in lockstep to requests",
    "pause_lease": "end a pause whose sidecar has died",
    "lockstep_pause_lease": "end a pause of lockstep ranks whose sidecars have died",
    "core_status": "show what each engine core does, and where it hangs",
    "lockstep_core_status": "show what lockstep ranks do, and which one hangs",
    "lockstep_pause_fixes": "keep repeated pauses and resumes of lockstep ranks from hanging",
    "dp_coordinator": "coordinate data parallel ranks by the bus",
    "vllm_worker_engines": "drive vLLM's own worker engines, such as nccl",
    "lora_updates": "update LoRA adapters",
    "draft_updates": "update draft models",
    "sleep": "have engines sleep and wake, also with a KV connector",
    "in_process": "drive an AsyncLLM in its own process",
    "over_http": "drive an API server through its RL routes",
    "cpu_experts": "run mixtures of experts in lockstep on CPUs",
}

_CORE: Final = "vllm.v1.engine.core"
_PLAIN: Final = f"{_CORE}:EngineCoreProc"
_LOCKSTEP: Final = f"{_CORE}:DPEngineCoreProc"
_BASE: Final = f"{_CORE}:EngineCore"
_PUBLISH: Final = f"{_BASE}._set_kv_connector_handshake_metadata"
_PARALLEL: Final = "vllm.config.parallel:ParallelConfig"
_COORDINATOR: Final = "vllm.v1.engine.coordinator"
_TRANSFER: Final = "vllm.distributed.weight_transfer"
_WORKERS: Final = "vllm.v1.worker.worker_base"
_LORA: Final = "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager"
_PLUGIN: Final = "sidecar.vllm_plugin"
_RPC: Final = Takes(f"{_PLAIN}.collective_rpc", ("self", "method", "timeout", "args", "kwargs"))
_REQUESTS: Final = Takes(f"{_PLAIN}._handle_client_request", ("self", "request_type", "request"))
_PAUSE: Final = Takes(f"{_PLAIN}.pause_scheduler", ("self", "mode", "clear_cache"))
_RESUME: Final = Takes(f"{_PLAIN}.resume_scheduler", ("self",))
_ABORTS: Final = Takes(
    f"{_PLAIN}._send_abort_outputs_to_client", ("self", "req_ids", "client_index")
)
_AGREE: Final = Takes(f"{_LOCKSTEP}._has_global_unfinished_reqs", ("self", "local_unfinished"))
_RESUMES_AT_ONCE: Final = (
    "self.ignore_start_dp_wave = False\n"
    "    has_global_unfinished = ParallelConfig.has_unfinished_dp("
)
_START_WAVE: Final = "EngineCoreOutputs(start_wave=self.current_wave)"


def _wraps(module: str, *pairs: tuple[str, str]) -> tuple[Wrap, ...]:
    return tuple(Wrap(target, f"{_PLUGIN}.{module}:{around}") for target, around in pairs)


# Who notices that an idle DP group has got a request: the front end, which tells the coordinator
# FIRST_REQ; or the engine core itself, which starts the wave and reports that.
_BY_FRONT_ENDS: Final = Form(
    "front ends start waves",
    (
        Says("vllm.v1.engine.core_client:DPAsyncMPClient", ("'FIRST_REQ'",)),
        Says(f"{_LOCKSTEP}.add_request", ("request_wave != self.current_wave",)),
    ),
    sets=((_LOCKSTEP, "wavebus_joins_asked_waves", True),),
)
_BY_CORES: Final = Form(
    "engine cores start waves",
    (
        Says(
            f"{_LOCKSTEP}.add_request",
            (
                "if self.has_coordinator:\n        if request_wave > self.current_wave:",
                "self.scheduler.pause_state == PauseState.UNPAUSED",
                _START_WAVE,
            ),
        ),
    ),
    sets=((_LOCKSTEP, "wavebus_joins_asked_waves", False),),
)

_SEAMS: Final = (
    Seam(
        "weight transfer engine",
        ("weight_updates", "staged_updates", "lockstep_staged_updates"),
        (
            Takes(
                f"{_TRANSFER}.factory:WeightTransferEngineFactory.register_engine",
                ("cls", "name", "module_path_or_cls", "class_name"),
            ),
            Takes(
                f"{_TRANSFER}.base:WeightTransferEngine.__init__",
                ("self", "config", "vllm_config", "device", "model"),
            ),
            Has(
                f"{_TRANSFER}.base:WeightTransferEngine",
                (
                    "parse_init_info",
                    "init_transfer_engine",
                    "start_weight_update",
                    "update_weights",
                    "finish_weight_update",
                    "shutdown",
                ),
            ),
            Has(f"{_TRANSFER}.base", ("WeightTransferInitInfo", "WeightTransferUpdateInfo")),
        ),
        process="any",
        install=f"{_PLUGIN}.native_factory:register",
    ),
    Seam(
        "worker methods",
        ("weight_updates", "staged_updates", "lockstep_staged_updates"),
        (Has(_WORKERS, ("WorkerBase", "WorkerWrapperBase")),),
        process="worker",
        sets=(
            *(
                (f"{_WORKERS}:WorkerBase", f"wavebus_{name}", Ref(f"{_PLUGIN}.facts:{name}"))
                for name in (
                    "facts",
                    "requests",
                    "draft",
                    "loading",
                    "lane",
                    "perform",
                    "arm",
                    # Answered by engine cores; by workers where the cores don't know them.
                    "door",
                    "swap",
                    "call_off",
                )
            ),
            (f"{_WORKERS}:WorkerWrapperBase", "__str__", Ref(f"{_PLUGIN}.facts:presence")),
        ),
    ),
    Seam(
        "worker engines",
        ("vllm_worker_engines",),
        (
            Takes(
                f"{_TRANSFER}.factory:WeightTransferEngineFactory.create_engine",
                ("cls", "config", "vllm_config", "device", "model"),
            ),
            Has(f"{_TRANSFER}.factory:WeightTransferEngineFactory._registry"),
        ),
        process="any",
        wraps=_wraps(
            "native_factory",
            (f"{_TRANSFER}.factory:WeightTransferEngineFactory.create_engine", "create_engine"),
        ),
    ),
    Seam(
        "core status",
        ("core_status", "lockstep_core_status", "pause_lease", "lockstep_pause_lease"),
        (
            Takes(f"{_PLAIN}._process_input_queue", ("self",)),
            Takes(f"{_PLAIN}._process_engine_step", ("self",)),
            _REQUESTS,
            Takes(f"{_PLAIN}.step", ("self",)),
            Takes(f"{_PLAIN}.step_with_batch_queue", ("self",)),
            _ABORTS,
            Takes(f"{_PLAIN}.has_work", ("self",)),
        ),
        process="core",
        wraps=_wraps(
            "core_page",
            (f"{_PLAIN}._process_input_queue", "input_queue"),
            (f"{_PLAIN}._handle_client_request", "client_request"),
            (f"{_PLAIN}._process_engine_step", "engine_step"),
            (f"{_PLAIN}.step", "outputs_made"),
            (f"{_PLAIN}.step_with_batch_queue", "outputs_made"),
            (f"{_PLAIN}._send_abort_outputs_to_client", "abort_outputs"),
        ),
    ),
    Seam(
        "lockstep core status",
        ("lockstep_core_status", "lockstep_pause_lease"),
        (
            _AGREE,
            Takes(f"{_LOCKSTEP}.execute_dummy_batch", ("self",)),
            Takes(f"{_LOCKSTEP}.resume_scheduler", ("self",)),
        ),
        process="core",
        needs=("core status",),
        sets=((_LOCKSTEP, "wavebus_shows_barriers", True),),
        wraps=_wraps(
            "core_page",
            (f"{_LOCKSTEP}.execute_dummy_batch", "dummy_batch"),
            (f"{_LOCKSTEP}._has_global_unfinished_reqs", "agreement"),
            (f"{_LOCKSTEP}.resume_scheduler", "barrier"),
        ),
    ),
    Seam(
        "pause lease",
        ("pause_lease", "lockstep_pause_lease"),
        (
            Takes(f"{_PLAIN}._process_input_queue", ("self",)),
            _REQUESTS,
            Takes(f"{_PLAIN}._send_abort_outputs", ("self", "aborted_reqs")),
            _RPC,
            _PAUSE,
            _RESUME,
            Takes(f"{_PLAIN}.has_work", ("self",)),
            Has(f"{_CORE}:EngineCoreRequestType", ("WAKEUP",)),
            Has(f"{_CORE}:RequestStatus", ("FINISHED_ABORTED",)),
        ),
        process="core",
        needs=("core status",),
        sets=(
            (_PLAIN, "wavebus_wakeup", Ref(f"{_CORE}:EngineCoreRequestType.WAKEUP")),
            (_PLAIN, "wavebus_aborted", Ref(f"{_CORE}:RequestStatus.FINISHED_ABORTED")),
        ),
        wraps=_wraps(
            "core_hold",
            (f"{_PLAIN}._process_input_queue", "process_input_queue"),
            (f"{_PLAIN}._handle_client_request", "handle_client_request"),
            (f"{_PLAIN}.collective_rpc", "collective_rpc"),
        ),
    ),
    Seam(
        "lockstep pause fixes",
        ("lockstep_pause_fixes",),
        (
            Takes(f"{_LOCKSTEP}.resume_scheduler", ("self",)),
            Takes(f"{_LOCKSTEP}.pause_scheduler", ("self", "mode", "clear_cache")),
            Takes(f"{_LOCKSTEP}._pause_complete", ("self",)),
            Takes(f"{_LOCKSTEP}._handle_client_request", ("self", "request_type", "request")),
            Says(f"{_LOCKSTEP}._handle_client_request", ("new_wave, exclude_eng_index = request",)),
            Says(
                f"{_LOCKSTEP}._has_global_unfinished_reqs",
                ("self.ignore_start_dp_wave = True", "self.pending_pause = False"),
            ),
            Says(f"{_LOCKSTEP}.resume_scheduler", ("ParallelConfig.has_unfinished_dp(",)),
            Has(f"{_CORE}:EngineCoreRequestType", ("START_DP_WAVE",)),
        ),
        process="core",
        off="WAVEBUS_CORE_GUARD",
        sets=(
            (_LOCKSTEP, "wavebus_owed_wave", None),
            (_LOCKSTEP, "wavebus_alone", False),
            (_LOCKSTEP, "wavebus_complete_alone", Ref(f"{_PLAIN}._pause_complete")),
        ),
        wraps=_wraps(
            "core_guard",
            (f"{_LOCKSTEP}.resume_scheduler", "resume_scheduler"),
            (f"{_LOCKSTEP}._handle_client_request", "handle_client_request"),
            (f"{_LOCKSTEP}.pause_scheduler", "pause_scheduler"),
            (f"{_LOCKSTEP}._pause_complete", "pause_complete"),
        ),
    ),
    Seam(
        "admission",
        ("admission", "lockstep_admission"),
        (
            _REQUESTS,
            _RPC,
            _ABORTS,
            Says(f"{_PLAIN}._handle_client_request", ("req, request_wave = request",)),
            Has(f"{_CORE}:EngineCoreRequestType", ("ADD",)),
        ),
        process="core",
        wraps=_wraps("door", (f"{_PLAIN}._handle_client_request", "handle_client_request")),
        answers=(("wavebus_door", f"{_PLUGIN}.door:turned"),),
    ),
    Seam(
        "lockstep admission",
        ("lockstep_admission",),
        (Says(f"{_LOCKSTEP}._handle_client_request", ("self.ignore_start_dp_wave",)),),
        forms=(_BY_FRONT_ENDS, _BY_CORES),
        process="core",
        needs=("admission",),
    ),
    Seam(
        "version labels",
        ("version_labels",),
        (
            Takes(f"{_BASE}._attach_weight_version", ("self", "outputs")),
            Takes(f"{_PLAIN}.get_weight_version", ("self",)),
            Says(f"{_BASE}.step_with_batch_queue", ("batch_queue.appendleft(",)),
        ),
        process="core",
        sets=((_BASE, "wavebus_labels_steps", True),),
        wraps=_wraps("core_swap", (f"{_BASE}._attach_weight_version", "attach_weight_version")),
    ),
    Seam(
        "prefix cache versions",
        ("prefix_cache_versions",),
        (
            Takes(f"{_PLAIN}.preprocess_add_request", ("self", "request")),
            Takes(f"{_BASE}.add_request", ("self", "request", "request_wave")),
            Takes(f"{_BASE}.set_weight_version", ("self", "weight_version")),
            Takes(f"{_PLAIN}.get_weight_version", ("self",)),
            Says("vllm.v1.core.kv_cache_utils", ("request.cache_salt",)),
            Has("vllm.v1.request:Request", ("update_block_hashes",)),
        ),
        process="core",
        sets=((_PLAIN, "wavebus_salt", ""),),
        wraps=_wraps(
            "core_swap",
            (f"{_PLAIN}.preprocess_add_request", "preprocess_add_request"),
            (f"{_BASE}.add_request", "add_request"),
            (f"{_BASE}.set_weight_version", "set_weight_version"),
        ),
    ),
    Seam(
        "swap",
        ("staged_updates", "lockstep_staged_updates"),
        (
            _RPC,
            Takes(
                f"{_PLAIN}.reset_prefix_cache",
                ("self", "reset_running_requests", "reset_connector"),
            ),
            Takes(f"{_PLAIN}.reset_encoder_cache", ("self",)),
            Takes(f"{_BASE}.set_weight_version", ("self", "weight_version")),
            Takes(f"{_PLAIN}.get_weight_version", ("self",)),
            Says(f"{_PLAIN}._invoke_utility_method", ("isinstance(result, Future)",)),
            Says(f"{_BASE}.step_with_batch_queue", ("batch_queue.appendleft(",)),
        ),
        process="core",
        answers=(
            ("wavebus_swap", f"{_PLUGIN}.core_swap:swap"),
            ("wavebus_call_off", f"{_PLUGIN}.core_swap:call_off"),
        ),
        sets=((_PLAIN, "wavebus_ready", None),),
    ),
    Seam(
        "lockstep swap",
        ("lockstep_staged_updates",),
        (
            _AGREE,
            Says(
                f"{_PARALLEL}.sync_dp_state",
                (
                    "[int(has_unfinished), int(pending_pause)], dtype=torch.int32",
                    "tensor[0].item() > 0 or pause_count % dp_size != 0",
                    "return (has_unfinished_global, pause_count == dp_size)",
                ),
            ),
            Says(f"{_LOCKSTEP}.run_busy_loop", (_START_WAVE, "self.step_counter = 0")),
        ),
        forms=(
            Form(
                "torch adds up",
                (
                    Takes(
                        f"{_PARALLEL}.sync_dp_state",
                        ("dp_group", "has_unfinished", "pending_pause"),
                    ),
                    Says(f"{_PARALLEL}.sync_dp_state", ("torch.distributed.all_reduce(tensor",)),
                ),
                wraps=_wraps("core_swap", (f"{_PARALLEL}.sync_dp_state", "sum_by_torch")),
            ),
            Form(
                "vLLM adds up",
                (
                    Takes(
                        f"{_PARALLEL}.sync_dp_state",
                        ("self", "dp_group", "has_unfinished", "pending_pause"),
                    ),
                    Says(
                        f"{_PARALLEL}.sync_dp_state",
                        ("cpu_all_reduce_(tensor, dp_group, timeout=",),
                    ),
                    Takes("vllm.distributed.utils:cpu_all_reduce_", ("tensor", "group", "timeout")),
                ),
                wraps=_wraps("core_swap", (f"{_PARALLEL}.sync_dp_state", "sum_by_vllm")),
            ),
        ),
        process="core",
        needs=("swap",),
        sets=(
            (_LOCKSTEP, "wavebus_swaps_together", True),
            (_LOCKSTEP, "wavebus_outputs", Ref(f"{_CORE}:EngineCoreOutputs")),
        ),
        wraps=_wraps(
            "core_swap", (f"{_LOCKSTEP}._has_global_unfinished_reqs", "has_global_unfinished_reqs")
        ),
    ),
    Seam(
        "wake",
        ("sleep",),
        (
            Takes(f"{_BASE}.wake_up", ("self", "tags")),
            Says(
                f"{_BASE}.wake_up", ("self.model_executor.wake_up(tags)", "self.resume_scheduler()")
            ),
        ),
        forms=(
            Form("caches stay known to peers", (SaysNot(f"{_BASE}.wake_up", ("kv_connector",)),)),
            Form(
                "caches are published again",
                (
                    Takes(_PUBLISH, ("self",)),
                    Says(f"{_BASE}.wake_up", ("self._set_kv_connector_handshake_metadata()",)),
                ),
                sets=((_BASE, "wavebus_publish_caches", Ref(_PUBLISH)),),
            ),
        ),
        process="core",
    ),
    Seam(
        "dp coordinator",
        ("dp_coordinator",),
        (
            Has(f"{_COORDINATOR}:DPCoordinator"),
            Has("vllm.v1.engine.utils:DPCoordinator"),
            Takes(
                f"{_COORDINATOR}:DPCoordinator.__init__",
                ("self", "parallel_config", "enable_wave_coordination", "logging_config"),
            ),
            Takes(f"{_COORDINATOR}:DPCoordinator.get_engine_socket_addresses", ("self",)),
            Takes(f"{_COORDINATOR}:DPCoordinator.get_stats_publish_address", ("self",)),
            Takes(f"{_COORDINATOR}:DPCoordinator.shutdown", ("self", "timeout")),
            Fields(
                "vllm.v1.engine:EngineCoreOutputs",
                ((0, "engine_index"), (6, "wave_complete"), (7, "start_wave")),
            ),
            Says("vllm.v1.engine:EngineCoreRequestType", ("START_DP_WAVE = b'\\x02'",)),
            Says(
                f"{_COORDINATOR}:DPCoordinatorProc",
                (
                    "send(b'READY')",
                    "outputs.wave_complete",
                    "outputs.start_wave",
                    "msgspec.msgpack.encode((wave, exclude_engine_index))",
                ),
            ),
            Says(f"{_LOCKSTEP}.run_busy_loop", (_START_WAVE, "not self.pending_pause")),
            # A rank that resumes obeys a START before it waits for the others (docs/waves.md).
            Says(
                f"{_LOCKSTEP}.resume_scheduler",
                (_RESUMES_AT_ONCE,),
            ),
            # A core that has heard READY ignores it when it comes again.
            Says(f"{_PLAIN}.process_input_sockets", ("type_frame.buffer == b'READY'",)),
        ),
        forms=(_BY_FRONT_ENDS, _BY_CORES),
        process="coordinator",
        needs=("lockstep pause fixes",),
        sets=(
            (
                "vllm.v1.engine.utils",
                "DPCoordinator",
                Ref(f"{_PLUGIN}.coordinator:BusCoordinator"),
            ),
        ),
    ),
    Seam(
        "lora adapters",
        ("lora_updates",),
        (
            Takes(f"{_LORA}._load_adapter", ("self", "lora_request")),
            Takes(f"{_LORA}._apply_adapters", ("self", "lora_requests")),
            Takes(
                "vllm.lora.lora_model:LoRAModel.from_lora_tensors",
                (
                    "cls",
                    "lora_model_id",
                    "tensors",
                    "peft_helper",
                    "device",
                    "dtype",
                    "model_vocab_size",
                    "weights_mapper",
                    "skip_prefixes",
                ),
            ),
            Has("vllm.lora.peft_helper:PEFTHelper"),
            Has("vllm.lora.utils:parse_fine_tuned_lora_name"),
        ),
        wraps=_wraps(
            "adapters",
            (f"{_LORA}._load_adapter", "load_adapter"),
            (f"{_LORA}._apply_adapters", "apply_adapters"),
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
        install=f"{_PLUGIN}.cpu_experts:install",
    ),
)


REGISTRY: Final = Registry(_FEATURES, (*_SEAMS, *CALLED))
# The class whose ``collective_rpc`` answers what is in :attr:`Seam.answers`.
CORES: Final = _PLAIN
