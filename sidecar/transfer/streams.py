"""A stream of one's own on the device where the weights are; CPUs have none, and need none."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def own_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A new one; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def within(stream: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """What this thread asks of the device in the block goes into that stream, if there is one."""
    if stream is None:
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
