"""Chooses a process's event loop: uvloop if it is installed, else asyncio's own."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Coroutine

LoopChoice: TypeAlias = Literal["auto", "asyncio", "uvloop"]
T = TypeVar("T")


def choose_loop(loop: LoopChoice = "auto") -> Literal["asyncio", "uvloop"]:
    """Returns the event loop to use on this host.

    Args:
        loop: the user's choice; ``auto`` is uvloop if it is installed.

    Raises:
        UsageError: ``loop`` is ``uvloop``, which is not installed.
    """
    if loop == "asyncio":
        return "asyncio"
    if find_spec("uvloop") is not None:
        return "uvloop"
    if loop == "uvloop":
        raise UsageError("--loop uvloop: it is not installed; pip install 'wavebus[fast]'")
    return "asyncio"


def run(main: Coroutine[None, None, T], *, loop: LoopChoice = "auto") -> T:
    """Runs ``main`` to its end, as :func:`asyncio.run` does.

    Args:
        main: the coroutine.
        loop: the event loop, as in :func:`choose_loop`.

    Raises:
        UsageError: as :func:`choose_loop`.
    """
    try:
        kind = choose_loop(loop)
    except UsageError:
        main.close()
        raise
    if kind == "asyncio":
        return asyncio.run(main)
    import uvloop  # noqa: PLC0415 - optional, and nothing else needs it

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
