"""Reads the TOML file of settings, which flags and ``WAVEBUS_…`` variables override.

The file is ``--config``, or ``WAVEBUS_CONFIG``, or ``wavebus.toml`` in the current
folder. Keys are the long options without the dashes in front. Top-level keys apply to every
command that has the option; the keys of a table apply to its command::

    group = "policy"

    [sidecar]
    broker = "tcp://10.0.0.7:7710"
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import click

    # The options of a command by their keys, and such mappings of its subcommands by their names.
    Options: TypeAlias = Mapping[str, "click.Option | Options"]

DEFAULT_BROKER: Final = "tcp://127.0.0.1:7710"
DEFAULT_FILE: Final = Path("wavebus.toml")


def load(
    path: Path | None,
    command: str,
    options: Options,
    commands: Collection[str],
    all_options: Callable[[], Collection[str] | None],
) -> dict[str, Any]:
    """Returns the defaults of one command from the settings file, by parameter name.

    The values are text, like those of flags and environment variables. So the command checks all
    values in the same way, and its error names the option whose value is wrong.

    Args:
        path: the file; None: ``wavebus.toml``, if it exists.
        command: the name of the command and of its table.
        options: the command's options.
        commands: the names of all commands: the file may have a table for each.
        all_options: returns the options of all commands, or None if some commands are not
            installed. It is called only if a top-level key is no option of this command.

    Raises:
        UsageError: the file can't be read, is no TOML, or belongs to another user and ``path`` is
            None; or a table or key of the file belongs to no command.
    """
    is_default = path is None
    if path is None:
        if not DEFAULT_FILE.is_file():
            return {}
        path = DEFAULT_FILE
    try:
        with path.open("rb") as file:
            if is_default:
                _refuse_foreign(os.fstat(file.fileno()).st_uid)
            data = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    for name, table in data.items():
        if isinstance(table, dict) and name not in commands:
            known = ", ".join(sorted(commands))
            raise UsageError(f"{path}: [{name}] names no command; commands are: {known}")
    everywhere = {_key(k): v for k, v in data.items() if not isinstance(v, dict)}
    others = everywhere.keys() - options.keys()
    known_options = all_options() if others else None
    if known_options is not None and (wrong := sorted(others.difference(known_options))):
        raise UsageError(f"{path}: no command has the option {wrong[0]!r}; remove or correct it")
    own = data.get(command, {})
    return _merge(path, command, everywhere, own if isinstance(own, dict) else {}, options)


def _refuse_foreign(owner: int) -> None:
    """Refuses a default settings file of another user, who may have put it into ``/tmp``.

    Raises:
        UsageError: the file's owner is neither this user nor root.
    """
    if owner not in (0, os.geteuid()):
        raise UsageError(
            f"{DEFAULT_FILE} in the current folder belongs to another user (uid {owner}), so it is "
            f"not read; if you trust the file, give --config {DEFAULT_FILE}"
        )


def _merge(
    path: Path,
    table: str,
    everywhere: Mapping[str, Any],
    own: Mapping[str, Any],
    options: Options,
) -> dict[str, Any]:
    given = {_key(key): value for key, value in own.items()}
    for key in given:
        if key not in options:
            names = ", ".join(sorted(options))
            raise UsageError(f"{path}: {table} has no option {key!r}; its options are: {names}")
    known: dict[str, Any] = {}
    for key, option in options.items():
        value = given.get(key, everywhere.get(key))
        if isinstance(option, Mapping):
            inner = value if isinstance(value, dict) else {}
            known[key] = _merge(path, f"{table}.{key}", everywhere, inner, option)
        elif value is not None:
            assert option.name is not None
            several = value if isinstance(value, list) else [value]
            known[option.name] = list(map(str, several)) if option.multiple else str(value)
    return known


def _key(text: str) -> str:
    return text.replace("_", "-")
