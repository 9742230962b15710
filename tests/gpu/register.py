"""Make a checkout that is not installed known to vLLM and to `wavebus`.

    python -m tests.gpu.register FOLDER [pair] [one-gpu]

writes wavebus's entry points into FOLDER, which must be on PYTHONPATH, as the checkout
must. For machines that reach no package index. With ``pair`` vLLM also finds the worker and
trainer engine of :mod:`tests.support.pair`, which stand in for its own where there is no CUDA;
with ``one-gpu`` its workers share one, as :mod:`tests.gpu.one_gpu` has it.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def register(checkout: Path, folder: Path) -> None:
    """Write what an installer would."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), ""]
    _write(folder, project["name"], project["version"], lines)


def register_pair(folder: Path) -> None:
    """The same for the pair of engines that needs no CUDA."""
    entry = "wavebus_pair = tests.support.pair_plugin:register"
    _write(folder, "wavebus-pair", "0", ["[vllm.general_plugins]", entry])


def register_one_gpu(folder: Path) -> None:
    """The same for what has all workers on one GPU."""
    entry = "wavebus_one_gpu = tests.gpu.one_gpu:register"
    _write(folder, "wavebus-one-gpu", "0", ["[vllm.general_plugins]", entry])


def _write(folder: Path, name: str, version: str, lines: list[str]) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    register(Path(__file__).resolve().parents[2], target)
    if "pair" in sys.argv[2:]:
        register_pair(target)
    if "one-gpu" in sys.argv[2:]:
        register_one_gpu(target)
