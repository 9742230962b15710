"""Runs a process's event loop: uvloop if it is installed, else asyncio's own."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


def has_uvloop() -> bool:
    return find_spec("uvloop") is not None


def run(main: Coroutine[None, None, T]) -> T:
    """Runs ``main`` to its end, as :func:`asyncio.run` does.

    Args:
        main: the coroutine of the process.

    Returns:
        The result of ``main``.
    """
    if not has_uvloop():
        return asyncio.run(main)
    import uvloop  # noqa: PLC0415 - optional, and nothing else needs it

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
