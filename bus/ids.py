"""Names and ids that are unique without a central registry."""

from __future__ import annotations

import re
import secrets
from typing import Final

from bus.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def new_boot() -> int:
    """Returns a random number of 48 bits for one life of one process."""
    return secrets.randbits(48)


def new_update_id(boot: int, count: int) -> str:
    """Returns the id of the ``count``-th pause or update of the trainer process ``boot``."""
    return f"u{count}-{boot & 0xFFFFFF:06x}"


# While its engine starts, a sidecar joins the bus with the engine's name and this suffix.
BOOT_SUFFIX: Final = ":boot"


def check_name(value: str, option: str) -> str:
    """Returns ``value`` if it is a valid name of a peer or group.

    Raises:
        UsageError: the name is invalid; the text names ``option``.
    """
    if not _NAME.fullmatch(value):
        raise UsageError(
            f"{option}={value!r}: 1 to 128 letters, digits and . _ : / -, "
            "starting with a letter or digit"
        )
    return value
