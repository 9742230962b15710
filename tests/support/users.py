"""Runs code as another user than the one who made a file."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY: Final = 65_534


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Runs the body as the user nobody, if the tests run as root; else as the user who runs them.

    A user who is not root can't take files of another user from a folder without write permission.
    """
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
