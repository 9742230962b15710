"""What a worker keeps of a chunk until it is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm._vllm import require_vllm

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("owned", [False, True])
def test_only_what_is_not_the_workers_own_is_copied(owned: bool) -> None:
    """Views of a transport's buffers would be overwritten under vLLM's reload."""
    from sidecar.vllm_plugin.worker import WavebusWeightTransferEngine  # noqa: PLC0415 - vLLM

    tensor = torch.arange(6.0)
    worker: Any = SimpleNamespace(
        _receiver=SimpleNamespace(owned=owned), device=torch.device("cpu")
    )
    own: Any = WavebusWeightTransferEngine._own
    [(name, staged)] = own(worker, [("w", tensor)])
    assert name == "w"
    assert torch.equal(staged, tensor)
    assert (staged.data_ptr() == tensor.data_ptr()) == owned
