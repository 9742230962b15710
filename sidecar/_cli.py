"""The command `wavebus sidecar`: puts one engine, or all ranks of a DP group, on the bus."""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import click

from bus._cli.options import key_options, log_options, options_of, run_until_stopped
from bus._ids import check_name
from bus._keys import BROKER_KEY_VARIABLE, INSECURE_VARIABLE, KEY_VARIABLE
from bus._net import advertised
from bus.errors import UsageError
from sidecar._cli_plan import SidecarPlan, make_embedded, make_vllm
from sidecar._supervision.launch import SUPERVISED

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from bus._cli.options import Keys
    from sidecar.engine import Engine

# How many times in a row engines that are started here are restarted by default.
RESTARTS: Final = 5

_SEPARATE: Final = (
    "Put -- before the command of a vLLM server, so that its options are not taken for the "
    "sidecar's: wavebus sidecar --group policy -- python -m vllm.entrypoints.openai.api_server "
    "--model MODEL"
)
_HELP: Final = """Put one engine on the bus, and serve it until it dies, or until SIGINT or SIGTERM.

\b
Start and supervise a vLLM server (on loopback, unless its --host says otherwise; only this
host reaches its RL routes):
  wavebus sidecar --group policy -- \\
      python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B
Use one that runs:
  wavebus sidecar --group policy --attach http://127.0.0.1:8000
The embedded engine:
  wavebus sidecar --group policy --engine embedded --model ./checkpoint
All ranks of a data parallel group on this host, restarted as one when one dies:
  wavebus sidecar --group policy --dp-size 2 --dp-coordinator bus -- \\
      python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-30B-A3B

Exits with 4 if the engine dies and is not restarted.
"""


class _SidecarCommand(click.Command):
    """Adds to errors a hint to put ``--`` before a server's command, if it is missing."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        separated = "--" in args  # parsing empties the list
        has_server = any("vllm" in each or "--model" in each for each in args)
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            if has_server and not separated:
                raise click.UsageError(f"{error.format_message()}\n{_SEPARATE}", ctx) from error
            raise
        if ctx.params["command"] and not separated:
            raise click.UsageError(_SEPARATE, ctx)
        return rest


@click.command(
    cls=_SidecarCommand,
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": True},
    short_help="Put one engine on the bus.",
    help=_HELP,
)
@options_of(SidecarPlan)
@key_options
@log_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def sidecar(ctx: click.Context, plan: SidecarPlan, keys: Keys, command: tuple[str, ...]) -> None:
    """Runs `wavebus sidecar`."""
    names = (("--name", plan.name), ("--group", plan.group), ("--dp-group", plan.dp_group))
    for option_name, value in names:
        if value is not None:
            check_name(value, option_name)
    _hand_down_keys(keys)
    if plan.trust_kv_connector:  # found there by this process, and by a server that it starts
        from sidecar._vllm.plugin.environment import TRUST_KV_CONNECTORS  # noqa: PLC0415 - after --help

        os.environ[TRUST_KV_CONNECTORS] = ",".join(plan.trust_kv_connector)
    all_ranks = plan.dp_size > 1 and plan.dp_rank is None
    restarts = plan.restarts
    if restarts is None:
        restarts = RESTARTS if all_ranks or _alone(command) else 0
    if all_ranks:
        _supervise(ctx, plan, command, restarts)
        return
    made: Engine | None = None
    if command or plan.attach or plan.engine == "vllm":
        made = make_vllm(plan, command)
    elif not restarts:
        made = make_embedded(plan)
    advertised(getattr(made, "endpoint", ""), plan.advertise or "")  # raises before it boots
    if made is None or restarts:
        _supervise(ctx, plan, command, restarts)
        return

    async def serve(stop: asyncio.Event) -> None:
        from sidecar._booting import shown_as_booting  # noqa: PLC0415 - after --help
        from sidecar._sidecar import Sidecar  # noqa: PLC0415 - after --help

        agent = Sidecar(
            made,
            broker=plan.broker,
            group=plan.group,
            name=plan.name,
            dp_group=plan.dp_group,
            supervised=not plan.attach and os.environ.get(SUPERVISED) == "1",
            advertise=plan.advertise or "",
            pd_role=plan.role or "",
        )
        # An embedded engine boots at once.
        slow = command or plan.attach
        with shown_as_booting(plan.broker, plan.group, agent.name) if slow else nullcontext():
            await _until(agent.start(), stop)
        if stop.is_set():
            await agent.close("stopped")
            return
        try:
            await _until(agent.run(), stop)
        finally:
            await agent.close("stopped" if stop.is_set() else "ended")

    run_until_stopped(serve)


def _hand_down_keys(keys: Keys) -> None:
    """Puts the keys into the environment, where DP coordinators find them.

    Raises:
        UsageError: a key is wrong.
    """
    keys.security()
    for variable, path in ((KEY_VARIABLE, keys.key), (BROKER_KEY_VARIABLE, keys.broker_key)):
        if path is not None:
            os.environ[variable] = str(path.resolve())
    if keys.insecure:
        os.environ[INSECURE_VARIABLE] = "1"


async def _until(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Awaits ``work``, or cancels it when ``stop`` is set. Raises the error of ``work``."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return
    task.result()


def _supervise(
    ctx: click.Context, plan: SidecarPlan, command: tuple[str, ...], restarts: int
) -> None:
    """Runs an engine, or all ranks of a DP group, in child processes, with restarts.

    Raises:
        UsageError: all ranks are started, and an option makes sense for a single rank only.
    """
    from bus._runtime.peer import default_name  # noqa: PLC0415 - after --help
    from bus._vllm.source import SourceTree  # noqa: PLC0415
    from sidecar._supervision import ranks  # noqa: PLC0415

    if plan.dp_size == 1 or plan.dp_rank is not None:
        options = _given(ctx, frozenset({"name", "restarts"}))
        name = plan.name or default_name("engine")
        serves_at = "" if plan.attach or plan.port else ranks.serving_host(command, plan.host)
        launch = ranks.RankLaunchPlan(name, 1, options, command, serves_at=serves_at)
    else:
        for field in ("attach", "name", "dp_master", "core_page"):
            if getattr(plan, field) is not None:
                flag = field.replace("_", "-")
                raise UsageError(f"--{flag} applies to a single rank: give --dp-rank, too")
        server, port = ranks.parse_server_command(command)
        launch = ranks.RankLaunchPlan(
            dp_group=plan.dp_group or default_name("dp"),
            size=plan.dp_size,
            options=_given(ctx, frozenset({"dp_group", "dp_size", "port", "restarts"})),
            command=ranks.with_sync_interval(server, SourceTree.installed()) if server else (),
            port=port or plan.port,
            serves_at=ranks.serving_host(server, plan.host),
            gpus=ranks.visible_gpus() if server else (),
        )
    run_until_stopped(ranks.RankSupervisor(launch, restarts=restarts).run)


def _alone(command: tuple[str, ...]) -> bool:
    """Returns whether a command starts a single server, not one data-parallel rank."""
    return bool(command) and not any(
        argument.startswith(("--data-parallel-rank", "-dpr")) for argument in command
    )


def _given(ctx: click.Context, without: frozenset[str]) -> tuple[str, ...]:
    """Returns the options that differ from their defaults, as arguments for another process.

    Options that may be given several times, and those in ``without``, are left out.
    """
    arguments: list[str] = []
    for param in ctx.command.params:
        value = ctx.params.get(str(param.name))
        if value is None or isinstance(value, tuple) or param.name in without:
            continue
        if value == param.get_default(ctx):
            continue
        arguments += [param.opts[0]] if value is True else [param.opts[0], str(value)]
    return tuple(arguments)
