"""Engines for the GPU scripts: served vLLM under a sidecar, each with a log of its own; and what
one of them serves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bus.rejection import is_rejected
from lab.demo.processes import VLLM_ON_CPU
from tests.gpu import one_gpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PROMPTS: Final = ([5, 17, 99, 3, 42, 7], [11, 200, 13], [250, 1, 1, 2, 3, 5, 8, 13, 21])
TOKENS: Final = 48
_ANSWER_S: Final = 60.0
_AGAIN_S: Final = 0.05


@dataclass(frozen=True)
class EngineSpec:
    """One engine: its name and group on the bus, its GPUs, the checkpoint it boots with, what vLLM
    is told besides (on GPUs), and with which worker engine it is booted."""

    name: str
    group: str
    gpus: tuple[int, ...]
    checkpoint: str = "a"
    args: tuple[str, ...] = ()
    ranks: int = 1  # of a DP group of experts, one per GPU; each is an engine on the bus
    backend: str = "wavebus"
    everywhere: tuple[str, ...] = ()  # what vLLM is told besides, also on a CPU

    @property
    def names(self) -> tuple[str, ...]:
        """Of its engines on the bus."""
        return tuple(f"{self.name}-{n}" for n in range(self.ranks)) if self.moe else (self.name,)

    @property
    def moe(self) -> bool:
        return self.ranks > 1

    @property
    def model(self) -> str:
        """The checkpoint's folder."""
        return model_folder(self.checkpoint, moe=self.moe)


def model_folder(checkpoint: str, *, moe: bool) -> str:
    return f"moe-{checkpoint}" if moe else checkpoint


class Serving:
    """What was started here: a broker and engines. Everything is stopped at the end.

    Args:
        environment: variables for all of them, beside those of this process.
        share_gpu: all engines are on the first, whatever GPUs they ask for.
    """

    def __init__(
        self,
        device: str,
        checkpoints: Path,
        logs: Path,
        environment: Mapping[str, str] | None = None,
        *,
        share_gpu: bool = False,
    ) -> None:
        self._device = device
        self._share_gpu = share_gpu
        # A script that is told to end still gets to its call of `stop`.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
        self._checkpoints = checkpoints
        self._logs = logs
        self._environment = {**os.environ, **(environment or {})}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self.sidecars: dict[str, int] = {}
        self.broker = ""

    def start_broker(self) -> None:
        """Its address is known when this returns."""
        arguments = ["broker", "--listen", "tcp://127.0.0.1:*", "--log-format", "json"]
        process = self._start("broker", [*wavebus(), *arguments], {})
        assert process.stdout is not None
        self.broker = process.stdout.readline().strip()

    def start_engine(self, spec: EngineSpec) -> None:
        """It is up when it joins its group."""
        server = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self._checkpoints / spec.model), "--served-model-name", "m"),
            *("--skip-tokenizer-init", "--enforce-eager", "--max-num-seqs=8"),
            *("--max-model-len=1024", f"--tensor-parallel-size={len(spec.gpus) // spec.ranks}"),
            *("--weight-transfer-config", json.dumps({"backend": spec.backend})),
        ]
        environment = dict(VLLM_ON_CPU)
        if self._device == "cpu":
            server.append("--dtype=float32")
        else:
            # Several boot at once on a GPU: none may measure what is free.
            server += ["--gpu-memory-utilization=0.1", f"--kv-cache-memory-bytes={1 << 30}"]
            server += spec.args
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(_gpu, spec.gpus))}
            if self._share_gpu:
                server += one_gpu.SERVER
                # Each rank is given its share of these, and all workers of a rank have that one.
                environment = {"CUDA_VISIBLE_DEVICES": ",".join([_gpu(0)] * spec.ranks)}
        server += spec.everywhere
        who = ["--name", spec.name]
        if spec.moe:
            who = ["--dp-group", spec.name, "--dp-size", str(spec.ranks)]
        sidecar = [
            *(*wavebus(), "sidecar", "--broker", self.broker, "--group", spec.group),
            *(*who, "--log-format", "json", "--", *server),
        ]
        self.sidecars[spec.name] = self._start(spec.name, sidecar, environment).pid

    def stop(self) -> None:
        """Engines first; who doesn't end is killed."""
        started = list(reversed(self._processes.values()))
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            for pid in (*descendants(process.pid), process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def ended(self) -> list[str]:
        """Those that have ended, which none should."""
        return [name for name, process in self._processes.items() if process.poll() is not None]

    def tails(self, lines: int = 12) -> str:
        """The last lines of every log."""
        told = []
        for name in self._processes:
            log = (self._logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            told += [f"-- {name}", *log.splitlines()[-lines:]]
        return "\n".join(told)

    def _start(
        self, name: str, argv: Sequence[str], environment: dict[str, str]
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE if name == "broker" else subprocess.DEVNULL,
            stderr=(self._logs / f"{name}.log").open("wb"),
            text=True,
            env={**self._environment, **environment},
        )
        self._processes[name] = process
        return process


def _gpu(index: int) -> str:
    """What shows a process one of the GPUs that this one sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return seen.split(",")[index] if seen else str(index)


def wavebus() -> list[str]:
    """The command, of the checkout that this is."""
    return [sys.executable, "-m", "bus._cli.main"]


def descendants(pid: int) -> list[int]:
    """Processes that this one has started, and theirs."""
    found: list[int] = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def command(pid: int) -> str:
    """What a process calls itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ")
    except OSError:
        return ""


def _children(pid: int) -> Iterable[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, path.read_text(encoding="ascii").split())


@dataclass(frozen=True)
class Served:
    """What an engine answers with: greedy tokens, and vLLM's own checksums of its weights."""

    tokens: tuple[tuple[int, ...], ...]
    checksums: dict[str, str]

    def difference(self, other: Served) -> str:
        """What is another one; empty, if nothing is."""
        if self.checksums.keys() != other.checksums.keys():
            return "checksums of other tensors"
        differing = [k for k, v in self.checksums.items() if other.checksums[k] != v]
        if differing:
            return f"checksums differ: {len(differing)}, first {differing[0]}"
        return "tokens differ" if self.tokens != other.tokens else ""


def tokens_of(
    endpoint: str, count: int, prompt: Sequence[int] = PROMPTS[0], *, adapter: str = ""
) -> tuple[int, ...]:
    """So many greedy tokens after ``prompt``, of the model or of an adapter."""
    sampling = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True}
    body = {
        "token_ids": prompt,
        "sampling_params": sampling,
        **({"model": adapter} if adapter else {}),
    }
    answer = _post(f"{endpoint}/inference/v1/generate", body)
    return tuple(answer["choices"][0]["token_ids"])


def load_adapter(endpoint: str, name: str, folder: Path) -> None:
    """Has vLLM load an adapter from a folder by itself."""
    body = json.dumps({"lora_name": name, "lora_path": str(folder)}).encode()
    request = urllib.request.Request(
        f"{endpoint}/v1/load_lora_adapter", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_S):
        pass


def served(endpoint: str, count: int = TOKENS) -> Served:
    """Ask an engine for so many tokens after each of some prompts, and for its checksums."""
    tokens = [tokens_of(endpoint, count, prompt) for prompt in PROMPTS]
    checked = _post(f"{endpoint}/weight_checker", {"action": "checksum"})
    return Served(tuple(tokens), dict(checked["checksums"]))


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if not is_rejected(json.load(error)):
                raise
        time.sleep(_AGAIN_S)
