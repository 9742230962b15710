"""``wavebus bench gap``."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bus.commands.options import json_option
from bus.errors import WavebusError
from bus.runtime import loop as event_loop
from sidecar.bench.cli_common import need_backend, need_modules, run_measuring, say

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from sidecar.bench.gap import Measured

_CHUNK_MEGABYTES = 8


@click.command()
@click.option(
    "--engine",
    type=click.Choice(["embedded"]),
    default="embedded",
    show_default=True,
    help="Whose requests decode.",
)
@click.option("--backend", default="", help="How tensors travel. Default: shm.")
@click.option(
    "--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds of each way."
)
@click.option(
    "--requests",
    type=click.IntRange(1, 256),
    default=32,
    show_default=True,
    help="Requests that decode while the weights come.",
)
@click.option(
    "--tokens", type=click.IntRange(100, 900), default=200, show_default=True, help="Of each."
)
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
@click.option(
    "--logs",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder that keeps what all processes log.",
)
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
    help="At most so much is in a chunk. Default: 8.",
)
@click.option(
    "--dp-size",
    type=click.IntRange(1, 8),
    default=1,
    show_default=True,
    help="embedded: ranks in lockstep, over which the experts are spread.",
)
@json_option
def gap(
    *,
    engine: str,  # noqa: ARG001 - vllm follows
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
    as_json: bool,
) -> None:
    """The time between tokens over a weight update: natively, paused, and staged.

    Requests decode while the engines are updated, by the engine's own flow without a bus, over the
    bus in a pause, and over the bus staged; these alternate in one run.
    """
    need_modules("torch", "aiohttp")
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    from sidecar.bench import gap_embedded  # noqa: PLC0415 - it needs torch

    backend = backend or "shm"
    need_backend(backend)
    plan = gap_embedded.Plan(
        backend=backend,
        megabytes=megabytes,
        chunk_bytes=(chunk_megabytes or _CHUNK_MEGABYTES) * 1_000_000,
        rounds=rounds,
        requests=requests,
        tokens=tokens,
        clear_cache=clear_cache,
        dp_size=dp_size,
    )
    kind = event_loop.chosen("auto")
    tell(gap_embedded.bench(plan, kind, say, logs=logs), picture, as_json=as_json)


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
    from sidecar.bench.gap import table, typical  # noqa: PLC0415 - it needs aiohttp

    figures, measured = run_measuring(measuring, event_loop.chosen("auto"))
    figures["picture"] = None
    if find_spec("matplotlib") is None:
        say("no picture, since there is no matplotlib: pip install 'wavebus[bench]'")
    else:
        from sidecar.bench.gap_picture import draw  # noqa: PLC0415 - it is optional

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
