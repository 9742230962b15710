"""The matrix, its page, and its share in every run."""

from __future__ import annotations

from tests.faults.matrix import (
    ACTORS,
    CELLS,
    FAULTS,
    OF_VLLM,
    PAGE,
    SHARE,
    STEPS,
    VLLM_ACTORS,
    VLLM_CELLS,
    VLLM_SHARE,
    filled,
)


def test_every_combination_is_a_cell() -> None:
    """Each has a test of its own, in `make chaos`."""
    assert len(set(CELLS)) == len(ACTORS) * len(FAULTS) * len(STEPS)


def test_the_share_has_everything() -> None:
    """Each actor and each fault, if not each of their combinations."""
    assert {cell.actor for cell in SHARE} == ACTORS.keys()
    assert {cell.fault for cell in SHARE} == FAULTS.keys()


def test_the_cells_on_vllm_have_everything() -> None:
    """Each scene's actors; each fault, and each step but the canary, in one of them."""
    assert {(cell.scene, cell.actor) for cell in VLLM_CELLS} == {
        (scene, actor) for scene, actors in VLLM_ACTORS.items() for actor in actors
    }
    assert {cell.fault for cell in VLLM_CELLS} == FAULTS.keys()
    assert {cell.step for cell in VLLM_CELLS} == STEPS.keys() - {"canary"}
    of_vllm = {cell.fault for cell in VLLM_CELLS if cell.actor in OF_VLLM}
    assert of_vllm == {"sigkill", "sigstop"}  # they have no link of their own
    assert {cell.scene for cell in VLLM_SHARE} == VLLM_ACTORS.keys()
    assert set(VLLM_SHARE) < set(VLLM_CELLS)


def test_the_page_is_the_matrix() -> None:
    """Else: ``python -m tests.faults.matrix``."""
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page
