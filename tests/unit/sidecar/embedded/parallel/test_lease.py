"""Two embedded ranks whose leases are over: they resume once both have voted, or none does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import pytest
from msgspec.structs import replace

from bus.errors import EngineError
from sidecar._embedded.config import read_config
from sidecar._embedded.model import ModelRunner
from sidecar._embedded.parallel.core import LockstepCore
from sidecar._embedded.parallel.lease import EmbeddedLease
from sidecar._embedded.parallel.options import DataParallel
from sidecar._embedded.parallel.waves import RankWaves
from sidecar._shared_pages.core_status import CoreStatusPage
from sidecar._shared_pages.pause_lease import PauseLease
from tests.support.checkpoints import make_checkpoint
from tests.support.lease_store import LeaseStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LIMIT_S = 60.0
FAR_NS = 2**62
LEASE = PauseLease(7, "u1", 0, 1, "moe", 3, "", (), asleep=False, resuming=False)


class Core:
    """A core, with what carries out its updates, whose actions run at once."""

    def __init__(self) -> None:
        self.resumes = 0
        self.is_resuming = False
        self.is_paused = self.is_pause_complete = True
        self.done: list[str] = []
        self.changed = threading.Event()
        self.fails = False
        self.lease: Any = None
        self.memory = self

    def call(self, action: Callable[[], None]) -> None:
        action()

    def join_pause(self) -> None:
        self.is_paused = self.is_pause_complete = True
        self._do("pause")

    def end_requests(self) -> None:
        self._do("end")

    def require_whole(self) -> None:
        raise EngineError("an update is open")

    def restore(self) -> None:
        if self.fails:
            raise EngineError("it broke")
        self._do("restore")

    def wake(self) -> None:
        self._do("wake")

    def resume(self) -> None:
        self.is_paused = self.is_pause_complete = False
        self.resumes += 1
        self._do("resume")

    def _do(self, what: str) -> None:
        self.done.append(what)
        if what in ("resume", "end"):
            self.changed.set()


@pytest.fixture
def ranks() -> Iterator[list[tuple[Core, EmbeddedLease]]]:
    store, made = LeaseStore(), []
    for rank in range(2):
        core = Core()
        options = DataParallel(2, rank, "127.0.0.1:1", "moe")
        lease = EmbeddedLease(options, cast("Any", core), cast("Any", core), store)
        made.append((core, lease))
    yield made
    for _, lease in made:
        lease.close()


def test_ranks_resume_together(ranks: list[tuple[Core, EmbeddedLease]]) -> None:
    """What an update had begun is undone before, and what slept is awake."""
    for _, lease in ranks:
        assert lease.page.write_lease(replace(LEASE, begun="model", asleep=True)) is None
    for core, lease in ranks:
        assert core.changed.wait(LIMIT_S)
        assert core.done == ["restore", "wake", "resume"]
        end = lease.page.write_lease(LEASE)
        assert end is not None
        assert end.state == "resumed"


def test_a_rank_that_can_not_undo_keeps_both_paused(
    ranks: list[tuple[Core, EmbeddedLease]],
) -> None:
    ranks[1][0].fails = True
    for _, lease in ranks:
        lease.page.write_lease(replace(LEASE, begun="model"))
    for core, _ in ranks:
        assert core.changed.wait(LIMIT_S)
        assert "resume" not in core.done


def test_a_rank_that_was_never_asked_to_pause_joins_its_peer(
    ranks: list[tuple[Core, EmbeddedLease]],
) -> None:
    """Whose pause is not complete without it; then both resume."""
    (first, lease), (second, _) = ranks
    second.is_paused = second.is_pause_complete = first.is_pause_complete = False
    lease.page.write_lease(LEASE)
    join = second.join_pause

    def join_pause() -> None:
        join()
        first.is_pause_complete = True

    second.join_pause = join_pause  # type: ignore[method-assign]
    for core in (first, second):
        assert core.changed.wait(LIMIT_S)
    assert second.done == ["pause", "resume"]
    assert first.done == ["resume"]


class Peer:
    name, rank = "moe", 0


class Voted:
    is_void = True


def test_a_rank_that_has_voted_changes_no_weights(tmp_path: Path) -> None:
    config = read_config(make_checkpoint(tmp_path, seed=3).folder)
    core = LockstepCore(
        ModelRunner(config, slots=1, max_len=8),
        slots=1,
        publish=cast("Any", None),
        died=pytest.fail,
        page=CoreStatusPage(None),
        group=cast("Any", Peer()),
        waves=RankWaves(0, 2),
        report=lambda _: None,
    )
    core._mode = "keep"
    core.require_paused("load")
    core.lease = cast("Any", Voted())
    with pytest.raises(EngineError, match="the ranks decide how the pause ends"):
        core.require_paused("load")
