"""Decides whether there is memory to stage an update beside the served weights."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from bus._weight_transfer.allocation import StagingCapacity
from bus.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus.messages import Staging

# The part of free memory that staging leaves to requests.
SPARED: Final = 0.1
_MEMORY_INFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")
# Of control groups version 2 and 1: folder, file of the limit, file of the usage, cached files.
_V2: Final = ("", "memory.max", "memory.current", "inactive_file")
_V1: Final = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def staging_capacity(
    staging: Staging, needed_bytes: int, device: torch.device, *, held_bytes: int = 0
) -> StagingCapacity:
    """Returns whether there is memory to stage an update, and how much staging takes.

    Args:
        staging: the options of the staged update, from the trainer's ARM, with a memory limit.
        needed_bytes: the memory that staging takes in this worker, in bytes.
        device: where the weights are.
        held_bytes: staging memory, still allocated from an earlier update, that this update uses
            again, in bytes.

    Raises:
        EngineError: the available memory can't be read.
    """
    why_not = ""
    if staging.budget_bytes and needed_bytes > staging.budget_bytes:
        limit = _size(staging.budget_bytes)
        why_not = f"staging takes {_size(needed_bytes)}, and the update's limit is {limit}"
    elif needed_bytes > held_bytes:
        free_bytes = held_bytes + int(free_memory(device) * (1 - SPARED))
        if needed_bytes > free_bytes:
            free = _size(free_bytes)
            why_not = f"staging takes {_size(needed_bytes)}, and only {free} are available"
    return StagingCapacity(needed_bytes, why_not)


def free_memory(device: torch.device) -> int:
    """Returns how many bytes can be allocated on the device.

    On a GPU this includes memory that this process's allocator holds and does not use. On a CPU it
    is the host's available memory, within the limits of the process's control groups.

    Args:
        device: where the weights are.

    Raises:
        EngineError: the available memory can't be read.
    """
    if device.type != "cpu":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + spare_memory(device)
    for line in _MEMORY_INFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return min(int(rest.split()[0]) * 1024, *_left_in_cgroups(), 2**63)
    raise EngineError(f"{_MEMORY_INFO} has no MemAvailable, so the free memory is unknown")


def _left_in_cgroups() -> Iterator[int]:
    """Yields for each control group of this process how many bytes its limit leaves.

    Memory of cached files counts as free.
    """
    for line in _CGROUP.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, limit, used, cached = _V1 if controllers else _V2
        group = _CGROUPS / folder / name.lstrip("/")
        for each in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such group, or no limit ("max")
                stat = dict(
                    line.split() for line in (each / "memory.stat").read_text().splitlines()
                )
                taken = int((each / used).read_text()) - int(stat[cached])
                yield int((each / limit).read_text()) - taken


def spare_memory(device: torch.device) -> int:
    """Returns how many bytes this process's allocator holds on the device and does not use.

    The driver is not called, because a call takes time and may delay the allocations of a step.

    Args:
        device: where the weights are. For a CPU the result is 0.
    """
    if device.type == "cpu":
        return 0
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    own, used = (stats[each]["all"]["current"] for each in ("reserved_bytes", "allocated_bytes"))
    return int(own - used)


def _size(size_bytes: int) -> str:
    for unit, divisor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= divisor:
            return f"{size_bytes / divisor:.1f} {unit}"
    return f"{size_bytes} bytes"
