"""Which process is which of those that a sidecar's vLLM consists of."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_CORE: Final = "VLLM::EngineCor"  # as much of its title as the kernel keeps


def process_of_vllm(sidecar_pid: int, which: str) -> int:
    """The ``server`` that answers requests, or the engine's ``core``.

    Raises:
        LookupError: it has none.
    """
    for guard in children(sidecar_pid):
        for server in children(guard):
            if which == "server":
                return server
            for core in descendants(server):
                if Path(f"/proc/{core}/comm").read_text().strip() == _CORE:
                    return core
    raise LookupError(f"process {sidecar_pid} has started no {which}")


def children(pid: int) -> list[int]:
    """Of all threads of a process; none if it is gone meanwhile."""
    try:
        tasks = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [int(child) for task in tasks for child in task.split()]


def descendants(pid: int) -> list[int]:
    """Children, and theirs, and so on."""
    own = children(pid)
    return own + [below for child in own for below in descendants(child)]


def runs(pid: int) -> bool:
    """Whether it is there, and has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # of more than one kind: it may end between the open and the read
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
