"""The command `wavebus demo`."""

from __future__ import annotations

import json
import signal
from functools import partial
from typing import TYPE_CHECKING

import click

from bus._cli.options import configure_log, json_option, options_of
from bus.errors import UsageError
from lab.demo.plan import DemoPlan

if TYPE_CHECKING:
    from types import FrameType


@click.command(short_help="See it all at work: an RL run on this machine.")
@options_of(DemoPlan)
@json_option
def demo(*, plan: DemoPlan, as_json: bool) -> None:
    """Asynchronous GRPO of a small transformer, from scratch, with live weight updates.

    Starts a broker and engines as separate processes, and trains in this process. The weights of
    every optimizer step reach the engines over the bus while these generate. Prints a table and
    draws demo.png.
    """
    plan.check()
    configure_log("warning", "auto")
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        if plan.chaos or plan.sessions is not None:
            _demo_with_faults(plan, as_json=as_json)
        else:
            _demo(plan, as_json=as_json)
    except ModuleNotFoundError as error:
        raise UsageError(f"the demo needs {error.name}: install wavebus[demo]") from error


def _demo(plan: DemoPlan, *, as_json: bool) -> None:
    from lab.demo import report, run  # noqa: PLC0415 - after --help

    with report.ProgressLine(plan.updates or run.STEPS) as line:
        result = run.run_demo(plan, say=line.say, progress=line.show)
    report.picture(result, plan.picture)
    if as_json:
        click.echo(json.dumps(result.as_json()))
    else:
        report.show(result, plan.picture)


def _demo_with_faults(plan: DemoPlan, *, as_json: bool) -> None:
    """Runs the demo that kills processes, prints its result; exit code 1 if a check failed."""
    from lab.demo import chaos, twin  # noqa: PLC0415 - after --help

    say = partial(click.echo, err=True)
    kind: type[chaos.Chaos | twin.Twin] = chaos.Chaos if plan.chaos else twin.Twin
    result = kind(plan, say).run()
    answer = result.as_json()
    if as_json:
        click.echo(json.dumps(answer))
    else:
        for name, value in answer.items():
            click.echo(f"{name:20} {value}")
    if not result.clean:
        raise click.exceptions.Exit(1)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Stops the demo and its processes on SIGTERM and SIGHUP, as Ctrl-C does."""
    raise KeyboardInterrupt
