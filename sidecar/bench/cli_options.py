"""What the commands of ``wavebus bench`` have in common."""

from __future__ import annotations

import asyncio
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from bus.errors import UsageError
from bus.runtime import event_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from bus.runtime.event_loop import LoopChoice
    from sidecar.bench.transfer.broadcast_ends import Device
    from sidecar.bench.vllm_fleet import FleetPlan

    Option: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

T = TypeVar("T")

backend_option = click.option(
    "--backend",
    default="",
    help="How tensors travel. Default: shm; with vllm alone nccl, or gloo on a CPU.",
)
device_option = click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="vllm: two GPUs, or one for each rank; or none.",
)
packed_option = click.option(
    "--packed/--unpacked",
    default=True,
    show_default=True,
    help="vllm: chunks of wavebus's backend go through buffers.",
)


def engine_option(what: str) -> Option:
    """``--engine``."""
    return click.option(
        "--engine",
        type=click.Choice(["embedded", "vllm"]),
        default="embedded",
        show_default=True,
        help=what,
    )


def rounds_option(what: str) -> Option:
    """``--rounds``."""
    return click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help=what)


def requests_option(what: str) -> Option:
    """``--requests``."""
    return click.option(
        "--requests", type=click.IntRange(1, 256), default=32, show_default=True, help=what
    )


def tokens_option(default: int, what: str) -> Option:
    """``--tokens``."""
    return click.option(
        "--tokens", type=click.IntRange(100, 900), default=default, show_default=True, help=what
    )


def model_option(*names: str, mixtures: bool = False) -> Option:
    """``--model-size``, and what else it is called; ``mixtures``: those of experts, too."""
    dense = "the shape of Qwen3-8B, or 26 million parameters"
    experts = ", or 7 billion or 21 million as a mixture of experts" if mixtures else ""
    default = " Default: 8b; with --dp-size moe." if mixtures else ""
    return click.option(
        "--model-size",
        *names,
        "model_size",
        type=click.Choice(["8b", "tiny", *(("moe", "tiny-moe") if mixtures else ())]),
        default=None if mixtures else "8b",
        show_default=True,
        help=f"vllm: {dense}{experts}; bf16 on GPUs.{default}",
    )


def native_engine_option(what: str, default: str | None = "nccl") -> Option:
    """``--native-engine``."""
    return click.option("--native-engine", default=default, show_default=True, help=what)


def logs_option(what: str) -> Option:
    """``--logs``."""
    return click.option("--logs", type=click.Path(file_okay=False, path_type=Path), help=what)


def require_backend(backend: str) -> None:
    """
    Raises:
        BadParameter: it is none of those that this host has.
    """
    from bus.weight_transfer.registry import receiver_backends  # noqa: PLC0415 - it needs torch

    known = receiver_backends()
    if backend not in known:
        raise click.BadParameter(
            f"{backend!r}: choose one of {', '.join(known)}", param_hint="--backend"
        )


def require_modules(*modules: str) -> None:
    """
    Raises:
        UsageError: names those that are not installed, and how to get them.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise click.UsageError(
            f"this bench needs {', '.join(missing)}: pip install 'wavebus[bench,trainer]'"
        )


def require_servers(plan: FleetPlan) -> None:
    """
    Raises:
        UsageError: vLLM servers can't be measured so here.
    """
    try:
        plan.check()
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    require_backend(plan.backend)
    require_modules("vllm")


def vllm_backend(backend: str, device: Device, dp_size: int = 1) -> str:
    """As it was asked for, or what fits the device, and ranks on all of them."""
    return backend or ("shm" if dp_size > 1 else "nccl" if device == "cuda" else "gloo")


def say(text: str) -> None:
    """How it goes; stdout is for figures."""
    click.echo(text, err=True)


def run_measuring(measuring: Coroutine[Any, Any, T], loop: LoopChoice) -> T:
    """Measure, and clean up on SIGTERM as on Ctrl-C."""

    async def until_cancelled() -> T:
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        return await measuring

    try:
        return event_loop.run(until_cancelled(), loop=loop)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
