"""Which dtypes may fill which parameters."""

from __future__ import annotations

import pytest
import torch

from bus.errors import EngineError
from bus.manifest import TensorMeta
from sidecar.vllm.plugin.loading.loader_trace import LoaderTrace, TargetNames


@pytest.mark.parametrize(
    ("sent", "parameter", "is_refused"),
    [
        ("bfloat16", torch.bfloat16, False),
        ("bfloat16", torch.float32, False),  # a router, as a bfloat16 checkpoint fills it
        ("float32", torch.float32, False),
        ("float32", torch.bfloat16, True),
        ("float16", torch.bfloat16, True),
        ("float16", torch.float32, True),
    ],
)
def test_a_model_in_bfloat16(sent: str, parameter: torch.dtype, is_refused: bool) -> None:
    model = torch.nn.Module()
    model.gate = torch.nn.Linear(4, 1, bias=False, dtype=parameter, device="meta")
    target = model.gate.weight
    metas = (TensorMeta("gate.weight", sent, (1, 4)),)
    trace = LoaderTrace(metas, TargetNames(model), exact_dtype=True, model_dtype="bfloat16")
    refusals = []
    with trace, torch.no_grad():
        for _, source in trace.feed(0, 1, ""):
            try:
                target.copy_(source)
            except EngineError as error:
                refusals.append(str(error))
    assert bool(refusals) == is_refused
    assert all('dtype="engine"' in text for text in refusals)


def test_a_parameter_that_the_loader_makes_as_it_goes() -> None:
    """As vLLM's Transformers backend does with the bias of an output head, at each load."""
    model = torch.nn.Linear(4, 2, device="meta")
    trace = LoaderTrace(
        (TensorMeta("bias", "float32", (2,)),), TargetNames(model), exact_dtype=True
    )
    with trace, torch.no_grad():
        for _, source in trace.feed(0, 1, ""):
            model.bias = torch.nn.Parameter(torch.empty(2, device="meta"))
            model.bias.copy_(source)
    assert trace.written("bias") == 2
    assert trace.tensor("bias") is model.bias
    assert not trace.beyond_copies
