"""Reads the TOML file of settings, which ranks below flags and ``WAVEBUS_…`` variables.

The file is ``--config``, or ``WAVEBUS_CONFIG``, or ``wavebus.toml`` in the current
folder. Keys are the long options without dashes. Top-level keys apply to every
command that has the option; the keys of a table apply to its command::

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
    from collections.abc import Mapping

DEFAULT_BROKER: Final = "tcp://127.0.0.1:7710"
DEFAULT_FILE: Final = Path("wavebus.toml")


def load(path: Path | None, command: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults of one command from the settings file.

    Args:
        path: the file; None: ``wavebus.toml``, if it exists.
        command: the name of the command and of its table.
        options: the command's option names; the value of a subcommand's name is such a mapping.

    Raises:
        UsageError: the file can't be read, is no TOML, or its table has a key that is no
            option of the command.
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
    everywhere = {_option(k): v for k, v in data.items() if not isinstance(v, dict)}
    own = data.get(command, {})
    return _merge(path, command, everywhere, own if isinstance(own, dict) else {}, options)


def _merge(
    path: Path,
    table: str,
    everywhere: Mapping[str, Any],
    own: Mapping[str, Any],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    known = {key: value for key, value in everywhere.items() if key in options}
    for key, value in own.items():
        name = _option(key)
        if name not in options:
            names = ", ".join(sorted(options))
            raise UsageError(f"{path}: [{table}] has no option {key!r}; it has: {names}")
        inner = options[name]
        if inner is None:
            known[name] = value
        elif isinstance(value, dict):
            known[name] = _merge(path, f"{table}.{key}", everywhere, value, inner)
    for name, inner in options.items():
        if inner is not None and name not in known:
            known[name] = _merge(path, f"{table}.{name}", everywhere, {}, inner)
    return known


def _option(key: str) -> str:
    return key.replace("-", "_")
