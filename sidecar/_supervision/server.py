"""Starts a vLLM API server that never outlives its sidecar.

Options that the bus needs, such as those for vLLM's RL routes, are added to the user's command if
they are missing. The server runs under :mod:`sidecar._supervision.reaper`, in a process group of
its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import aiohttp
import anyio
import anyio.to_thread

import bus.log
from bus._keys import API_KEY_VARIABLE, INSECURE_VARIABLE
from bus._locked_paths import LockedFolder
from bus._net import WILDCARDS, http_url, is_loopback_host
from bus._vllm.payloads import UNSUPPORTED
from bus.errors import EngineDead, EngineError, UsageError
from sidecar._supervision.launch import free_port, long_options, with_reaper
from sidecar._vllm.plugin import environment
from sidecar._vllm.plugin.compat import BACKEND
from sidecar._vllm.plugin.front_end import DataRoutesOnly

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from sidecar._vllm.plugin.environment import BusAddress

__all__ = ["ServerCommand", "SupervisedServer", "complete_command"]

DEV_MODE: Final = "VLLM_SERVER_DEV_MODE"
LORA_UPDATING: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
RUST_FRONT_END: Final = "VLLM_USE_RUST_FRONTEND"
LAST_LINES: Final = 30
_PAGES_PREFIX: Final = "wavebus-server-"
HEALTH_PERIOD_S: Final = 0.25
HEALTH_ANSWER_S: Final = 10.0
REAPER_EXTRA_S: Final = 10.0  # more than the reaper waits for killed processes (its GONE_S)
OK: Final = 200
_HEALTH_LINE: Final = '"GET /health HTTP/1.1" 200'


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """The command that starts a vLLM server, with every option that the bus needs.

    Attributes:
        argv: the command line.
        env: the server's environment.
        base_url: the URL by which this host reaches the server.
        endpoint: the URL for clients, with the host on which the server listens.
        api_key: the key that the server's data routes require; empty: none.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    base_url: str
    endpoint: str
    api_key: str


def complete_command(argv: Sequence[str], env: Mapping[str, str]) -> ServerCommand:
    """Adds the options that the bus needs to the command of a vLLM API server.

    These options are added where they are missing: ``--host 127.0.0.1``, a free ``--port``, the
    weight transfer backend, and ``--enable-scale-out`` (the token-in, token-out route). A host
    other than loopback also gets the middleware that keeps the RL routes to this host.

    The environment gets ``VLLM_SERVER_DEV_MODE=1`` and, with ``--enable-lora``,
    ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` unless that variable is set.

    Options in a ``--config`` file are not read. vLLM prefers the added ones, which come later.

    Args:
        argv: the user's command.
        env: the environment that the server is to get.

    Raises:
        UsageError: an option contradicts what the bus needs. The text names the option.
    """
    if not argv:
        raise UsageError(
            "no command: give one, such as python -m "
            "vllm.entrypoints.openai.api_server --model MODEL"
        )
    options = long_options(argv)
    added: list[str] = []
    if "uds" in options:
        raise UsageError("--uds: the sidecar reaches its server only by TCP; leave --uds out")
    host = options.get("host")
    if host is None:
        host = "127.0.0.1"
        added += ["--host", host]
    api_key = options.get("api-key") or env.get(API_KEY_VARIABLE, "")
    if not is_loopback_host(host):
        added += _for_other_hosts(host, api_key, env)
    port = options.get("port")
    if port is None:
        port = str(free_port(host))
        added += ["--port", port]
    elif not port.isdigit():
        raise UsageError(f"--port {port}: must be a number")
    added += _transfer_options(options)
    if not {"enable-scale-out", "no-enable-scale-out"} & set(options):
        added.append("--enable-scale-out")
    if env.get(DEV_MODE, "1") != "1":
        raise UsageError(f"{DEV_MODE}={env[DEV_MODE]}: the RL routes need {DEV_MODE}=1")
    switches = {DEV_MODE: "1"}
    if "enable-lora" in options:
        switches[LORA_UPDATING] = env.get(LORA_UPDATING, "1")
    base_url = http_url(WILDCARDS.get(host, host), port)
    return ServerCommand(
        (*argv, *added), {**env, **switches}, base_url, http_url(host, port), api_key
    )


def _for_other_hosts(host: str, api_key: str, env: Mapping[str, str]) -> list[str]:
    """Returns further options for a server that clients on other hosts can reach.

    Raises:
        UsageError: the server's routes would not be protected.
    """
    if env.get(RUST_FRONT_END, "0") != "0":
        raise UsageError(
            f"--host {host}: with {RUST_FRONT_END} other hosts could use the RL routes: unset it, "
            "or listen on 127.0.0.1"
        )
    if not api_key and env.get(INSECURE_VARIABLE) != "1":
        raise UsageError(
            f"--host {host}: any client that reaches the server could generate there: set "
            f"{API_KEY_VARIABLE} for the server and its clients or, on a network that only you can "
            f"reach, {INSECURE_VARIABLE}=1"
        )
    return ["--middleware", f"{DataRoutesOnly.__module__}.{DataRoutesOnly.__name__}"]


class SupervisedServer:
    """Runs one vLLM server as a child process, which never outlives this process.

    The server's output goes to this process's stderr. Lines about the sidecar's health checks are
    left out, unless the log's level is debug.

    Args:
        argv: the command, such as ``python -m vllm.entrypoints.openai.api_server --model …``, which
            :func:`complete_command` completes.
        env: the server's environment. Default: this process's.
        ready_timeout_s: how long :meth:`start` waits until the server is healthy, in seconds.
        grace_s: how long the server may take to end after SIGTERM before it is killed, in seconds.
        coordinate: broker, group and DP group, if the DP coordinator asks the broker; else None.
            Passed to each rank's server by its environment; rank 0's starts the DP coordinator.

    Raises:
        UsageError: as :func:`complete_command`.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        ready_timeout_s: float = 600.0,
        grace_s: float = 20.0,
        coordinate: BusAddress | None = None,
    ) -> None:
        variables = {} if coordinate is None else coordinate.variables()
        self.prepared = complete_command(
            argv, {**(os.environ if env is None else env), **variables}
        )
        self.base_url = self.prepared.base_url
        self._ready_timeout_s = ready_timeout_s
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._pages: LockedFolder | None = None  # has the status pages of the server's cores

    @property
    def pid(self) -> int:
        """The pid of the reaper, which is the server's parent; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> str:
        """Starts the server, and returns its URL when it is healthy. Can be called once.

        Raises:
            EngineDead: the server ended before it was healthy. The text has its exit code and last
                lines.
            EngineError: the server was not healthy in time, and was stopped.
        """
        if self._process is not None:
            raise EngineError("start() can be called only once")
        self._pages = pages = LockedFolder(_PAGES_PREFIX, environment.memory_folder())
        # A thread's end counts as the parent's death: start only from the main thread's loop.
        self._process = process = subprocess.Popen(  # noqa: S603, ASYNC220 - the user's command; forking is quick
            with_reaper(self.prepared.argv, self._grace_s),
            env={**self.prepared.env, environment.CORE_PAGES: str(pages.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()
        try:
            await self._wait_until_healthy(process)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.stop()
            raise
        return self.base_url

    async def wait_for_exit(self) -> str:
        """Waits until the server has ended, and returns its exit code in words."""
        process = self._process
        if process is None:
            raise EngineError("the server is not started: call start() first")
        await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        return self._reason(process)

    def send_signal(self, signum: int) -> None:
        """Sends a signal to the reaper; see :mod:`sidecar._supervision.reaper`."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signum)

    async def stop(self, *, at_once: bool = False) -> None:
        """Ends the server and its process group: SIGTERM, then SIGKILL after the grace period.

        Args:
            at_once: whether to skip SIGTERM and the grace period. A server without its engine core
                has no request to finish, and its workers may hang in a collective.
        """
        process = self._process
        if process is None:
            return
        self.send_signal(signal.SIGQUIT if at_once else signal.SIGTERM)
        with anyio.move_on_after(self._grace_s + REAPER_EXTRA_S, shield=True):
            await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        if process.poll() is None:
            process.kill()  # the kernel then kills the server
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(process.wait)
        if self._reader is not None:
            self._reader.join(REAPER_EXTRA_S)
        if self._pages is not None:
            self._pages.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # -- inside ------------------------------------------------------------------------

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        """Reads the server's output in a thread, so a busy event loop never blocks it."""
        assert process.stdout is not None
        stderr = bus.log.Stderr()
        with process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip("\r\n")
                if _HEALTH_LINE in line and not bus.log.is_debug():
                    continue
                self._last.append(line)
                stderr.write(f"vllm| {line}\n")

    async def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        timeout = aiohttp.ClientTimeout(total=HEALTH_ANSWER_S)
        with anyio.move_on_after(self._ready_timeout_s):
            async with aiohttp.ClientSession(timeout=timeout) as session:
                while process.poll() is None:
                    try:
                        async with session.get(f"{self.base_url}/health") as response:
                            if response.status == OK:
                                return
                    except (aiohttp.ClientError, TimeoutError):
                        pass  # not listening yet
                    await anyio.sleep(HEALTH_PERIOD_S)
            raise EngineDead(f"{self._reason(process)}{self._tail()}")
        raise EngineError(
            f"the server was not healthy within {self._ready_timeout_s:g} s{self._tail()}"
        )

    def _reason(self, process: subprocess.Popen[bytes]) -> str:
        return f"the server (reaper {process.pid}) ended with exit code {process.returncode}"

    def _tail(self) -> str:
        if self._reader is not None and self._process is not None and self._process.returncode:
            self._reader.join(REAPER_EXTRA_S)
        return "; its last lines:\n" + "\n".join(self._last) if self._last else ""


def _transfer_options(options: Mapping[str, str]) -> list[str]:
    """Returns the option that chooses wavebus's transfer backend; empty if a backend is chosen."""
    name = "weight-transfer-config"
    chosen = options.get(f"{name}.backend")
    if name in options:
        try:
            chosen = json.loads(options[name]).get("backend")
        except (ValueError, AttributeError) as error:
            raise UsageError(f"--{name} {options[name]}: not a JSON object") from error
    if chosen is None:
        return [f"--{name}", json.dumps({"backend": BACKEND})]
    if chosen in UNSUPPORTED:
        raise UsageError(
            f"--{name} chooses vLLM's {chosen!r}, which the bus can't drive: {UNSUPPORTED[chosen]}"
        )
    return []
