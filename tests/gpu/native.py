"""vLLM's own trainer engines over the bus, on two GPUs: does an engine then serve what was sent?

    python -m tests.gpu.native --json-out native.json

The trainer is this process, on the first GPU. ``nccl``, packed and not, goes to an engine on the
second one; ``ipc``, packed and not, to an engine on the trainer's own; ``sparse_nccl`` to a third
engine, on the second GPU: patches onto a whole set of weights that the agent has sent by itself,
and onto each other; ``nccl_m2n`` to a fourth one, there as well, if NVIDIA's library for it is
here: without it its rounds are skipped, and the table says why. After each update the engine's
greedy tokens and the sums of ``/weight_checker`` must be those of an engine that was booted with
the checkpoint which was sent. A whole set is sent twice by the same trainer engine, since some
describe their tensors in the first update only; the second time, a request is under way, which must
end with all tokens that it asked for. ``nccl`` and ``ipc`` are updated in a pause, and staged: the
report must say so. Prints one table, last; exits with 1 if anything is
wrong or took too long, or nothing was run. Some three minutes, most of which is booting.
``--one-gpu`` puts all on the first one (:mod:`tests.gpu.one_gpu`): its times mean nothing.

Without GPUs the same runs with a pair of engines that is made like vLLM's own
(:mod:`tests.support.pair`), and ``sparse_nccl`` and ``nccl_m2n`` over gloo
(:mod:`tests.support.sparse_pair`, :mod:`tests.support.m2n_pair`): ``--device cpu``. There
``/weight_checker`` verifies nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from tests.gpu import one_gpu
from tests.gpu.checkpoints import dense_config, make
from tests.gpu.register import register, register_one_gpu, register_pair
from tests.gpu.serving import PROMPTS, EngineSpec, Served, Serving, served, tokens_of
from tests.support import pair_plugin
from trainer_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainer_agent._options import How

ROOT: Final = Path(__file__).resolve().parents[2]
LIMIT_S: Final = 300.0
ROUND_S: Final = 45.0
STOP_S: Final = 15.0
RANDOM: Final = 3  # checkpoints: what engines boot with, and two to be sent;
MIXED: Final = 3  # the number of one more: the first that is sent, with some of the second
SHARE: Final = 0.02  # so much of it
SPARSE: Final = "sparse_nccl"
M2N: Final = "nccl_m2n"
LONG: Final = 600  # tokens of the request that is under way
M2N_NCCL: Final = 23005  # the oldest that has what its library needs


@dataclass(frozen=True)
class Round:
    """One update: with which of vLLM's trainer engines, and how its info is filled.
    ``chunk_bytes`` and ``how`` are for ``agent.client``. ``base`` is the checkpoint onto which
    patches go; ``based``: the engine serves it already."""

    name: str
    engine: str
    checkpoint: int
    fields: dict[str, Any]
    chunk_bytes: int | None = None
    base: int | None = None
    based: bool = False
    how: How = "paused"


@dataclass
class Outcome:
    """A line of the table."""

    round: str
    result: str = "not run"
    tokens: str = ""
    sums: str = ""
    changed: bool = False
    verified: str = ""
    how: str = ""
    why_paused: str = ""
    in_flight: str = ""
    chunks: int = 0
    mb: float = 0.0
    sent_ms: float = 0.0
    paused_ms: float = 0.0
    commit_ms: float = 0.0
    staging_mb: float = 0.0
    detail: str = field(default="", repr=False)


IPC_PACKED: Final = {"packed": True, "packed_buffer_size_bytes": 1 << 28}
PATCHES: Final = (
    Round("sparse_nccl, few elements", SPARSE, MIXED, {}, base=1),
    Round("sparse_nccl, most elements", SPARSE, 2, {}, base=MIXED, based=True),
)
SHARDS: Final = (
    Round("nccl_m2n", M2N, 1, {}),
    Round("nccl_m2n, anew", M2N, 2, {}),
)
ON_GPUS: Final = (
    Round("nccl, packed", "nccl", 1, {"packed": True}),
    Round("nccl, unpacked", "nccl", 2, {"packed": False}),
    Round("ipc, unpacked", "ipc", 1, {"packed": False}),
    Round("ipc, packed", "ipc", 2, IPC_PACKED),
    Round("nccl, packed, staged", "nccl", 1, {"packed": True}, how="staged"),
    Round("nccl, unpacked, staged", "nccl", 2, {"packed": False}, how="staged"),
    Round("ipc, unpacked, staged", "ipc", 1, {"packed": False}, how="staged"),
    Round("ipc, packed, staged", "ipc", 2, IPC_PACKED, how="staged"),
    *PATCHES,
    *SHARDS,
)
ON_CPU: Final = (
    Round("pair, many chunks", "pair", 1, {"buffer_bytes": 1 << 15}, 1 << 15),
    Round("pair, one chunk", "pair", 2, {"buffer_bytes": 1 << 30}),
    *PATCHES,
    *SHARDS,
)


# -- checkpoints ----------------------------------------------------------------------


def checkpoints(folder: Path, *, small: bool) -> list[dict[str, torch.Tensor]]:
    """Random weights, several sets of one model, each saved in a folder by its number."""
    made: list[dict[str, torch.Tensor]] = []
    config = dense_config(small=small)
    for number in range(RANDOM):
        model = make(config, folder / str(number), number, "cpu" if small else "cuda:0")
        made.append({name: p.detach().clone() for name, p in model.named_parameters()})
    _mix(model, made[1], made[2])
    model.save_pretrained(folder / str(MIXED))
    return [*made, {name: p.detach() for name, p in model.named_parameters()}]


@torch.no_grad()
def _mix(
    model: torch.nn.Module, first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> None:
    for name, parameter in model.named_parameters():
        other = torch.rand(parameter.shape, device=parameter.device) < SHARE
        parameter.copy_(torch.where(other, second[name], first[name]))


# -- processes ------------------------------------------------------------------------


def environment(folder: Path, *, cpu: bool, share_gpu: bool) -> dict[str, str]:
    """Under which vLLM finds the plugin: the installed one, or this checkout's."""
    path = [str(ROOT)]
    try:
        distribution("wavebus")
    except PackageNotFoundError:
        register(ROOT, folder)
        path.insert(0, str(folder))
    if cpu:
        register_pair(folder)
        path.insert(0, str(folder))
    if share_gpu:
        register_one_gpu(folder)
        path.insert(0, str(folder))
    more = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join([*path, *([more] if more else [])]),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def no_m2n() -> str:
    """Why ``nccl_m2n`` can't run here; empty, if it can."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary  # noqa: PLC0415
    from vllm.distributed.weight_transfer.m2n_common import import_m2n  # noqa: PLC0415

    try:
        library = import_m2n()
    except ImportError as error:
        return f"no nccl.m2n ({error.__cause__})"
    version = int(str(NCCLLibrary().ncclGetRawVersion()))
    if version < M2N_NCCL:
        return f"NCCL {version}, older than {M2N_NCCL}"
    torch.zeros(1, device="cuda:0")  # it works in the context that is current
    try:
        library.Handle.create(library.Config(max_cta=None)).destroy()
    except Exception as error:  # noqa: BLE001 - of any kind: it is told
        return f"nccl.m2n does not start ({error})"
    return ""


# -- rounds ---------------------------------------------------------------------------


def difference(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    """Where and what is other by now, of each tensor."""
    from vllm.distributed.weight_transfer.sparse_nccl_engine import (  # noqa: PLC0415
        SparseWeightPatch,
    )

    for name, weight in new.items():
        [at] = torch.nonzero((weight != old[name]).flatten(), as_tuple=True)
        values = weight.flatten()[at]
        yield SparseWeightPatch(name, at.to(torch.int32), values, tuple(weight.shape))


def update(
    agent: SyncTrainerAgent,
    this: Round,
    weights: list[dict[str, torch.Tensor]],
    outcome: Outcome,
    endpoint: str,
) -> None:
    """What a user writes, with a clock."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

    new = weights[this.checkpoint]
    if this.base is not None and not this.based:
        agent.update_weights(weights[this.base])
    source: Any = None
    if this.engine == M2N:
        from tests.support.m2n_source import Replicated  # noqa: PLC0415 - it needs vLLM

        source = agent.source(Replicated(new))
    elif this.base is None:
        source = agent.source(new)
    trainer = WeightTransferTrainerFactory.trainer_init(
        agent.init_info(this.engine, **this.fields),
        client=agent.client(chunk_bytes=this.chunk_bytes, how=this.how),
        source=source,
    )
    asked = ThreadPoolExecutor(1)
    try:
        begun_s = time.perf_counter()
        if this.base is None:
            trainer.send_weights()
            asking = asked.submit(tokens_of, endpoint, LONG, PROMPTS[0])
            begun_s = time.perf_counter()
            trainer.send_weights()
        else:
            asking = None
            trainer.send_weights(agent.patches(difference(weights[this.base], new)))
        outcome.sent_ms = round((time.perf_counter() - begun_s) * 1000, 1)
        if asking is not None:
            outcome.in_flight = f"{len(asking.result())} of {LONG}"
    finally:
        asked.shutdown(wait=False)
        trainer.shutdown()
    report = agent.last_update
    assert report is not None
    outcome.verified, outcome.chunks = report.verified, report.chunks
    outcome.mb, outcome.paused_ms = round(report.size_bytes / 1e6, 1), round(report.paused_ms, 1)
    outcome.how, outcome.why_paused = report.how, report.why_paused
    outcome.commit_ms = round(report.commit_ms, 1)
    outcome.staging_mb = round(report.staging_bytes / 1e6, 1)


def judge(outcome: Outcome, how: How, before: Served, after: Served, fresh: Served) -> None:
    """Does it serve what the fresh one does, and not what it did before? Was it staged or not, as
    was asked for, and did the request that was under way get all of its tokens?"""
    equal = sum(a == b for a, b in zip(after.tokens, fresh.tokens, strict=True))
    same = sum(after.checksums.get(name) == value for name, value in fresh.checksums.items())
    outcome.tokens = f"{equal} of {len(fresh.tokens)}"
    outcome.sums = f"{same} of {len(fresh.checksums)}"
    outcome.changed = after.tokens != before.tokens
    right = after == fresh and outcome.changed and outcome.verified == "unsupported"
    right = right and outcome.how == how and outcome.in_flight in ("", f"{LONG} of {LONG}")
    outcome.result = "equal" if right else "DIFFERS"


class Bench:
    """Everything that runs, and what became of the rounds."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.cpu = options.device == "cpu"
        rounds = ON_CPU if self.cpu else ON_GPUS
        self.rounds = [r for r in rounds if options.only in ("", r.engine)]
        self.skipped = ""
        if not self.cpu and any(r.engine == M2N for r in self.rounds):
            self.skipped = no_m2n()
        self.outcomes = [Outcome(r.name) for r in self.rounds]
        self.figures: dict[str, Any] = {}
        self._folder = folder
        options.logs.mkdir(parents=True, exist_ok=True)
        variables = environment(folder, cpu=self.cpu, share_gpu=options.one_gpu)
        if self.cpu:  # all keep weights as they are loaded, or their sums could not be compared
            variables[pair_plugin.SPARSE] = variables[pair_plugin.M2N] = "1"
        self.serving = Serving(
            options.device, folder, options.logs, variables, share_gpu=options.one_gpu
        )
        self._agents: dict[str, SyncTrainerAgent] = {}

    def engines(self) -> list[EngineSpec]:
        """Those that are updated, and one fresh one for each checkpoint that is sent; each alone
        in the group of its name."""
        place = {"nccl": 1, "ipc": 0, "pair": 0, SPARSE: 1, M2N: 1}
        rounds = [r for r in self.rounds if r.engine != M2N or not self.skipped]
        names = dict.fromkeys(r.engine for r in rounds)
        updated = [EngineSpec(n, n, (place[n],), "0", backend=n) for n in names]
        sent = sorted({r.checkpoint for r in rounds})
        last = 0 if self.cpu else torch.cuda.device_count() - 1
        fresh = [EngineSpec(f"fresh-{n}", f"fresh-{n}", (min(n % 2, last),), str(n)) for n in sent]
        return [*updated, *fresh]

    def run(self) -> None:
        """All rounds; an outcome says what went wrong, and the others are tried."""
        began_s = time.monotonic()
        weights = checkpoints(self._folder, small=self.cpu)
        self.figures["made_s"] = round(time.monotonic() - began_s, 1)
        urls = self._boot()
        self.figures["ready_s"] = round(time.monotonic() - began_s, 1)
        names = {r.checkpoint: f"fresh-{r.checkpoint}" for r in self.rounds}
        fresh = {number: served(urls[name]) for number, name in names.items() if name in urls}
        for this, outcome in zip(self.rounds, self.outcomes, strict=True):
            if this.engine == M2N and self.skipped:
                outcome.result, outcome.detail = f"skipped: {self.skipped[:60]}", self.skipped
                continue
            before = served(urls[this.engine])
            self._one(this, weights, outcome, urls[this.engine])
            if outcome.result == "sent":
                judge(outcome, this.how, before, served(urls[this.engine]), fresh[this.checkpoint])

    def _boot(self) -> dict[str, str]:
        self.serving.start_broker()
        for spec in self.engines():
            self.serving.start_engine(spec)
        urls: dict[str, str] = {}
        for spec in self.engines():
            agent = SyncTrainerAgent(
                self.serving.broker,
                group=spec.group,
                name=f"trainer-{spec.group}",
                backend="nccl" if spec.backend == SPARSE and not self.cpu else "shm",
                timeout_s=ROUND_S,
            )
            agent.connect()
            self._agents[spec.group] = agent
            [view] = agent.wait_for_engines(1, timeout_s=self.options.boot_s)
            urls[spec.group] = view.endpoint
            self.figures["software"] = view.software
        return urls

    def _one(
        self, this: Round, weights: list[dict[str, torch.Tensor]], outcome: Outcome, endpoint: str
    ) -> None:
        """In a thread: a collective that hangs is left behind, and this process with it."""
        pool = ThreadPoolExecutor(1)
        try:
            if not self.cpu:
                torch.cuda.synchronize()
            agent = self._agents[this.engine]
            pool.submit(update, agent, this, weights, outcome, endpoint).result(ROUND_S)
            outcome.result = "sent"
        except TimeoutError:
            outcome.result, outcome.detail = "HUNG", f"not sent within {ROUND_S:g} s"
        except Exception as error:  # noqa: BLE001 - it is told, and the next round tried
            outcome.result = "FAILED"
            outcome.detail = f"{type(error).__name__}: {error}"[:500]
            traceback.print_exc()
        finally:
            pool.shutdown(wait=False)


def print_table(bench: Bench) -> None:
    """The last that is printed."""
    heads = ("result", "tokens", "sums", "changed", "verified", "how", "in_flight", "chunks", "mb")
    names = ("round", *heads, "sent_ms", "paused_ms", "commit_ms", "staging_mb")
    rows = [[str(getattr(outcome, name)) for name in names] for outcome in bench.outcomes]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json-out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", choices=["", "nccl", "ipc", "pair", SPARSE, M2N], default="")
    parser.add_argument("--boot-s", type=float, default=150.0)
    parser.add_argument("--logs", type=Path, default=Path("gpu-logs/native"))
    parser.add_argument("--one-gpu", action="store_true", help="all on the first one")
    options = parser.parse_args()
    if options.device == "cuda":
        need = 1 if options.only == "ipc" or options.one_gpu else 2
        if options.one_gpu:
            one_gpu.apart()
        if torch.cuda.device_count() < need:
            parser.error(f"{need} GPUs are needed, and {torch.cuda.device_count()} are here")
    else:
        pair_plugin.register()
        pair_plugin.register_on_cpu(SPARSE)
        pair_plugin.register_on_cpu(M2N)
    options.logs = options.logs.resolve()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(options, Path(name))
        failure = ""
        pool = ThreadPoolExecutor(1)
        try:
            pool.submit(bench.run).result(LIMIT_S)
        except TimeoutError:
            ended = ", ".join(bench.serving.ended())
            failure = f"not done within {LIMIT_S:g} s; ended: {ended or 'nobody'}"
        except Exception as error:  # noqa: BLE001 - what there is, is printed all the same
            failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        if failure:
            print(bench.serving.tails())
        bench.serving.stop()
    found = {
        **bench.figures,
        "torch": torch.__version__,
        "gpus": torch.cuda.device_count(),
        "failure": failure,
        "rounds": [asdict(outcome) for outcome in bench.outcomes],
    }
    options.json_out.write_text(json.dumps(found, indent=1) + "\n")
    for outcome in bench.outcomes:
        if outcome.detail:
            print(f"{outcome.round}: {outcome.detail}")
    if failure:
        print(f"failed: {failure}")
    print_table(bench)
    results = [r.result for r in bench.outcomes if not r.result.startswith("skipped: ")]
    right = not failure and bool(results) and all(result == "equal" for result in results)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if right else 1)  # threads may hang in a collective


if __name__ == "__main__":
    main()
