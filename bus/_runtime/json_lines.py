"""Commands and answers between two processes: lines on stdin, and JSON lines on stdout.

The driven process ends when its stdin does, so it never outlives its driver.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def read_commands() -> AsyncIterator[str]:
    """Yields the lines of stdin until its end.

    Ctrl-C is ignored here, because it reaches the driver too, which then closes stdin.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        yield line.decode().strip()


def write_answer(**fields: object) -> None:
    """Writes the fields to stdout, as one line of JSON."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()
