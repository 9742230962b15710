"""A transport that fails on purpose, put into vLLM's workers by a plugin of the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidecar.transfer import register_receiver
from sidecar.transfer.shm import ShmReceiver

if TYPE_CHECKING:
    from bus.manifest import TensorMeta


class Poisoned(torch.Tensor):
    """Looks right, moves between devices, and can't be cut or copied into a parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.narrow, torch.Tensor.copy_):
            raise RuntimeError("poisoned on purpose")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class FaultyReceiver(ShmReceiver):
    """Delivers what was announced, but loading the last tensor of a chunk fails in vLLM."""

    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        received = super().receive(tensors, handle)
        name, tensor = received[-1]
        return [*received[:-1], (name, tensor.as_subclass(Poisoned))]


def register() -> None:
    """vLLM calls this in every process."""
    register_receiver("faulty", FaultyReceiver)
