"""Options that several commands share, and how a command's main loop is run."""

from __future__ import annotations

import asyncio
import functools
import signal
from dataclasses import field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

import bus.log
from bus.keys import BROKER_KEY_VARIABLE, INSECURE_VARIABLE, KEY_VARIABLE
from bus.runtime.event_loop import run
from bus.settings import DEFAULT_BROKER

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

F = TypeVar("F", bound="Callable[..., Any]")

broker_option = click.option(
    "--broker",
    envvar="WAVEBUS_BROKER",
    default=DEFAULT_BROKER,
    show_default=True,
    metavar="ADDRESS",
    help="The broker's address.  [env: WAVEBUS_BROKER]",
)
group_option = click.option(
    "--group",
    envvar="WAVEBUS_GROUP",
    default="policy",
    show_default=True,
    help="The engines that take the same weights.  [env: WAVEBUS_GROUP]",
)
insecure_option = click.option(
    "--insecure",
    is_flag=True,
    envvar=INSECURE_VARIABLE,
    help="Allow connections beyond loopback without keys. Anyone who can reach the port can then "
    "control the engines.  "
    f"[env: {INSECURE_VARIABLE}]",
)
journal_argument = click.argument(
    "source",
    metavar="FILE_OR_DIR",
    type=click.Path(exists=True, path_type=Path),
)
timeout_option = click.option(
    "--timeout-s",
    type=click.FloatRange(0.1, 600),
    default=3.0,
    show_default=True,
    help="How long to wait for the broker.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def option(default: Any, help: str, *names: str, **more: Any) -> Any:  # noqa: A002 - as click's
    """Declares a dataclass field that :func:`options_of` makes an option of.

    Args:
        default: of the field and of the option.
        help: the option's help text.
        names: what the option is called. Default: as the field.
        more: ``min`` and ``max`` bound a number; other words are :func:`click.option`'s.
    """
    return field(default=default, metadata={"help": help, "names": names, **more})


def options_of(plan: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command one option for each field of a dataclass, and an instance of it as ``plan``.

    Fields that :func:`option` has not declared keep their defaults. The annotation chooses the
    option's type: a number, a ``Literal``, a path, or a flag.
    """
    hints, declared = get_type_hints(plan), [each for each in fields(plan) if each.metadata]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_plan(**values: Any) -> Any:
            own = {each.name: values.pop(each.name) for each in declared}
            return command(plan=plan(**own), **values)

        for each in reversed(declared):
            hint, more = hints[each.name], dict(each.metadata)
            if type(None) in get_args(hint):
                hint = get_args(hint)[0]
            names = more.pop("names") or (f"--{each.name.replace('_', '-')}",)
            is_flag = hint is bool and "/" not in names[0]
            if get_origin(hint) is Literal:
                more["type"] = click.Choice(get_args(hint))
            elif bounds := {name: more.pop(name) for name in ("min", "max") if name in more}:
                of = click.IntRange if hint is int else click.FloatRange
                more["type"] = of(**bounds)
            more.setdefault("type", hint)
            if is_flag:
                more["is_flag"] = True
            more["show_default"] = not is_flag and each.default not in (None, "")
            click.option(*names, each.name, default=each.default, **more)(with_plan)
        return with_plan

    return decorate


def key_options(command: F) -> F:
    """``--key``, ``--broker-key`` and ``--insecure``, for :func:`bus.keys.security`."""
    command = insecure_option(command)
    command = click.option(
        "--broker-key",
        envvar=BROKER_KEY_VARIABLE,
        type=click.Path(path_type=Path),
        default=None,
        help=f"The broker's public key (broker.pub).  [env: {BROKER_KEY_VARIABLE}]",
    )(command)
    return click.option(
        "--key",
        envvar=KEY_VARIABLE,
        type=click.Path(path_type=Path),
        default=None,
        help=f"The own secret key (NAME.secret of `wavebus keygen`).  [env: {KEY_VARIABLE}]",
    )(command)


def log_options(command: F) -> F:
    """``--log-level`` and ``--log-format``; they take effect before the command's body."""
    command = click.option(
        "--log-level",
        type=click.Choice(bus.log.LEVELS),
        envvar="WAVEBUS_LOG_LEVEL",
        default="info",
        show_default=True,
        help="Log lines at least this important.  [env: WAVEBUS_LOG_LEVEL]",
    )(command)
    return click.option(
        "--log-format",
        type=click.Choice(["auto", "console", "json"]),
        envvar="WAVEBUS_LOG_FORMAT",
        default="auto",
        show_default=True,
        help="auto: console on a terminal, JSON otherwise.  [env: WAVEBUS_LOG_FORMAT]",
    )(command)


def configure_log(log_level: str, log_format: str) -> None:
    """Set up logging as the options say."""
    bus.log.configure(level=log_level, json=None if log_format == "auto" else log_format == "json")


def run_until_stopped(
    main: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
) -> None:
    """Run ``main(stop)``; SIGINT and SIGTERM set ``stop``, and it ends in order."""

    async def guarded() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await main(stop)

    run(guarded())
