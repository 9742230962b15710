"""A communicator of tests on a CPU, in the place of NCCL's: of gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

MEET_S = 120.0


def join(address: str, port: int, rank: int, size: int) -> Any:
    """The group, when all have joined it."""
    c10d: Any = dist
    timeout = timedelta(seconds=MEET_S)
    store = c10d.TCPStore(
        address, port, is_master=rank == 0, wait_for_workers=False, timeout=timeout
    )
    return joined(store, address, rank, size)


def joined(store: Any, address: str, rank: int, size: int) -> Any:
    """The group of those who have this store."""
    c10d: Any = dist
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=MEET_S)
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
    return c10d.ProcessGroupGloo(c10d.PrefixStore("pair", store), rank, size, options)


def broadcast(group: Any, memory: Tensor, root: int = 0) -> None:
    """From one rank to all."""
    start_broadcast(group, memory, root).wait()


def start_broadcast(group: Any, memory: Tensor, root: int = 0) -> Any:
    """The same, which goes on."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    return group.broadcast([memory], options)
