"""Which dtypes may fill which parameters."""

from __future__ import annotations

import pytest
import torch

from bus._manifest import TensorMeta
from bus.errors import EngineError
from sidecar._vllm.plugin.loading.loader_trace import LoaderTrace, TargetNames


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


class Kept(torch.nn.Module):
    """A layer of each kind that engines keep in float32, in a model of bfloat16 and float8."""

    def __init__(self) -> None:
        super().__init__()

        def parameter(dtype: torch.dtype, *shape: int) -> torch.nn.Parameter:
            empty = torch.empty(shape, dtype=dtype, device="meta")
            return torch.nn.Parameter(empty, requires_grad=False)

        self.weight = parameter(torch.float8_e4m3fn, 4, 4)
        self.weight_scale = parameter(torch.float32, 2)  # of two parts of a fused weight
        self.A = parameter(torch.float32, 4)
        self.norm = parameter(torch.bfloat16, 4)
        router_bias = torch.empty(4, dtype=torch.float32, device="meta")
        self.register_buffer("e_score_correction_bias", router_bias)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "k.weight_scale":
            self.weight_scale[1].copy_(tensor)
        elif name == "A_log":  # as vLLM's Mamba layers compute it
            self.A.copy_(-torch.exp(tensor.float()))
        else:
            self.state_dict(keep_vars=True)[name].copy_(tensor)


@pytest.mark.parametrize(
    ("name", "sent", "shape", "is_kept"),
    [
        ("weight", "float8_e4m3fn", (4, 4), False),
        ("k.weight_scale", "bfloat16", (), True),
        ("k.weight_scale", "float16", (), True),
        ("k.weight_scale", "float32", (), False),
        ("A_log", "bfloat16", (4,), True),
        ("A_log", "float32", (4,), False),
        ("e_score_correction_bias", "bfloat16", (4,), True),
        ("e_score_correction_bias", "float32", (4,), False),
        ("norm", "bfloat16", (4,), False),
    ],
)
@pytest.mark.parametrize("exact", [False, True], ids=["quantised", "plain"])
def test_what_the_engine_keeps_in_float32_is_named(
    name: str, sent: str, shape: tuple[int, ...], is_kept: bool, exact: bool
) -> None:
    """A cast would have lost it, whether the loader copies the tensor or computes with it."""
    model = Kept()
    metas = (TensorMeta(name, sent, shape),)
    model_dtype = sent if sent == "float16" else "bfloat16"
    trace = LoaderTrace(metas, TargetNames(model), exact_dtype=exact, model_dtype=model_dtype)
    with trace, torch.no_grad():
        for given, source in trace.feed(0, 1, ""):
            model.load(given, source)
    assert trace.used == {0}
    assert trace.widened == ({0} if is_kept else set())


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
