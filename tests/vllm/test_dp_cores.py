"""Two cores behind one server (vLLM's internal load balancer), whose sidecar dies in a pause: they
resume together, or neither does."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from sidecar._shared_pages.core_status import LOCALLY_PAUSED, CoreStatusReader
from sidecar._shared_pages.pause_lease import LeaseOutcome, PauseLeasePage
from tests.vllm._vllm import PROMPT, require_vllm
from tests.vllm.test_deadline import LONG, Attached, Bus, load, until
from trainer_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar._shared_pages.core_status import CoreStatusView

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

CORES = 2


class AttachedCores(Attached):
    """One server with two of them."""

    def views(self) -> list[CoreStatusView]:
        """Their status pages."""
        return [CoreStatusReader(path).read() for path in sorted(self.pages.glob("*.page"))]

    def busy(self) -> bool:
        """Each has a request."""
        views = self.views()
        return len(views) == CORES and all(view.running for view in views)

    def paused(self) -> list[bool]:
        return [bool(view.flags & LOCALLY_PAUSED) for view in self.views()]

    def ends(self) -> list[LeaseOutcome]:
        """What each core has made of its hold; waits for it."""

        def found() -> list[LeaseOutcome]:
            ends = []
            for path in sorted(self.pages.glob("*.hold")):
                with PauseLeasePage.open(path) as page:
                    hold, end = page.lease(), page.outcome()
                if hold and end and end.serial == hold.serial and end.state != "waiting":
                    ends.append(end)
            return ends if len(ends) == CORES else []

        ends: list[LeaseOutcome] = until(found)
        return ends


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttachedCores]:
    folder = tmp_path_factory.mktemp("cores")
    started = AttachedCores(folder, "--data-parallel-size", str(CORES))
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture
def bus(attached: AttachedCores) -> Iterator[Bus]:
    with contextlib.ExitStack() as stack:
        yield Bus(stack, attached)


def test_a_sidecar_killed_in_a_pause(bus: Bus, attached: AttachedCores) -> None:
    """Both resume when the lease is over, and the requests of both end whole; the next sidecar
    finds them running."""
    sidecar = bus.sidecar()
    trainer = bus.trainer()
    requests = [attached.ask() for _ in range(CORES)]
    until(attached.busy)
    assert trainer.begin() == "paused"
    before = [len(request.tokens) for request in requests]
    assert attached.paused() == [True, True]
    sidecar.kill()
    assert [end.state for end in attached.ends()] == ["resumed", "resumed"]
    assert max(before) < LONG
    whole = attached.checkpoint.greedy(load(attached), PROMPT, LONG)
    assert [request.result() for request in requests] == [(whole, "length")] * CORES
    assert attached.paused() == [False, False]
    trainer.kill()
    again = bus.sidecar()
    assert bus.phase() == "running"
    assert again.stop() == 0


def test_a_sidecar_killed_with_a_chunk_loaded(bus: Bus, attached: AttachedCores) -> None:
    """Both stay paused, their requests end with the tokens they have, and a whole update frees
    both."""
    sidecar = bus.sidecar()
    trainer = bus.trainer(str(attached.checkpoint.folder))
    requests = [attached.ask() for _ in range(CORES)]
    until(attached.busy)
    assert trainer.begin() == "chunk"
    sidecar.kill()
    assert [end.state for end in attached.ends()] == ["quarantined", "quarantined"]
    for request in requests:
        tokens, finish = request.result()
        assert 0 < len(tokens) < LONG
        assert finish == "abort"
    assert attached.paused() == [True, True]
    trainer.kill()
    again = bus.sidecar()
    assert bus.phase() == "quarantined"
    with SyncTrainerAgent(bus.address, name="next", lease_ms=14_000) as agent:
        agent.wait_for_engines(1, timeout_s=60)
        agent.update_weights(list(load(attached).items()))
    whole = attached.checkpoint.greedy(load(attached), PROMPT, LONG)
    requests = [attached.ask() for _ in range(CORES)]
    assert [request.result()[0] for request in requests] == [whole] * CORES
    assert again.stop() == 0
