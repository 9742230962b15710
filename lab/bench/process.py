"""What a bench's processes share: the choice of the event loop, and lines of commands and answers.

Commands are lines on stdin, answers are lines of JSON on stdout.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from bus._runtime import event_loop
from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

LoopChoice: TypeAlias = Literal["auto", "asyncio", "uvloop"]
T = TypeVar("T")


def choose_loop(loop: LoopChoice) -> Literal["asyncio", "uvloop"]:
    """Returns the event loop to use on this host; ``auto`` is uvloop where it is installed.

    Raises:
        UsageError: ``loop`` is uvloop, which is not installed.
    """
    if loop != "asyncio" and event_loop.has_uvloop():
        return "uvloop"
    if loop == "uvloop":
        raise UsageError("--loop uvloop: it is not installed; pip install 'wavebus[fast]'")
    return "asyncio"


def run(main: Coroutine[None, None, T], loop: Literal["asyncio", "uvloop"]) -> T:
    """Runs ``main`` to its end in the event loop that :func:`choose_loop` has returned."""
    return asyncio.run(main) if loop == "asyncio" else event_loop.run(main)


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
