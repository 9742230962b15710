"""What the commands of ``wavebus bench`` have in common."""

from __future__ import annotations

import asyncio
import signal
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bus.errors import UsageError
from bus.runtime import loop as event_loop

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from bus.runtime.loop import LoopChoice

T = TypeVar("T")


def need_backend(backend: str) -> None:
    """
    Raises:
        BadParameter: it is none of those that this host has.
    """
    from sidecar.transfer import available_backends  # noqa: PLC0415 - it needs torch

    known = available_backends()
    if backend not in known:
        raise click.BadParameter(
            f"{backend!r}: choose one of {', '.join(known)}", param_hint="--backend"
        )


def need_modules(*modules: str) -> None:
    """
    Raises:
        UsageError: names those that are not installed, and how to get them.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise click.UsageError(
            f"this bench needs {', '.join(missing)}: pip install 'wavebus[bench,trainer]'"
        )


def say(text: str) -> None:
    """How it goes; stdout is for figures."""
    click.echo(text, err=True)


def run_measuring(measuring: Coroutine[Any, Any, T], loop: LoopChoice) -> T:
    """Measure, and clean up on SIGTERM as on Ctrl-C."""

    async def until_told() -> T:
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        return await measuring

    try:
        return event_loop.run(until_told(), loop=loop)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
