"""Finds free ports for child processes, and makes a child end with its parent."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bus.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

# A supervisor that restarts a sidecar and its engine sets this variable for the sidecar.
SUPERVISED: Final = "WAVEBUS_SUPERVISED"
_REAPER: Final = Path(__file__).with_name("reaper.py")
_FIRST_PORT: Final = 21_000
_PORTS: Final = 11_000
_TRIES: Final = 100


def free_port(host: str = "127.0.0.1", wanted: int = 0) -> int:
    """Returns a port of this host on which nothing listens now.

    The port is a random one below the ephemeral range. So no outgoing connection gets it, and two
    processes that search at the same time rarely get the same one.

    Args:
        wanted: the port to return if nothing listens there, as after a restart; 0: none.

    Raises:
        EngineError: ``host`` is not this host, or has no free port in that range.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    others = (_FIRST_PORT + secrets.randbelow(_PORTS) for _ in range(_TRIES))
    for port in (wanted, *others) if wanted else others:
        with socket.socket(family) as probe:
            if port == wanted:  # connections of the server before may still be closing
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise EngineError(f"no free port on {host} between {_FIRST_PORT} and {_FIRST_PORT + _PORTS}")


def long_options(argv: Sequence[str]) -> dict[str, str]:
    """Returns a command's ``--long`` options by name, with their values; empty for flags."""
    found: dict[str, str] = {}
    for index, argument in enumerate(argv):
        if not argument.startswith("--") or argument == "--":
            continue
        name, equals, value = argument[2:].partition("=")
        if not equals and index + 1 < len(argv) and not argv[index + 1].startswith("--"):
            value = argv[index + 1]
        found[name.replace("_", "-")] = value
    return found


def with_reaper(argv: Sequence[str], grace_s: float) -> list[str]:
    """Returns a command that runs ``argv`` and ends it when the calling process ends.

    The program :mod:`sidecar._supervision.reaper` runs between this process and ``argv``. It ends
    ``argv`` even if this process is killed by SIGKILL.

    Args:
        grace_s: how long ``argv`` may take to end after SIGTERM, in seconds; then it gets SIGKILL.
    """
    return [sys.executable, str(_REAPER), str(os.getpid()), str(grace_s), *argv]
