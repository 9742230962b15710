"""What a worker's models hold, read by a plugin of the tests: vLLM's weight checker knows
nothing of drafts, and on CPUs it sees empty tensors where linear layers were repacked."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

READ_MODELS = "tests_read_models"
READ_FLOAT32 = "tests_read_float32"
# What a layer calls the width of its input: sharded, whole, or an output head's.
WIDTHS = ("input_size_per_partition", "input_size", "embedding_dim")


def register() -> None:
    """vLLM calls this in every process."""
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415 - only where there is a vLLM

    setattr(WorkerBase, READ_MODELS, _read)
    setattr(WorkerBase, READ_FLOAT32, _read_float32)


def _read_float32(worker: Any) -> dict[str, list[float]]:
    """Its model's parameters and buffers that are float32, by their names."""
    model = worker.get_model()
    every = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wide = {name: each for name, each in every.items() if str(each.dtype) == "torch.float32"}
    return {name: each.detach().flatten().tolist() for name, each in wide.items()}


def _read(worker: Any) -> dict[str, dict[str, str]]:
    """Of each of its models a digest per layer that has weights."""
    models = {"model": worker.get_model(), "draft": worker.get_draft_model()}
    return {name: _digests(model) for name, model in models.items() if model is not None}


def _digests(model: torch.nn.Module) -> dict[str, str]:
    import torch  # noqa: PLC0415 - as above

    found: dict[str, str] = {}
    for name, layer in model.named_modules():
        weight: Any = getattr(layer, "weight", None)
        if not isinstance(weight, torch.Tensor):
            continue
        repacked: Any = getattr(layer, "cpu_linear", None)
        if repacked is not None:  # what it makes of all unit vectors is its matrix
            sizes = (getattr(layer, name, None) for name in WIDTHS)
            weight = repacked(torch.eye(next(size for size in sizes if size)), weight, None)
        found[name] = hashlib.sha256(weight.detach().contiguous().numpy().tobytes()).hexdigest()
    return found
