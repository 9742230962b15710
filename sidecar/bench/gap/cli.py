"""``wavebus bench gap``."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from bus.cli.options import json_option
from bus.errors import WavebusError
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

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from sidecar.bench.gap.gap_rounds import Measured
    from sidecar.bench.transfer.broadcast_ends import Device
    from sidecar.bench.vllm_fleet import Model

_CHUNK_MEGABYTES: Final = 8
_VLLM_CHUNK_MEGABYTES: Final = 2048
_SHM_CHUNK_MEGABYTES: Final = 512  # two of them are in the host's memory


@click.command()
@engine_option("Whose requests decode; vllm: real servers.")
@backend_option
@rounds_option("Rounds of each way.")
@requests_option("Requests that decode while the weights come.")
@tokens_option(300, "Of each request: enough for it to outlast the update.")
@click.option(
    "--clear-cache/--keep-cache",
    default=False,
    show_default=True,
    help="Requests compute their keys and values anew after each update, in all ways.",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("gap.png"),
    show_default=True,
    help="Where the picture goes: tokens over the time of an update.",
)
@logs_option("A folder that keeps what all processes log.")
@click.option(
    "--megabytes",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="embedded: size of the model.",
)
@click.option(
    "--chunk-megabytes",
    "--chunk-mb",
    "chunk_megabytes",
    type=click.IntRange(min=1),
    help="At most so much is in a chunk. Default: 8; with vllm 2048, or 512 over shm.",
)
@click.option(
    "--dp-size",
    type=click.IntRange(1, 8),
    default=1,
    show_default=True,
    help="Ranks in lockstep, over which experts are spread; vllm: each on a GPU of its own.",
)
@device_option
@model_option("--model", mixtures=True)
@native_engine_option(
    "vllm: the trainer and worker engine of vLLM's, or of a plugin, of the native way. "
    "Default: nccl; with --dp-size ipc.",
    default=None,
)
@click.option(
    "--native-packed/--native-unpacked",
    default=None,
    help="vllm: what that engine sends goes through buffers. Default: as vLLM has it.",
)
@packed_option
@click.option(
    "--cuda-graphs/--eager",
    default=False,
    show_default=True,
    help="vllm, on GPUs: a step is one graph, or one kernel after the other.",
)
@json_option
def gap(
    *,
    engine: str,
    backend: str,
    rounds: int,
    requests: int,
    tokens: int,
    clear_cache: bool,
    picture: Path,
    logs: Path | None,
    megabytes: int,
    chunk_megabytes: int | None,
    dp_size: int,
    device: Device,
    model_size: Model | None,
    native_engine: str | None,
    native_packed: bool | None,
    packed: bool,
    cuda_graphs: bool,
    as_json: bool,
) -> None:
    """The time between tokens over a weight update: natively, paused, and staged.

    Requests decode while the engines are updated, by the engine's own flow without a bus, over the
    bus in a pause, and over the bus staged; these alternate in one run.
    """
    require_modules("torch", "aiohttp")
    measuring: Coroutine[Any, Any, tuple[dict[str, Any], Measured]]
    kind = event_loop.choose_loop("auto")
    if engine == "vllm":
        from sidecar.bench import vllm_fleet  # noqa: PLC0415 - it needs torch
        from sidecar.bench.gap import vllm_gap  # noqa: PLC0415 - it needs torch

        over = vllm_backend(backend, device, dp_size)
        chunk = _SHM_CHUNK_MEGABYTES if over == "shm" else _VLLM_CHUNK_MEGABYTES
        servers = vllm_fleet.FleetPlan(
            model=model_size or ("moe" if dp_size > 1 else "8b"),
            device=device,
            native_engine=native_engine or ("ipc" if dp_size > 1 else "nccl"),
            native_packed=native_packed,
            backend=over,
            chunk_bytes=(chunk_megabytes or chunk) * 1_000_000,
            packed=packed,
            rounds=rounds,
            requests=requests,
            tokens=tokens,
            clear_cache=clear_cache,
            dp_size=dp_size,
            cuda_graphs=cuda_graphs,
        )
        require_servers(servers)
        measuring = vllm_gap.bench(servers, kind, say, logs=logs)
    else:
        from sidecar.bench.gap import embedded_gap  # noqa: PLC0415 - it needs torch

        plan = embedded_gap.EmbeddedGapPlan(
            backend=backend or "shm",
            megabytes=megabytes,
            chunk_bytes=(chunk_megabytes or _CHUNK_MEGABYTES) * 1_000_000,
            rounds=rounds,
            requests=requests,
            tokens=tokens,
            clear_cache=clear_cache,
            dp_size=dp_size,
        )
        require_backend(plan.backend)
        measuring = embedded_gap.bench(plan, kind, say, logs=logs)
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    tell(measuring, picture, as_json=as_json)


def tell(
    measuring: Coroutine[Any, Any, tuple[dict[str, Any], Measured]],
    picture: Path,
    *,
    as_json: bool,
) -> None:
    """Measure, draw, print.

    Raises:
        WavebusError: the weights did not arrive.
    """
    from sidecar.bench.gap.gap_rounds import table, typical  # noqa: PLC0415 - it needs aiohttp

    figures, measured = run_measuring(measuring, event_loop.choose_loop("auto"))
    figures["picture"] = None
    if find_spec("matplotlib") is None:
        say("no picture, since there is no matplotlib: pip install 'wavebus[bench]'")
    else:
        from sidecar.bench.gap.picture import draw  # noqa: PLC0415 - it is optional

        draw({way: typical(rounds) for way, rounds in measured.rounds.items()}, figures, picture)
        figures["picture"] = str(picture)
    if as_json:
        click.echo(json.dumps(figures))
    else:
        click.echo(table(figures))
        if figures["picture"]:
            click.echo(f"picture: {picture}")
    if not figures["weights_arrived"]:
        raise WavebusError("the engines do not all serve the weights that were sent")
