"""CUDA IPC handles that are made up, in PyTorch's form."""

from __future__ import annotations

from typing import Any

import torch


def handle(index: int) -> tuple[Any, ...]:
    """What PyTorch's ``reduce_tensor`` gives of a CUDA tensor."""
    return (
        torch.Tensor,
        torch.Size((2, 3)),
        (3, 1),
        0,
        torch.storage.TypedStorage,
        torch.float32,
        index,
        b"h" * 66,
        24,
        512,
        False,
        b"/torch_1_2",
        0,
        b"e" * 64,
        True,
    )
