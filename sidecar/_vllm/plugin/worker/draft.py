"""Makes the worker's draft model known to its weight transfer engine.

vLLM passes the served model to the engine, and points the engine at the draft only when an update
of the draft starts. The manifest must be checked before that, so a sidecar first makes the draft
model known. Only the drafter knows from which configuration a draft model was built, and vLLM's two
model runners expose it in different ways (0.32).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from sidecar._vllm.plugin.loading.manifest_check import Blueprint

if TYPE_CHECKING:
    import torch

logger = init_logger("vllm.wavebus")


def introduce(worker: Any) -> bool:
    """Makes the worker's draft model known to the worker's weight transfer engine.

    Returns:
        False, with a warning in the log, if the draft can't be updated: this vLLM hides how the
            draft was built, or its engine can't use the draft.
    """
    try:
        draft = worker.get_draft_model()
        worker.weight_transfer_engine.introduce_draft(draft, _blueprint(worker, draft))
    except Exception:
        logger.warning("wavebus: the draft model can't be updated", exc_info=True)
        return False
    return True


def shared_parameters(draft: torch.nn.Module, model: torch.nn.Module) -> frozenset[str]:
    """Returns the names of a draft's parameters that also belong to the main model."""
    theirs = {id(parameter) for parameter in model.parameters()}
    ours = draft.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in ours if id(parameter) in theirs)


def _blueprint(worker: Any, draft: torch.nn.Module) -> Blueprint:
    speculative = worker.speculative_config
    config = speculative.draft_model_config
    return Blueprint(
        _config(worker),
        config,
        config.quantization is not None,
        # The prefix of parameter names: a separate model has one, a head on the main model none.
        "draft_model" if speculative.uses_draft_model() else "",
        shared_parameters(draft, worker.get_model()),
    )


def _config(worker: Any) -> Any:
    runner = worker.model_runner
    drafter = runner.speculator if worker.use_v2_model_runner else runner.drafter
    own = getattr(drafter, "_draft_vllm_config", None)
    make = getattr(drafter, "_create_draft_vllm_config", None)
    if own is None and make is not None:
        own = make()
    return own or worker.speculative_config.apply_draft_overrides(worker.vllm_config)
