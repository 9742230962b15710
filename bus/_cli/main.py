"""The command `wavebus`: the bus's own subcommands, and those of installed roles.

Exit codes: 0 done; 1 failed, with the reason on stderr; 2 wrong usage; 3 the bus could not be
reached, or did not answer in time; 4 the engine died.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint, entry_points, version
from typing import TYPE_CHECKING, Any, Final

import click

from bus import _settings as settings
from bus._cli import broker, doctor, journal, keygen, replay, routes, status, trace, why
from bus._cli.options import NamedPath, run_command
from bus.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

_OWN: Final[dict[str, click.Command]] = {
    "broker": broker.broker,
    "routes": routes.routes,
    "status": status.status,
    "keygen": keygen.keygen,
    "doctor": doctor.doctor,
    "why": why.why,
    "journal": journal.journal,
    "replay": replay.replay,
    "trace": trace.trace,
}


class CommandGroup(click.Group):
    """The bus's own commands, and those of the entry point group ``wavebus.commands``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all commands."""
        del ctx
        return [*_OWN, *sorted(_entries())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command of that name, with its defaults from the TOML file.

        If a package is missing for the command, the returned command only raises an error that says
        what to install. Returns None if there is no such command.
        """
        if cmd_name in _OWN:
            _defaults_of(ctx, cmd_name, _OWN[cmd_name])
            return _OWN[cmd_name]
        entry = _entries().get(cmd_name)
        if entry is None:
            return None
        try:
            command: click.Command = entry.load()
        except ModuleNotFoundError as error:
            missing = f"it needs {error.name}, which is not installed"

            @click.command(cmd_name, short_help=f"({missing})", add_help_option=False)
            @click.argument("rest", nargs=-1, type=click.UNPROCESSED)
            def unavailable(rest: tuple[str, ...]) -> None:
                del rest
                raise UsageError(
                    f"`wavebus {cmd_name}`: {missing}; install wavebus[{_extra(cmd_name)}]"
                )

            unavailable.ignore_unknown_options = True
            return unavailable
        _defaults_of(ctx, cmd_name, command)
        return command


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="wavebus.commands")}


def _extra(command: str) -> str:
    return command if command in ("sidecar", "demo", "bench") else "trainer"


def _defaults_of(ctx: click.Context, name: str, command: click.Command) -> None:
    """Sets a command's defaults from the TOML file, which ranks below flags and environment."""
    commands = {*_OWN, *_entries()}
    path = ctx.params.get("config")
    defaults = settings.load(path, name, _options(command), commands, _all_options)
    ctx.default_map = {**(ctx.default_map or {}), name: defaults}


def _options(command: click.Command) -> dict[str, Any]:
    """Returns a tree of the options of a command and its subcommands, by long name."""
    found: dict[str, Any] = {
        max(param.opts, key=len).lstrip("-"): param
        for param in command.params
        if isinstance(param, click.Option)
    }
    if isinstance(command, click.Group):
        found |= {name: _options(sub) for name, sub in command.commands.items()}
    return found


def _all_options() -> set[str] | None:
    """Returns the options of all commands, or None if a command's package is missing."""
    try:
        commands = [*_OWN.values(), *(entry.load() for entry in _entries().values())]
    except ModuleNotFoundError:
        return None
    found: set[str] = set()
    trees = [_options(command) for command in commands]
    for tree in trees:  # grows by those of subcommands
        found |= {name for name, option in tree.items() if not isinstance(option, dict)}
        trees += [option for option in tree.values() if isinstance(option, dict)]
    return found


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("wavebus"), prog_name="wavebus")
@click.option(
    "--config",
    type=NamedPath(dir_okay=False),
    envvar="WAVEBUS_CONFIG",
    help="TOML file of settings.  [default: wavebus.toml, if it is there]",
)
def wavebus(config: Path | None) -> None:
    """The control plane of RL post-training with vLLM.

    A broker relays pauses, weight updates and resumes between a trainer and one
    sidecar beside each engine. Start a broker, then sidecars, then your trainer;
    or see it all at work with `wavebus demo`.

    Settings come from flags, then the environment (WAVEBUS_...), then the TOML file.
    """
    del config


def main() -> None:
    """Runs the command `wavebus`."""
    _open_closed_streams()
    sys.exit(run(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Opens the standard streams that are closed, so that no socket gets their numbers.

    Libraries write to stderr by its number.
    """
    number = os.open(os.devnull, os.O_RDWR)
    while number <= 2:  # noqa: PLR2004 - stderr is 2
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)


def run(arguments: list[str]) -> int:
    """Runs `wavebus` with these arguments, and returns the exit code, as :func:`run_command`."""
    return run_command(wavebus, arguments, "wavebus")


if __name__ == "__main__":
    main()
