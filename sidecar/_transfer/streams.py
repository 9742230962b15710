"""CUDA streams on the device of the weights. On a CPU nothing here has an effect."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def own_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Returns a new CUDA stream on a device; None if the device is a CPU.

    Args:
        device: where the weights are.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def within(stream: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """Runs a block's device work in a stream, if there is one.

    Args:
        stream: the stream; None: the block runs as without this function.
    """
    if stream is None:
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
