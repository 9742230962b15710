"""Is this vLLM one whose inside we know? Asked of its source, before anything is replaced.

A version alone says little of builds between releases, and nothing of forks. Each check
returns what is not as expected, in words; nothing means that all is.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The coordinator's frames and rules were read, and tried, on these.
COORDINATOR_VERSIONS: Final = ((0, 32),)

COORDINATOR_CHECKED: Final = (
    "version, constructor and methods of DPCoordinator, order of EngineCoreOutputs, number of "
    "START_DP_WAVE, frames READY and (wave, excluded), reports of both edges of a wave"
)


def coordinator_gaps(version: str, coordinator: Any, utils: Any, engine: Any) -> list[str]:
    """What forbids to stand in for vLLM's DP coordinator.

    Args:
        version: vLLM's.
        coordinator: the module ``vllm.v1.engine.coordinator``.
        utils: the module ``vllm.v1.engine.utils``, which starts it.
        engine: the module ``vllm.v1.engine``.
    """
    return [*_coordinator_gaps(version, coordinator, utils, engine)]


def _coordinator_gaps(version: str, coordinator: Any, utils: Any, engine: Any) -> Iterator[str]:
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or (int(found[1]), int(found[2])) not in COORDINATOR_VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in COORDINATOR_VERSIONS)
        yield f"vLLM {version} is not among those whose coordination is known ({known})"
        return
    theirs = getattr(coordinator, "DPCoordinator", None)
    if theirs is None or getattr(utils, "DPCoordinator", None) is not theirs:
        yield "vllm.v1.engine.utils does not take DPCoordinator from vllm.v1.engine.coordinator"
        return
    yield from _signature_gaps(
        theirs,
        __init__=("self", "parallel_config", "enable_wave_coordination", "logging_config"),
        get_engine_socket_addresses=("self",),
        get_stats_publish_address=("self",),
        shutdown=("self", "timeout"),
    )
    fields = tuple(getattr(engine.EngineCoreOutputs, "__struct_fields__", ()))
    if fields[0:1] != ("engine_index",) or fields[6:8] != ("wave_complete", "start_wave"):
        yield f"EngineCoreOutputs has other fields: {', '.join(fields)}"
    if engine.EngineCoreRequestType.START_DP_WAVE.value != b"\x02":
        yield "START_DP_WAVE has another number"
    yield from _source_gaps(
        coordinator.DPCoordinatorProc,
        'send(b"READY")',
        "outputs.wave_complete",
        "outputs.start_wave",
        "msgspec.msgpack.encode((wave, exclude_engine_index))",
    )


def core_gaps(core: Any) -> list[str]:
    """What forbids the status page in the module ``vllm.v1.engine.core``."""
    return [
        *_signature_gaps(
            getattr(core, "EngineCoreProc", None),
            _process_input_queue=("self",),
            _process_engine_step=("self",),
            _handle_client_request=("self", "request_type", "request"),
            step=("self",),
            step_with_batch_queue=("self",),
            _send_abort_outputs_to_client=("self", "req_ids", "client_index"),
            has_work=("self",),
        ),
        *_signature_gaps(
            getattr(core, "DPEngineCoreProc", None),
            _has_global_unfinished_reqs=("self", "local_unfinished"),
            execute_dummy_batch=("self",),
            resume_scheduler=("self",),
        ),
    ]


def guard_gaps(core: Any) -> list[str]:
    """What forbids the guard."""
    theirs = getattr(core, "DPEngineCoreProc", None)
    gaps = [
        *_signature_gaps(
            theirs,
            resume_scheduler=("self",),
            pause_scheduler=("self", "mode", "clear_cache"),
            _pause_complete=("self",),
            _handle_client_request=("self", "request_type", "request"),
        )
    ]
    if gaps:
        return gaps
    return [
        *_source_gaps(
            theirs,
            "self.pending_pause = False",
            "self.ignore_start_dp_wave = True",
            "new_wave, exclude_eng_index = request",
            "ParallelConfig.has_unfinished_dp(",
        )
    ]


def hold_gaps(core: Any) -> list[str]:
    """What forbids that a core ends a pause by itself."""
    gaps = [
        *_signature_gaps(
            getattr(core, "EngineCoreProc", None),
            _process_input_queue=("self",),
            _handle_client_request=("self", "request_type", "request"),
            _send_abort_outputs=("self", "aborted_reqs"),
            collective_rpc=("self", "method", "timeout", "args", "kwargs"),
            pause_scheduler=("self", "mode", "clear_cache"),
            resume_scheduler=("self",),
            has_work=("self",),
        )
    ]
    kinds = getattr(core, "EngineCoreRequestType", None)
    if not hasattr(kinds, "WAKEUP"):
        gaps.append("EngineCoreRequestType has no WAKEUP")
    if not hasattr(getattr(core, "RequestStatus", None), "FINISHED_ABORTED"):
        gaps.append("RequestStatus has no FINISHED_ABORTED")
    return gaps


def door_gaps(core: Any) -> list[str]:
    """What forbids the door."""
    theirs = getattr(core, "EngineCoreProc", None)
    gaps = [
        *_signature_gaps(
            theirs,
            _handle_client_request=("self", "request_type", "request"),
            _send_abort_outputs_to_client=("self", "req_ids", "client_index"),
            collective_rpc=("self", "method", "timeout", "args", "kwargs"),
        )
    ]
    return gaps or [*_source_gaps(theirs, "req, request_wave = request")]


def swap_gaps(core: Any) -> list[str]:
    """What forbids swaps between steps."""
    gaps = [
        *_signature_gaps(
            getattr(core, "EngineCoreProc", None),
            collective_rpc=("self", "method", "timeout", "args", "kwargs"),
            preprocess_add_request=("self", "request"),
            get_weight_version=("self",),
            reset_prefix_cache=("self", "reset_running_requests", "reset_connector"),
            reset_encoder_cache=("self",),
        ),
        *_signature_gaps(
            getattr(core, "EngineCore", None),
            add_request=("self", "request", "request_wave"),
            set_weight_version=("self", "weight_version"),
            _attach_weight_version=("self", "outputs"),
        ),
        *_signature_gaps(
            getattr(core, "DPEngineCoreProc", None),
            _has_global_unfinished_reqs=("self", "local_unfinished"),
        ),
        *_signature_gaps(
            getattr(core, "ParallelConfig", None),
            sync_dp_state=("dp_group", "has_unfinished", "pending_pause"),
        ),
    ]
    if gaps:
        return gaps
    return [
        *_source_gaps(
            core.ParallelConfig.sync_dp_state,
            "[int(has_unfinished), int(pending_pause)], dtype=torch.int32",
            "tensor[0].item() > 0 or pause_count % dp_size != 0",
            "return has_unfinished_global, pause_count == dp_size",
        ),
        *_source_gaps(core.EngineCoreProc, "if isinstance(result, Future):"),
        *_source_gaps(core.EngineCore, "batch_queue.appendleft("),
    ]


def factory_gaps(factory: Any) -> list[str]:
    """What forbids to make vLLM's worker engines in its ``WeightTransferEngineFactory``'s place."""
    gaps = [
        *_signature_gaps(factory, create_engine=("config", "vllm_config", "device", "model")),
    ]
    if not isinstance(getattr(factory, "_registry", None), dict):
        gaps.append(f"{factory.__name__} has no _registry")
    return gaps


def adapter_gaps(worker_manager: Any, lora_model: Any) -> list[str]:
    """What forbids adapters: vLLM's modules ``vllm.lora.worker_manager`` and ``lora_model``."""
    theirs = getattr(worker_manager, "LRUCacheWorkerLoRAManager", None)
    return [
        *_signature_gaps(
            theirs,
            _load_adapter=("self", "lora_request"),
            _apply_adapters=("self", "lora_requests"),
        ),
        *_signature_gaps(
            getattr(lora_model, "LoRAModel", None),
            from_lora_tensors=(
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
    ]


def _signature_gaps(theirs: Any, **methods: tuple[str, ...]) -> Iterator[str]:
    if theirs is None:
        yield f"no class with {', '.join(methods)}"
        return
    for name, expected in methods.items():
        method: Callable[..., Any] | None = getattr(theirs, name, None)
        if method is None:
            yield f"{theirs.__name__} has no {name}"
        elif (found := tuple(inspect.signature(method).parameters)) != expected:
            yield f"{theirs.__name__}.{name} takes {', '.join(found)}"


def _source_gaps(theirs: Any, *facts: str) -> Iterator[str]:
    try:
        source = inspect.getsource(theirs)
    except (OSError, TypeError):
        yield f"the source of {theirs.__name__} is not there to be read"
        return
    for fact in facts:
        if fact not in source:
            yield f"the source of {theirs.__name__} has no `{fact}`"
