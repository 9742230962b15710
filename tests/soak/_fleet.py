"""A broker, embedded engines that always serve requests, and a trainer: real processes, measured.

Several engines share a process, since each process needs 250 MB of libraries and some seconds to
start.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from tests.soak._actors import Actor
from tests.support.checkpoints import make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

# What an engine, a broker or a trainer needs until all that it keeps is there.
WARM_UP: Final = 60
_GROWTH: Final = 0.05
# In a short run, as in `make test`, not all that is kept is there after the warm-up: engines grew
# by 8 to 19 % in runs of 40 and 30 updates. So it finds gross leaks alone.
_GROWTH_OF_SHORT_RUNS: Final = 0.5
FILES: Final = 2  # may be open for a moment
PEER_TIMEOUT_MS: Final = 1500
SERVING_S: Final = 60.0  # in which engines that serve have ended requests
_EARLY: Final = 10  # updates, in which files are opened that stay


class Fleet:
    """The processes, those that were before them, and what each took.

    Args:
        folder: their checkpoint, logs and journal.
        engines: how many.
        processes: how many these are shared out to, evenly.
        load: that engines have, one of `tests.support.soak_engines.LOADS`.
        peer_timeout_ms: after which silence a process is lost.
    """

    def __init__(
        self,
        folder: Path,
        *,
        engines: int,
        processes: int,
        load: str,
        peer_timeout_ms: int = PEER_TIMEOUT_MS,
    ) -> None:
        self.folder = folder
        self.checkpoint = make_checkpoint(folder / "checkpoint", seed=1)
        self.lives: list[Actor] = []
        self.address = ""
        self._peer_timeout_ms = peer_timeout_ms
        self.broker = self.start_broker()
        names = [f"e{number}" for number in range(engines)]
        each = engines // processes
        self.names = {f"engines {k}": names[k * each : (k + 1) * each] for k in range(processes)}
        self._load = load
        self.engines = {name: self.start_engines(name) for name in self.names}
        self.trainer = self.start_trainer()
        for actor in (*self.engines.values(), self.trainer):
            actor.answer()

    # -- processes ------------------------------------------------------------------------

    def start(self, name: str, *arguments: str) -> Actor:
        actor = Actor(name, *arguments, log=self.folder / f"{name.replace(' ', '-')}.log")
        self.lives.append(actor)
        return actor

    def start_broker(self) -> Actor:
        listen = self.address or "tcp://127.0.0.1:*"
        options = ("--heartbeat-ms", "300", "--peer-timeout-ms", str(self._peer_timeout_ms))
        journal = ("--journal", str(self.folder / "journal"), "--journal-bytes", "1000000")
        limits = ("--step-timeout-ms", "10000", "--log-level", "error")
        broker = self.start(
            "broker",
            "-m",
            "bus._cli.main",
            "broker",
            "--listen",
            listen,
            *options,
            *journal,
            *limits,
        )
        self.address = broker.line()
        return broker

    def start_engines(self, name: str) -> Actor:
        module = ("-m", "tests.support.soak_engines", self._load)
        return self.start(
            name, *module, self.address, str(self.checkpoint.folder), *self.names[name]
        )

    def start_trainer(self) -> Actor:
        module = ("-m", "tests.support.soak_trainer")
        return self.start("trainer", *module, self.address, str(self.checkpoint.folder))

    @property
    def alive(self) -> list[Actor]:
        return [self.broker, *self.engines.values(), self.trainer]

    def ask(self, number: int, how: str = "paused") -> None:
        """Of the trainer, an update of all engines; the next number has other weights."""
        engines = sum(len(names) for names in self.names.values())
        self.trainer.tell(f"{engines} {number % 2} {how}")

    # -- what came of it --------------------------------------------------------------------

    def sample(self, update: int) -> None:
        """Measure all that live."""
        for actor in self.alive:
            actor.sample(update)

    def requests(self, more_than: int = 0) -> Counter[str]:
        """Of all engines that live; they must serve the weights that were sent last. Those that
        were started last have counted few: so it is waited until more than so many have ended."""
        until_s = time.monotonic() + SERVING_S
        counts = self._requests()
        while counts["ended"] <= more_than and time.monotonic() < until_s:
            counts = self._requests()
        return counts

    def _requests(self) -> Counter[str]:
        served: set[tuple[int, ...]] = set()
        counts: Counter[str] = Counter()
        for actor in self.engines.values():
            actor.tell("requests")
            answer = actor.answer()
            assert not answer.pop("dead"), actor.tail()
            served |= {tuple(tokens) for tokens in answer.pop("served").values()}
            counts.update(answer)
        assert len(served) == 1, served
        return counts

    def growth_of(self, updates: int) -> tuple[dict[str, list[float]], float]:
        """What memory grew by in a run of so many updates, and by how much it may."""
        warm_up = min(WARM_UP, updates // 3)
        return self._growth(warm_up), _GROWTH if warm_up == WARM_UP else _GROWTH_OF_SHORT_RUNS

    def _growth(self, warm_up: int) -> dict[str, list[float]]:
        """Of the lives that were long enough, what their memory grew by after the warm-up: from
        the median of its last third to that of the life's last third.

        Args:
            warm_up: updates. A life counts that has three times as many.
        """
        found: dict[str, list[float]] = {}
        for actor in self.lives:
            if len(actor.samples) < 3 * warm_up:
                continue
            warm = statistics.median(s.memory for s in actor.samples[warm_up * 2 // 3 : warm_up])
            last = statistics.median(s.memory for s in actor.samples[-warm_up // 3 :])
            found.setdefault(actor.name, []).append(last / warm - 1)
        return found

    def files(self) -> dict[str, int]:
        """By how many files the most of each kind of process had more open at its end than when
        all had joined."""
        found: dict[str, int] = {}
        for actor in self.lives:
            if len(actor.samples) > _EARLY:
                files = [sample.files for sample in actor.samples]
                early = max(files[:_EARLY])
                found[actor.name] = max(found.get(actor.name, 0), files[-1] - early)
        return found
