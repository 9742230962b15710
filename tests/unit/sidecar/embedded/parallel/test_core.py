"""A rank that is ready to swap, and whose peer rank is not yet."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

from sidecar._embedded.config import read_config
from sidecar._embedded.model import ModelRunner
from sidecar._embedded.parallel.core import LockstepCore
from sidecar._embedded.parallel.waves import RankWaves
from sidecar._embedded.requests import GenerationRequest
from sidecar._embedded.sampling import SamplingParams
from sidecar._shared_pages.core_status import CoreStatusPage
from tests.support.checkpoints import make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar._embedded.parallel.group import RankGroup
    from sidecar._embedded.requests import Delta

LIMIT_S = 60.0
# The peer rank is ready at the fifth step at which it confers with one that is.
STEPS_APART = 5
TOKENS = 40


class PeerRank:
    """The other rank, as far as the first one sees it: it always has work, and is never paused."""

    name, rank, size = "m", 0, 2

    def __init__(self) -> None:
        self.steps_waited = 0

    def sums(self, unfinished: int, paused: int = 0, ready: int = 0) -> list[int]:
        """Of the numbers of both ranks."""
        self.steps_waited += ready
        return [unfinished + 1, paused, ready + (self.steps_waited >= STEPS_APART)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    config = read_config(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=3).folder)
    return ModelRunner(config, slots=2, max_len=64)


def test_it_generates_until_the_peer_rank_is_ready_and_swaps_then(model: ModelRunner) -> None:
    first_token, ended = threading.Event(), threading.Event()
    versions: list[int] = []

    def publish(deltas: Sequence[Delta]) -> None:
        for _ in deltas:
            versions.append(core.version)
            first_token.set()
            if len(versions) == TOKENS:
                ended.set()

    def take() -> None:
        core.version = 1

    peer = PeerRank()
    core = LockstepCore(
        model,
        slots=2,
        publish=cast("Any", publish),
        died=pytest.fail,
        page=CoreStatusPage(None),
        group=cast("RankGroup", peer),
        waves=RankWaves(0, 2, interval=1),
        report=lambda _: None,
    )
    core.start()
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    core.submit(GenerationRequest("r", (5, 9, 77), params, 0, TOKENS, (), stream=True))
    assert first_token.wait(LIMIT_S)
    tokens_before: list[int] = []
    made = core.swap(lambda: tokens_before.append(len(versions)), take, clear_cache=False)
    made.result(LIMIT_S)
    assert ended.wait(LIMIT_S)
    core.stop()
    assert peer.steps_waited == STEPS_APART
    # A token at each of those steps but the last, which follows the swap.
    assert versions.count(0) >= tokens_before[0] + STEPS_APART - 1
    assert versions == sorted(versions)
