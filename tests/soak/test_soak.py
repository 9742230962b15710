"""Updates without end, with a fault every so many: nothing leaks, and all goes on without a hand.

Real processes: a broker with a journal, embedded engines that always serve requests, a trainer
that sends by shared memory. Faults are SIGKILL of any of them, and SIGSTOP for longer than it takes
to be missed, most of them in the middle of an update. Four engines share a process, since each
process needs 250 MB of libraries and some seconds to start; one process of them is never touched,
and shows what grows over all updates.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from tests.soak._actors import Actor, segments
from tests.support.checkpoints import make_checkpoint
from tests.support.procs import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

UPDATES: Final = int(os.environ.get("WAVEBUS_SOAK_UPDATES", "40"))
ENGINES: Final = int(os.environ.get("WAVEBUS_SOAK_ENGINES", "4"))
EVERY: Final = 20  # updates there is a fault
PROCESSES: Final = 4 if ENGINES >= 16 else 2  # of engines
FAULTS: Final = (
    "engines killed",
    "broker killed",
    "trainer killed",
    "engines killed",
    "engines stopped",
    "engines killed",
    "engines stopped",
    "broker stopped",
    "engines killed",
    "trainer stopped",
)
# What an engine, a broker or a trainer needs until all that it keeps is there.
WARM_UP: Final = 60
WARM_ENOUGH: Final = 3 * WARM_UP  # a life of fewer updates says nothing of growth
GROWTH: Final = 0.05
FILES: Final = 2  # may be open for a moment
MENDED_S: Final = 60.0  # until an update has reached all engines again
STOPPED_S: Final = 2.2
PEER_TIMEOUT_MS: Final = 1500


class Soak:
    """The processes, what was done to them, and what came of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = make_checkpoint(folder / "checkpoint", seed=1)
        self.random = random.Random(1)
        self.updates = 0
        self.faults: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.attempts = 0
        self.lives: list[Actor] = []
        self.address = ""
        self.broker = self.start_broker()
        names = [f"e{number}" for number in range(ENGINES)]
        each = ENGINES // PROCESSES
        self.names = {f"engines {k}": names[k * each : (k + 1) * each] for k in range(PROCESSES)}
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
        options = ("--heartbeat-ms", "300", "--peer-timeout-ms", str(PEER_TIMEOUT_MS))
        journal = ("--journal", str(self.folder / "journal"), "--journal-bytes", "1000000")
        limits = ("--step-timeout-ms", "10000", "--log-level", "error")
        broker = self.start(
            "broker", "-m", "bus.cli", "broker", "--listen", listen, *options, *journal, *limits
        )
        self.address = broker.line()
        return broker

    def start_engines(self, name: str) -> Actor:
        module = ("-m", "tests.support.soak_engines")
        return self.start(
            name, *module, self.address, str(self.checkpoint.folder), *self.names[name]
        )

    def start_trainer(self) -> Actor:
        module = ("-m", "tests.support.soak_trainer")
        return self.start("trainer", *module, self.address, str(self.checkpoint.folder))

    @property
    def alive(self) -> list[Actor]:
        return [self.broker, *self.engines.values(), self.trainer]

    # -- updates --------------------------------------------------------------------------

    def ask(self) -> None:
        """Of the trainer, an update of all engines."""
        self.attempts += 1
        self.trainer.tell(f"{ENGINES} {self.updates % 2}")

    def mended(self, answer: dict[str, Any]) -> None:
        """Until an update has reached all engines."""
        asked_s = time.monotonic()
        while "version" not in answer or answer["excluded"]:
            self.errors[str(answer.get("error", "excluded")).split(":")[0]] += 1
            waited_s = time.monotonic() - asked_s
            assert waited_s < MENDED_S, f"update {self.updates}: {answer}; {self.told()}"
            self.ask()
            answer = self.trainer.answer()
        self.updates += 1

    def update(self) -> None:
        self.ask()
        self.mended(self.trainer.answer())

    def update_with(self, fault: str) -> None:
        """And while it is under way, something happens."""
        self.faults[fault] += 1
        who, what = fault.split()
        self.ask()
        time.sleep(0.25 * self.random.random())  # somewhere in it, or just after
        if who == "engines":
            name = self.random.choice([name for name in self.engines if name != "engines 0"])
            self.hit(self.engines[name], what)
            if what == "killed":
                self.engines[name] = self.start_engines(name)
                self.engines[name].answer()
            self.mended(self.trainer.answer())
        elif who == "broker":
            self.hit(self.broker, what)
            if what == "killed":
                self.broker = self.start_broker()
            self.mended(self.trainer.answer())
        elif what == "killed":
            self.trainer.kill()
            self.trainer = self.start_trainer()
            self.trainer.answer()
            self.ask()
            self.mended(self.trainer.answer())
        else:
            self.hit(self.trainer, what)
            self.mended(self.trainer.answer())
        dead = {actor.pid for actor in self.lives} - {actor.pid for actor in self.alive}
        assert segments(dead) == []

    def hit(self, actor: Actor, what: str) -> None:
        if what == "killed":
            actor.kill()
            return
        actor.stop()
        time.sleep(STOPPED_S)  # longer than it takes to be missed: the fault itself
        actor.cont()

    def run(self) -> None:
        while self.updates < UPDATES:
            if self.updates % EVERY == EVERY - 1:
                self.update_with(FAULTS[self.updates // EVERY % len(FAULTS)])
            else:
                self.update()
            for actor in self.alive:
                actor.sample(self.updates)

    # -- what came of it --------------------------------------------------------------------

    def requests(self) -> Counter[str]:
        """Of all engines that live; they must serve the weights that were sent last."""
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

    def growth(self) -> dict[str, list[float]]:
        """Of the lives that were long enough, what their memory grew by after the warm-up: from
        the median of its last third to that of the life's last third."""
        found: dict[str, list[float]] = {}
        for actor in self.lives:
            if len(actor.samples) < WARM_ENOUGH:
                continue
            warm = statistics.median(s.memory for s in actor.samples[WARM_UP * 2 // 3 : WARM_UP])
            last = statistics.median(s.memory for s in actor.samples[-WARM_UP // 3 :])
            found.setdefault(actor.name, []).append(last / warm - 1)
        return found

    def files(self) -> dict[str, int]:
        """By how many files the most of each kind of process had more open at its end than when
        all had joined."""
        found: dict[str, int] = {}
        for actor in self.lives:
            if len(actor.samples) > EVERY // 2:
                files = [sample.files for sample in actor.samples]
                early = max(files[: EVERY // 2])
                found[actor.name] = max(found.get(actor.name, 0), files[-1] - early)
        return found

    def told(self) -> str:
        return f"{self.updates} updates, faults {dict(self.faults)}, errors {dict(self.errors)}"


def test_updates_go_on_and_nothing_leaks(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Every update reaches all engines in the end; memory grows by no more than a twentieth, no
    file stays open, and nothing of those that were killed has a name in shared memory."""
    began = time.monotonic()
    soak = Soak(tmp_path)
    try:
        soak.run()
        requests = soak.requests()
    except BaseException:
        shutil.copytree(tmp_path, ROOT / "build" / "soak", dirs_exist_ok=True)  # logs, journal
        raise
    finally:
        for actor in soak.alive:
            actor.kill()
    left = segments({actor.pid for actor in soak.lives})
    growth, files = soak.growth(), soak.files()
    record_property("updates", soak.updates)
    record_property("engines", ENGINES)
    record_property("faults", json.dumps(soak.faults))
    record_property("asked again", soak.attempts - soak.updates)
    record_property("errors", json.dumps(soak.errors))
    record_property("requests", json.dumps(requests))
    for name, values in growth.items():
        record_property(f"growth of {name}, %", [round(100 * value, 1) for value in values])
    record_property("files more", json.dumps(files))
    record_property("left in shared memory", len(left))
    record_property("seconds", round(time.monotonic() - began))
    assert left == []
    assert requests["ended"] > UPDATES
    assert requests["wrong"] == 0
    assert requests["versions_met"] > 0, "no update met a request"
    assert {name: more for name, more in files.items() if more > FILES} == {}
    assert {name: by for name, by in growth.items() if max(by) > GROWTH} == {}
    if len(FAULTS) * EVERY <= UPDATES:
        assert set(soak.faults) == set(FAULTS)
        assert "engines 0" in growth
