"""CUDA IPC handles of tensors in another process, in the form that PyTorch rebuilds."""

from __future__ import annotations

from typing import Any

import torch

from bus._vllm.payloads import IpcTensor


def rebuildable(value: Any) -> Any:
    """Returns a value whose CUDA IPC handles are in the form that PyTorch needs.

    Args:
        value: an :class:`IpcTensor`, which becomes the arguments of PyTorch's
            ``rebuild_cuda_tensor``; or a list or dict that may contain some, at any depth. Other
            values stay as they are.

    Raises:
        ValueError: a handle has a dtype that PyTorch does not know.
    """
    if isinstance(value, IpcTensor):
        return _arguments(value)
    if isinstance(value, list):
        return [rebuildable(each) for each in value]
    if isinstance(value, dict):
        return {key: rebuildable(each) for key, each in value.items()}
    return value


def _arguments(handle: IpcTensor) -> tuple[Any, ...]:
    dtype = getattr(torch, handle.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor's handle has dtype {handle.dtype!r}")  # noqa: TRY004 - it is text
    return (
        torch.Tensor,
        torch.Size(handle.size),
        handle.stride,
        handle.offset,
        torch.storage.TypedStorage,
        dtype,
        handle.device,
        handle.handle or None,
        handle.storage_bytes,
        handle.storage_offset_bytes,
        handle.requires_grad,
        handle.counter or None,
        handle.counter_offset,
        handle.event or None,
        handle.event_sync,
    )
