"""The options of each command of ``wavebus bench``.

The module loads neither torch nor vLLM, so that help texts are quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from bus._cli.options import NamedPath, check_parent, checked, option
from bus.errors import UsageError
from lab.bench.process import LoopChoice  # noqa: TC001 - an option's type, read by options_of

Device: TypeAlias = Literal["cuda", "cpu"]
EngineKind: TypeAlias = Literal["embedded", "vllm"]
Model: TypeAlias = Literal["8b", "tiny", "moe", "tiny-moe"]

MIXTURES: Final[tuple[Model, ...]] = ("moe", "tiny-moe")
_FOLDER: Final = NamedPath(file_okay=False)
_SHAPES: Final = "vllm: the shape of Qwen3-8B, or 26 million parameters"


@dataclass(frozen=True, kw_only=True)
class ControlPlan:
    """Options of ``bench control``."""

    engines: int = option(64, "Engines in the group.", min=1)
    rounds: int = option(100, "Pause-and-resume rounds of each kind.", min=1)
    loop: LoopChoice = option(
        "auto", "The event loop of all processes; auto is uvloop where it is installed."
    )
    plain: bool = option(
        False, "Also measure a bus without CURVE keys and journal, in turn with the others."
    )
    scale: bool = option(False, "Also measure the bus with 8, 64, 256 and 1,024 engines.")
    idle: bool = option(
        False,
        "Also measure the memory and the heartbeat CPU of a broker with 1,024 idle engines (10 s).",
    )


@dataclass(frozen=True, kw_only=True)
class PausePlan:
    """Options of ``bench pause``."""

    engine: EngineKind = option("embedded", "vllm: real servers, whose pauses are compared, too.")
    dp_size: int = option(2, "Ranks of each DP group.", min=2, max=8)
    rounds: int = option(40, "Rounds of each kind.", min=1)


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """Options of ``bench rollout``."""

    rounds: int = option(3, "Rounds of each way.", min=1)
    kills: int = option(6, "Engines that get SIGKILL while the client streams from them.", min=0)
    live: int = option(1024, "Streams at once when memory is measured.", min=1, max=4096)
    vllm: bool = option(
        False, "Also measure prefix cache hits of sessions, on two real vLLM servers on the CPU."
    )


@dataclass(frozen=True, kw_only=True)
class EnginesPlan:
    """Options of ``bench transfer`` and ``bench gap``, which update engines.

    Fields without a help text are options of :class:`GapPlan` alone.
    """

    engine: EngineKind = option(
        "embedded", "The engines that load the weights; vllm: real servers, which decode meanwhile."
    )
    backend: str = option(
        "",
        "The transfer backend. Default: shm; for vllm without --dp-size, nccl, or gloo on a CPU.",
    )
    rounds: int = option(5, "Rounds of each way.", min=1)
    megabytes: int = option(64, "embedded: size of the model.", min=1)
    requests: int = option(32, "Requests that decode during the update.", min=1, max=256)
    tokens: int = option(
        300, "Tokens of each request, which must outlast the update.", min=100, max=900
    )
    device: Device = option("cuda", "vllm: cuda needs two GPUs, or one for each rank.")
    model_size: Model | None = option(
        None,
        f"{_SHAPES}, or 7 billion or 21 million as a mixture of experts; bf16 on GPUs. "
        "Default: 8b; with --dp-size moe.",
        *("--model-size", "--model"),
    )
    native_engine: str | None = option(
        None,
        "vllm: the trainer and worker engine for vLLM's own flow: vLLM's, or a plugin's. "
        "Default: nccl; with --dp-size ipc.",
    )
    chunk_megabytes: int | None = option(
        None,
        "The largest size of a chunk. Default: 8; with vllm 2048, or 512 over shm.",
        *("--chunk-megabytes", "--chunk-mb"),
        min=1,
    )
    packed: bool = option(
        True, "vllm: pack the chunks of wavebus's backend into buffers.", "--packed/--unpacked"
    )
    logs: Path | None = option(None, "A folder for the logs of all processes.", type=_FOLDER)
    clear_cache: bool = True
    dp_size: int = 1
    native_packed: bool | None = None
    cuda_graphs: bool = False
    gateway: bool = False

    @property
    def over(self) -> str:
        """The transfer backend of the bus's updates: the requested one, or the engines' default."""
        if self.engine == "embedded" or self.dp_size > 1:
            return self.backend or ("gloo" if self.gateway else "shm")
        return self.backend or ("nccl" if self.device == "cuda" else "gloo")

    @property
    def model(self) -> Model:
        """The name of vLLM's model: the requested one, or the default."""
        return self.model_size or ("moe" if self.dp_size > 1 else "8b")

    @property
    def native(self) -> str:
        """The trainer and worker engine of the way ``native``, by vLLM's name."""
        return self.native_engine or ("ipc" if self.dp_size > 1 else "nccl")

    @property
    def chunk_bytes(self) -> int:
        """The size limit of a chunk, in bytes; smaller over shm, to save CPU memory."""
        usual = 512 if self.over == "shm" else 2048
        chosen = self.chunk_megabytes or (8 if self.engine == "embedded" else usual)
        return chosen * 1_000_000

    def settings(self) -> dict[str, Any]:
        """Returns the options as fields of the JSON output."""
        names = ["engine", "rounds", "requests", "tokens", "clear_cache", "dp_size", "chunk_bytes"]
        found = {"backend": self.over}
        if self.engine == "vllm":
            names += ["device", "model", "packed", "native_packed", "cuda_graphs"]
            found["native_engine"] = self.native
        return {**found, **{name: getattr(self, name) for name in names}}

    @property
    def mixture(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self.model in MIXTURES

    @property
    def one_gpu(self) -> bool:
        """Whether trainer and servers share a GPU: ``native`` and the bus send by CUDA IPC."""
        return self.dp_size == 1 and self.native == self.over == "ipc"

    @property
    def gpus(self) -> list[int]:
        """The servers' GPUs, by rank. The trainer is on the first GPU."""
        if self.dp_size > 1:
            return list(range(self.dp_size))
        return [0 if self.one_gpu else 1]

    def check(self) -> None:
        """Checks that this host can run vLLM's servers with these options.

        Raises:
            UsageError: something is missing. The text names it.
        """
        cuda = self.device == "cuda"
        if self.dp_size > 1:
            self._check_ranks(cuda=cuda)
        if not cuda and self.cuda_graphs:
            raise UsageError("--cuda-graphs: a CPU has none")
        if not cuda and self.native in ("nccl", "ipc"):
            raise UsageError(
                "vLLM's own trainer engines need CUDA: on a CPU name one of a plugin of yours "
                "with --native-engine"
            )
        import torch  # noqa: PLC0415 - a help text needs none

        need, count = max(0, *self.gpus) + 1, torch.cuda.device_count()
        if cuda and count < need:
            needed = "a GPU is" if need == 1 else f"{need} GPUs are"
            fewer = "on one there are --backend ipc --native-engine ipc"
            fewer = fewer if count and self.dp_size == 1 else "see --device cpu"
            raise UsageError(f"{needed} needed, and there are {count}: {fewer}")

    def _check_ranks(self, *, cuda: bool) -> None:
        if not self.mixture:
            raise UsageError(
                f"--dp-size {self.dp_size}: ranks in lockstep are those of a mixture of experts, "
                f"and {self.model} is none: choose --model {' or '.join(MIXTURES)}"
            )
        if self.requests < self.dp_size:
            raise UsageError(
                f"--requests {self.requests}: each of the {self.dp_size} ranks needs one at least"
            )
        if cuda and self.over in ("nccl", "ipc"):
            raise UsageError(
                f"--backend {self.over}: with --dp-size each rank is on another GPU, and the "
                "trainer beside the first one: take shm or gloo"
            )
        if cuda and self.native == "nccl":
            raise UsageError(
                "--native-engine nccl: it needs a GPU for the trainer alone, and with --dp-size "
                "there is a rank on each: take ipc"
            )


@dataclass(frozen=True, kw_only=True)
class TransferBenchPlan(EnginesPlan):
    """Options of ``bench transfer``."""

    megabytes: int = option(400, "embedded: size of the model with few large tensors.", min=1)
    requests: int = option(32, "vllm: requests that decode during the update.", min=1, max=256)
    tokens: int = option(200, "vllm: tokens of each request.", min=100, max=900)
    model_size: Literal["8b", "tiny"] = option("8b", f"{_SHAPES}; bf16 on GPUs.")
    native_engine: str = option(
        "nccl", "vllm: the trainer and worker engine to compare with: vLLM's, or a plugin's."
    )
    chunk_megabytes: int = option(
        2048, "vllm: the largest size of a chunk of wavebus's backend.", min=1
    )
    tensors: int = option(
        40_000, "embedded: tensors of the model with many small ones.", min=20, max=100_000
    )
    gateway: bool = option(
        False,
        "Measure instead the duration of a staged update through `wavebus gateway`, compared with "
        "`agent.update_weights`.",
    )


@dataclass(frozen=True, kw_only=True)
class GapPlan(EnginesPlan):
    """Options of ``bench gap``."""

    clear_cache: bool = option(
        False,
        "After each update, drop the KV cache, so that requests compute it again.",
        "--clear-cache/--keep-cache",
    )
    dp_size: int = option(
        1,
        "Number of ranks in lockstep, which share the experts; vllm: each needs a GPU.",
        min=1,
        max=8,
    )
    native_packed: bool | None = option(
        None,
        "vllm: pack the tensors of --native-engine into buffers. Default: vLLM's.",
        "--native-packed/--native-unpacked",
    )
    cuda_graphs: bool = option(
        False,
        "vllm, on GPUs: run each step as CUDA graphs, or eagerly.",
        "--cuda-graphs/--eager",
    )
    picture: Path = option(
        Path("gap.png"),
        "File for the picture, which shows tokens over the time of an update.",
        type=NamedPath(dir_okay=False),
        callback=checked(check_parent),
    )
