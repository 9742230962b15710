"""Starts and restarts all ranks of one DP group, or one engine, on this host.

Each rank is a `wavebus sidecar` of its own, with its engine. A rank that dies leaves its peer ranks
in collectives that never end, and a rank cannot rejoin. So when one rank ends, all are ended, and
the DP group starts again with a new rendezvous. The broker sees the DP group down, and then up when
all ranks have joined.

::

    state     event              next      what is done
    STARTING  (made)             RUNNING   start every rank
    RUNNING   a rank ends        ENDING    end the others
    RUNNING   stop is set        STOPPING  end all ranks
    ENDING    all have ended     WAITING   wait longer after each failure in a row
    ENDING    too many failures  (exit)    EngineError; UsageError after a rank's exit code 2
    WAITING   the wait is over   STARTING  with a new rendezvous
    STOPPING  all have ended     (exit)    no error
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import bus.log
from bus.errors import EngineError, UsageError
from bus.messages import NackCode
from sidecar._supervision.launch import SUPERVISED, free_port, long_options, with_reaper

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bus._vllm.source import SourceTree

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_USAGE: Final = 2
_SYNC_INTERVAL: Final = "dp-sync-interval"
# vLLM's default is 16. See docs/gpu.md for what it costs.
SYNC_STEPS: Final = 4
# Longer than a rank's sidecar gives its server, so that the server ends with its rank.
STOP_GRACE_S: Final = 45.0
# If a DP group ran for this long, its earlier failures are no longer counted.
CLEAN_AFTER_S: Final = 600.0
_BACKOFF_S: Final = (0.5, 2.0, 5.0, 15.0, 30.0)


@dataclass(frozen=True, slots=True)
class RankLaunchPlan:
    """Describes how to start the ranks of one DP group.

    A DP group of one is one sidecar with its engine.

    Args:
        dp_group: the DP group's name. Rank ``r`` is the engine ``dp_group-r``; an engine alone has
            the name itself.
        options: options of `wavebus sidecar`, for every rank.
        command: the command of a vLLM server, without its data parallel options; empty for embedded
            engines, and for a server that runs already.
        port: the port at which rank 0 serves requests; the other ranks use the ports after it. 0:
            free ports, which stay the same over restarts unless another process takes one.
        serves_at: the address at which the ranks serve; empty: the ranks get no port from here,
            since the command has one, or the server runs already.
        host: an address of this host, at which the ranks find each other.
        gpus: GPUs of this host, by the names of ``CUDA_VISIBLE_DEVICES``, in equal shares for
            the ranks. Empty: every rank sees the GPUs that this process sees.

    Raises:
        UsageError: there are fewer GPUs than ranks.
    """

    dp_group: str
    size: int
    options: tuple[str, ...]
    command: tuple[str, ...] = ()
    port: int = 0
    serves_at: str = ""
    host: str = "127.0.0.1"
    gpus: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.gpus and len(self.gpus) < self.size:
            raise UsageError(
                f"--dp-size {self.size}: this host shows {len(self.gpus)} GPUs "
                f"({', '.join(self.gpus)}); each rank needs its own"
            )

    def environment(self, rank: int) -> dict[str, str]:
        """Returns the environment variables that a rank gets beside those of this process."""
        if not self.gpus:
            return {}
        share = len(self.gpus) // self.size
        return {_VISIBLE: ",".join(self.gpus[rank * share : (rank + 1) * share])}

    def argv(self, rank: int, meeting_port: int, chosen_port: int = 0) -> list[str]:
        """Returns the command line of one rank's sidecar, with its engine.

        Args:
            meeting_port: the port of ``host`` at which the ranks find each other; a new one for
                every start of the DP group.
            chosen_port: the port at which the rank serves requests if :attr:`port` is 0; 0: none.
        """
        line = [sys.executable, "-m", "bus._cli.main", "sidecar", *self.options]
        number = self.port + rank if self.port else chosen_port
        port = ["--port", str(number)] if number else []
        if self.size == 1:
            line += ["--name", self.dp_group, "--restarts", "0"]
            return [*line, "--", *self.command, *port] if self.command else [*line, *port]
        line += ["--name", f"{self.dp_group}-{rank}", "--dp-group", self.dp_group]
        if not self.command:
            line += ["--dp-size", str(self.size), "--dp-rank", str(rank)]
            line += ["--dp-master", f"{self.host}:{meeting_port}"]
            return [*line, *port]
        vllm = rank_options(rank, self.size, self.host, meeting_port)
        return [*line, "--", *self.command, *vllm, *port]


def rank_options(rank: int, size: int, host: str, meeting_port: int) -> list[str]:
    """Returns vLLM's options that make a server one rank of a DP group.

    Args:
        host: the address at which the ranks find each other.
        meeting_port: the port there.
    """
    return [
        *("--data-parallel-size", str(size), "--data-parallel-rank", str(rank)),
        *("--data-parallel-address", host, "--data-parallel-rpc-port", str(meeting_port)),
        "--data-parallel-external-lb",
    ]


def with_sync_interval(command: Sequence[str], vllm: SourceTree | None) -> tuple[str, ...]:
    """Returns a vLLM server's command with ``--dp-sync-interval``, unless it has that.

    Ranks agree on pauses and swaps only at every such step, so a staged update waits for half of
    them on average, and a pause for more. Each agreement costs a small all-reduce on the host.

    Args:
        vllm: the source of the server's vLLM; None: unknown. An old one lacks the option.
    """
    known = vllm is not None and "dp_sync_interval" in vllm.text("vllm.config.parallel")
    if _SYNC_INTERVAL in long_options(command) or not known:
        return tuple(command)
    return (*command, f"--{_SYNC_INTERVAL}", str(SYNC_STEPS))


def parse_server_command(command: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Removes ``--port`` from a vLLM server's command, because each rank needs its own port.

    Args:
        command: the command, as the user gave it.

    Returns:
        The command without ``--port``, and the port; 0 if the command has none.

    Raises:
        UsageError: the command has data parallel options, which are set per rank, or its port is
            not a number.
    """
    rest: list[str] = []
    port = "0"
    arguments = iter(command)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name.startswith(("--data-parallel", "-dp")):
            raise UsageError(
                f"{name}: --dp-size starts all ranks and sets this; leave it out, or start each "
                "rank with a `wavebus sidecar` of its own"
            )
        if name == "--port":
            port = value if equals else next(arguments, "")
        else:
            rest.append(argument)
    if not port.isdigit():
        raise UsageError(f"--port {port}: must be a number")
    return tuple(rest), int(port)


def serving_host(command: Sequence[str], embedded: str) -> str:
    """Returns the address at which an engine serves; empty if its port is given already.

    Args:
        command: the command of a vLLM server; empty for the embedded engine.
        embedded: the address of the embedded engine.
    """
    options = long_options(command)
    if {"port", "uds"} & options.keys():
        return ""
    return options.get("host", "127.0.0.1" if command else embedded)


def visible_gpus() -> tuple[str, ...]:
    """Returns the GPUs that this process may use, by the names of ``CUDA_VISIBLE_DEVICES``."""
    visible = os.environ.get(_VISIBLE)
    if visible is not None:
        return tuple(name for name in visible.split(",") if name)
    numbers = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return tuple(sorted(numbers, key=int))


class RankSupervisor:
    """Runs all ranks of a DP group, and restarts all ranks when one rank dies.

    Args:
        restarts: how many times in a row the DP group is restarted before :meth:`run` fails. A run
            of over 10 minutes resets the count.
        output: where ranks write. Default: this process's stdout and stderr.
        env: the ranks' environment. Default: this process's.
    """

    def __init__(
        self,
        plan: RankLaunchPlan,
        *,
        restarts: int = 5,
        output: IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.plan = plan
        self.generation = 0
        self._restarts = restarts
        self._output = output
        self._env = env
        self._ranks: list[asyncio.subprocess.Process] = []
        self._ports = [0] * plan.size  # free ones, if the plan names none
        self._log = bus.log.logger(dp_group=plan.dp_group)

    async def run(self, stop: asyncio.Event) -> None:
        """Runs the ranks until ``stop`` is set, or until they died too often.

        Args:
            stop: ends the ranks and this call when it is set.

        Raises:
            EngineError: code ``engine_dead``: the DP group died once more than it may be restarted.
            UsageError: a rank rejects its options (exit code 2).
        """
        failures = 0
        while True:
            began_s = time.monotonic()
            await self._start()
            rank, code = await self._first_to_end(stop)
            if rank is None:
                await self._end()
                self._log.info("dp_group_stopped")
                return
            lived_s = time.monotonic() - began_s
            failures = 1 if lived_s > CLEAN_AFTER_S else failures + 1
            self._log.error("rank_ended", dp_rank=rank, exit_code=code, generation=self.generation)
            await self._end()
            if code == _USAGE:
                raise UsageError(f"rank {rank} refused its options; its error is in the log above")
            if failures > self._restarts:
                raise EngineError(
                    f"DP group {self.plan.dp_group} died {failures} times in a row, last with "
                    f"rank {rank} (exit code {code})",
                    code=NackCode.ENGINE_DEAD,
                )
            pause_s = _BACKOFF_S[min(failures, len(_BACKOFF_S)) - 1]
            self._log.warning("dp_group_restarts", in_s=pause_s, failures=failures)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await stop.wait()
                return

    async def _start(self) -> None:
        self.generation += 1
        meeting_port = free_port(self.plan.host)
        self._ranks = []
        if self.plan.serves_at and not self.plan.port:
            self._ports = [free_port(self.plan.serves_at, wanted) for wanted in self._ports]
        for rank in range(self.plan.size):
            process = await asyncio.create_subprocess_exec(
                *with_reaper(self.plan.argv(rank, meeting_port, self._ports[rank]), STOP_GRACE_S),
                env={**(self._env or os.environ), SUPERVISED: "1", **self.plan.environment(rank)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
            )
            self._ranks.append(process)
        pids = [process.pid for process in self._ranks]
        self._log.info(
            "dp_group_starts", ranks=self.plan.size, generation=self.generation, pids=pids
        )

    async def _first_to_end(self, stop: asyncio.Event) -> tuple[int | None, int]:
        """Returns the first rank that ends, and its exit code; (None, 0) after ``stop``."""
        waits = {
            asyncio.create_task(process.wait()): rank for rank, process in enumerate(self._ranks)
        }
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*waits, stopped], return_when=asyncio.FIRST_COMPLETED)
            if stopped in done:
                return None, 0
            first = min(done & waits.keys(), key=lambda task: waits[task])
            return waits[first], first.result()
        finally:
            for task in (*waits, stopped):
                task.cancel()

    async def _end(self) -> None:
        """Sends SIGTERM to all ranks, SIGKILL after the grace period, and waits for them."""
        for process in self._ranks:
            _signal(process, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await asyncio.gather(*(process.wait() for process in self._ranks))
        for process in self._ranks:
            _signal(process, signal.SIGKILL)  # the kernel then ends the rank's server
        await asyncio.gather(*(process.wait() for process in self._ranks))


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
