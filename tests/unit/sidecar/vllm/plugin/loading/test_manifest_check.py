"""A model on the meta device, as its own constructors build it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sidecar._vllm.plugin.loading.manifest_check import _complete, _ValuesOnCpu


class Activation(nn.Module):
    """As constructors of vLLM's layers do: some read values of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.pow(torch.tensor(0.5), torch.arange(1, 4, dtype=torch.int32)).tolist()
        self.alpha = nn.Parameter(torch.log(torch.tensor(0.5)).unsqueeze(0))
        self.alpha.loader = "its own"  # type: ignore[attr-defined]
        self.register_buffer("beta", torch.tensor(0.25))
        self.scale = float(self.get_buffer("beta").item())
        self.register_buffer("factors", torch.tensor([1.0, 2.0]) / torch.empty(2))
        self.register_buffer("table", torch.arange(3, dtype=torch.int32))
        self.weight = nn.Parameter(torch.empty(2, 2))
        self.register_parameter("bias", None)


def _built() -> Activation:
    with torch.device("meta"), _ValuesOnCpu():
        return Activation()


def test_constructors_may_read_what_they_make_of_numbers() -> None:
    layer = _built()
    assert layer.slopes == [0.5, 0.25, 0.125]
    assert layer.scale == 0.25
    assert layer.weight.is_meta
    assert layer.get_buffer("factors").is_meta


def test_a_complete_layer_has_memory_for_integer_tables_alone() -> None:
    layer, serving = _built(), Activation()
    serving.get_buffer("table").copy_(torch.tensor([2, 1, 0]))
    _complete(layer, serving)
    kept: Any = layer.alpha
    assert kept.loader == "its own"
    assert layer.get_buffer("table").tolist() == [2, 1, 0]
    assert {name for name, each in layer.state_dict().items() if not each.is_meta} == {"table"}
    assert layer.bias is None


def test_a_bias_that_a_loader_has_made_is_expected() -> None:
    layer, serving = _built(), Activation()
    serving.bias = nn.Parameter(torch.ones(2))
    _complete(layer, serving)
    assert layer.bias is not None
    assert (layer.bias.shape, layer.bias.is_meta) == ((2,), True)
