"""Which dtypes may fill which parameters."""

from __future__ import annotations

import pytest
import torch

from bus.errors import EngineError
from bus.manifest import TensorMeta
from sidecar.vllm.plugin.loading.loader_trace import LoaderTrace


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
    target = torch.nn.Parameter(torch.empty(4, dtype=parameter, device="meta"))
    metas = (TensorMeta("gate.weight", sent, (4,)),)
    trace = LoaderTrace(
        metas, {"gate.weight": target}, {}, exact_dtype=True, model_dtype="bfloat16"
    )
    refusals = []
    with trace, torch.no_grad():
        for _, source in trace.feed(0, 1, ""):
            try:
                target.copy_(source)
            except EngineError as error:
                refusals.append(str(error))
    assert bool(refusals) == is_refused
    assert all('dtype="engine"' in text for text in refusals)
