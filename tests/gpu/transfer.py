"""Weights over every backend into real vLLM, and what becomes of a backend that is hurt.

    python -m tests.gpu.transfer CASE... --json-out FILE

Without a CASE, all. Starts a broker and the engines that the cases need, all at once; then each
case is a trainer in a process of its own, with a log and a time limit, and the next runs whatever
became of it. After each the engines must serve exactly what an engine of the same layout does that
was freshly loaded from the same checkpoint: greedy tokens, and vLLM's own checksums of every
tensor. An adapter must give the tokens that it gives when vLLM loads it from a folder. Prints one
table, and writes one JSON object per case; exits with 1 if any failed.

Two GPUs are needed, three for ``nccl-tp2``, four for ``shm-moe-dp4``; or one for all, with
``--one-gpu`` (:mod:`tests.gpu.one_gpu`): slower, and no measure of anything. With ``--device cpu``
the same runs on vLLM's CPU build, with shm and gloo in place of ipc and nccl, and a tiny model: to
try everything but CUDA.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from lab.bench.fleet import step_graphs
from tests.gpu.serving import TOKENS, EngineSpec, Served, Serving, model_folder, served
from trainer_agent import TrainerAgent

_MOE: Final = ("--enable-expert-parallel",)
_FP8: Final = ("--quantization=fp8",)
_GRAPHS: Final = step_graphs(1)
_LORA: Final = ("--enable-lora", "--max-lora-rank=8", "--max-loras=4", "--max-cpu-loras=4")
ENGINES: Final = (
    EngineSpec("one", "one", (1,)),
    EngineSpec("graphs", "graphs", (1,), args=_GRAPHS),
    EngineSpec("zero", "zero", (0,), args=("--enable-sleep-mode",)),
    EngineSpec("fp8", "fp8", (0,), args=_FP8),
    EngineSpec("lora-zero", "lora-zero", (0,), everywhere=_LORA),
    EngineSpec("lora-one", "lora-one", (1,), everywhere=_LORA),
    EngineSpec("pair-a", "pair", (1,)),
    EngineSpec("pair-b", "pair", (1,)),
    EngineSpec("split", "split", (0, 1)),
    EngineSpec("wide", "wide", (1, 2)),
    EngineSpec("fresh", "fresh", (0,), "b"),
    EngineSpec("fresh-split", "fresh-split", (0, 1), "b"),
    EngineSpec("moe", "moe", (0, 1), args=_MOE, ranks=2),
    EngineSpec("fresh-moe", "fresh-moe", (0, 1), "b", _MOE, ranks=2),
    EngineSpec("moe-4", "moe-4", (0, 1, 2, 3), args=_MOE, ranks=4),
    EngineSpec("fresh-moe-4", "fresh-moe-4", (0, 1, 2, 3), "b", _MOE, ranks=4),
    EngineSpec("fresh-fp8", "fresh-fp8", (0,), "b", _FP8),
)
# Processes on one GPU take turns, at each step that they must make together.
_SHARED_SLOWDOWN: Final = 4
ON_CPU: Final = {"nccl": "gloo", "ipc": "shm"}


@dataclass(frozen=True)
class Case:
    """One run of :mod:`tests.gpu.transfer_trainer`, against the engines of one group."""

    group: str
    backend: str
    what: str = "update"
    packed: bool = True
    device: str = "cuda:0"
    gpus: int = 2
    cuda_only: bool = False
    chunk_bytes: int = 64 << 20
    limit_s: float = 60.0
    # The engine of the same layout that has loaded the other checkpoint from its files.
    fresh: str = "fresh"

    def engines(self) -> list[EngineSpec]:
        return [spec for spec in ENGINES if spec.group == self.group]


CASES: Final = {
    "nccl-packed": Case("one", "nccl"),
    "nccl-unpacked": Case("one", "nccl", packed=False),
    "nccl-one-chunk": Case("one", "nccl", packed=False, chunk_bytes=2 << 30),
    "ipc-packed": Case("zero", "ipc"),
    "ipc-unpacked": Case("zero", "ipc", packed=False),
    "ipc-other-gpu": Case("one", "ipc", "refused", cuda_only=True),
    "nccl-same-gpu": Case("zero", "nccl", "refused", cuda_only=True),
    "ipc-two-engines": Case("pair", "ipc", device="cuda:1"),
    "shm-two-engines": Case("pair", "shm"),
    "ipc-asleep-1": Case("zero", "ipc", "asleep-1", gpus=1, cuda_only=True),
    "ipc-asleep-2": Case("zero", "ipc", "asleep-2", gpus=1, cuda_only=True),
    "ipc-fp8": Case("fp8", "ipc", gpus=1, fresh="fresh-fp8", cuda_only=True),
    "shm-moe-dp2": Case("moe", "shm", fresh="fresh-moe", cuda_only=True),
    "nccl-staged": Case("one", "nccl", "staged"),
    "nccl-unpacked-staged": Case("one", "nccl", "staged", packed=False),
    "nccl-graphs-staged": Case("graphs", "nccl", "staged", cuda_only=True),
    "ipc-staged": Case("zero", "ipc", "staged", gpus=1),
    "ipc-fp8-not-staged": Case(
        "fp8", "ipc", "not-staged", gpus=1, fresh="fresh-fp8", cuda_only=True
    ),
    "shm-two-staged": Case("pair", "shm", "staged"),
    "shm-moe-dp2-staged": Case("moe", "shm", "staged", fresh="fresh-moe", cuda_only=True),
    "shm-moe-dp4-staged": Case(
        "moe-4", "shm", "staged", gpus=4, fresh="fresh-moe-4", cuda_only=True
    ),
    "nccl-tp2-staged": Case("wide", "nccl", "staged", gpus=3, fresh="fresh-split", cuda_only=True),
    "gloo-tp2-staged": Case("split", "gloo", "staged", fresh="fresh-split"),
    "gloo-tp2": Case("split", "gloo", fresh="fresh-split"),
    "nccl-tp2": Case("wide", "nccl", gpus=3, fresh="fresh-split", cuda_only=True),
    # The model itself stays as these engines have loaded it.
    "ipc-adapter": Case(
        "lora-zero", "ipc", "adapter", gpus=1, chunk_bytes=1 << 20, fresh="lora-zero"
    ),
    "nccl-adapter": Case("lora-one", "nccl", "adapter", chunk_bytes=1 << 20, fresh="lora-one"),
    "ipc-remade": Case("zero", "ipc", "remade", limit_s=75),
    "nccl-remade": Case("one", "nccl", "remade", limit_s=90),
    "nccl-killed": Case("one", "nccl", "killed", chunk_bytes=8 << 20, limit_s=75),
}


@dataclass
class Run:
    """What a run has, and has found."""

    options: argparse.Namespace
    serving: Serving
    checkpoints: Path
    logs: Path
    endpoints: dict[str, str]
    # By engine and checkpoint, before anything was sent.
    loaded: dict[tuple[str, str], Served]
    serves: dict[str, str]

    def case(self, name: str) -> dict[str, Any]:
        """Run one; never raises."""
        case, since_s = CASES[name], time.monotonic()
        found: dict[str, Any] = {"case": name, "backend": self.backend(case)}
        try:
            found |= self._run(name, case)
            found["ok"] = "failure" not in found
        except Exception as error:  # noqa: BLE001 - the next one runs all the same
            found |= {"ok": False, "failure": f"{type(error).__name__}: {error}"[:400]}
        return found | {"took_s": round(time.monotonic() - since_s, 1)}

    def served(self, endpoint: str) -> Served:
        return served(endpoint, self.options.served_tokens)

    def backend(self, case: Case) -> str:
        on_cpu = self.options.device == "cpu"
        return ON_CPU.get(case.backend, case.backend) if on_cpu else case.backend

    def _run(self, name: str, case: Case) -> dict[str, Any]:
        specs = case.engines()
        names = [name for spec in specs for name in spec.names]
        missing = [name for name in names if name not in self.endpoints]
        if missing:
            return {"failure": f"did not boot: {', '.join(missing)}"}
        # Another one than they have, so that what was not sent shows.
        target = "a" if self.serves[specs[0].name] == "b" else "b"
        found = self._trainer(name, case, target)
        if "failure" in found and case.what != "remade":
            return found
        if case.what == "killed":
            del self.endpoints[specs[0].name]
            return found
        keeps = case.what in ("refused", "adapter")
        expected = self.serves[specs[0].name] if keeps else target
        for spec in specs:
            self.serves[spec.name] = expected
            fresh = next(each for each in ENGINES if each.name == case.fresh)
            sources = spec.names if expected == spec.checkpoint else fresh.names
            for rank, source in zip(spec.names, sources, strict=True):
                reference = self.loaded.get((source, expected))
                if reference is None:
                    return found | {"failure": f"nothing to compare with: {source} did not boot"}
                differs = self.served(self.endpoints[rank]).difference(reference)
                if differs:
                    return found | {"failure": f"{rank} is not as {source} loaded it: {differs}"}
        return found | {"serves": f"as loaded from files ({expected})"}

    def _trainer(self, name: str, case: Case, target: str) -> dict[str, Any]:
        out = self.logs / f"{name}.json"
        on_cpu = self.options.device == "cpu"
        weights = model_folder(target, moe=case.engines()[0].moe)
        argv = [
            *(sys.executable, "-m", "tests.gpu.transfer_trainer", "--what", case.what),
            *("--broker", self.serving.broker, "--group", case.group),
            *("--engines", str(sum(spec.ranks for spec in case.engines()))),
            *("--backend", self.backend(case)),
            *("--device", "cpu" if on_cpu else self._gpu(case), "--times", str(self.options.times)),
            *("--tokens", str(self.options.tokens)),
            *(["--one-gpu"] if self.options.one_gpu else []),
            *("--weights", str(self.checkpoints / weights / "model.safetensors")),
            *("--chunk-bytes", str(20_000 if on_cpu else case.chunk_bytes), "--out", str(out)),
            *([] if case.packed or on_cpu else ["--unpacked"]),
            *("--sidecar", str(self.serving.sidecars[case.engines()[0].name])),
        ]
        limit_s = case.limit_s * (_SHARED_SLOWDOWN if self.options.one_gpu else 1)
        with _log(self.logs / f"{name}.log") as log:
            done = subprocess.run(
                argv, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            )
        if done.returncode:
            lines = (self.logs / f"{name}.log").read_text(errors="replace").strip().splitlines()
            return {"failure": f"exit {done.returncode}: {(lines or ['no word'])[-1][:300]}"}
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found

    def _gpu(self, case: Case) -> str:
        return "cuda:0" if self.options.one_gpu else case.device


def _log(path: Path) -> IO[bytes]:
    return path.open("wb")


def skipped(name: str, options: argparse.Namespace, gpus: int) -> str:
    """Why a case can't run here; empty, if it can."""
    case = CASES[name]
    if options.device == "cpu":
        return "needs GPUs" if case.cuda_only else ""
    if options.one_gpu and case.what == "refused":
        return "nobody is on another GPU, and NCCL takes all for being on another host"
    return f"needs {case.gpus} GPUs, there are {gpus}" if gpus < case.gpus else ""


def gpu_count() -> int:
    """Without CUDA in this process."""
    code = "import torch; print(torch.cuda.device_count())"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return int(answer.stdout)


async def booted(run: Run, names: set[str]) -> None:
    """Wait for engines, and ask each what it serves with its own checkpoint."""

    async def wait(group: str) -> None:
        specs = [s for s in ENGINES if s.group == group and s.name in names]
        name = f"boot-{group}"
        async with TrainerAgent(run.serving.broker, group=group, name=name) as agent:
            ranks = sum(spec.ranks for spec in specs)
            views = await agent.wait_for_engines(ranks, timeout_s=run.options.boot_s)
        found = {view.name: view.endpoint for view in views}
        for spec in specs:
            for name in spec.names:
                answer = await asyncio.to_thread(run.served, found[name])
                run.loaded[name, spec.checkpoint] = answer
                run.endpoints[name] = found[name]
            run.serves[spec.name] = spec.checkpoint

    groups = {spec.group for spec in ENGINES if spec.name in names}
    outcomes = await asyncio.gather(*map(wait, sorted(groups)), return_exceptions=True)
    for group, outcome in zip(sorted(groups), outcomes, strict=True):
        if isinstance(outcome, BaseException):
            _say(f"{group}: {type(outcome).__name__}: {outcome}")


def needed(cases: list[str]) -> set[str]:
    """The engines that these cases need, with those they are compared to."""
    names = {spec.name for case in cases for spec in CASES[case].engines()}
    return names | {CASES[case].fresh for case in cases}


def table(rows: list[dict[str, Any]]) -> str:
    """One line per case: whether it went well, and what it found."""
    lines = []
    for row in rows:
        state = "skipped" if "skipped" in row else "ok" if row["ok"] else "FAILED"
        told = [f"{k}={v}" for k, v in row.items() if k not in ("case", "ok", "skipped", "failure")]
        why = row.get("failure") or row.get("skipped") or ""
        lines.append(f"{row['case']:20} {state:8} {' '.join(filter(None, [why, *told]))}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--json-out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--logs", type=Path, default=Path("gpu-logs/transfer"))
    parser.add_argument("--boot-s", type=float, default=150.0)
    parser.add_argument("--budget-s", type=float, default=420.0, help="no case begins after it")
    parser.add_argument("--times", type=int, default=20, help="how often transports are remade")
    parser.add_argument("--tokens", type=int, default=600, help="of each request meanwhile")
    parser.add_argument(
        "--served-tokens", type=int, default=TOKENS, help="compared, of each prompt"
    )
    parser.add_argument("--one-gpu", action="store_true", help="all on the first one")
    options = parser.parse_args()
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: choose of {', '.join(CASES)}")
    options.logs.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    gpus = 0 if options.device == "cpu" else sys.maxsize if options.one_gpu else gpu_count()
    rows: list[dict[str, Any]] = []
    # In the order of the table: the one that kills its engine comes last.
    chosen = [name for name in CASES if name in (options.cases or CASES)]
    to_run = [name for name in chosen if not skipped(name, options, gpus)]
    with tempfile.TemporaryDirectory() as folder, options.json_out.open("w") as out:

        def note(row: dict[str, Any]) -> None:
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
            _say(table([row]))

        for name in chosen:
            if name not in to_run:
                note({"case": name, "skipped": skipped(name, options, gpus), "ok": True})
        run = Run(
            options,
            Serving(options.device, Path(folder), options.logs, share_gpu=options.one_gpu),
            Path(folder),
            options.logs,
            {},
            {},
            {},
        )
        try:
            shapes = {"moe" if s.moe else "dense" for s in ENGINES if s.name in needed(to_run)}
            making = [sys.executable, "-m", "tests.gpu.checkpoints", folder, options.device]
            with _log(options.logs / "checkpoints.log") as log:
                subprocess.run([*making, *shapes], check=True, timeout=120, stdout=log, stderr=log)
            run.serving.start_broker()
            for spec in ENGINES:
                if spec.name in needed(to_run):
                    run.serving.start_engine(spec)
            asyncio.run(booted(run, needed(to_run)))
            _say(f"booted after {time.monotonic() - began_s:.0f} s: {', '.join(run.endpoints)}")
            for name in to_run:
                if time.monotonic() - began_s > options.budget_s:
                    note({"case": name, "ok": False, "failure": "not run: the time was over"})
                else:
                    note(run.case(name))
        finally:
            run.serving.stop()
    _say(f"\n{table(rows)}\n{time.monotonic() - began_s:.0f} s in all")
    return 0 if all(row["ok"] for row in rows) else 1


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
