"""Wrapped modules are sent by the names that their checkpoints have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from bus._manifest import TensorMeta
from bus.errors import UsageError
from trainer_agent._update.lora import adapter_tensors
from trainer_agent._weights.any_source import as_source
from trainer_agent._weights.wrappers import plain_names, require_whole, unwrapped

if TYPE_CHECKING:
    from collections.abc import Callable


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.module = nn.Linear(2, 2, bias=False)


class Checkpointed(nn.Module):
    """As torch's wrapper for activation checkpoints."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = inner


def names(weights: object) -> list[str]:
    return [name for name, _ in as_source(weights)]  # type: ignore[arg-type]


def with_wrapped_parts(model: nn.Module) -> nn.Module:
    model.first = torch.compile(Checkpointed(model.first))  # type: ignore[assignment, arg-type]
    return model


@pytest.mark.filterwarnings("default")  # torch.compile imports what torch calls deprecated
@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        torch.compile,
        DataParallel,
        lambda model: torch.compile(DataParallel(model)),
        with_wrapped_parts,
        Checkpointed,
    ],
)
def test_a_wrapped_module_has_its_own_names(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """As a module, and as its state dict."""
    wrapped, expected = wrap(Model()), ["first.weight", "module.weight"]
    assert names(wrapped) == expected
    assert names(dict(wrapped.named_parameters())) == expected


def test_other_names_stay() -> None:
    for plain in (["module.a", "b"], ["a_orig_mod.b"], []):
        tensors = dict.fromkeys(plain, 1)
        assert plain_names(tensors) is tensors
    assert unwrapped(7) == 7


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match=r"a\.weight appears twice"):
        plain_names({"a.weight": 1, "a._orig_mod.weight": 2})


@pytest.mark.parametrize(
    "name",
    ["base_model.model.q.base_layer.weight", "q.lora_A.default.weight", "h.modules_to_save.w"],
)
def test_a_model_in_pefts_wrapper_is_refused_with_what_to_send(name: str) -> None:
    with pytest.raises(UsageError, match="merge_and_unload") as refused:
        require_whole([TensorMeta("a.weight", "float32", (2,)), TensorMeta(name, "float32", (2,))])
    assert name in str(refused.value)
    require_whole([TensorMeta("explora_A.weight", "float32", (2,))])


def test_an_adapter_that_has_more_than_engines_take_is_refused() -> None:
    model = nn.Module()
    model.lora_A = nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)})
    inner = nn.Module()
    inner.q = model
    assert list(adapter_tensors(inner)) == ["q.lora_A.weight"]
    inner.modules_to_save = nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)})
    top = nn.Module()
    top.head = inner
    with pytest.raises(UsageError, match=r"head\.modules_to_save\.default\.weight.*would be lost"):
        adapter_tensors(top)


def test_an_empty_tensor_is_named() -> None:
    with pytest.raises(UsageError, match=r"b\.weight is empty \(shape \[0, 3\]\)"):
        require_whole([TensorMeta("b.weight", "float32", (0, 3))])
