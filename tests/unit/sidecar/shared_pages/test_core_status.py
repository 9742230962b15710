"""The status page of an engine core: what is written is read, from outside and at any time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from sidecar._shared_pages import core_status
from sidecar._shared_pages.core_status import (
    GLOBALLY_PAUSED,
    LOCALLY_PAUSED,
    PAGE_BYTES,
    CoreStatusPage,
    CoreStatusReader,
    StepLimit,
)
from sidecar._shared_pages.pause_lease import PauseLeasePage
from sidecar._shared_pages.two_slot_page import NoPage
from tests.support.procs import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from bus.messages import CorePhase

PHASES: tuple[CorePhase, ...] = ("idle", "work", "step", "dummy", "sync", "barrier")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    with closing(CoreStatusPage(tmp_path / "page", rank=3)) as page:
        for number, phase in enumerate(PHASES):
            flags = LOCALLY_PAUSED | GLOBALLY_PAUSED
            page.count(step=number, wave=7, flags=flags, waiting=2, running=1, untagged=number)
            before_s = time.monotonic()
            page.enter(phase)
            view = CoreStatusReader(tmp_path / "page").read()
            assert view == page.view()
            assert (view.rank, view.phase, view.step, view.wave) == (3, phase, number, 7)
            assert (view.flags, view.waiting, view.running) == (flags, 2, 1)
            assert view.untagged == view.message().untagged == number
            assert 0 <= view.age_ms() <= (time.monotonic() - before_s) * 1000
    assert not (tmp_path / "page").exists()


def test_a_process_that_does_not_run_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that tells no time is not, nor is one whose core waits for work; but one whose core has
    stood in a step for a minute is."""
    with closing(CoreStatusPage(None)) as page:
        assert (page.view().beat_s, page.view().is_frozen) == (0.0, False)
        page.beat()
        assert 0 < page.view().beat_s <= time.monotonic()
        assert not page.view().is_frozen
        now_s = page.view().beat_s
        for phase, after_s, frozen in (("idle", 9, False), ("idle", 11, True), ("step", 9, False)):
            page.enter(cast("CorePhase", phase))
            with monkeypatch.context() as patched:
                patched.setattr(time, "monotonic", lambda later=now_s + after_s: later)
                assert page.view().is_frozen is frozen
        view = replace(page.view(), beat_s=0.0, since_s=now_s - 61)
        assert (view.is_frozen, replace(view, phase="idle").is_frozen) == (True, False)


STEP_MS, STUCK_MS = core_status._STEP_MS, core_status._STUCK_MS


def limits(*steps: tuple[float, int], warm: int = 10) -> list[float]:
    """How long each of these steps may take: (how long it takes in s, a new prompt's tokens)."""
    limit, found = StepLimit(), []
    for step, (took_s, tokens) in enumerate([*[(0.02, 0)] * warm, *steps]):
        if tokens:
            limit.on_prompt(tokens)
        found.append(limit.limit_ms(step, 1))
        limit.on_step(took_s * 1000, found[-1], step=step, waiting=0)
    return found[warm:]


def test_a_core_that_has_stepped_may_take_ten_seconds_for_a_step() -> None:
    """Its first steps may compile, however long they take; they are no measure for later ones."""
    assert limits(*[(50.0, 7)] * 10, *[(0.02, 0)] * 2, warm=0) == [STUCK_MS] * 10 + [STEP_MS] * 2
    assert StepLimit().limit_ms(99, 0) == STUCK_MS  # it has no request


def test_a_core_whose_steps_are_slow_may_take_longer() -> None:
    assert limits((0.5, 0), (2.0, 0), (6.0, 0), (9.0, 0), (1.0, 0)) == [
        STEP_MS,
        STEP_MS,
        STEP_MS,
        24_000.0,
        36_000.0,
    ]


def test_a_long_prompt_may_take_longer_than_any_before() -> None:
    """And once it has, another one of that length."""
    assert limits((0.1, 8), (0.1, 15), (30.0, 4000), (0.1, 0), (0.1, 8000), (0.1, 17_000)) == [
        STUCK_MS,
        STEP_MS,
        STUCK_MS,
        STUCK_MS,
        STUCK_MS,
        STUCK_MS,
    ]
    assert limits((0.1, 4000), (0.1, 8), (0.1, 8000)) == [STUCK_MS, STEP_MS, STEP_MS]


def test_a_step_that_was_held_up_is_no_measure() -> None:
    """As of a process that was stopped: the next one is missed as early."""
    assert limits((40.0, 0), (0.1, 0)) == [STEP_MS, STEP_MS]


def test_a_page_says_how_long_its_step_may_take() -> None:
    """A core in a step beyond that is frozen, if it has requests, and runs again with the next."""
    with closing(CoreStatusPage(None)) as page:
        for step in range(11):
            page.count(step=step, wave=0, running=1)
            page.enter("step")
            assert page.view().limit_ms == (STUCK_MS if step < 10 else STEP_MS)
            page.enter("work")
        assert page.view().limit_ms == STUCK_MS
        page.enter("step")
        view = page.view()
        late = replace(view, since_s=time.monotonic() - STEP_MS / 1000 - 0.1)
        assert (view.is_frozen, late.is_frozen) == (False, True)
        assert not replace(late, phase="work").is_frozen
        page.enter("work")
        assert not page.view().is_frozen
        for phase in ("dummy", "sync", "barrier"):  # other ranks may compile, or load
            page.enter(phase)
            assert page.view().limit_ms == STUCK_MS


def test_a_page_is_its_owners(tmp_path: Path) -> None:
    with closing(CoreStatusPage(tmp_path / "page")):
        assert (tmp_path / "page").stat().st_mode & 0o777 == 0o600


def test_a_page_of_another_user_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who can write where pages lie could report anything. Root reads the pages of all."""
    with closing(CoreStatusPage(tmp_path / "page")), PauseLeasePage.make(tmp_path / "page.hold"):
        monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "page").stat().st_uid + 1)
        with pytest.raises(NoPage, match="another user"):
            CoreStatusReader(tmp_path / "page").read()
        with pytest.raises(NoPage, match="another user"):
            PauseLeasePage.open(tmp_path / "page.hold")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        CoreStatusReader(tmp_path / "page").read()


@pytest.mark.parametrize("content", [None, b"", b"WBCP", b"x" * PAGE_BYTES])
def test_what_is_no_page(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "page").write_bytes(content)
    with pytest.raises(NoPage):
        CoreStatusReader(tmp_path / "page").read()


def test_a_new_core_takes_the_page_over(tmp_path: Path) -> None:
    """What the last one left, ended or not, is gone."""
    reader = CoreStatusReader(tmp_path / "page")
    first = CoreStatusPage(tmp_path / "page", rank=1)
    first.count(step=9, wave=9)
    first.enter("step")
    with closing(CoreStatusPage(tmp_path / "page", rank=1)):
        assert (reader.read().phase, reader.read().step) == ("idle", 0)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_write_cut_anywhere_shows_the_one_before(tmp_path: Path, backwards: bool) -> None:
    """A writer that has come as far as any byte, its stores seen in order or the last first."""
    with closing(CoreStatusPage(tmp_path / "page")) as page:
        page.count(step=1, wave=1)
        page.enter("step")
        before, then = page.view(), (tmp_path / "page").read_bytes()
        page.count(step=2**40 + 2, wave=2**50 + 2, waiting=2, running=2)
        page.enter("sync")
        after, now = page.view(), (tmp_path / "page").read_bytes()
    written = [at for at in range(PAGE_BYTES) if then[at] != now[at]]
    assert len(written) > 10  # the checksum among them
    for cut in range(len(written)):
        page_bytes = bytearray(then)
        for at in (written[::-1] if backwards else written)[:cut]:
            page_bytes[at] = now[at]
        (tmp_path / "cut").write_bytes(page_bytes)
        assert CoreStatusReader(tmp_path / "cut").read() == before
    (tmp_path / "cut").write_bytes(now)
    assert CoreStatusReader(tmp_path / "cut").read() == after


def test_it_can_be_read_at_any_time(tmp_path: Path) -> None:
    """The writer writes as fast as it can, and threads of its own take the GIL from it in the
    middle; each view is whole: all its numbers are of one write, and none is older than what
    was seen before."""
    program = f"""
import threading
from pathlib import Path
from sidecar._shared_pages.core_status import CoreStatusPage

def spin():
    while True:
        sum(range(1000))

for _ in range(3):
    threading.Thread(target=spin, daemon=True).start()
page = CoreStatusPage(Path({str(tmp_path / "page")!r}))
number = 0
print("begun", flush=True)
while True:
    number += 1
    page.count(step=number, wave=number, waiting=number, running=number)
    page.enter("step")
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT
    ) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            reader = CoreStatusReader(tmp_path / "page")
            seen = [0]
            deadline_s = time.monotonic() + 1.5
            while time.monotonic() < deadline_s or seen[-1] < 100:
                assert writer.poll() is None
                view = reader.read()
                assert view.step == view.wave == view.waiting == view.running
                assert view.step >= seen[-1]
                seen.append(view.step)
        finally:
            writer.kill()
