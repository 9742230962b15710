"""What memory can be had for staging on a CPU: of the host, and within limits of control groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from sidecar._transfer import memory_budget
from sidecar._transfer.memory_budget import free_memory

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
HOST_BYTES = 9_000 * 1024


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal: 10000 kB\nMemAvailable: 9000 kB\n")
    (tmp_path / "self").write_text("4:cpu:/x\n")
    monkeypatch.setattr(memory_budget, "_MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_budget, "_CGROUP", tmp_path / "self")
    monkeypatch.setattr(memory_budget, "_CGROUPS", tmp_path / "cgroup")
    return tmp_path


def write_group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def test_without_a_limit_it_is_the_hosts(root: Path) -> None:
    assert free_memory(CPU) == HOST_BYTES
    (root / "self").write_text("0::/a\n")
    write_group(root / "cgroup/a", {"memory.max": "max", "memory.current": 5, "memory.stat": ""})
    assert free_memory(CPU) == HOST_BYTES


def test_a_limit_counts_that_of_a_parent_too(root: Path) -> None:
    """Cached files can be dropped. The least that is left counts."""
    (root / "self").write_text("0::/a/b\n")
    group = {"memory.current": 700, "memory.stat": "anon 600\ninactive_file 50"}
    write_group(root / "cgroup/a/b", {**group, "memory.max": 5_000})
    assert free_memory(CPU) == 5_000 - 700 + 50
    write_group(root / "cgroup/a", {**group, "memory.max": 1_000})
    assert free_memory(CPU) == 1_000 - 700 + 50


def test_a_limit_of_version_1_counts(root: Path) -> None:
    """A container may see its own group as the root, and be told of a path outside."""
    (root / "self").write_text("3:cpuset:/\n2:cpu,memory:/docker/x\n0::/\n")
    write_group(
        root / "cgroup/memory",
        {
            "memory.limit_in_bytes": 1_000,
            "memory.usage_in_bytes": 400,
            "memory.stat": "total_inactive_file 100",
        },
    )
    assert free_memory(CPU) == 700
