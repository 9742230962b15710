"""What a dead or stopped process costs the others, in staged updates over NCCL.

    python -m tests.gpu.kills --json-out kills.jsonl
    python -m tests.gpu.kills --groups moe --json-out lockstep.jsonl
    python -m tests.gpu.kills --device cpu --rounds 1 --groups eager    # over gloo, without a GPU

It needs three GPUs or four: the trainers' is the first, and each group has an engine on each of the
others. Two groups run at the same time: one with CUDA graphs, one without. A trainer per group
updates without a pause in between, so that faults come at random moments of updates. A round is:

1. SIGKILL to the core of one engine; when the others have committed another update,
2. SIGKILL to the sidecar of a second one (which ends its vLLM);
3. SIGSTOP to the trainer for some seconds, with the third one alone; when all engines are back,
4. SIGSTOP to the core of an engine for as long.

With ``--one-gpu`` (:mod:`tests.gpu.one_gpu`, and ``one-gpu`` at ``tests.gpu.register``) all share
the first GPU: who waits for whom is the same, gaps are longer, since processes take turns on it.

The group `moe` has no faults, but two ranks of experts in lockstep, which get `--updates` updates
with a pause of a second in between. Its row has the times of COMMIT, and the gaps. With
``--gpus 2`` the trainer shares the first rank's GPU (set ``NCCL_SOCKET_IFNAME=lo`` then).

A fault's row has: the longest gap between two tokens of one request on one engine that had no
fault (`gap_ms`), the same in the seconds before (`before_ms`), and how long after the fault, or the
end of a stop, the next staged update was committed (`again_s`; `took_s`: of it that update itself).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bus.errors import WavebusError
from lab.bench.fleet import step_graphs
from tests.gpu import one_gpu
from tests.gpu.serving import EngineSpec, Serving, command, descendants, model_folder
from trainer_agent import RolloutClient, SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.messages import EngineView
    from trainer_agent import TokenDelta

MOE: Final = "moe"
_TOKENS: Final = 300
_STREAMS_PER_ENGINE: Final = 4
_BEFORE_S: Final = 3.0
_AFTER_S: Final = 0.5
_PATIENCE_S: Final = 60.0
_BOOT_S: Final = 400.0
_LONG_GAP_S: Final = 0.2
_MOST_GAP_MS: Final = 1000.0
_MOST_AGAIN_S: Final = 5.0
_TWO: Final = 2  # GPUs, of which the trainer shares the first with an engine


# -- the trainer, a process -------------------------------------------------------------------


def train(
    broker: str, group: str, folder: str, device: str, chunk_bytes: int, idle_s: float
) -> None:
    """Updates without end; says of each on stdout when it ended, and how."""
    from safetensors.torch import load_file  # noqa: PLC0415 - slow

    place = "cuda:0" if device == "cuda" else "cpu"
    weights = [
        load_file(Path(folder) / model_folder(name, moe=group == MOE) / "model.safetensors", place)
        for name in "ba"
    ]
    backend = "nccl" if device == "cuda" else "gloo"
    with SyncTrainerAgent(
        broker, group=group, backend=backend, chunk_bytes=chunk_bytes, timeout_s=_PATIENCE_S
    ) as agent:
        for target in itertools.cycle(weights):
            row: dict[str, Any] = {"begun": time.monotonic()}
            try:
                agent.update_weights(target, how="staged")
            except WavebusError as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            else:
                report = agent.last_update
                assert report is not None
                row |= {"engines": report.engines, "commit_ms": report.commit_ms}
            say(json.dumps(row | {"ended": time.monotonic()}))
            time.sleep(idle_s)


# -- the requests, a process ------------------------------------------------------------------


def load(broker: str, group: str, streams: int, out: str) -> None:
    """Asks without end, until stdin closes; then writes when which engine gave a token."""
    told = asyncio.run(_load(broker, group, streams))
    Path(out).write_text(json.dumps(told), encoding="utf-8")


async def _load(broker: str, group: str, streams: int) -> dict[str, Any]:
    pieces: list[list[tuple[float, str]]] = [[] for _ in range(streams)]
    counts = {"requests": 0, "short": 0}
    lost: list[str] = []

    async def stream(client: RolloutClient, number: int) -> None:
        draw = random.Random(number)
        mine = pieces[number]

        def note(delta: TokenDelta) -> None:
            if delta.token_ids:
                mine.append((time.monotonic(), delta.engine))

        while True:
            prompt = [draw.randrange(3, 250) for _ in range(draw.randrange(4, 40))]
            sampling = {"max_tokens": _TOKENS, "temperature": 1.0, "ignore_eos": True}
            mine.append((time.monotonic(), ""))
            try:
                done = await client.generate(prompt, sampling, on_delta=note, on_inexact="continue")
            except WavebusError as error:
                lost.append(f"{type(error).__name__}: {error}"[:200])
                await asyncio.sleep(0.1)
                continue
            counts["requests"] += 1
            counts["short"] += len(done.choices[0].token_ids) != _TOKENS

    async with RolloutClient(broker, group=group) as client:
        asking = [asyncio.create_task(stream(client, number)) for number in range(streams)]
        await asyncio.to_thread(sys.stdin.read)
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return {"pieces": pieces, "lost": lost, **counts}


def longest_gap_ms(
    pieces: Sequence[Sequence[tuple[float, str]]], engines: set[str], since_s: float, until_s: float
) -> float:
    """The longest wait for the next token of one request on one of these engines, that overlaps a
    period."""
    longest = 0.0
    for stream in pieces:
        for (begin, engine), (end, same) in itertools.pairwise(stream):
            if engine == same and engine in engines and end > since_s and begin < until_s:
                longest = max(longest, end - begin)
    return round(longest * 1000, 1)


# -- faults -----------------------------------------------------------------------------------


@dataclass
class Fault:
    """What was done to whom, and what came of it."""

    group: str
    what: str
    victim: str
    survivors: set[str]
    began_s: float
    ended_s: float
    again: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def row(self, pieces: Sequence[Sequence[tuple[float, str]]]) -> dict[str, Any]:
        """For the results."""
        until_s = self.again.get("ended", self.ended_s + _PATIENCE_S) + _AFTER_S
        again_s = round(self.again["ended"] - self.ended_s, 2) if self.again else None
        before = (self.began_s - _BEFORE_S, self.began_s - _AFTER_S)
        gap_ms = longest_gap_ms(pieces, self.survivors, self.began_s, until_s)
        return {
            "group": self.group,
            "what": self.what,
            "victim": self.victim,
            "survivors": len(self.survivors),
            "gap_ms": gap_ms,
            "before_ms": longest_gap_ms(pieces, self.survivors, *before),
            "again_s": again_s,
            "took_s": round(self.again["ended"] - self.again["begun"], 2) if self.again else None,
            "engines": self.again.get("engines"),
            "failed": self.failed[:3],
            "ok": 0 < gap_ms <= _MOST_GAP_MS and again_s is not None and again_s <= _MOST_AGAIN_S,
        }


class Campaign(threading.Thread):
    """The faults of one group."""

    def __init__(
        self, options: argparse.Namespace, serving: Serving, group: str, folder: Path
    ) -> None:
        super().__init__(daemon=True)
        self.options, self.serving, self.group, self.folder = options, serving, group, folder
        self.names = [name for spec in specs(options, group) for name in spec.names]
        self.faults: list[Fault] = []
        self.updates: list[dict[str, Any]] = []
        self.heard = threading.Condition()
        self.problem = ""
        self.told: dict[str, Any] = {"pieces": []}
        self._draw = random.Random(f"{options.seed} {group}")
        self._last_round_s = time.monotonic() + options.limit_s
        self._views: dict[str, EngineView] = {}

    def run(self) -> None:
        """Writes what went wrong to ``problem``."""
        try:
            self._all_there()
            self._run()
        except Exception as error:  # noqa: BLE001 - it is reported
            self.problem = f"{type(error).__name__}: {error}"

    def _run(self) -> None:
        out = self.folder / f"load-{self.group}.json"
        me = [sys.executable, "-m", "tests.gpu.kills"]
        streams = str(_STREAMS_PER_ENGINE * len(self.names))
        broker, device = self.serving.broker, self.options.device
        chunk = str(int(self.options.chunk_mb * (1 << 20)))
        idle_s = "1" if self.group == MOE else "0"
        apart = "apart" if self.options.one_gpu or self.options.gpus == _TWO else ""
        with (
            subprocess.Popen(
                [*me, "load", broker, self.group, streams, str(out)], stdin=subprocess.PIPE
            ) as asking,
            subprocess.Popen(
                [*me, "train", broker, self.group, str(self.folder), device, chunk, idle_s, apart],
                stdout=subprocess.PIPE,
                text=True,
            ) as trainer,
        ):
            threading.Thread(target=self._listen, args=(trainer,), daemon=True).start()
            try:
                if self.group == MOE:
                    self._watch()
                for _ in range(self.options.rounds if self.group != MOE else 0):
                    if time.monotonic() > self._last_round_s:
                        break
                    self._round(trainer.pid)
            finally:
                trainer.kill()
                assert asking.stdin is not None
                asking.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    asking.wait(_PATIENCE_S)
                asking.kill()
                if out.exists():
                    self.told = json.loads(out.read_text(encoding="utf-8"))

    def lockstep_row(self) -> dict[str, Any]:
        """For the results of a group without faults."""
        done = [row for row in self.updates if "error" not in row][-self.options.updates :]
        names = set(self.names)
        gaps = [
            longest_gap_ms(self.told["pieces"], names, row["begun"], row["ended"] + _AFTER_S)
            for row in done
        ]
        commits = [round(row["commit_ms"], 1) for row in done]
        first_s = self.updates[0]["begun"] if self.updates else 0.0
        pairs = itertools.chain.from_iterable(map(itertools.pairwise, self.told["pieces"]))
        long = {
            (engine, round(begin - first_s, 2), round(end - first_s, 2))
            for (begin, engine), (end, same) in pairs
            if engine and engine == same and end - begin > _LONG_GAP_S
        }
        return {
            "group": self.group,
            "what": "update",
            "commit_ms": commits,
            "update_ms": [round((row["ended"] - row["begun"]) * 1000, 1) for row in done],
            "gaps_ms": gaps,
            # By engine, from and to, in seconds since the first update began; also between updates.
            "long_gaps_s": sorted(long, key=lambda each: each[1]),
            "updates_s": [
                (round(row["begun"] - first_s, 2), round(row["ended"] - first_s, 2)) for row in done
            ],
            "gap_ms": max(gaps, default=0.0),
            "before_ms": statistics.median(gaps) if gaps else 0.0,
            "again_s": statistics.median(commits) / 1000 if commits else None,
            "commit_max_ms": max(commits, default=0.0),
            "failed": [row["error"] for row in self.updates if "error" in row],
            "ok": bool(done) and max(gaps) <= 200.0 and max(commits) <= 100.0,
        }

    def _listen(self, trainer: subprocess.Popen[str]) -> None:
        assert trainer.stdout is not None
        for line in trainer.stdout:
            with self.heard:
                self.updates.append(json.loads(line))
                self.heard.notify_all()

    def _watch(self) -> None:
        seen, count = len(self.updates), self.options.updates
        self._wait(lambda: len(self.updates) >= seen + count, f"{count} updates")

    def _round(self, trainer: int) -> None:
        order = self._draw.sample(self.names, len(self.names))
        if self.options.kills:
            self._fault("kill core", order[0], [self._core(order[0])], set(order[1:]))
            if len(order) > 2:
                victim = [self._views[order[1]].pid]
                self._fault("kill sidecar", order[1], victim, set(order[2:]))
        last = set(order[2:] or order[1:]) if self.options.kills else set(order)
        self._fault("stop trainer", "trainer", [trainer], last, stop=True)
        self._all_there()
        victim = [self._core(order[-1])]
        self._fault("stop core", order[-1], victim, set(order[:-1]), stop=True)
        self._all_there()

    def _fault(
        self, what: str, victim: str, pids: list[int], survivors: set[str], *, stop: bool = False
    ) -> None:
        seen = len(self.updates)
        self._wait(lambda: any("error" not in row for row in self.updates[seen:]), "an update")
        time.sleep(_BEFORE_S + self._draw.random())  # at a random moment
        began_s = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP if stop else signal.SIGKILL)
        if stop:
            time.sleep(self.options.stop_s)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        fault = Fault(
            self.group, what, victim, survivors, began_s, time.monotonic() if stop else began_s
        )

        def after() -> list[dict[str, Any]]:
            return [row for row in self.updates if row["ended"] > began_s]

        self._wait(
            lambda: any("error" not in row and row["ended"] > fault.ended_s for row in after()),
            f"an update after {what} of {victim}",
        )
        fault.again = next(
            row for row in after() if "error" not in row and row["ended"] > fault.ended_s
        )
        fault.failed = [row["error"] for row in after() if "error" in row]
        self.faults.append(fault)
        again_s = fault.again["ended"] - fault.ended_s
        say(f"{self.group}: {what} {victim}, again after {again_s:.2f} s")

    def _wait(self, holds: Any, what: str) -> None:
        with self.heard:
            if not self.heard.wait_for(holds, _PATIENCE_S):
                raise TimeoutError(f"no sign of {what}: {self.updates[-3:]}")

    def _all_there(self) -> None:
        """Waits until all engines are back and an update has had them all."""
        nobody = f"none-{self.group}"
        with SyncTrainerAgent(self.serving.broker, group=nobody, name=nobody) as agent:
            until_s = time.monotonic() + _BOOT_S
            while time.monotonic() < until_s:
                groups = {group.name: group for group in agent.status().groups}
                mine = groups.get(self.group)
                engines = {e.name: e for e in mine.engines} if mine else {}
                self._views = engines
                if all(name in engines and engines[name].phase == "running" for name in self.names):
                    break
                time.sleep(0.5)
            else:
                raise TimeoutError(f"engines did not come back: {sorted(engines)}")
        if not self.updates:
            return
        count, seen = len(self.names), len(self.updates)
        self._wait(
            lambda: any(row.get("engines") == count for row in self.updates[seen:]),
            f"an update of all {count} engines",
        )

    def _core(self, name: str) -> int:
        """The pid of an engine's core; on a CPU of whatever process is its server's only child."""
        found = [
            pid for pid in descendants(self.serving.sidecars[name]) if "EngineCore" in command(pid)
        ]
        assert found, f"{name} has no core"
        return found[0]


def specs(options: argparse.Namespace, group: str) -> list[EngineSpec]:
    """The engines of a group."""
    graphs = step_graphs(1) if group == "graphs" else ()
    if group == MOE:
        steps = options.sync_interval
        args = ("--enable-expert-parallel", *(["--dp-sync-interval", str(steps)] if steps else []))
        gpus = (0, 1) if options.gpus == _TWO else (1, 2)
        return [EngineSpec(MOE, MOE, gpus, args=args, ranks=2)]
    return [
        EngineSpec(f"{group}-{gpu}", group, (gpu,), args=graphs) for gpu in range(1, options.gpus)
    ]


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "train":
        broker, group, checkpoints, device, chunk_bytes, idle_s, apart = sys.argv[2:]
        if apart:
            one_gpu.apart()
        train(broker, group, checkpoints, device, int(chunk_bytes), float(idle_s))
        return
    if len(sys.argv) > 1 and sys.argv[1] == "load":
        broker, group, streams, out = sys.argv[2:]
        load(broker, group, int(streams), out)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--one-gpu", action="store_true", help="all on the first one")
    parser.add_argument("--groups", default="graphs,eager")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--sync-interval", type=int, default=0, help="vLLM's --dp-sync-interval")
    parser.add_argument("--chunk-mb", type=float, default=8.0)
    parser.add_argument("--stop-s", type=float, default=20.0)
    parser.add_argument("--no-kills", dest="kills", action="store_false")
    parser.add_argument("--limit-s", type=float, default=3600, help="no round begins later")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, default=Path("build/kills"))
    parser.add_argument("--json-out", type=Path, required=True)
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    groups = options.groups.split(",")
    shapes = sorted({"moe" if group == MOE else "dense" for group in groups})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [sys.executable, "-m", "tests.gpu.checkpoints", name, options.device, *shapes],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        serving = Serving(options.device, folder, options.logs, share_gpu=options.one_gpu)
        try:
            serving.start_broker()
            for group in groups:
                for spec in specs(options, group):
                    serving.start_engine(spec)
            campaigns = [Campaign(options, serving, group, folder) for group in groups]
            for campaign in campaigns:
                campaign.start()
            for campaign in campaigns:
                campaign.join()
        finally:
            serving.stop()
            for pid in descendants(os.getpid()):  # of interrupted campaigns
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    sys.exit(not report(campaigns, options.json_out))


def report(campaigns: Sequence[Campaign], out: Path) -> bool:
    """Writes all rows and a table; returns whether all is well."""
    rows = [fault.row(each.told["pieces"]) for each in campaigns for fault in each.faults]
    rows += [each.lockstep_row() for each in campaigns if each.group == MOE]
    with out.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
        for each in campaigns:
            told = {k: v for k, v in each.told.items() if k != "pieces"}
            summary = {"group": each.group, "problem": each.problem, **told}
            file.write(json.dumps(summary) + "\n")
            say(json.dumps(summary))
    groups = [each.group for each in campaigns]
    for group, what in itertools.product(groups, dict.fromkeys(row["what"] for row in rows)):
        those = [row for row in rows if (row["group"], row["what"]) == (group, what)]
        gaps = [row["gap_ms"] for row in those]
        again = [row["again_s"] for row in those]
        if those:
            before = max(row["before_ms"] for row in those)
            say(
                f"{group:8}{what:14}{len(those):3} faults,"
                f" gap median {statistics.median(gaps):7.1f} max {max(gaps):7.1f} ms"
                f" (before {before:6.1f});"
                f" again median {statistics.median(again):5.2f} max {max(again):5.2f} s;"
                f" ok {sum(row['ok'] for row in those)}"
            )
    return bool(rows) and all(row["ok"] for row in rows) and not any(c.problem for c in campaigns)


if __name__ == "__main__":
    main()
