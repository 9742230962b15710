"""Options of `wavebus sidecar`, and the engine that is made from them.

The help text must load neither torch nor vLLM, so each engine's module is imported only when an
engine of that kind is made.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - an option's type, read by options_of
from typing import TYPE_CHECKING, Literal, TypeVar

from bus._cli.options import GroupPlan, NamedPath, checked, option
from bus._keys import API_KEY_VARIABLE
from bus._net import check_url
from bus.errors import UsageError

if TYPE_CHECKING:
    from sidecar._embedded.parallel.options import DataParallel
    from sidecar._vllm.plugin.environment import DpCoordinator
    from sidecar.engine import Engine


T = TypeVar("T")


@dataclass(frozen=True)
class SidecarPlan(GroupPlan):
    """The values of all options of ``wavebus sidecar``."""

    name: str | None = option(
        None,
        "This engine's name on the bus; unique.  [default: from host and pid]",
        envvar="WAVEBUS_NAME",
    )
    dp_group: str | None = option(
        None,
        "The DP group of which this engine is a rank.  [default: the engine's name]",
        envvar="WAVEBUS_DP_GROUP",
    )
    role: Literal["prefill", "decode"] | None = option(
        None,
        "The engine's part in prefill/decode disaggregation. If a group has engines of both roles, "
        "an update needs all engines, unless the trainer sets another quorum.  [default: both]",
        envvar="WAVEBUS_ROLE",
    )
    engine: Literal["embedded", "vllm"] | None = option(
        None,
        "embedded: the small engine of wavebus itself (default without a COMMAND or --attach); "
        "vllm: needs a COMMAND or --attach.",
    )
    dp_coordinator: Literal["vllm", "bus"] | None = option(
        None,
        "What wakes the idle ranks of a data parallel group: vLLM's own coordinator (embedded: a "
        "coordinator without a broker), or one that asks the broker. Give all ranks the same."
        "  [default: vllm; embedded: bus]",
        envvar="WAVEBUS_DP_COORDINATOR",
    )
    attach: str | None = option(
        None,
        "Use the vLLM server that runs at this URL, on loopback.",
        metavar="URL",
        callback=checked(check_url),
    )
    model: Path | None = option(
        None,
        "Embedded: folder of a Qwen3 or Qwen3-MoE checkpoint (config.json, *.safetensors). "
        "A vLLM server takes its --model after --.",
        type=NamedPath(exists=True, file_okay=False),
    )
    host: str = option("127.0.0.1", "Embedded: the address that serves requests.")
    port: int = option(
        0, "Embedded: the port that serves requests; 0 takes any free one.", min=0, max=65535
    )
    advertise: str | None = option(
        None,
        "Host or URL by which clients reach the engine. Needed if it listens on every address.  "
        "[default: the address on which it listens]",
        metavar="HOST|URL",
        envvar="WAVEBUS_ADVERTISE",
    )
    max_num_seqs: int = option(64, "Embedded: the largest number of sequences at once.", min=1)
    step_ms: float = option(
        0,
        "Embedded: the shortest duration of a step, to imitate a larger model.",
        min=0,
        show_default=False,
    )
    max_model_len: int | None = option(
        None, "Embedded: the largest number of tokens in a sequence.", min=2
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option("auto", "Embedded: the weights' dtype.")
    threads: int = option(1, "Embedded: the number of CPU threads that torch uses.", min=1)
    dp_size: int = option(
        1,
        "Ranks of a data parallel group, which share the model's experts. Without --dp-rank all "
        "of them are started here, and restarted together when one dies.",
        min=1,
    )
    dp_rank: int | None = option(None, "Embedded: start this rank alone.", min=0)
    dp_master: str | None = option(
        None,
        "Embedded: a free port on rank 0's host, where the ranks meet; the same for all ranks.",
        metavar="HOST:PORT",
    )
    restarts: int | None = option(
        None,
        "How many times in a row to restart the engine and its sidecar (with --dp-size: all "
        "ranks).  [default: 5 with --dp-size, or for a single server; else 0]",
        min=0,
    )
    core_page: Path | None = option(
        None,
        "Embedded: keep the core's status page in this file.",
        type=NamedPath(dir_okay=False),
    )
    boot_timeout_s: float = option(
        1800.0, "vLLM: how many seconds the server may take until it is healthy.", min=1
    )
    trust_kv_connector: tuple[str, ...] = option(
        (),
        "vLLM: a KV connector that wavebus does not know. You vouch that it returns no keys "
        "and values of older weights. May be given several times.",
        metavar="NAME",
        multiple=True,
        type=str,
    )


def make_vllm(plan: SidecarPlan, command: tuple[str, ...]) -> Engine:
    """Makes the adapter of a vLLM server, as the options ask.

    Args:
        command: the command that starts the server; empty if ``--attach`` names a running one.

    Raises:
        UsageError: the options contradict each other, or one is missing.
    """
    coordinate = None
    if plan.dp_coordinator == "bus" and (command or plan.attach):
        from sidecar._vllm.plugin.environment import BusAddress  # noqa: PLC0415 - after --help

        if plan.dp_group is None:
            raise UsageError(
                "--dp-coordinator=bus: give all ranks of the DP group the same --dp-group"
            )
        coordinate = BusAddress(plan.broker, plan.group, plan.dp_group)
    if command and plan.attach:
        raise UsageError("--attach uses a running server, a COMMAND starts one: give one of them")
    if plan.engine == "embedded" and (command or plan.attach):
        raise UsageError("--engine=embedded: the embedded engine takes no COMMAND and no --attach")
    if plan.dp_size > 1 or (plan.dp_rank, plan.dp_master) != (None, None):
        raise UsageError(
            "--dp-rank and --dp-master are for the embedded engine. To start one rank of vLLM, "
            "give the server vLLM's own options (--data-parallel-rank and so on)"
        )
    from sidecar._vllm.connection_http import HttpConnection  # noqa: PLC0415 - only where it is used
    from sidecar._vllm.engine import VllmAdapter  # noqa: PLC0415

    coordinator: DpCoordinator = "bus" if coordinate else "vllm"
    if plan.attach is not None:
        attached = HttpConnection(
            plan.attach,
            ready_timeout_s=plan.boot_timeout_s,
            api_key=os.environ.get(API_KEY_VARIABLE, ""),
        )
        return VllmAdapter(attached, coordinator)
    if not command:
        raise UsageError(
            "--engine=vllm: give --attach URL, or the server's command after --, such as "
            "-- python -m vllm.entrypoints.openai.api_server --model ..."
        )
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]}: there is no such command; check it, and PATH")
    from sidecar._supervision.server import SupervisedServer  # noqa: PLC0415
    from sidecar._vllm.plugin.environment import BOOT_CLOSED, DP_COORDINATOR  # noqa: PLC0415

    server = SupervisedServer(
        command,
        env={BOOT_CLOSED: "1", **os.environ, DP_COORDINATOR: coordinator},
        ready_timeout_s=plan.boot_timeout_s,
        coordinate=coordinate,
    )
    return VllmAdapter(HttpConnection(server=server), coordinator)


def make_embedded(plan: SidecarPlan) -> Engine:
    """Makes the embedded engine, as the options ask.

    Raises:
        UsageError: the options contradict each other, or one is missing.
    """
    if plan.model is None:
        raise UsageError(
            "--model: the embedded engine needs a checkpoint folder (config.json and "
            "model.safetensors of a Qwen3 model); `wavebus demo` makes its own"
        )
    import torch  # noqa: PLC0415 - slow to import

    from sidecar._embedded.engine import EmbeddedEngine  # noqa: PLC0415
    from sidecar._vllm.plugin.environment import BOOT_CLOSED  # noqa: PLC0415

    torch.set_num_threads(plan.threads)
    return EmbeddedEngine(
        plan.model,
        host=plan.host,
        port=plan.port,
        api_key=os.environ.get(API_KEY_VARIABLE, ""),
        max_num_seqs=plan.max_num_seqs,
        max_model_len=plan.max_model_len,
        dtype=plan.dtype,
        dp=_data_parallel(plan),
        core_page=plan.core_page,
        step_ms=plan.step_ms,
        boot_closed=os.environ.get(BOOT_CLOSED, "1") == "1",
    )


def _data_parallel(plan: SidecarPlan) -> DataParallel | None:
    """Returns the rank's data parallel options; None for an engine alone.

    Raises:
        UsageError: an option is missing, or needs another one.
    """
    if plan.dp_size == 1:
        for option, value in (("--dp-rank", plan.dp_rank), ("--dp-master", plan.dp_master)):
            if value is not None:
                raise UsageError(f"{option} needs --dp-size, of at least 2")
        return None
    from sidecar._embedded.parallel.options import DataParallel  # noqa: PLC0415 - after --help

    return DataParallel(
        plan.dp_size,
        _of_rank("--dp-rank", plan.dp_rank),
        _of_rank("--dp-master", plan.dp_master),
        _of_rank("--dp-group", plan.dp_group),
        broker="" if plan.dp_coordinator == "vllm" else plan.broker,
        bus_group=plan.group,
    )


def _of_rank(option: str, value: T | None) -> T:
    """Returns the value of an option that every rank of a data parallel group needs."""
    if value is None:
        raise UsageError(f"{option}: a rank of a data parallel group needs this option")
    return value
