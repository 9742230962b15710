"""An engine's hold as its sidecar has it: on the page of every core behind the one client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

import bus.log
from bus.errors import EngineError
from bus.messages import NO_LIMITS, NackCode
from sidecar._shared_pages.core_status import LOCALLY_PAUSED, CoreStatusPage
from sidecar._shared_pages.pause_lease import (
    LeaseOutcome,
    OutcomeState,
    PauseLease,
    PauseLeasePage,
    lease_path,
)
from sidecar._vllm.core_state import CoreLink
from sidecar._vllm.plugin.worker_rpc import WorkerFacts

if TYPE_CHECKING:
    from pathlib import Path

PIDS = (1000, 1001)
HOLD = PauseLease(7, "u1", 10**12, 4711, "e0", 3, "", (), asleep=False, resuming=False)


class Pages:
    """Those of two cores, and the link to them."""

    def __init__(self, folder: Path) -> None:
        paths = [folder / f"{pid}.page" for pid in PIDS]
        self.status = [CoreStatusPage(path) for path in paths]
        self.holds = [PauseLeasePage.make(lease_path(path)) for path in paths]
        self.facts = WorkerFacts("vllm", "", 0, PIDS[0], str(paths[0]), PIDS, {}, NO_LIMITS)
        self.link = CoreLink("vllm")
        self.new_link()

    def new_link(self, cores: int = 2) -> CoreLink:
        """That of another sidecar, after the one before has ended."""
        self.link.close()
        self.link = CoreLink("vllm")
        self.link.open(self.facts, dp_size=2, cores=cores)
        return self.link

    def end(self, *states: OutcomeState | None, serial: int = 7) -> None:
        """What the cores have made of it, in their order."""
        for page, state in zip(self.holds, states, strict=True):
            if state is not None:
                page.write_outcome(serial, state, f"it is {state}")


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    return Pages(tmp_path)


def test_every_core_hears_by_what_they_are_held_and_who_they_are(pages: Pages) -> None:
    assert pages.link.write_pause_lease(HOLD) is None
    assert [page.lease() for page in pages.holds] == [replace(HOLD, cores=PIDS)] * 2
    assert pages.link.write_pause_lease(None) is None
    assert [page.lease() for page in pages.holds] == [None, None]


def test_one_core_decides_alone(pages: Pages) -> None:
    """It has no peer ranks, whoever else is a child of its parent."""
    link = pages.new_link(cores=1)
    assert link.write_pause_lease(HOLD) is None
    assert [page.lease() for page in pages.holds] == [HOLD, None]
    pages.end("waiting", None)
    assert link.write_pause_lease(HOLD) == LeaseOutcome(7, "waiting", "it is waiting")
    assert link.write_pause_lease(replace(HOLD, serial=8)) is None


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (("resumed", "resumed"), "resumed"),
        (("resumed", None), "waiting"),
        (("waiting", "resumed"), "waiting"),
        (("waiting", "quarantined"), "quarantined"),
        ((None, "quarantined"), "quarantined"),
    ],
)
def test_they_have_decided_when_all_have(
    pages: Pages, states: tuple[OutcomeState | None, ...], state: OutcomeState
) -> None:
    """Or when one is quarantined: the others follow."""
    pages.link.write_pause_lease(HOLD)
    pages.end(*states)
    end = pages.link.write_pause_lease(HOLD)
    assert end is not None
    assert (end.serial, end.state) == (7, state)


@pytest.mark.parametrize("states", [("waiting", None), ("resumed", "waiting")])
def test_a_hold_is_not_taken_from_under_who_has_voted(
    pages: Pages, states: tuple[OutcomeState | None, ...]
) -> None:
    """One may have resumed: the other is not to be held on; when both have, there is a new one."""
    pages.link.write_pause_lease(HOLD)
    pages.end(*states)
    end = pages.link.write_pause_lease(replace(HOLD, serial=8))
    assert end is not None
    assert (end.serial, end.state) == (8, "waiting")
    assert [page.lease() for page in pages.holds] == [replace(HOLD, cores=PIDS)] * 2
    pages.end("resumed", "resumed")
    assert pages.link.write_pause_lease(replace(HOLD, serial=8)) is None
    assert [page.lease() for page in pages.holds] == [replace(HOLD, serial=8, cores=PIDS)] * 2


def test_what_was_left_behind_is_the_worst_of_both(pages: Pages) -> None:
    """Of those that are paused."""
    pages.link.write_pause_lease(HOLD)
    assert pages.new_link().abandoned_pause() is None
    for page in pages.status:
        page.count(step=1, wave=0, flags=LOCALLY_PAUSED)
        page.enter("idle")
    pages.end("waiting", "quarantined")
    left = pages.new_link().abandoned_pause()
    assert left is not None
    assert left.partial == ("model",)


def test_cores_that_are_not_all_found_are_held_by_nobody(
    pages: Pages, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of another host, say."""
    bus.log.configure(level="warning", json=True)
    link = pages.new_link(cores=3)
    assert link.write_pause_lease(HOLD) is None
    assert [page.lease() for page in pages.holds] == [None, None]
    assert "pause_lease_not_written" in (said := "".join(capsys.readouterr()))
    assert "3 cores are behind one client, but only 2 have pages on this host" in said


def test_an_engine_has_one_sidecar_of_its_host(pages: Pages) -> None:
    """A second one is refused before it changes anything; the first one writes on."""
    second = CoreLink("vllm")
    with pytest.raises(EngineError, match="another sidecar of this host") as refused:
        second.open(pages.facts, dp_size=2, cores=2)
    assert refused.value.code is NackCode.NAME_TAKEN
    second.close()
    assert pages.link.write_pause_lease(HOLD) is None
    pages.link.open(pages.facts, dp_size=2, cores=2)  # it begins anew
    pages.link.close()
    second.open(pages.facts, dp_size=2, cores=2)
    second.close()
