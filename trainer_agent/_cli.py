"""The command `wavebus gateway`."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click

import bus.log
from bus._cli.options import (
    FiniteRange,
    GroupPlan,
    Keys,
    announce,
    key_options,
    log_options,
    option,
    options_of,
    run_until_stopped,
)
from bus._keys import API_KEY_VARIABLE
from bus._net import is_loopback_host
from bus._runtime.status_client import fetch_status
from bus.errors import UsageError, WavebusError

if TYPE_CHECKING:
    import asyncio

_STATUS_S: Final = 5.0


@dataclass(frozen=True)
class GatewayPlan(GroupPlan):
    """Options of ``wavebus gateway``."""

    listen: str = option(
        "127.0.0.1:8000", "Where to serve; port 0 takes any free one.", metavar="HOST:PORT"
    )
    read_only: bool = option(False, "Serve generation alone: no pauses, no updates.", is_flag=True)
    silence_s: float = option(
        300.0,
        "End a pause, and undo an update, after this many seconds without a call.",
        type=FiniteRange(min=1.0),
    )
    client_requests: int = option(
        4096,
        "How many requests for tokens one client address may have at once; further requests get "
        "status 429. 0: any number.",
        type=click.IntRange(min=0),
    )
    tokenizer: str | None = option(
        None,
        "Folder of a Hugging Face tokenizer (transformers must be installed), for stop strings, "
        "for prompts and answers as text, and for chat if engines have no render route.",
        type=click.Path(exists=True, file_okay=False),
    )
    api_key: str = option(
        "",
        "The bearer token that requests must have.  [env: WAVEBUS_API_KEY]",
        envvar="WAVEBUS_API_KEY",
    )
    control_key: str = option(
        "",
        "The bearer token of routes that pause or update; accepted by all other routes, too.  "
        "[env: WAVEBUS_CONTROL_KEY]",
        envvar="WAVEBUS_CONTROL_KEY",
    )
    allow_pickled_handles: bool = option(
        False,
        "Accept the pickled CUDA IPC handles of vLLM's clients, on loopback only. The pickles are "
        "read without running their code.",
        is_flag=True,
    )
    engine_api_key: str | None = option(
        None,
        "The engines' own API key, if they have one.  [env: VLLM_API_KEY]",
        envvar=API_KEY_VARIABLE,
    )


@click.command(short_help="Serve a group over HTTP as if it were one vLLM.")
@options_of(GatewayPlan)
@key_options
@log_options
def gateway(plan: GatewayPlan, keys: Keys) -> None:
    """Serve a group's engines at one address, with the routes of one vLLM.

    Requests survive updates, pauses and dead engines: a request continues on another engine with
    its tokens so far. Routes: /inference/v1/generate as in vLLM, /v1/completions,
    /v1/chat/completions, /v1/models and /health. Requests of one session (header X-Session-ID, or
    field session_id) go to one engine. While requests wait, clients take turns; a client is a user
    (field user), or else a connection.

    A trainer that updates one vLLM over HTTP can update the group with the same calls: /pause,
    /resume, /sleep, /wake_up, /init_weight_transfer_engine, /start_weight_update, /update_weights,
    /finish_weight_update, and related routes. The first such call makes the gateway the group's
    trainer.

    Prints its URL once it listens. Beyond loopback, --api-key and --control-key are needed, or
    --insecure. A client without an option for a key can use the URL http://x:KEY@HOST:PORT.
    """
    listen = plan.listen
    try:
        host, port = urlsplit(f"//{listen}").hostname, urlsplit(f"//{listen}").port
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise UsageError(f"--listen {listen}: a host and a port are needed, as 127.0.0.1:8000")
    is_locked = plan.api_key and (plan.control_key or plan.read_only)
    if not (is_locked or keys.insecure or is_loopback_host(host)):
        raise UsageError(
            f"--listen {listen}: others can reach it: give --api-key and --control-key (or "
            "--read-only), or --insecure to let anyone use the engines"
        )
    if plan.allow_pickled_handles and not is_loopback_host(host):
        raise UsageError(f"--listen {listen}: --allow-pickled-handles is for loopback alone")
    own = keys.security().own
    if own is not None and own.role == "observer" and not plan.read_only:
        raise UsageError(
            f"--key {keys.key}: a key of role observer may not pause or update engines: give a key "
            "of role trainer, or --read-only"
        )
    from trainer_agent._gateway import server  # noqa: PLC0415 - after --help

    _raise_file_limit()
    loaded = _load_tokenizer(plan.tokenizer) if plan.tokenizer is not None else None

    async def main(stop: asyncio.Event) -> None:
        async with server.serve(
            plan.broker,
            plan.group,
            host,
            port,
            keys=keys,
            tokenizer=loaded,
            api_key=plan.api_key,
            control_key=plan.control_key,
            engine_api_key=plan.engine_api_key,
            silence_s=None if plan.read_only else plan.silence_s,
            allow_pickled_handles=plan.allow_pickled_handles,
            client_requests=plan.client_requests,
        ) as url:
            await _warn_of_empty_group(plan, keys)
            announce(url)
            await stop.wait()

    run_until_stopped(main)


def _raise_file_limit() -> None:
    """Raises the limit of open files to what the system allows: each connection needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the old one must do
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _warn_of_empty_group(plan: GatewayPlan, keys: Keys) -> None:
    """Logs a warning if the group has no engine, as after a mistyped ``--group``."""
    try:
        status = await fetch_status(plan.broker, timeout_s=_STATUS_S, security=keys.security())
    except WavebusError:  # the client has joined, and says if its broker is gone
        return
    engines = {group.name: len(group.engines) for group in status.groups}
    if not engines.get(plan.group):
        others = [name for name, count in engines.items() if count]
        hint = "requests wait until an engine joins; check --group"
        bus.log.logger(group=plan.group).warning("no_engine_yet", groups=others, hint=hint)


def _load_tokenizer(folder: str) -> Any:
    """Loads a tokenizer of transformers."""
    from trainer_agent._rollouts import text  # noqa: PLC0415 - after --help

    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - optional

        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ModuleNotFoundError as error:
        raise UsageError(f"--tokenizer: install {error.name}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"--tokenizer {folder}: {error}") from error
    return text.HfTokenizer(loaded)
