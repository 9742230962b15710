"""`wavebus sidecar`."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

import click

from bus.cli.options import (
    broker_option,
    configure_log,
    group_option,
    key_options,
    log_options,
    run_until_stopped,
)
from bus.errors import UsageError
from bus.ids import check_name
from bus.keys import (
    API_KEY_VARIABLE,
    BROKER_KEY_VARIABLE,
    INSECURE_VARIABLE,
    KEY_VARIABLE,
    security,
)
from bus.net import advertised
from sidecar.supervision.launch import SUPERVISED

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from bus.messages import PdRole
    from sidecar.cli_embedded import Embedded
    from sidecar.engine import Engine
    from sidecar.vllm.plugin.environment import BusAddress, DpCoordinator

# How often in a row engines that are started here are started anew, unless it is said.
RESTARTS: Final = 5


@click.command(
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": True},
    short_help="Put one engine on the bus.",
)
@broker_option
@group_option
@click.option(
    "--name",
    envvar="WAVEBUS_NAME",
    help="This engine's name on the bus; unique.  [default: from host and pid]",
)
@click.option(
    "--dp-group",
    envvar="WAVEBUS_DP_GROUP",
    help="The DP group it is a rank of.  [default: its name]",
)
@click.option(
    "--role",
    type=click.Choice(["prefill", "decode"]),
    envvar="WAVEBUS_ROLE",
    help="What it does in a disaggregated group. With both there, an update needs all of them, "
    "unless the trainer asks for another quorum.  [default: both]",
)
@click.option(
    "--engine",
    type=click.Choice(["embedded", "vllm"]),
    default=None,
    help="embedded: the small engine of wavebus itself (default without a COMMAND or --attach); "
    "vllm: needs a COMMAND or --attach.",
)
@click.option(
    "--dp-coordinator",
    type=click.Choice(["vllm", "bus"]),
    envvar="WAVEBUS_DP_COORDINATOR",
    default=None,
    help="Who wakes the idle ranks of a data parallel group: vLLM's own coordinator (embedded: a "
    "coordinator that asks nobody), or a coordinator that asks the broker. Same for all ranks.  "
    "[default: vllm; embedded: bus]",
)
@click.option("--attach", metavar="URL", help="Use the vLLM server that runs there, on loopback.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Embedded: folder of a Qwen3 or Qwen3-MoE checkpoint (config.json, *.safetensors).",
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Embedded: serve requests there."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Embedded: on this port; 0 takes any free one.",
)
@click.option(
    "--advertise",
    metavar="HOST|URL",
    envvar="WAVEBUS_ADVERTISE",
    help="By which clients reach the engine. Needed where it listens on every address.  "
    "[default: the address on which it listens]",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Embedded: sequences at once.",
)
@click.option(
    "--step-ms",
    type=click.FloatRange(0),
    default=0,
    help="Embedded: a step takes at least so long, as a larger model's does.",
)
@click.option("--max-model-len", type=click.IntRange(2), help="Embedded: tokens of a sequence.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Embedded: of the weights.",
)
@click.option(
    "--threads", type=click.IntRange(1), default=1, show_default=True, help="Embedded: of torch."
)
@click.option(
    "--dp-size",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Ranks of a data parallel group, which share the model's experts. Without --dp-rank all "
    "of them are started here, and started anew together when one dies.",
)
@click.option("--dp-rank", type=click.IntRange(0), help="Embedded: start this rank alone.")
@click.option(
    "--dp-master",
    metavar="HOST:PORT",
    help="Embedded: where the ranks meet; a free port on rank 0's host, the same for all.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    help="How many times in a row to restart the engine and its sidecar (with --dp-size: all "
    "ranks).  "
    "[default: 5 with --dp-size, or a COMMAND that is no rank among others; else 0]",
)
@click.option(
    "--core-page",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Embedded: keep the core's status page in this file.",
)
@click.option(
    "--boot-timeout-s",
    type=click.FloatRange(1),
    default=1800.0,
    show_default=True,
    help="vLLM: how long the server may take to come up.",
)
@click.option(
    "--trust-kv-connector",
    metavar="NAME",
    multiple=True,
    help="vLLM: a KV connector that wavebus does not know, and that gives no keys and values of "
    "older weights. May be given several times.",
)
@key_options
@log_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def sidecar(
    ctx: click.Context,
    broker: str,
    group: str,
    name: str | None,
    dp_group: str | None,
    role: PdRole | None,
    engine: str | None,
    dp_coordinator: DpCoordinator | None,
    attach: str | None,
    advertise: str | None,
    boot_timeout_s: float,
    restarts: int | None,
    trust_kv_connector: tuple[str, ...],
    key: Path | None,
    broker_key: Path | None,
    insecure: bool,
    log_level: str,
    log_format: str,
    command: tuple[str, ...],
    **embedded: Unpack[Embedded],
) -> None:
    """Put one engine on the bus, and serve it until it dies, SIGINT or SIGTERM.

    \b
    Start and supervise a vLLM server (on loopback, unless its --host says otherwise; its RL routes
    are for this host alone):
      wavebus sidecar --group policy -- \\
          python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B
    Use one that runs:
      wavebus sidecar --group policy --attach http://127.0.0.1:8000
    The embedded engine:
      wavebus sidecar --group policy --engine embedded --model ./checkpoint
    All ranks of a data parallel group on this host, restarted as one when one dies:
      wavebus sidecar --group policy --dp-size 2 --dp-coordinator bus -- \\
          python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-30B-A3B

    Exits with 4 when the engine dies, and is not started anew.
    """
    configure_log(log_level, log_format)
    for option, value in (("--name", name), ("--group", group), ("--dp-group", dp_group)):
        if value is not None:
            check_name(value, option)
    _hand_down_keys(key, broker_key, insecure=insecure)
    if trust_kv_connector:  # a server that is started here finds it there, as this process does
        from sidecar.vllm.plugin.environment import TRUST_KV_CONNECTORS  # noqa: PLC0415 - after --help

        os.environ[TRUST_KV_CONNECTORS] = ",".join(trust_kv_connector)
    all_ranks = embedded["dp_size"] > 1 and embedded["dp_rank"] is None
    if restarts is None:
        restarts = RESTARTS if all_ranks or _alone(command) else 0
    if all_ranks:
        _all_ranks(ctx, name, dp_group, attach, command, embedded, restarts)
        return
    coordinate = None
    if dp_coordinator == "bus" and (command or attach):
        coordinate = _coordinate(broker, group, dp_group)
    made: Engine | None = None
    if command or attach or engine == "vllm":
        made = _vllm(engine, attach, command, embedded, boot_timeout_s, coordinate)
    elif not restarts:
        asked = "" if dp_coordinator == "vllm" else broker
        from sidecar.cli_embedded import make_embedded  # noqa: PLC0415 - after --help

        made = make_embedded(embedded, asked, group, dp_group)
    advertised(getattr(made, "endpoint", ""), advertise or "")  # refused before it boots
    if made is None or restarts:
        _one_engine(ctx, name, command, restarts)
        return

    async def serve(stop: asyncio.Event) -> None:
        from sidecar.booting import shown_as_booting  # noqa: PLC0415 - after --help
        from sidecar.sidecar import Sidecar  # noqa: PLC0415 - after --help

        agent = Sidecar(
            made,
            broker=broker,
            group=group,
            name=name,
            dp_group=dp_group,
            supervised=not attach and os.environ.get(SUPERVISED) == "1",
            advertise=advertise or "",
            pd_role=role or "",
        )
        # An embedded engine boots in no time.
        boots = shown_as_booting(broker, group, agent.name) if command or attach else nullcontext()
        with boots:
            await _until(agent.start(), stop)
        if stop.is_set():
            await agent.close("stopped")
            return
        try:
            await _until(agent.run(), stop)
        finally:
            await agent.close("stopped" if stop.is_set() else "ended")

    run_until_stopped(serve)


def _hand_down_keys(key: Path | None, broker_key: Path | None, *, insecure: bool) -> None:
    """DP coordinators, also those that vLLM starts, find the keys where their parents have them.

    Raises:
        UsageError: a key is wrong.
    """
    security(key, broker_key, insecure=insecure)
    for variable, path in ((KEY_VARIABLE, key), (BROKER_KEY_VARIABLE, broker_key)):
        if path is not None:
            os.environ[variable] = str(path.resolve())
    if insecure:
        os.environ[INSECURE_VARIABLE] = "1"


async def _until(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Await ``work``, but no longer than until ``stop``; its error is raised."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return
    task.result()


def _all_ranks(
    ctx: click.Context,
    name: str | None,
    dp_group: str | None,
    attach: str | None,
    command: tuple[str, ...],
    embedded: Embedded,
    restarts: int,
) -> None:
    """Start every rank, with the options that were given here.

    Raises:
        UsageError: an option is one rank's alone.
    """
    from bus.runtime.peer import default_name  # noqa: PLC0415 - after --help
    from sidecar.supervision.ranks import (  # noqa: PLC0415 - after --help
        RankLaunchPlan,
        RankSupervisor,
        parse_server_command,
        visible_gpus,
    )

    for option, value in (
        ("--attach", attach),
        ("--name", name),
        ("--dp-master", embedded["dp_master"]),
        ("--core-page", embedded["core_page"]),
    ):
        if value is not None:
            raise UsageError(f"{option}: of one rank; with it, give --dp-rank, too")
    server, port = parse_server_command(command)
    plan = RankLaunchPlan(
        dp_group=dp_group or default_name("dp"),
        size=embedded["dp_size"],
        options=_given(ctx, _OF_THE_SUPERVISOR),
        command=server,
        port=port or embedded["port"],
        gpus=visible_gpus() if server else (),
    )
    run_until_stopped(RankSupervisor(plan, restarts=restarts).run)


def _one_engine(
    ctx: click.Context, name: str | None, command: tuple[str, ...], restarts: int
) -> None:
    """Start the same again, as a process that is started anew when it ends."""
    from bus.runtime.peer import default_name  # noqa: PLC0415 - after --help
    from sidecar.supervision.ranks import EngineLaunchPlan, RankSupervisor  # noqa: PLC0415

    options = _given(ctx, frozenset({"name", "restarts"}))
    plan = EngineLaunchPlan(name or default_name("engine"), options, command)
    run_until_stopped(RankSupervisor(plan, restarts=restarts).run)


def _alone(command: tuple[str, ...]) -> bool:
    """Whether this is the command of a server that is no rank among others: a rank that ends can't
    come back without them."""
    return bool(command) and not any(
        argument.startswith(("--data-parallel-rank", "-dpr")) for argument in command
    )


# Options that each rank gets anew, or that are none of its concern.
_OF_THE_SUPERVISOR = frozenset({"dp_group", "dp_size", "port", "restarts"})


def _given(ctx: click.Context, without: frozenset[str]) -> tuple[str, ...]:
    """The command's options as they came, wherever from, to be given to another process; but those
    that may be given several times."""
    arguments: list[str] = []
    for param in ctx.command.params:
        value = ctx.params.get(str(param.name))
        if value is None or isinstance(value, tuple) or param.name in without:
            continue
        if value == param.get_default(ctx):
            continue
        arguments += [param.opts[0]] if value is True else [param.opts[0], str(value)]
    return tuple(arguments)


def _coordinate(broker: str, group: str, dp_group: str | None) -> BusAddress:
    from sidecar.vllm.plugin.environment import BusAddress  # noqa: PLC0415 - after --help

    if dp_group is None:
        raise UsageError("--dp-coordinator=bus: give all ranks of the DP group the same --dp-group")
    return BusAddress(broker=broker, group=group, dp_group=dp_group)


def _vllm(
    engine: str | None,
    attach: str | None,
    command: tuple[str, ...],
    embedded: Embedded,
    boot_timeout_s: float,
    coordinate: BusAddress | None,
) -> Engine:
    """The vLLM engine that the options ask for.

    Raises:
        UsageError: they contradict each other, or lack something.
    """
    if command and attach:
        raise UsageError("--attach: a COMMAND starts a server, --attach uses one; give one of them")
    if engine == "embedded" and (command or attach):
        raise UsageError("--engine=embedded: it takes neither a COMMAND nor --attach")
    if embedded["dp_size"] > 1 or (embedded["dp_rank"], embedded["dp_master"]) != (None, None):
        raise UsageError(
            "--dp-rank, --dp-master: of the embedded engine; one rank of vLLM is a server with "
            "vLLM's own options (--data-parallel-rank and so on)"
        )
    if engine == "vllm" and not (command or attach):
        raise UsageError(
            "--engine=vllm: give --attach URL, or the server's command after --, such as "
            "-- python -m vllm.entrypoints.openai.api_server --model ..."
        )
    from sidecar.vllm.connection_http import HttpConnection  # noqa: PLC0415 - only where it is used
    from sidecar.vllm.engine import VllmAdapter  # noqa: PLC0415

    if command:
        if shutil.which(command[0]) is None:
            raise UsageError(f"{command[0]}: there is no such command; check it, and PATH")
        from sidecar.supervision.server import SupervisedServer  # noqa: PLC0415
        from sidecar.vllm.plugin.environment import BOOT_CLOSED, DP_COORDINATOR  # noqa: PLC0415

        coordinator = "bus" if coordinate else "vllm"
        server = SupervisedServer(
            command,
            env={BOOT_CLOSED: "1", **os.environ, DP_COORDINATOR: coordinator},
            ready_timeout_s=boot_timeout_s,
            coordinate=coordinate,
        )
        connection = HttpConnection(server=server)
    else:
        assert attach is not None
        connection = HttpConnection(
            attach,
            ready_timeout_s=boot_timeout_s,
            api_key=os.environ.get(API_KEY_VARIABLE, ""),
        )
    return VllmAdapter(connection, "bus" if coordinate else "vllm")
