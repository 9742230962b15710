"""An adapter on the trainer's side: what it may be, and what its transport is opened with."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from bus._lora import AdapterInit
from bus._weight_transfer.formats import decode
from bus.errors import UsageError
from trainer_agent._update.lora import Adapter, adapter_tensors, config_text

A, B = (f"base_model.model.layers.0.q_proj.lora_{half}.weight" for half in "AB")
TENSORS = {A: torch.arange(12.0).view(2, 6), B: torch.arange(8.0).view(2, 4).T}
CONFIG: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": {"q_proj"}}


def test_engines_get_the_config_with_the_params_of_the_sender() -> None:
    adapter = Adapter("mine", TENSORS, CONFIG)
    init = decode(adapter.init("gloo", b"there"), AdapterInit)
    assert adapter.backend == "lora:mine"
    assert (init.backend, init.params) == ("gloo", b"there")
    assert json.loads(init.config) == {**CONFIG, "target_modules": ["q_proj"]}


def test_a_transport_serves_one_adapter_with_one_config() -> None:
    """Its tensors may change from version to version."""
    adapter = Adapter("mine", TENSORS, CONFIG)
    assert Adapter("mine", {A: TENSORS[A]}, CONFIG).opens_like(adapter)
    assert not Adapter("other", TENSORS, CONFIG).opens_like(adapter)
    assert not Adapter("mine", TENSORS, {**CONFIG, "r": 4}).opens_like(adapter)
    assert not adapter.opens_like(None)


def test_tensors_of_a_module_by_the_names_of_a_checkpoint() -> None:
    """PEFT has the adapter's name in them; the other parameters are not taken."""
    layer = nn.Module()
    layer.lora_A = nn.ModuleDict({"default": nn.Linear(6, 2, bias=False)})
    layer.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})
    layer.base_layer = nn.Linear(6, 4)
    model = nn.ModuleDict({"q_proj": layer})
    found = adapter_tensors(model)
    assert list(found) == ["q_proj.lora_A.weight", "q_proj.lora_B.weight"]
    layer.lora_A["second"] = nn.Linear(6, 2, bias=False)
    with pytest.raises(UsageError, match="appears twice"):
        adapter_tensors(model)


@pytest.mark.parametrize("source", [{}, nn.Linear(2, 2)])
def test_a_source_without_an_adapter(source: Any) -> None:
    with pytest.raises(UsageError, match="lora_A and lora_B"):
        adapter_tensors(source)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"r": 0}, "r must be given"),
        ({"r": -1}, "r=-1"),
        ({"r": True}, "r=True"),
        ({"r": "8"}, "r='8'"),
        ({"lora_alpha": None}, "lora_alpha must"),
        ({"lora_alpha": "16"}, "lora_alpha='16'"),
        ({"target_modules": []}, "target_modules must"),
        ({"x": object()}, "no place in JSON"),
        ({"x": "a" * 1024 * 1024}, "the limit is"),
    ],
)
def test_a_config_that_is_none(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        config_text({**CONFIG, **change})


def test_a_config_that_is_no_dict() -> None:
    with pytest.raises(UsageError, match="a dict"):
        config_text("r=8")  # type: ignore[arg-type]
