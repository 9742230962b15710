"""What is wrapped in vLLM's front ends (API servers, and processes with an ``AsyncLLM``): a part of
the registry.

Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

from typing import Final

from bus.seams import Form, Has, Ref, Says, Seam, Takes
from sidecar.vllm.plugin.vllm_names import CORE_MODULE, PLAIN_CORE, wraps_by

_OUTPUTS: Final = "vllm.v1.engine.output_processor"
_STATE: Final = f"{_OUTPUTS}:RequestState"
_PROCESS_OUTPUTS: Final = f"{_OUTPUTS}:OutputProcessor.process_outputs"
_CHECK_TOKENS: Final = "vllm.renderers.base:BaseRenderer.validate_token_ids"

FRONT_ENDS: Final = (
    Seam(
        "closed answer",
        ("closed_answer",),
        (
            Has(CORE_MODULE, ("EngineCoreOutput", "EngineCoreOutputs", "FinishReason")),
            Says(_PROCESS_OUTPUTS, ("req_state.queue.put(request_output)",)),
            Says(
                f"{_OUTPUTS}:RequestOutputCollector.put",
                ("self.output is None or isinstance(output, Exception)",),
            ),
            Says("vllm.v1.engine.async_llm:AsyncLLM.generate", ("raise e.cause from e",)),
            Takes("vllm.v1.engine.async_llm:InputStreamError.__init__", ("self", "cause")),
            Takes("vllm.exceptions:RetryableRequestError.__init__", ("self", "message")),
        ),
        process="core",
        needs=("admission",),
        sets=(
            (PLAIN_CORE, "wavebus_aborts", Ref(f"{CORE_MODULE}:FinishReason.ABORT")),
            (PLAIN_CORE, "wavebus_output", Ref(f"{CORE_MODULE}:EngineCoreOutput")),
            (PLAIN_CORE, "wavebus_outputs", Ref(f"{CORE_MODULE}:EngineCoreOutputs")),
        ),
        wraps=wraps_by("core.admission", (_PROCESS_OUTPUTS, "process_outputs")),
        off="WAVEBUS_CLOSED_ANSWER",
    ),
    Seam(
        "streamed versions",
        ("streamed_versions",),
        (
            Takes(
                f"{_STATE}._new_completion_output",
                ("self", "token_ids", "finish_reason", "stop_reason"),
            ),
            Takes(f"{_STATE}._weight_version_spans", ("self",)),
            Has("vllm.outputs:CompletionOutput", ("weight_versions",)),
            Says(
                "vllm.outputs:RequestOutput.add",
                ("completion.weight_versions = next_completion.weight_versions",),
            ),
            Says(
                "vllm.entrypoints.scale_out.token_in_token_out.serving",
                ("weight_versions=output.weight_versions",),
            ),
        ),
        process="core",
        wraps=wraps_by(
            "front_end", (f"{_STATE}._new_completion_output", "label_completion_output")
        ),
    ),
    Seam(
        "token checks",
        ("token_checks",),
        (
            Takes(_CHECK_TOKENS, ("self", "token_ids", "parameter")),
            Says(
                "vllm.v1.engine.input_processor:InputProcessor",
                ("self.renderer.validate_token_ids(prompt_ids)",),
            ),
            Has("vllm.config.model:ModelConfig", ("get_vocab_size",)),
        ),
        forms=(
            Form(
                "checked with a tokenizer",
                (
                    Says(_CHECK_TOKENS, ("if not token_ids or tokenizer is None:",)),
                    Has("vllm.exceptions:VLLMValidationError"),
                ),
                wraps=wraps_by("front_end", (_CHECK_TOKENS, "check_token_ids")),
            ),
            Form(
                "always checked",
                (Says(_CHECK_TOKENS, ("max_token_id = self.model_config.get_vocab_size() - 1",)),),
            ),
        ),
        process="core",
    ),
)
