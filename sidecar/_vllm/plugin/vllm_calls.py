"""Expectations about the vLLM functions that wavebus calls without wrapping them.

Each :class:`Seam` here names parts of vLLM, what wavebus expects of them, and which of its features
need them.

Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

from typing import Final

from bus._vllm.seams import Form, Has, Says, Seam, Takes
from sidecar._vllm.plugin.vllm_names import (
    IPC_ENGINE,
    NCCL_ENGINE,
    PYNCCL,
    TRANSFER_PACKAGE,
)

_LLM: Final = "vllm.v1.engine.async_llm:AsyncLLM"
_ENTRY: Final = "vllm.entrypoints"
_SAMPLER: Final = "vllm.v1.worker.gpu.sample.sampler:Sampler"
_PAUSE_ROUTES: Final = ("'/pause'", "'/resume'", "'/update_weight_version'", "'/weight_info'")

CALLED: Final = (
    Seam(
        "model loading",
        ("weight_updates", "staged_updates", "lockstep_staged_updates"),
        (
            Takes(
                "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload",
                "model",
            ),
            Has("vllm.model_executor.model_loader.reload:finalize_layerwise_reload"),
            Takes("vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info", "layer"),
            Has("vllm.model_executor.model_loader.utils:initialize_model"),
            Takes("vllm.utils.torch_utils:set_default_torch_dtype", "dtype"),
            Has("vllm.model_executor.layers.rotary_embedding:_ROPE_DICT"),
            Has("vllm.distributed.parallel_state", "get_tp_group, get_pp_group"),
        ),
    ),
    # A worker engine passes its tensors to `self.model`, which wavebus replaces
    # (:mod:`sidecar._vllm.plugin.worker.native_transport`).
    Seam(
        "staged worker engines",
        ("staged_worker_engines",),
        (
            Takes(f"{NCCL_ENGINE}.receive_weights", "self, update_info"),
            Says(
                f"{NCCL_ENGINE}.receive_weights",
                "post_unpack_func=self.model.load_weights",
                "broadcast(weight, src=0, stream=torch.cuda.current_stream())",
                "self.model.load_weights([(name, weight)])",
            ),
            Says(f"{NCCL_ENGINE}.shutdown", "self.model_update_group.destroy()"),
            Says(f"{PYNCCL}.destroy", "ncclCommAbort("),
            Says(
                f"{TRANSFER_PACKAGE}.packed_tensor:packed_nccl_broadcast_consumer",
                "post_unpack_func(",
                "stream.synchronize()",
            ),
            Has(
                f"{TRANSFER_PACKAGE}.nccl_common:NCCLWeightTransferInitInfo",
                "world_size, packed, packed_buffer_size_bytes, packed_num_buffers",
            ),
            Takes(f"{IPC_ENGINE}.receive_weights", "self, update_info"),
            Says(f"{IPC_ENGINE}.receive_weights", "self.model.load_weights(weights)"),
            Says(f"{IPC_ENGINE}.finish_weight_update", "self._packed_importer.close()"),
            Takes(
                f"{TRANSFER_PACKAGE}.base:WeightTransferEngine.parse_update_info",
                "self, update_dict",
            ),
        ),
        needs=("worker engines",),
    ),
    Seam(
        "draft models",
        ("draft_updates",),
        (Has("vllm.v1.worker.worker_base:WorkerBase", "supports_draft_weight_updates"),),
    ),
    Seam(
        "request limits",
        ("request_limits", "exact_seeds"),
        (
            Has("vllm.config.vllm:VllmConfig", "use_v2_model_runner, speculative_config"),
            Has("vllm.config.model:ModelConfig", "get_vocab_size, max_model_len"),
            Has("vllm.config.scheduler:SchedulerConfig", "max_num_seqs"),
        ),
    ),
    # The noise of a draw depends on the request's seed and the token's absolute position alone.
    Seam(
        "seeded draws",
        ("exact_seeds",),
        (
            Says(f"{_SAMPLER}.__call__", "pos = input_batch.positions["),
            Says(f"{_SAMPLER}.sample", "or self.sampling_states.any_explicit_seed("),
            Says(f"{_SAMPLER}._sample_random", "self.sampling_states.seeds.gpu, pos,"),
            Says(
                "vllm.v1.worker.gpu.sample.gumbel:gumbel_noised_argmax",
                "murmur3_uniform32(seed, pos, keys)",
                "murmur3_uniform64(seed, pos, keys)",
            ),
        ),
    ),
    Seam(
        "AsyncLLM",
        ("in_process",),
        (
            Takes(f"{_LLM}.resume_generation", "self"),
            Takes(f"{_LLM}.collective_rpc", "self, method, timeout, args, kwargs"),
            Takes(f"{_LLM}.wake_up", "self, tags"),
            Takes(f"{_LLM}.update_weight_version", "self, new_version"),
            Takes(f"{_LLM}.add_lora", "self, lora_request"),
            Has(
                _LLM,
                "pause_generation, get_weight_version, reset_prefix_cache, reset_mm_cache, "
                "reset_encoder_cache, abort, generate, errored",
            ),
            Says(
                "vllm.v1.engine.output_processor:OutputProcessor.__init__",
                "self.request_states",
                "self.parent_requests",
            ),
            Has("vllm.v1.engine.exceptions:EngineDeadError"),
        ),
    ),
    Seam(
        "routes in process",
        ("in_process_routes",),
        (
            Says(f"{_ENTRY}.cli.serve", "make_arg_parser"),
            Takes(f"{_ENTRY}.launchers.app:build_app", "args, supported_tasks, model_config"),
            Takes(
                f"{_ENTRY}.launchers.api_server.app_state:init_app_state",
                "engine_client, state, args, supported_tasks",
            ),
            Has(f"{_ENTRY}.launchers.launcher:NoSignalServer", "capture_signals"),
            Has(_LLM, "get_supported_tasks"),
        ),
    ),
    Seam(
        "routes",
        ("over_http",),
        (
            Says(f"{_ENTRY}.serve.dev.rpc.api_router", "'/collective_rpc'"),
            Says(
                f"{_ENTRY}.serve.dev.cache.api_router",
                "'/reset_prefix_cache'",
                "'/reset_mm_cache'",
                "'/reset_encoder_cache'",
            ),
            Says(f"{_ENTRY}.serve.dev.sleep.api_router", "'/wake_up'"),
            Says(f"{_ENTRY}.serve.dev.server_info.api_router", "'/server_info'"),
            # This status shows that the engine is dead.
            Says(
                f"{_ENTRY}.serve.instrumentator.health",
                "except EngineDeadError:",
                "Response(status_code=503)",
            ),
        ),
        forms=(
            Form("RL routes", (Says(f"{_ENTRY}.rl.online.api_router", *_PAUSE_ROUTES),)),
            Form("RLHF routes", (Says(f"{_ENTRY}.serve.dev.rlhf.api_router", *_PAUSE_ROUTES),)),
        ),
    ),
)
