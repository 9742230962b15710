"""Updates without end, with a fault every so many: nothing leaks, and all goes on without a hand.

Real processes: a broker with a journal, embedded engines that always serve requests, a trainer
that sends by shared memory. Faults are SIGKILL of any of them, and SIGSTOP for longer than it takes
to be missed, most of them in the middle of an update. One process of engines is never touched, and
shows what grows over all updates.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.soak._actors import Actor, segments
from tests.soak._fleet import FILES, Fleet
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
MENDED_S: Final = 60.0  # until an update has reached all engines again
STOPPED_S: Final = 2.2


class Soak(Fleet):
    """What was done to them, and how it went on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, engines=ENGINES, processes=PROCESSES, load="now-and-then")
        self.random = random.Random(1)
        self.updates = 0
        self.faults: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.attempts = 0

    def try_it(self) -> None:
        self.attempts += 1
        self.ask(self.updates)

    def mended(self, answer: dict[str, Any]) -> None:
        """Until an update has reached all engines."""
        asked_s = time.monotonic()
        while "version" not in answer or answer["excluded"]:
            self.errors[str(answer.get("error", "excluded")).split(":")[0]] += 1
            waited_s = time.monotonic() - asked_s
            assert waited_s < MENDED_S, f"update {self.updates}: {answer}; {self.told()}"
            self.try_it()
            answer = self.trainer.answer()
        self.updates += 1

    def update(self) -> None:
        self.try_it()
        self.mended(self.trainer.answer())

    def update_with(self, fault: str) -> None:
        """And while it is under way, something happens."""
        self.faults[fault] += 1
        who, what = fault.split()
        self.try_it()
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
            self.try_it()
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
            self.sample(self.updates)

    def told(self) -> str:
        return f"{self.updates} updates, faults {dict(self.faults)}, errors {dict(self.errors)}"


@pytest.mark.ci
def test_updates_go_on_and_nothing_leaks(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Every update reaches all engines in the end; memory grows by no more than a twentieth (a
    half in a short run), no file stays open, and nothing of those that were killed has a name in
    shared memory."""
    began = time.monotonic()
    soak = Soak(tmp_path)
    try:
        soak.run()
        requests = soak.requests(UPDATES)
    except BaseException:
        shutil.copytree(tmp_path, ROOT / "build" / "soak", dirs_exist_ok=True)  # logs, journal
        raise
    finally:
        for actor in soak.alive:
            actor.kill()
    left = segments({actor.pid for actor in soak.lives})
    (growth, allowed), files = soak.growth_of(UPDATES), soak.files()
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
    assert {name: by for name, by in growth.items() if max(by) > allowed} == {}
    assert "engines 0" in growth
    if len(FAULTS) * EVERY <= UPDATES:
        assert set(soak.faults) == set(FAULTS)
