"""What several commands share: options, and running a coroutine until a signal.

Most options are declared as fields of dataclasses, so that commands can inherit and pass them on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import signal
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin, get_type_hints

import click

import bus.log
from bus._keys import BROKER_KEY_VARIABLE, INSECURE_VARIABLE, KEY_VARIABLE, Security, security
from bus._net import broker_addresses
from bus._runtime.event_loop import run
from bus._settings import DEFAULT_BROKER
from bus.errors import BusTimeout, UsageError, WavebusError
from bus.messages import NackCode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def echo(*lines: str, err: bool = False) -> None:
    """Prints lines; characters that could command the terminal are escaped.

    Args:
        lines: the lines. Peers may have chosen parts of them.
        err: whether they go to stderr.
    """
    for line in lines:
        click.echo(bus.log.printable(line), err=err)


class FiniteRange(click.FloatRange):
    """A finite number between bounds; click's own range may accept NaN and infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Returns the value as a number; one that is not finite is a usage error."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class NamedPath(click.Path):
    """A path. An empty text is an error here; click takes it for the current folder.

    Args:
        rules: as :class:`click.Path` takes them, such as ``exists``.
    """

    def __init__(self, **rules: bool) -> None:
        super().__init__(path_type=Path, **rules)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the text as a path."""
        if value == "":
            self.fail("the path is empty.", param, ctx)
        return super().convert(value, param, ctx)


def check_parent(path: Path) -> None:
    """Checks that a file can be written into its folder.

    Raises:
        UsageError: the folder does not exist, or can't be written.
    """
    if not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"{path}: no such folder, or it can't be written")


def checked(check: Callable[[Any], object]) -> Callable[..., Any]:
    """Returns an option's callback that checks the value; its error names the option.

    Args:
        check: raises :class:`UsageError` if the value is malformed.
    """

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            if value is not None:
                check(value)
        except UsageError as error:
            raise click.BadParameter(str(error), ctx, param) from error
        return value

    return callback


EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 3
EXIT_ENGINE_DEAD: Final = 4
INSECURE_HELP: Final = (
    "Allow connections beyond loopback without keys. Anyone who can reach the port can then "
    f"control the engines.  [env: {INSECURE_VARIABLE}]"
)
journal_argument = click.argument(
    "source",
    metavar="FILE_OR_DIR",
    type=NamedPath(exists=True),
)
timeout_option = click.option(
    "--timeout-s",
    type=FiniteRange(0.1, 600),
    default=3.0,
    show_default=True,
    help="How long to wait for the broker.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def option(default: Any, help: str, *names: str, **more: Any) -> Any:  # noqa: A002 - as click's
    """Declares a dataclass field that :func:`options_of` turns into an option.

    Args:
        default: default value of the field and of the option.
        help: the option's help text.
        names: the option's flags. Default: the field's name.
        more: ``min`` and ``max`` bound a number; :func:`click.option` gets the other arguments.
    """
    return field(default=default, metadata={"help": help, "names": names, **more})


def options_of(
    plan: type[Any], name: str = "plan"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that gives a command the fields of a dataclass as options.

    The annotation of a field chooses the option's type: a number, a ``Literal``, a path, or a flag.

    Args:
        plan: the dataclass. A field that :func:`option` has not declared becomes no option and
            keeps its default.
        name: the command's argument that receives the dataclass with the options' values.
    """
    hints, declared = get_type_hints(plan), [each for each in fields(plan) if each.metadata]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_plan(**values: Any) -> Any:
            own = {each.name: values.pop(each.name) for each in declared}
            return command(**{name: plan(**own)}, **values)

        for each in reversed(declared):
            hint, more = hints[each.name], dict(each.metadata)
            if type(None) in get_args(hint):
                hint = get_args(hint)[0]
            names = more.pop("names") or (f"--{each.name.replace('_', '-')}",)
            is_flag = hint is bool and "/" not in names[0]
            if get_origin(hint) is Literal:
                more["type"] = click.Choice(get_args(hint))
            elif bounds := {end: more.pop(end) for end in ("min", "max") if end in more}:
                of = click.IntRange if hint is int else FiniteRange
                more["type"] = of(**bounds)
            more.setdefault("type", hint)
            if is_flag:
                more["is_flag"] = True
            more.setdefault("show_default", not is_flag and each.default not in (None, "", ()))
            click.option(*names, each.name, default=each.default, **more)(with_plan)
        return with_plan

    return decorate


@dataclass(frozen=True)
class BrokerAddress:
    """The option ``--broker``: the address of the broker to which a command connects."""

    broker: str = option(
        DEFAULT_BROKER,
        "The broker's address; several, separated by commas, if it may move.  "
        "[env: WAVEBUS_BROKER]",
        envvar="WAVEBUS_BROKER",
        metavar="ADDRESS",
        callback=checked(broker_addresses),
    )


@dataclass(frozen=True)
class GroupPlan(BrokerAddress):
    """The options ``--broker`` and ``--group`` of commands that concern one group."""

    group: str = option(
        "policy",
        "The engines that take the same weights.  [env: WAVEBUS_GROUP]",
        envvar="WAVEBUS_GROUP",
    )


@dataclass(frozen=True)
class Keys:
    """The options of the CURVE keys with which a command connects to the broker."""

    key: Path | None = option(
        None,
        f"This peer's secret key (NAME.secret of `wavebus keygen`).  [env: {KEY_VARIABLE}]",
        envvar=KEY_VARIABLE,
        type=NamedPath(),
    )
    broker_key: Path | None = option(
        None,
        f"The broker's public key (broker.pub).  [env: {BROKER_KEY_VARIABLE}]",
        envvar=BROKER_KEY_VARIABLE,
        type=NamedPath(),
    )
    insecure: bool = option(False, INSECURE_HELP, envvar=INSECURE_VARIABLE)

    def security(self) -> Security:
        """Reads the key files, and returns the keys for the connection to the broker.

        Raises:
            UsageError: a file is missing or wrong, or only one of the two keys is given.
        """
        return security(self.key, self.broker_key, insecure=self.insecure)


@dataclass(frozen=True)
class _LogPlan:
    log_format: Literal["auto", "console", "json"] = option(
        "auto",
        "auto: console on a terminal, JSON otherwise.  [env: WAVEBUS_LOG_FORMAT]",
        envvar="WAVEBUS_LOG_FORMAT",
    )
    log_level: str = option(
        "info",
        "Log lines at least this important.  [env: WAVEBUS_LOG_LEVEL]",
        type=click.Choice(bus.log.LEVELS),
        envvar="WAVEBUS_LOG_LEVEL",
    )


broker_option = options_of(BrokerAddress, "address")
key_options = options_of(Keys, "keys")


def log_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--log-level`` and ``--log-format``, which take effect before the command's body."""

    @options_of(_LogPlan, "log")
    @functools.wraps(command)
    def with_log(log: _LogPlan, **values: Any) -> Any:
        configure_log(log.log_level, log.log_format)
        return command(**values)

    return with_log


def configure_log(log_level: str, log_format: str) -> None:
    """Configures logging from the values of ``--log-level`` and ``--log-format``."""
    bus.log.configure(level=log_level, json=None if log_format == "auto" else log_format == "json")


def announce(address: str) -> None:
    """Prints the address at which a command serves; it serves also if nobody can read that."""
    try:
        click.echo(address)
    except OSError:  # its reader is gone, or the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_until_stopped(
    main: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
) -> None:
    """Runs a command's coroutine ``main(stop)`` until it returns.

    SIGINT and SIGTERM set the event ``stop``, so that ``main`` can end in order.
    """

    async def guarded() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await main(stop)

    run(guarded())


def run_command(command: click.Command, arguments: list[str], name: str) -> int:
    """Runs a command, and returns the exit code; an error becomes one line on stderr.

    Args:
        command: the command.
        arguments: the words of the command line after its name.
        name: how usage and errors call the command.
    """
    try:
        code = command.main(arguments, prog_name=name, standalone_mode=False)
    except click.exceptions.Exit as leaving:
        code = leaving.exit_code
    except click.UsageError as error:
        with contextlib.suppress(OSError):  # stderr can't be written
            error.show()
        code = EXIT_USAGE
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        code = EXIT_FAILED
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except WavebusError as error:
        with contextlib.suppress(OSError):
            echo(*f"{name}: {error}".split("\n"), err=True)
        code = _exit_code(error)
    except BrokenPipeError:  # the reader of stdout is gone
        sys.stderr.close()
        code = EXIT_FAILED
    return code if isinstance(code, int) else 0


def _exit_code(error: WavebusError) -> int:
    if isinstance(error, UsageError):
        return EXIT_USAGE
    if isinstance(error, BusTimeout):
        return EXIT_UNREACHABLE
    is_dead = getattr(error, "code", None) is NackCode.ENGINE_DEAD
    return EXIT_ENGINE_DEAD if is_dead else EXIT_FAILED
