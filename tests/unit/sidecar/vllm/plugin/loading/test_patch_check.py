"""Parameters that lie as they were loaded, and others: those take no patch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._vllm.plugin.loading.patch_check import check_in_place

if TYPE_CHECKING:
    from collections.abc import Callable


class Model(nn.Module):
    """Two layers; a square matrix looks the same when it is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 6, bias=False)


UNQUANTISED = SimpleNamespace(quant_config=None)
NAMES = {"first.weight": "a.weight", "second.weight": "b.weight"}


def check(serving: nn.Module, config: Any = UNQUANTISED, **names: str) -> None:
    loaded = dict(Model().to("meta").named_parameters())
    check_in_place(config, serving, loaded, names or NAMES)


def backend(name: str) -> Any:
    return SimpleNamespace(unquantized_backend=SimpleNamespace(name=name))


def replaced(parameter: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Model], None]:
    def spoil(model: Model) -> None:
        model.first.weight = nn.Parameter(parameter(model.first.weight), requires_grad=False)

    return spoil


def packed(model: Model) -> None:
    first: Any = model.first
    weight = first.weight
    first.cpu_linear = lambda x: x @ weight


def reordered(model: Model) -> None:
    model.first.quant_method = backend("FLASHINFER_CUTLASS")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (replaced(lambda weight: weight.t()), "changed the layout of first.weight"),
        (replaced(lambda _: torch.empty(0)), r"changed the layout of first.weight .*\[0\]"),
        (replaced(lambda weight: weight.half()), "float16"),
        (packed, "packed for the CPU"),
        (reordered, "FLASHINFER_CUTLASS.*--moe-backend triton"),
    ],
)
def test_what_was_laid_out_anew_takes_no_patch(spoil: Callable[[Model], None], text: str) -> None:
    """Named by the trainer's tensor; the others can still be patched."""
    model = Model()
    check(model)
    spoil(model)
    with pytest.raises(EngineError, match=f"a.weight: .*{text}") as error:
        check(model)
    assert (error.value.code, error.value.tensor) == (NackCode.MANIFEST_REFUSED, "a.weight")
    check(model, **{"second.weight": "b.weight"})


def test_experts_that_lie_as_they_were_loaded_take_patches() -> None:
    model = Model()
    model.first.quant_method = backend("TRITON")
    check(model)


def test_a_quantised_model_takes_none() -> None:
    """Its scales were computed from what a patch would change."""
    with pytest.raises(
        EngineError, match=r"a.weight: the model, and so first.weight, is quantised"
    ):
        check(Model(), SimpleNamespace(quant_config=object()))
