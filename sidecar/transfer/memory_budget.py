"""Whether there is memory to stage an update in, beside the weights that are served."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from bus.errors import EngineError
from bus.weight_transfer.allocation import StagingCapacity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus.messages import Staging

# Of what is free, so much stays so: for requests that come meanwhile.
SPARED: Final = 0.1
_MEMORY_INFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")
# Of version 2 and 1: folder, limit, what is used, and of that cached files.
_V2: Final = ("", "memory.max", "memory.current", "inactive_file")
_V1: Final = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def staging_capacity(
    staging: Staging, needed_bytes: int, device: torch.device, *, held_bytes: int = 0
) -> StagingCapacity:
    """Whether so much can be staged on this device.

    Args:
        staging: as ARM has it.
        needed_bytes: what staging takes here.
        device: where the weights are.
        held_bytes: of that, what an update before has left.
    """
    why_not = ""
    if staging.budget_bytes and needed_bytes > staging.budget_bytes:
        why_not = f"staging takes {_size(needed_bytes)}, and may take {_size(staging.budget_bytes)}"
    elif needed_bytes > held_bytes:
        free_bytes = held_bytes + int(free_memory(device) * (1 - SPARED))
        if needed_bytes > free_bytes:
            why_not = f"staging takes {_size(needed_bytes)}, and {_size(free_bytes)} can be had"
    return StagingCapacity(needed_bytes, why_not)


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on the device: those that are nobody's, and those that this process has
    and does not use. Of a CPU: of the host's, what the limits of control groups leave."""
    if device.type != "cpu":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + spare_memory(device)
    for line in _MEMORY_INFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return min(int(rest.split()[0]) * 1024, *_left_in_cgroups(), 2**63)
    raise EngineError(f"{_MEMORY_INFO} does not tell how much memory is available")


def _left_in_cgroups() -> Iterator[int]:
    """What the limit of each control group of this process leaves. Files that are only cached count
    as left."""
    for line in _CGROUP.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, limit, used, cached = _V1 if controllers else _V2
        group = _CGROUPS / folder / name.lstrip("/")
        for each in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no group, or no limit: "max"
                stat = dict(
                    line.split() for line in (each / "memory.stat").read_text().splitlines()
                )
                taken = int((each / used).read_text()) - int(stat[cached])
                yield int((each / limit).read_text()) - taken


def spare_memory(device: torch.device) -> int:
    """Bytes of the device that this process has and does not use; of a CPU, none. Its driver is not
    asked, which takes time, and may keep a step from asking for anything meanwhile."""
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
