"""``python -m tests.support.broadcast_engine FOLDER BROKER NAME``: an engine of
:mod:`tests.support.broadcasts` with its sidecar, in a process that a test can kill."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sidecar import Sidecar
from tests.support.broadcasts import BroadcastEngine, registered


async def main(folder: str, broker: str, name: str) -> None:
    engine = BroadcastEngine(Path(folder))
    with registered():
        async with Sidecar(engine, broker=broker, group="policy", name=name):
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
