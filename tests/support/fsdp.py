"""A trainer of several ranks around a bus: processes that shard their weights."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from tests.support.fork_server import ForkedProcess
from tests.support.procs import PYTHONPATH, ROOT

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
    process = ForkedProcess(
        (sys.executable, "-m", "tests.support.fsdp_rank", json.dumps(told)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout as output, process.stderr as errors:
        try:
            said, why = await asyncio.gather(
                asyncio.to_thread(output.read), asyncio.to_thread(errors.read)
            )
            assert process.wait() == 0, why
        finally:
            process.kill()
    return [json.loads(line) for line in said.splitlines()]
