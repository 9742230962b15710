"""Settings: flags, then the environment (``WAVEBUS_…``), then a TOML file, then defaults.

The file is ``--config``, or ``WAVEBUS_CONFIG``, or ``wavebus.toml`` in the current
folder. Keys are the long options without dashes; what stands at its top holds for
every command that has the option, a table holds for its command alone::

    broker = "tcp://10.0.0.7:7710"

    [sidecar]
    group = "policy"
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DEFAULT_BROKER: Final = "tcp://127.0.0.1:7710"
DEFAULT_FILE: Final = Path("wavebus.toml")


def load(path: Path | None, commands: Mapping[str, Iterable[str]]) -> dict[str, dict[str, Any]]:
    """Read the file into defaults per command.

    Args:
        path: the file that was asked for, or None for the default one if it is there.
        commands: the option names that each command knows.

    Raises:
        UsageError: the file can't be read, is no TOML, or has a key that no command knows.
    """
    if path is None:
        if not DEFAULT_FILE.is_file():
            return {}
        path = DEFAULT_FILE
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    known = {name: set(options) for name, options in commands.items()}
    everywhere = {k: v for k, v in data.items() if not isinstance(v, dict)}
    for key in everywhere:
        if not any(_option(key) in options for options in known.values()):
            raise UsageError(f"{path}: no command has an option {key!r}")
    defaults: dict[str, dict[str, Any]] = {
        name: {_option(k): v for k, v in everywhere.items() if _option(k) in options}
        for name, options in known.items()
    }
    for name, table in data.items():
        if not isinstance(table, dict):
            continue
        if name not in known:
            raise UsageError(f"{path}: [{name}]: no such command; there are {', '.join(known)}")
        for key, value in table.items():
            if _option(key) not in known[name]:
                raise UsageError(f"{path}: [{name}] has no option {key!r}")
            defaults[name][_option(key)] = value
    return defaults


def _option(key: str) -> str:
    return key.replace("-", "_")
