"""The lease page: what either side writes the other one reads, whole, at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from sidecar._shared_pages.pause_lease import (
    PAGE_BYTES,
    LeaseOutcome,
    PauseLease,
    PauseLeasePage,
)
from sidecar._shared_pages.two_slot_page import NoPage

if TYPE_CHECKING:
    from pathlib import Path

HOLD = PauseLease(
    7, "u1", 10**12, 4711, "e0", 3, "draft", ("draft", "model"), asleep=True, resuming=True
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    PauseLeasePage.make(tmp_path / "1.hold").close()
    return tmp_path / "1.hold"


def test_what_is_written_is_read(path: Path) -> None:
    """By somebody else, and by whoever opens it next; the halves don't touch each other."""
    with PauseLeasePage.open(path) as sidecar, PauseLeasePage.open(path) as core:
        assert (core.lease(), sidecar.outcome()) == (None, None)
        for serial in range(1, 6):
            sidecar.write_lease(replace(HOLD, serial=serial))
            core.write_outcome(serial, "waiting", "for rank 1")
            assert core.lease() == replace(HOLD, serial=serial)
            assert sidecar.outcome() == LeaseOutcome(serial, "waiting", "for rank 1")
        sidecar.write_lease(None)
        assert core.lease() is None
    with PauseLeasePage.open(path) as page:
        assert page.lease() is None
        page.write_lease(HOLD)
        assert page.lease() == HOLD
        assert page.outcome() == LeaseOutcome(5, "waiting", "for rank 1")


def test_a_page_is_its_owners(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_long_reason_is_cut(path: Path) -> None:
    with PauseLeasePage.open(path) as page:
        page.write_outcome(1, "quarantined", "x" * 1000)
        end = page.outcome()
        assert end is not None
        assert end.reason == "x" * 256


@pytest.mark.parametrize("content", [None, b"", b"WBHP", b"x" * PAGE_BYTES])
def test_what_is_no_page(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "page").write_bytes(content)
    with pytest.raises(NoPage):
        PauseLeasePage.open(tmp_path / "page")


@pytest.mark.parametrize(
    ("serial", "state", "partial"),
    [
        (7, "quarantined", ()),
        (7, "waiting", ()),
        (8, "quarantined", ()),
        (7, "waiting", ("draft",)),
    ],
)
def test_what_was_left_behind(
    path: Path, serial: int, state: str, partial: tuple[str, ...]
) -> None:
    """An end of another lease is none; who was quarantined for a peer's sake lacks the model."""
    with PauseLeasePage.open(path) as page:
        assert page.abandoned_pause(paused=True) is None
        page.write_lease(replace(HOLD, partial=partial))
        page.write_outcome(serial, state, "")  # type: ignore[arg-type]
        assert page.abandoned_pause(paused=False) is None
        left = page.abandoned_pause(paused=True)
        assert left is not None
        assert left.lease == replace(HOLD, partial=partial)
        quarantined = (serial, state) == (7, "quarantined")
        assert left.partial == (partial or (("model",) if quarantined else ()))
        assert (left.outcome is not None) == (serial == 7)


def test_one_at_a_time_has_an_engine(tmp_path: Path) -> None:
    """Until it closes the page; and nobody has one whose core has ended."""
    path = tmp_path / "page"
    with PauseLeasePage.make(path), PauseLeasePage.open(path) as one:
        other = PauseLeasePage.open(path)
        assert (one.claim(), other.claim()) == (True, False)
        one.close()
        other.close()
        with PauseLeasePage.open(path) as third:
            assert third.claim()
            path.unlink()
            with pytest.raises(NoPage), PauseLeasePage.open(path):
                pass
            third.close()
            with pytest.raises(NoPage, match="No such file"):
                third.claim()
