"""The matrix, its page, and its share in every run."""

from __future__ import annotations

from tests.faults.clients import CLIENT_CELLS, CLIENT_SHARE
from tests.faults.matrix import (
    ACTORS,
    CELLS,
    COLLECTIVE_CELLS,
    COLLECTIVE_SHARE,
    FAULTS,
    OF_MATES,
    OF_VLLM,
    PAGE,
    PAUSED_COLLECTIVE_CELLS,
    SHARE,
    SLOW_SHARE,
    STAGED_CELLS,
    STAGED_SHARE,
    STAGED_VLLM_CELLS,
    STAGED_VLLM_SHARE,
    VLLM_ACTORS,
    VLLM_CELLS,
    VLLM_SHARE,
    clears_cache,
    filled,
)
from tests.faults.steps import COLLECTIVE_STEPS, STAGED_STEPS, STEPS


def test_every_combination_is_a_cell() -> None:
    """Each has a test of its own, in `make chaos`."""
    assert len(set(CELLS)) == len(ACTORS) * len(FAULTS) * len(STEPS)
    of_two_ranks = (len(ACTORS) - 1) * len(FAULTS) * len(OF_MATES)
    staged = len(ACTORS) * len(FAULTS) * len(STAGED_STEPS) - of_two_ranks
    assert len({*CELLS, *STAGED_CELLS}) == len(CELLS) + staged


def test_ends_of_communicators_fail_at_each_chunk() -> None:
    """Processes die and stop, of engines and of the trainer. Of links, those of engines fail."""
    assert {(cell.actor, cell.step) for cell in COLLECTIVE_CELLS} == {
        (actor, step) for actor in ("sidecar", "engine", "rank0") for step in COLLECTIVE_STEPS
    }
    both = {*COLLECTIVE_CELLS, *PAUSED_COLLECTIVE_CELLS}
    assert {cell.how for cell in both} == {"staged", "paused"}
    assert {clears_cache(cell) for cell in both} == {False, True}
    assert set(COLLECTIVE_SHARE) < set(COLLECTIVE_CELLS)
    assert len({str(cell) for cell in (*CELLS, *STAGED_CELLS, *both)}) == len(
        {*CELLS, *STAGED_CELLS, *both}
    )


def test_each_step_has_both_kinds_of_cache() -> None:
    """Requests go on over old keys and values, and over new ones, whoever fails at it."""
    for kinds in (ACTORS, FAULTS, STAGED_STEPS):
        for name in kinds:
            mine = [each for each in STAGED_CELLS if name in (each.actor, each.fault, each.step)]
            assert {clears_cache(cell) for cell in mine} == {False, True}, name


def test_the_share_has_everything() -> None:
    """Each actor and each fault, if not each of their combinations."""
    always = {*SHARE, *STAGED_SHARE} - SLOW_SHARE
    for share in (set(SHARE), always):
        assert {cell.actor for cell in share} == ACTORS.keys()
        assert {cell.fault for cell in share} == FAULTS.keys()
    assert set(SHARE) > SLOW_SHARE
    assert set(STAGED_SHARE) < set(STAGED_CELLS)


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
    assert set(STAGED_VLLM_SHARE) < set(STAGED_VLLM_CELLS)


def test_the_page_is_the_matrix() -> None:
    """Else: ``python -m tests.faults.matrix``."""
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page


def test_the_page_shows_the_clients_cells() -> None:
    """With the outcome of each."""
    begin, end = (f"<!-- {slash}clients -->" for slash in ("", "/"))
    shown = PAGE.read_text().split(begin)[1].split(end)[0].strip().splitlines()[2:]
    rows = {
        row[0]: row[1:] for row in ([c.strip() for c in each.split("|")[1:-1]] for each in shown)
    }
    expected: dict[str, list[str]] = {}
    for cell in CLIENT_CELLS:
        expected.setdefault(cell.last, ["", ""])[cell.within] = cell.outcome
    assert rows == expected
    assert {each.outcome for each in CLIENT_SHARE} == {each.outcome for each in CLIENT_CELLS}
