"""The demo with faults: kills each process in turn while weights are being sent.

The broker, each engine with its sidecar, and the process of the trainer agent get SIGKILL and are
restarted while rollouts and training continue. The broker keeps a journal. At the end every token
is checked with the weights of its version (:mod:`trainer_agent.demo.oracle`).
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import save_file

from bus.errors import WavebusError
from bus.journal.reader import Entry, read
from bus.journal.records import FrameSent
from bus.journal.replay import Unplayable, replay_lives
from bus.messages import Commit
from bus.messages.codec import decode
from trainer_agent.demo.learner import GrpoConfig, GrpoLearner
from trainer_agent.demo.oracle import Verdict, judge
from trainer_agent.demo.policy import Policy, PolicyConfig, copy_of, save_checkpoint
from trainer_agent.demo.processes import Processes
from trainer_agent.demo.rollouts import RolloutPool
from trainer_agent.demo.trainer_process import TrainerProcess
from trainer_agent.sync_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bus.journal.reader import Item
    from trainer_agent.demo.learner import Rollout

GROUP: Final = "policy"
HEARTBEAT_MS: Final = 500
PEER_TIMEOUT_MS: Final = 3000
LEASE_MS: Final = 2 * PEER_TIMEOUT_MS
_BOOT_S: Final = 120.0
_STEP_S: Final = 20.0
# How many updates of all engines come between one kill and the next.
_CALM: Final = 3
# The latest moment of a kill after an update's begin: updates take about that long.
_WITHIN_S: Final = 0.06
# How many updates may fail after the last kill.
_TRIES: Final = 20
# The wait before a failed update is sent again.
_AGAIN_S: Final = 0.5
_LABEL: Final = "update "


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """The options of a run.

    Attributes:
        journal: the folder of the broker's journal, which remains after the run.
        engines: how many engines there are.
        rounds: how often each process is killed.
        seconds: the longest duration of the run.
        seed: decides the moments of the kills, the policy's first weights and the tasks.
    """

    journal: Path
    engines: int = 2
    rounds: int = 2
    seconds: float = 150.0
    seed: int = 0


@dataclass(slots=True)
class ChaosResult:
    """The results of a run.

    Attributes:
        options: the run's options.
        kills: how often each process was killed.
        updates: how many updates the trainer knows to be committed.
        staged: how many of ``updates`` were staged.
        committed: how many versions have a COMMIT in the journal.
        failed: how many updates failed.
        errors: how often updates failed, by class of the error.
        requests: how many requests were made.
        requests_lost: how many requests were lost.
        why_lost: how many requests were lost, by reason.
        cut_short: how often an engine interrupted a request, which was then continued, by reason.
        versions: the versions of the tokens, ascending.
        healed: all engines serve again at the end.
        verdict: the result of the check of all tokens.
        reward: the mean reward of the last step.
        seconds: how long the run took.
    """

    options: ChaosOptions
    kills: Counter[str] = field(default_factory=Counter)
    updates: int = 0  # committed, as the trainer knows
    staged: int = 0  # of these
    committed: int = 0  # versions with a COMMIT in the journal
    failed: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    requests_lost: int = 0
    why_lost: Counter[str] = field(default_factory=Counter)
    cut_short: Counter[str] = field(default_factory=Counter)
    versions: list[int] = field(default_factory=list)  # of tokens, ascending
    healed: bool = False
    verdict: Verdict = field(default_factory=Verdict)
    reward: float = 0.0
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether no request was lost, no token is mixed, and all engines serve again."""
        return self.healed and not self.requests_lost and not self.verdict.mixed

    def as_json(self) -> dict[str, object]:
        """Returns the object that ``--chaos --json`` prints."""
        return {
            "kills": dict(self.kills),
            "updates": self.updates,
            "staged": self.staged,
            "updates_failed": self.failed,
            "errors": dict(self.errors),
            "committed": self.committed,
            "versions": len(self.versions),
            "version_last": self.versions[-1] if self.versions else 0,
            "healed": self.healed,
            "requests": self.requests,
            "requests_lost": self.requests_lost,
            "why_lost": dict(self.why_lost),
            "requests_cut_short": dict(self.cut_short),
            "tokens_checked": self.verdict.tokens,
            "mixed_tokens": self.verdict.mixed,
            "logprob_error_max": self.verdict.worst,
            "reward_last": round(self.reward, 4),
            "journal": str(self.options.journal),
            "seconds": round(self.seconds, 1),
        }


class Chaos:
    """Runs the demo with faults.

    Args:
        options: the run's options.
        say: called with a line of text for each event.
    """

    def __init__(self, options: ChaosOptions, say: Callable[[str], None]) -> None:
        self.result = ChaosResult(options)
        self._options = options
        self._say = say
        self._chance = random.Random(options.seed)  # noqa: S311 - no secret
        self._policy = Policy(PolicyConfig(), seed=options.seed)
        self._weights = {0: copy_of(self._policy)}  # by the number of the update
        self._rollouts: list[Rollout] = []
        self._numbers = 0
        self._calm = 0  # whole updates since the last kill
        self._names = [f"engine-{i}" for i in range(options.engines)]
        self._turns = cycle(["broker", *self._names, "trainer"])
        self._left = options.rounds * (options.engines + 2)
        self._aborted: list[tuple[str, float, float]] = []

    def run(self) -> ChaosResult:
        """Runs until each process was killed ``rounds`` times and all engines serve again.

        Raises:
            WavebusError: the bus did not start, or the rollouts failed.
        """
        started = time.monotonic()
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="wavebus-demo-") as name:
            self._folder = Path(name)
            save_checkpoint(self._policy, self._folder / "checkpoint")
            with Processes(self._folder) as self._processes:
                self._address = self._broker()
                for each in self._names:
                    self._engine(each)
                with SyncTrainerAgent(self._address, group=GROUP, name="trainer") as agent:
                    agent.wait_for_engines(self._options.engines, timeout_s=_BOOT_S)
                self._train(started + self._options.seconds)
        self._judge()
        self._judge_aborted()
        self.result.seconds = time.monotonic() - started
        return self.result

    # -- processes --------------------------------------------------------------

    def _broker(self, listen: str = "tcp://127.0.0.1:*") -> str:
        times = ("--heartbeat-ms", str(HEARTBEAT_MS), "--peer-timeout-ms", str(PEER_TIMEOUT_MS))
        journal = ("--journal", str(self._options.journal))
        return self._processes.broker(*times, *journal, listen=listen)

    def _engine(self, name: str) -> None:
        self._processes.sidecar(name, "embedded", self._address, self._folder / "checkpoint")

    def _kill(self, who: str) -> None:
        self._say(f"SIGKILL {who}, in update {self._numbers}")
        self.result.kills[who] += 1
        if who == "trainer":
            self._sender.kill()
        elif who == "broker":
            self._processes.kill(who)
            self._broker(self._address)
        else:
            self._processes.kill(who)
            self._engine(who)

    # -- training ---------------------------------------------------------------

    def _train(self, until_s: float) -> None:
        config = GrpoConfig()
        learner = GrpoLearner(self._policy, config)
        options = {
            "group": GROUP,
            "name": "trainer",
            "lease_ms": LEASE_MS,
            "timeout_s": _STEP_S,
            "chunk_bytes": 64 * 1024,
        }
        pool = RolloutPool(
            self._address,
            group=GROUP,
            group_size=config.group_size,
            streams=4 * self._options.engines,
            ahead=2 * config.groups,
            seed=self._options.seed,
            whole=self._rollouts.append,
        )
        log = self._folder / "trainer.log"
        with TrainerProcess(self._address, options, log) as self._sender, pool:
            while self._left and time.monotonic() < until_s:
                stats = learner.step(pool.take(config.groups), self._publish)
                self.result.reward = stats.reward
                self._processes.check()
            tries = _TRIES
            while tries and not self._calm:
                learner.step(pool.take(config.groups), self._publish)
                tries -= 1
            self.result.healed = self._calm > 0
        counts = pool.counts
        self.result.requests, self.result.requests_lost = counts.requests, counts.lost
        self.result.cut_short, self.result.why_lost = counts.cut_short, counts.why_lost
        self._aborted = counts.aborted
        self.result.versions = sorted(counts.tokens_by_version)

    def _publish(self) -> None:
        """Sends the new weights, and meanwhile kills the next process if it is time.

        Repeats a failed update, because no engine may serve until it succeeds.
        """
        self._numbers += 1
        self._weights[self._numbers] = copy_of(self._policy)
        path = self._folder / "weights.safetensors"
        save_file(self._weights[self._numbers], path)
        how = "auto" if self._numbers % 2 else "paused"  # an engine that holds a part can't stage
        request = {"path": str(path), "label": f"{_LABEL}{self._numbers}", "how": how}
        self._sender.tell(request)
        if self._left and self._calm >= _CALM:
            self._calm = 0
            self._left -= 1
            time.sleep(self._chance.uniform(0.0, _WITHIN_S))
            self._kill(next(self._turns))
        tries = _TRIES
        while not self._ended(self._sender.answer()) and tries:
            tries -= 1
            time.sleep(_AGAIN_S)
            self._sender.tell(request)

    def _ended(self, answer: dict[str, Any] | None) -> bool:
        """Counts an update by its result; returns whether it was committed."""
        if answer is None:
            self.result.failed += 1
            self.result.errors["killed"] += 1
            self._sender.start()
        elif "error" in answer:
            self.result.failed += 1
            self.result.errors[answer["error"]] += 1
            self._say(f"update {self._numbers}: {answer['error']}: {answer['text']}")
        else:
            self.result.updates += 1
            self.result.staged += answer["how"] == "staged"
            whole = answer["engines"] == self._options.engines and not answer["excluded"]
            self._calm = self._calm + 1 if whole else 0
            return True
        return False

    # -- the oracle -------------------------------------------------------------

    def _judge(self) -> None:
        """Checks all tokens with the weights of their versions, as the journal has them."""
        numbers = {0: 0}
        for item in read(self._options.journal):
            if not isinstance(item, Entry) or not isinstance(item.record, FrameSent):
                continue
            _, message = decode(item.record.frame)
            if isinstance(message, Commit):
                number = int(message.label.removeprefix(_LABEL))
                if numbers.setdefault(message.version, number) != number:
                    raise WavebusError(f"version {message.version} was committed twice")
        self.result.committed = len(numbers) - 1
        weights = {version: self._weights[number] for version, number in numbers.items()}
        self.result.verdict = judge(PolicyConfig(), weights, self._rollouts)

    def _judge_aborted(self) -> None:
        """Counts as lost the requests that a routable engine ended early."""
        spans = out_of_service(read(self._options.journal))
        for engine, began_s, ended_s in self._aborted:
            known_s = ended_s + HEARTBEAT_MS / 1000  # the broker may hear of it a little later
            if any(since < known_s and began_s < until for since, until in spans[engine]):
                continue
            self.result.requests_lost += 1
            self.result.why_lost["ended by an engine that served"] += 1


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


def run_chaos(options: ChaosOptions, *, say: Callable[[str], None]) -> ChaosResult:
    """Runs the demo with faults; arguments and errors are those of :class:`Chaos`."""
    return Chaos(options, say).run()
