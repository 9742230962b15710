"""``wavebus bench``: figures of the bus on this host."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import click

from bus.cli.options import json_option
from bus.errors import UsageError, WavebusError
from bus.runtime import event_loop
from sidecar.bench.cli_options import (
    backend_option,
    device_option,
    engine_option,
    logs_option,
    model_option,
    native_engine_option,
    packed_option,
    requests_option,
    require_backend,
    require_modules,
    require_servers,
    rounds_option,
    run_measuring,
    say,
    tokens_option,
    vllm_backend,
)
from sidecar.bench.gap.cli import gap

if TYPE_CHECKING:
    from pathlib import Path

    from bus.runtime.event_loop import LoopChoice
    from sidecar.bench.pause import EngineKind
    from sidecar.bench.transfer.broadcast_ends import Device
    from sidecar.bench.vllm_fleet import Model

_NEEDS: Final = ("aiohttp", "fastapi", "uvicorn", "httptools", "torch")


@click.group()
def bench() -> None:
    """Measure the bus on this host."""


bench.add_command(gap)


@bench.command()
@click.option(
    "--engines",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Engines in the group.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Pause-and-resume rounds of each kind.",
)
@click.option(
    "--loop",
    type=click.Choice(["auto", "asyncio", "uvloop"]),
    default="auto",
    show_default=True,
    help="The event loop of all processes; auto is uvloop where it is installed.",
)
@click.option(
    "--plain",
    is_flag=True,
    help="Also a bus without CURVE keys and journal, in turn with the others.",
)
@click.option(
    "--scale", is_flag=True, help="Also the bus's rounds with 8, 64, 256 and 1,024 engines."
)
@click.option(
    "--idle",
    is_flag=True,
    help="Also the broker's memory and heartbeat CPU with 1,024 idle engines (10 s).",
)
@json_option
def control(
    *,
    engines: int,
    rounds: int,
    loop: LoopChoice,
    plain: bool,
    scale: bool,
    idle: bool,
    as_json: bool,
) -> None:
    """A group's pause and resume: over the bus, over HTTP, and over bare ZeroMQ.

    The bus has CURVE keys, a journal and limits. HTTP endpoints log no requests; beside them are
    others that do. All alternate in one run: only their ratios mean something on a busy host.
    """
    require_modules(*_NEEDS)
    try:
        kind = event_loop.choose_loop(loop)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    measuring = _measure(engines, rounds, kind, plain=plain, scale=scale, idle=idle)
    figures = run_measuring(measuring, kind)
    click.echo(json.dumps(figures) if as_json else _table(figures))


@bench.command()
@click.option(
    "--engine",
    type=click.Choice(["embedded", "vllm"]),
    default="embedded",
    show_default=True,
    help="vllm: real servers; pauses are compared, too.",
)
@click.option(
    "--dp-size",
    type=click.IntRange(2, 8),
    default=2,
    show_default=True,
    help="Ranks of each DP group.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=40, show_default=True, help="Rounds of each kind."
)
@json_option
def pause(*, engine: EngineKind, dp_size: int, rounds: int, as_json: bool) -> None:
    """What the bus adds to a DP group: to its first request, and to its pause.

    Two DP groups side by side, one of them on the bus, measured in turn.
    """
    require_modules(*_NEEDS, *(("vllm",) if engine == "vllm" else ()))
    from sidecar.bench import pause as measuring  # noqa: PLC0415 - it needs the bench's extra

    kind = event_loop.choose_loop("auto")
    figures = run_measuring(measuring.measure(engine, dp_size, rounds, kind, say), kind)
    click.echo(json.dumps(figures) if as_json else _pause_table(figures))


@bench.command()
@rounds_option("Rounds of each way.")
@click.option(
    "--kills",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    help="Engines that get SIGKILL while the client streams from them.",
)
@click.option(
    "--live",
    type=click.IntRange(1, 4096),
    default=1024,
    show_default=True,
    help="Streams at once, in ten waves, for the client's memory.",
)
@click.option(
    "--vllm",
    is_flag=True,
    help="Also prefix cache hits of sessions, on two real servers on the CPU.",
)
@json_option
def rollout(*, rounds: int, kills: int, live: int, vllm: bool, as_json: bool) -> None:
    """What the rollout client costs, against aiohttp alone and against vllm-router.

    All ask the same four embedded engines, whose steps take 20 ms. Ways alternate in one run.
    """
    require_modules("torch", "aiohttp", *(("vllm",) if vllm else ()))
    from sidecar.bench import rollout as measuring  # noqa: PLC0415 - it needs torch

    kind = event_loop.choose_loop("auto")
    plan = measuring.RolloutPlan(rounds, kills, live, vllm)
    figures = run_measuring(measuring.measure(plan, kind, say), kind)
    click.echo(json.dumps(figures) if as_json else measuring.table(figures))


@bench.command()
@engine_option("What loads the weights; vllm: real servers, that decode meanwhile.")
@backend_option
@click.option(
    "--megabytes",
    type=click.IntRange(min=1),
    default=400,
    show_default=True,
    help="embedded: size of the model of few large tensors.",
)
@click.option(
    "--tensors",
    type=click.IntRange(20, 100_000),
    default=40_000,
    show_default=True,
    help="embedded: tensors of the model of many small ones.",
)
@rounds_option("Rounds of each kind.")
@device_option
@model_option()
@requests_option("vllm: requests that decode while the weights come.")
@tokens_option(200, "vllm: of each request.")
@native_engine_option(
    "vllm: the trainer and worker engine of vLLM's, or of a plugin, to compare with."
)
@click.option(
    "--chunk-megabytes",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="vllm: at most so much is in a chunk of wavebus's backend.",
)
@packed_option
@logs_option("vllm: a folder that keeps what all processes log.")
@json_option
def transfer(
    *,
    engine: str,
    backend: str,
    megabytes: int,
    tensors: int,
    rounds: int,
    device: Device,
    model_size: Model,
    requests: int,
    tokens: int,
    native_engine: str,
    chunk_megabytes: int,
    packed: bool,
    logs: Path | None,
    as_json: bool,
) -> None:
    """What an update's transfer costs: its bandwidth, and its control plane.

    embedded: one engine, one trainer, one broker, each in its own process. First few large
    tensors: updates alternate with plain copies of as many bytes. Then many small ones: what an
    update takes beside putting, receiving and loading them.

    vllm: updates over the bus, by vLLM's worker engine and by wavebus's, alternate with vLLM's
    own flow and with a raw broadcast; how long requests stand still, and whose time that is.
    """
    require_modules("torch", "aiohttp")
    kind = event_loop.choose_loop("auto")
    if engine == "vllm":
        from sidecar.bench import vllm_fleet  # noqa: PLC0415 - it needs torch
        from sidecar.bench.transfer import vllm_transfer  # noqa: PLC0415 - it needs torch

        plan = vllm_fleet.FleetPlan(
            model=model_size,
            device=device,
            native_engine=native_engine,
            backend=vllm_backend(backend, device),
            chunk_bytes=chunk_megabytes * 1_000_000,
            packed=packed,
            rounds=rounds,
            requests=requests,
            tokens=tokens,
        )
        require_servers(plan)
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        figures = run_measuring(vllm_transfer.measure(plan, kind, say, logs=logs), kind)
        click.echo(json.dumps(figures) if as_json else vllm_transfer.table(figures))
        if not figures["weights_arrived"]:
            raise WavebusError("the servers do not all serve the weights that were sent")
        return
    from sidecar.bench.transfer import transfer_rounds as measuring  # noqa: PLC0415 - it needs torch

    backend = backend or "shm"
    require_backend(backend)
    figures = run_measuring(measuring.measure(backend, megabytes, tensors, rounds, kind, say), kind)
    click.echo(json.dumps(figures) if as_json else _transfer_table(figures))


def _transfer_table(figures: dict[str, Any]) -> str:
    rows = [
        f"{figures['engine']}, {figures['backend']}, {figures['rounds']} rounds of each",
        "",
        f"{figures['megabytes']:.0f} MB in few tensors",
    ]
    for what, name in (
        ("memcpy", "memcpy_gb_per_s"),
        ("two at once", "two_memcpy_gb_per_s"),
        ("transfer and load", "transfer_gb_per_s"),
    ):
        ratio = figures[name] / figures["memcpy_gb_per_s"]
        rows.append(f"  {what:<18}{figures[name]:9.2f} GB/s  {ratio:.2f} x memcpy")
    rows.append(f"  {'whole update':<18}{figures['update_ms']:9.2f} ms")
    rows.append(f"  {'engine paused for':<18}{figures['paused_ms']:9.2f} ms")
    if "lent_ratio_memcpy" in figures:
        speed, ratio = figures["lent_transfer_gb_per_s"], figures["lent_ratio_memcpy"]
        rows.append("the same, lent from shared memory")
        rows.append(f"  {'transfer and load':<18}{speed:9.2f} GB/s  {ratio:.2f} x memcpy")
        rows.append(f"  {'whole update':<18}{figures['lent_update_ms']:9.2f} ms")
        rows.append(f"  {'engine paused for':<18}{figures['lent_paused_ms']:9.2f} ms")
    rows.append(f"{figures['tensors']} small tensors")
    rows.append(f"  {'whole update':<18}{figures['small_update_ms']:9.2f} ms")
    rows.append(f"  {'control plane':<18}{figures['small_control_ms']:9.2f} ms")
    return "\n".join(rows)


def _pause_table(figures: dict[str, Any]) -> str:
    rows = [f"{figures['engine']}, {figures['dp_size']} ranks, {figures['rounds']} rounds of each"]
    for what, name in (("first request", "first_request"), ("pause", "pause")):
        if f"{name}_direct_ms" in figures:
            direct, bus = figures[f"{name}_direct_ms"], figures[f"{name}_bus_ms"]
            more = figures[f"{name}_more_ms"]
            rows.append(f"{what:<14} direct {direct:8.2f} ms  bus {bus:8.2f} ms  {more:+.2f} ms")
    return "\n".join(rows)


async def _measure(
    engines: int, rounds: int, loop: LoopChoice, *, plain: bool, scale: bool, idle: bool
) -> dict[str, Any]:
    from sidecar.bench.control import control_rounds as measuring  # noqa: PLC0415 - it needs the bench's extra

    samples = await measuring.compare(engines, rounds, loop, say, plain=plain)
    found = {**measuring.figures(samples), "loop": loop}
    if scale:
        found["growth"] = await measuring.scale(rounds, loop, say)
    if idle:
        found |= await measuring.idle(loop, say)
    return found


def _table(figures: dict[str, Any]) -> str:
    """The same for people."""
    shown = {
        "bus": "bus",
        "http": "http",
        "http_log": "http, requests logged",
        "raw": "raw zmq",
        "plain": "bus, no keys, no journal",
    }
    rows = [("", "p50 of a round", "bus is")]
    for kind, name in shown.items():
        if f"{kind}_p50_ms" in figures:
            ratio = f"{figures[f'ratio_{kind}']:.2f} x" if kind != "bus" else ""
            rows.append((name, f"{figures[f'{kind}_p50_ms']:.2f} ms", ratio))
    cpu = (
        f"broker {figures['broker_cpu_us_per_engine_round']:.0f} us, "
        f"HTTP client {figures['http_cpu_us_per_engine_round']:.0f} us"
    )
    lines = [
        f"{figures['engines']} engines, {figures['rounds']} rounds of each, {figures['loop']}",
        "",
        *(f"{name:<26}{took:>16}{ratio:>10}".rstrip() for name, took, ratio in rows),
        "",
        f"CPU per engine and round: {cpu}",
    ]
    if "growth" in figures:
        growth = ", ".join(f"{count}: {took:.2f} ms" for count, took in figures["growth"].items())
        lines.append(f"bus, by engines: {growth}")
    if "broker_rss_mb_1024" in figures:
        lines.append(
            f"1024 idle engines: broker {figures['broker_rss_mb_1024']:.0f} MB, heartbeats "
            f"{figures['heartbeat_core_share_1024']:.1%} of a core"
        )
    return "\n".join(lines)
