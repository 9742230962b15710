"""A trainer of several ranks around a bus: processes that shard their weights."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor


async def train(
    folder: Path,
    updates: Sequence[Mapping[str, Tensor]],
    *,
    broker: str,
    engines: int,
    backend: str,
    ranks: int = 2,
    chunk_bytes: int = 1 << 16,
    cached: bool = False,
    dtype: str = "source",
    config: Path | None = None,
) -> list[list[dict[str, Any]]]:
    """Send these weights one after the other; what each rank says of each."""
    paths = [str(folder / f"weights-{number}.safetensors") for number in range(len(updates))]
    for path, weights in zip(paths, updates, strict=True):
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
    common = {
        "ranks": ranks,
        "store": str(folder / "store"),
        "broker": broker,
        "backend": backend,
        "engines": engines,
        "chunk_bytes": chunk_bytes,
        "cached": cached,
        "dtype": dtype,
        "config": str(config or ""),
        "weights": paths,
    }
    return await asyncio.gather(*(_rank({**common, "rank": rank}) for rank in range(ranks)))


async def _rank(told: dict[str, Any]) -> list[dict[str, Any]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.fsdp_rank", json.dumps(told)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    return [json.loads(line) for line in said.decode().splitlines()]
