"""Names and ids that are unique without a central registry."""

from __future__ import annotations

import re
import secrets
from typing import Final

from bus.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def new_boot() -> int:
    """Returns a random number of 48 bits that identifies one life of a process.

    A process that restarts has a new number, so that peers can tell its frames from earlier ones.
    """
    return secrets.randbits(48)


def new_update_id(boot: int, count: int) -> str:
    """Returns an id for a pause or an update of a trainer.

    Args:
        boot: the number of the trainer's process, from :func:`new_boot`.
        count: the number of the pause or update in that process.
    """
    return f"u{count}-{boot & 0xFFFFFF:06x}"


# While its engine starts, a sidecar joins the bus with the engine's name and this suffix.
BOOT_SUFFIX: Final = ":boot"


def check_name(value: str, option: str) -> str:
    """Returns ``value`` if it is a valid name of a peer or group.

    Args:
        option: the option or field that the error names, such as ``--group``.

    Raises:
        UsageError: the name is invalid.
    """
    if not _NAME.fullmatch(value):
        raise UsageError(
            f"{option}={value!r} is not a valid name: use 1 to 128 letters, digits and . _ : / -, "
            "starting with a letter or digit"
        )
    return value
