"""Make a checkout that is not installed known to vLLM and to `wavebus`.

    python -m tests.gpu.register FOLDER

writes wavebus's entry points into FOLDER, which must be on PYTHONPATH, as the checkout
must. For machines that reach no package index.
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
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n",
        encoding="utf-8",
    )
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    register(Path(__file__).resolve().parents[2], Path(sys.argv[1]))
