"""The hold page: what either side writes the other one reads, whole, at any time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from sidecar.holdpage import PAGE_BYTES, Hold, HoldEnd, HoldPage, NoHoldPage

if TYPE_CHECKING:
    from pathlib import Path

HOLD = Hold(7, "u1", 10**12, 4711, "e0", 3, "draft", ("draft", "model"), asleep=True, resuming=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    HoldPage.make(tmp_path / "1.hold").close()
    return tmp_path / "1.hold"


def test_what_is_written_is_read(path: Path) -> None:
    """By somebody else, and by whoever opens it next; the halves don't touch each other."""
    with HoldPage.open(path) as sidecar, HoldPage.open(path) as core:
        assert (core.hold(), sidecar.end()) == (None, None)
        for serial in range(1, 6):
            sidecar.write_hold(replace(HOLD, serial=serial))
            core.write_end(serial, "waiting", "for rank 1")
            assert core.hold() == replace(HOLD, serial=serial)
            assert sidecar.end() == HoldEnd(serial, "waiting", "for rank 1")
        sidecar.write_hold(None)
        assert core.hold() is None
    with HoldPage.open(path) as page:
        assert page.hold() is None
        page.write_hold(HOLD)
        assert page.hold() == HOLD
        assert page.end() == HoldEnd(5, "waiting", "for rank 1")


def test_a_write_that_broke_off_is_not_read(path: Path) -> None:
    """The one before it stands."""
    with HoldPage.open(path) as page:
        page.write_hold(replace(HOLD, serial=1))
        page.write_hold(replace(HOLD, serial=2))
        _, at, _ = page._slots(0)[-1]
        page._memory[at + 30] ^= 0xFF
        assert page.hold() == replace(HOLD, serial=1)
        page.write_hold(replace(HOLD, serial=3))
        assert page.hold() == replace(HOLD, serial=3)


def test_a_page_is_its_owners(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_long_reason_is_cut(path: Path) -> None:
    with HoldPage.open(path) as page:
        page.write_end(1, "quarantined", "x" * 1000)
        end = page.end()
        assert end is not None
        assert end.reason == "x" * 256


@pytest.mark.parametrize("content", [None, b"", b"WBHP", b"x" * PAGE_BYTES])
def test_what_is_no_page(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "page").write_bytes(content)
    with pytest.raises(NoHoldPage):
        HoldPage.open(tmp_path / "page")


@pytest.mark.parametrize(
    ("serial", "state", "broken"),
    [
        (7, "quarantined", ()),
        (7, "waiting", ()),
        (8, "quarantined", ()),
        (7, "waiting", ("draft",)),
    ],
)
def test_what_was_left_behind(path: Path, serial: int, state: str, broken: tuple[str, ...]) -> None:
    """An end of another hold is none; who was quarantined for a mate's sake lacks the model."""
    with HoldPage.open(path) as page:
        assert page.left_behind(paused=True) is None
        page.write_hold(replace(HOLD, broken=broken))
        page.write_end(serial, state, "")  # type: ignore[arg-type]
        assert page.left_behind(paused=False) is None
        left = page.left_behind(paused=True)
        assert left is not None
        assert left.hold == replace(HOLD, broken=broken)
        quarantined = (serial, state) == (7, "quarantined")
        assert left.broken == (broken or (("model",) if quarantined else ()))
        assert (left.end is not None) == (serial == 7)
