"""The matrix, its page, and its share in every run."""

from __future__ import annotations

from tests.faults.matrix import ACTORS, CELLS, FAULTS, PAGE, SHARE, STEPS, filled


def test_every_combination_is_a_cell() -> None:
    """Each has a test of its own, in `make chaos`."""
    assert len(set(CELLS)) == len(ACTORS) * len(FAULTS) * len(STEPS)


def test_the_share_has_everything() -> None:
    """Each actor and each fault, if not each of their combinations."""
    assert {cell.actor for cell in SHARE} == ACTORS.keys()
    assert {cell.fault for cell in SHARE} == FAULTS.keys()


def test_the_page_is_the_matrix() -> None:
    """Else: ``python -m tests.faults.matrix``."""
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page
