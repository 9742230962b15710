"""``wavebus bench``: measures the bus on this host."""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import click

from bus._cli.options import json_option, options_of
from bus.errors import UsageError, WavebusError
from lab.bench import process
from lab.bench.plans import (
    ControlPlan,
    EnginesPlan,
    GapPlan,
    PausePlan,
    RolloutPlan,
    TransferBenchPlan,
)

if TYPE_CHECKING:
    from lab.bench.process import LoopChoice

_NEEDS: Final = ("aiohttp", "fastapi", "uvicorn", "httptools", "torch")


@click.group()
def bench() -> None:
    """Measure the bus on this host."""


@bench.command()
@options_of(ControlPlan)
@json_option
def control(*, plan: ControlPlan, as_json: bool) -> None:
    """Measure a group's pause and resume over bus, HTTP and ZeroMQ.

    The bus runs with CURVE keys, a journal and limits; HTTP endpoints run with and without request
    logs. All of these alternate in one run. On a busy host only their ratios are meaningful.
    """
    require_modules(*_NEEDS)
    show("control", plan, as_json=as_json, loop=plan.loop)


@bench.command()
@options_of(PausePlan)
@json_option
def pause(*, plan: PausePlan, as_json: bool) -> None:
    """Measure what the bus adds to a DP group's pause and first request.

    Two DP groups run side by side, one of them on the bus, and are measured in turn.
    """
    require_modules(*_NEEDS, *(("vllm",) if plan.engine == "vllm" else ()))
    show("pause", plan, as_json=as_json)


@bench.command()
@options_of(RolloutPlan)
@json_option
def rollout(*, plan: RolloutPlan, as_json: bool) -> None:
    """Measure what the rollout client and the gateway cost.

    Compares both with aiohttp alone and with vllm-router. All four alternate in one run of about
    three minutes, and use the same four embedded engines, whose steps take 20 ms.
    """
    require_modules("torch", "aiohttp", *(("vllm",) if plan.vllm else ()))
    show("rollout", plan, as_json=as_json)


@bench.command()
@options_of(TransferBenchPlan)
@json_option
def transfer(*, plan: TransferBenchPlan, as_json: bool) -> None:
    """Measure an update's bandwidth, and its control plane.

    embedded: one engine, one trainer and one broker, each in its own process. The first model has
    few large tensors: updates alternate with plain copies of as many bytes. The second model has
    many small tensors: this shows the time that is not spent on sending, receiving and loading.

    vllm: updates over the bus, with vLLM's and with wavebus's worker engine, alternate with vLLM's
    own flow and with a raw broadcast. Shows for how long requests get no tokens, and why.
    """
    embedded = "gateway" if plan.gateway else "transfer"
    show("vllm_transfer" if plan.engine == "vllm" else embedded, plan, as_json=as_json)


@bench.command()
@options_of(GapPlan)
@json_option
def gap(*, plan: GapPlan, as_json: bool) -> None:
    """Measure the time between tokens during a weight update.

    While requests decode, engines are updated in three ways, which alternate in one run: by the
    engine's own flow without a bus, over the bus in a pause, and over the bus staged.
    """
    show("gap", plan, as_json=as_json)


def require_modules(*modules: str) -> None:
    """Checks that the modules that a bench needs are installed.

    Raises:
        UsageError: one is missing. The text says how to install it.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise click.UsageError(
            f"this bench needs {', '.join(missing)}: pip install 'wavebus[bench]'"
        )


def require_engines(plan: EnginesPlan) -> None:
    """Checks that the engines that the options choose can be measured here.

    Raises:
        UsageError: something is missing. The text names it.
    """
    require_modules("torch", "aiohttp")
    if plan.engine == "vllm":
        plan.check()
    from bus._weight_transfer.registry import receiver_backends  # noqa: PLC0415 - it needs torch

    known = receiver_backends()
    if plan.over not in known:
        raise click.BadParameter(
            f"{plan.over!r}: choose one of {', '.join(known)}", param_hint="--backend"
        )
    if plan.engine == "vllm":
        require_modules("vllm")
    if plan.logs is not None:
        try:
            plan.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.BadParameter(
                f"{plan.logs}: {error.strerror}", param_hint="--logs"
            ) from error


def show(name: str, plan: Any, *, as_json: bool, loop: LoopChoice = "auto") -> None:
    """Runs the bench of a module of :mod:`lab.bench`, and prints its figures.

    SIGTERM ends the bench's processes, as Ctrl-C does.

    Raises:
        WavebusError: the engines don't serve the weights that were sent.
    """
    from lab.bench.harness import Bench, table  # noqa: PLC0415 - after --help

    async def measure(kind: LoopChoice) -> dict[str, Any]:
        # By name: a help text needs neither torch nor aiohttp.
        module = importlib.import_module(f"lab.bench.{name}")
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        async with Bench(kind, getattr(plan, "logs", None)) as running:
            figures: dict[str, Any] = await running.complete(module.measure(running, plan))
        return figures

    try:
        if isinstance(plan, EnginesPlan):
            require_engines(plan)
        kind = process.choose_loop(loop)
        figures = process.run(measure(kind), kind)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    click.echo(json.dumps(figures) if as_json else table(figures))
    if not figures.get("weights_arrived", True):
        raise WavebusError("the engines do not all serve the weights that were sent")
