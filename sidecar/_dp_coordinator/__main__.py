"""The program of a DP coordinator: ``python -m sidecar._dp_coordinator``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

import bus.log
from bus._cli.options import log_options, run_command
from bus._ids import check_name
from bus._runtime.event_loop import run
from sidecar._dp_coordinator.server import DpCoordinatorServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--dp-group", required=True, help="The DP group's name on the bus.")
@click.option("--size", type=click.IntRange(1, 65_536), required=True, help="How many ranks.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--broker", default="", metavar="ADDRESS", help="The broker; without one, decide alone."
)
@click.option("--group", default="policy", show_default=True, help="The group on the bus.")
@log_options
def coordinator(**place: Any) -> None:
    """Coordinate one DP group, until stdin ends, the parent dies, or SIGTERM.

    Prints one JSON line: the addresses of the three sockets, and the pid. SIGINT is
    ignored: Ctrl-C is for the front end, and the DP coordinator ends with that.
    """
    check_name(place["dp_group"], "--dp-group")
    check_name(place["group"], "--group")
    run(_serve(place))


async def _serve(place: dict[str, Any]) -> None:
    parent = os.getppid()
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end.set)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = DpCoordinatorServer(**place)
    with _end_of_parent(parent, end):
        server.start()
        click.echo(json.dumps({**server.sockets.addresses, "pid": os.getpid()}))
        await end.wait()
    server.close()
    bus.log.logger(peer=server.name).info("dp_coordinator_ended")


@contextlib.contextmanager
def _end_of_parent(parent: int, end: asyncio.Event) -> Iterator[None]:
    """Sets ``end`` when stdin ends or the parent is gone.

    Both are watched. Processes that the parent forks inherit the other end of stdin, and may
    outlive the parent. A parent may also close stdin and live on.
    """
    loop = asyncio.get_running_loop()
    stdin = sys.stdin.fileno()

    def read() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            end.set()

    with contextlib.suppress(PermissionError):  # a file or /dev/null can't be watched
        loop.add_reader(stdin, read)
    try:
        watch = os.pidfd_open(parent)
    except (AttributeError, OSError):  # no Linux, or the parent is gone already
        watch = -1
    if watch >= 0:
        loop.add_reader(watch, end.set)
    if os.getppid() != parent:
        end.set()
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        if watch >= 0:
            loop.remove_reader(watch)
            os.close(watch)


if __name__ == "__main__":
    sys.exit(run_command(coordinator, sys.argv[1:], "python -m sidecar._dp_coordinator"))
