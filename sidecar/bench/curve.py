"""Keys of a bench's own bus, in a folder that goes with it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bus.keys import AUTHORIZED, BROKER_KEY_VARIABLE, KEY_VARIABLE, Key, write_pair
from bus.runtime.zmq_curve import new_pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus.keys import FileRole

BROKER, ENGINE, TRAINER = "broker", "engine", "trainer"


@contextlib.contextmanager
def keyed() -> Iterator[dict[str, dict[str, str]]]:
    """The variables that a broker, engines and a trainer get for the length of a block."""
    with tempfile.TemporaryDirectory(prefix="wavebus-bench-") as name:
        folder = Path(name)
        authorized = folder / AUTHORIZED
        authorized.mkdir()

        def make(role: FileRole) -> tuple[Path, Path]:
            return write_pair(folder, Key(role, role, *new_pair()))

        _, public = make("broker")
        variables = {BROKER: {"WAVEBUS_CURVE_KEYS": name}}
        for role in (ENGINE, TRAINER):
            secret, own = make("engine" if role == ENGINE else "trainer")
            shutil.copy(own, authorized)
            variables[role] = {KEY_VARIABLE: str(secret), BROKER_KEY_VARIABLE: str(public)}
        yield variables
