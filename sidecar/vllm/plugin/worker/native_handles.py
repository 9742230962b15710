"""Handles of tensors in another process's GPU memory, as PyTorch rebuilds tensors from them."""

from __future__ import annotations

from typing import Any

import torch

from bus.vllm_payloads import IpcTensor


def rebuildable(value: Any) -> Any:
    """The value, with every :class:`IpcTensor` in it as arguments of ``rebuild_cuda_tensor``.

    Raises:
        ValueError: one has a dtype that PyTorch lacks.
    """
    if isinstance(value, IpcTensor):
        return _arguments(value)
    if isinstance(value, list):
        return [rebuildable(each) for each in value]
    if isinstance(value, dict):
        return {key: rebuildable(each) for key, each in value.items()}
    return value


def _arguments(told: IpcTensor) -> tuple[Any, ...]:
    dtype = getattr(torch, told.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor's handle has dtype {told.dtype!r}")  # noqa: TRY004 - it is text
    return (
        torch.Tensor,
        torch.Size(told.size),
        told.stride,
        told.offset,
        torch.storage.TypedStorage,
        dtype,
        told.device,
        told.handle or None,
        told.storage_bytes,
        told.storage_offset_bytes,
        told.requires_grad,
        told.counter or None,
        told.counter_offset,
        told.event or None,
        told.event_sync,
    )
