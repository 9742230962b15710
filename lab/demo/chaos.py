"""The demo with faults: kills each process in turn while weights are being sent.

The broker, each engine with its sidecar, and the process of the trainer agent get SIGKILL and are
restarted while rollouts and training continue. The broker keeps a journal. At the end every token
is checked with the weights of its version (:mod:`lab.demo.oracle`).
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import save_file

from bus._journal.reader import Entry, read
from bus._journal.records import FrameSent
from bus._journal.replay import Unplayable, replay_lives
from bus._journal.writer import journal_files
from bus.errors import WavebusError
from bus.messages import Commit
from bus.messages.codec import decode
from lab.demo.learner import GrpoConfig, GrpoLearner
from lab.demo.oracle import Verdict, judge
from lab.demo.policy import copy_of, make_policy, save_checkpoint
from lab.demo.processes import (
    BROKER_TIMES,
    GROUP,
    HEARTBEAT_MS,
    PEER_TIMEOUT_MS,
    Processes,
)
from lab.demo.rollouts import Counts, RolloutPool
from lab.demo.trainer_process import TrainerProcess
from lab.network import PolicyConfig
from trainer_agent._sync_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from bus._journal.reader import Item
    from lab.demo.learner import Rollout
    from lab.demo.plan import DemoPlan

_LEASE_MS: Final = 2 * PEER_TIMEOUT_MS
_BOOT_S: Final = 120.0
_STEP_S: Final = 20.0
# How often each process is killed.
_ROUNDS: Final = 2
# How many updates of all engines come between one kill and the next.
_CALM: Final = 3
# The latest moment of a kill after an update's begin: updates take about that long.
_WITHIN_S: Final = 0.06
# How many updates may fail after the last kill.
_TRIES: Final = 20
# The wait before a failed update is sent again.
_AGAIN_S: Final = 0.5
_LABEL: Final = "update "


@dataclass(slots=True)
class ChaosResult:
    """The results of a run."""

    plan: DemoPlan
    kills: Counter[str] = field(default_factory=Counter)  # by process
    updates: int = 0  # that are committed, as the trainer knows
    staged: int = 0  # of these updates
    committed: int = 0  # versions that have a COMMIT in the journal
    errors: Counter[str] = field(default_factory=Counter)  # of failed updates, by class
    counts: Counts = field(default_factory=Counts)
    healed: bool = False  # all engines serve again at the end
    verdict: Verdict = field(default_factory=Verdict)
    reward: float = 0.0  # of the last step
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether no request was lost, no token is mixed, and all engines serve again."""
        return self.healed and not self.counts.lost and not self.verdict.mixed

    def as_json(self) -> dict[str, object]:
        """Returns the object that ``--chaos --json`` prints."""
        return {
            "kills": dict(self.kills),
            "updates": self.updates,
            "staged": self.staged,
            "updates_failed": self.errors.total(),
            "errors": dict(self.errors),
            "committed": self.committed,
            "versions": len(self.counts.tokens_by_version),
            "version_last": max(self.counts.tokens_by_version, default=0),
            "healed": self.healed,
            "requests": self.counts.requests,
            "requests_lost": self.counts.lost,
            "why_lost": dict(self.counts.why_lost),
            "requests_cut_short": dict(self.counts.cut_short),
            "tokens_checked": self.verdict.tokens,
            "mixed_tokens": self.verdict.mixed,
            "logprob_error_max": self.verdict.worst,
            "reward_last": round(self.reward, 4),
            "journal": str(self.plan.journal.absolute()),
            "seconds": round(self.seconds, 1),
        }


class Chaos:
    """Runs the demo with faults.

    Args:
        plan: the run's options.
        say: called with a line of text for each event.
    """

    def __init__(self, plan: DemoPlan, say: Callable[[str], None]) -> None:
        self.result = ChaosResult(plan)
        self._plan = plan
        self._say = say
        self._chance = random.Random(plan.seed)  # noqa: S311 - no secret
        self._policy = make_policy(PolicyConfig(), seed=plan.seed)
        self._weights = [copy_of(self._policy)]  # by the number of the update
        self._calm = 0  # whole updates since the last kill
        self._engines = [f"engine-{index}" for index in range(plan.engine_count)]
        self._victims = ["broker", *self._engines, "trainer"] * _ROUNDS

    def run(self) -> ChaosResult:
        """Runs until each process was killed twice and all engines serve again.

        Raises:
            WavebusError: the bus did not start, or the rollouts failed.
        """
        started_s = time.monotonic()
        torch.set_num_threads(1)
        for old in journal_files(self._plan.journal):
            old.unlink()
        with tempfile.TemporaryDirectory(prefix="wavebus-demo-") as name:
            self._folder = Path(name)
            checkpoint = self._folder / "checkpoint"
            save_checkpoint(self._policy, checkpoint)
            with Processes(self._folder) as self._processes:
                journal = ("--journal", str(self._plan.journal.absolute()))
                address = self._processes.broker(*BROKER_TIMES, *journal)
                for each in self._engines:
                    self._processes.sidecar(each, "embedded", address, checkpoint)
                with SyncTrainerAgent(address, group=GROUP, name="trainer") as agent:
                    agent.wait_for_engines(len(self._engines), timeout_s=_BOOT_S)
                rollouts = self._train(address, started_s + self._plan.limit_s)
        self.result.verdict = judge(PolicyConfig(), self._committed_weights(), rollouts)
        self._judge_aborted()
        self.result.seconds = time.monotonic() - started_s
        return self.result

    # -- training ---------------------------------------------------------------

    def _train(self, address: str, until_s: float) -> list[Rollout]:
        """Trains while processes are killed; returns all complete sequences."""
        config = GrpoConfig()
        learner = GrpoLearner(self._policy, config)
        options = {
            "group": GROUP,
            "name": "trainer",
            "lease_ms": _LEASE_MS,
            "timeout_s": _STEP_S,
            "chunk_bytes": 64 * 1024,
        }
        pool = RolloutPool(address, config, 4 * len(self._engines), self._plan.seed)
        self.result.counts = pool.counts
        log = self._folder / "trainer.log"
        with TrainerProcess(address, options, log) as self._sender, pool:
            while self._victims and time.monotonic() < until_s:
                stats = learner.step(pool.take(config.groups), self._publish)
                self.result.reward = stats.reward
                self._processes.check()
            for _ in range(_TRIES):
                if self._calm:
                    break
                learner.step(pool.take(config.groups), self._publish)
            self.result.healed = self._calm > 0
        return pool.rollouts

    def _publish(self) -> None:
        """Sends the new weights, and meanwhile kills the next process if it is time.

        Repeats a failed update, because no engine may serve until it succeeds.
        """
        number = len(self._weights)
        self._weights.append(copy_of(self._policy))
        path = self._folder / "weights.safetensors"
        save_file(self._weights[number], path)
        how = "auto" if number % 2 else "paused"  # an engine that holds a part can't stage
        request = {"path": str(path), "label": f"{_LABEL}{number}", "how": how}
        self._sender.tell(request)
        if self._victims and self._calm >= _CALM:
            self._calm = 0
            time.sleep(self._chance.uniform(0.0, _WITHIN_S))
            self._kill(self._victims.pop(0))
        tries = _TRIES
        while not self._ended(self._sender.answer()) and tries:
            tries -= 1
            time.sleep(_AGAIN_S)
            self._sender.tell(request)

    def _kill(self, name: str) -> None:
        self._say(f"SIGKILL {name}, in update {len(self._weights) - 1}")
        self.result.kills[name] += 1
        if name == "trainer":
            self._sender.kill()
        else:
            self._processes.restart(name)

    def _ended(self, answer: dict[str, Any] | None) -> bool:
        """Counts an update by its result; returns whether it was committed."""
        if answer is None:
            self.result.errors["killed"] += 1
            self._sender.start()
            return False
        if "error" in answer:
            self.result.errors[answer["error"]] += 1
            self._say(f"update {len(self._weights) - 1}: {answer['error']}: {answer['text']}")
            return False
        self.result.updates += 1
        self.result.staged += answer["how"] == "staged"
        whole = answer["engines"] == len(self._engines) and not answer["excluded"]
        self._calm = self._calm + 1 if whole else 0
        return True

    # -- the oracle -------------------------------------------------------------

    def _committed_weights(self) -> dict[int, dict[str, Tensor]]:
        """Returns the weights of each version that has a COMMIT in the journal."""
        numbers = {0: 0}
        for item in read(self._plan.journal):
            if not isinstance(item, Entry) or not isinstance(item.record, FrameSent):
                continue
            _, message = decode(item.record.frame)
            if isinstance(message, Commit):
                number = int(message.label.removeprefix(_LABEL))
                if numbers.setdefault(message.version, number) != number:
                    raise WavebusError(f"version {message.version} was committed twice")
        self.result.committed = len(numbers) - 1
        return {version: self._weights[number] for version, number in numbers.items()}

    def _judge_aborted(self) -> None:
        """Counts as lost the requests that a routable engine ended early."""
        counts, spans = self.result.counts, out_of_service(read(self._plan.journal))
        for engine, began_s, ended_s in counts.aborted:
            known_s = ended_s + HEARTBEAT_MS / 1000  # the broker may hear of it a little later
            if any(since < known_s and began_s < until for since, until in spans[engine]):
                continue
            counts.lost += 1
            counts.why_lost["ended by an engine that served"] += 1


def out_of_service(journal: Iterable[Item]) -> dict[str, list[tuple[float, float]]]:
    """Returns when each engine was on the bus but not routable.

    Args:
        journal: the broker's journal.

    Returns:
        For each engine, spans of the wall clock (begin, end), in seconds since 1970.

    Raises:
        WavebusError: the journal can't be replayed.
    """
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    since: dict[str, float] = {}
    boot, here, seen_s = 0, set[str](), 0.0
    for item in replay_lives(journal):
        if isinstance(item, Unplayable):
            raise WavebusError(item.reason)
        replay, step = item
        if step.difference is not None:
            raise WavebusError(str(step.difference))
        began = step.entry.began
        assert began is not None
        if replay.boot != boot:  # no journal covers the time between two brokers
            boot, here, left_s = replay.boot, set(), seen_s
        seen_s = began.wall_s + (replay.now_ms - began.now_ms) / 1000
        group = replay.machine.groups.get(GROUP)
        engines = set(group.registry.engines) if group else set()
        serving = {route.engine for route in group.routing.now.engines} if group else set()
        for name in engines - serving - since.keys():
            since[name] = seen_s if name in here else left_s
        for name in since.keys() & (serving | (here - engines)):
            spans[name].append((since.pop(name), seen_s))
        here |= engines
    for name, began_s in since.items():
        spans[name].append((began_s, seen_s))
    return spans
