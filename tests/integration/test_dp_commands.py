"""Data parallel ranks as a user starts them: one ``wavebus sidecar`` each, on one bus."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from bus._runtime.status_client import fetch_status
from sidecar._shared_pages.core_status import CoreStatusReader
from sidecar._supervision.launch import free_port
from tests.integration.test_killed import engines, generate
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.procs import PATIENCE_S, wavebus
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from pathlib import Path

    from bus.messages import SleepLevel
    from tests.integration.conftest import Bus
    from tests.support.procs import Proc

PROMPT = [5, 9, 7]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("moe"), seed=8, experts=4)


def ranks(bus: Bus, moe: Checkpoint, folder: Path, size: int = 2) -> list[Proc]:
    """All ranks of a group, joined."""
    master = f"127.0.0.1:{free_port()}"
    started = [
        bus.add(
            wavebus(
                *("sidecar", "--broker", bus.address, "--name", f"e{rank}"),
                *("--engine", "embedded", "--model", str(moe.folder)),
                *("--dp-group", "moe", "--dp-size", str(size), "--dp-rank", str(rank)),
                *("--dp-master", master, "--core-page", str(folder / f"page{rank}")),
            )
        )
        for rank in range(size)
    ]
    for _ in range(size):
        bus.broker.wait_event("peer_joined", role="engine")
    return started


def test_ranks_serve_take_an_update_and_end(bus: Bus, moe: Checkpoint, tmp_path: Path) -> None:
    """Each serves requests; one update reaches all; SIGTERM ends them in order."""
    started = ranks(bus, moe, tmp_path)
    (group,) = asyncio.run(fetch_status(bus.address, timeout_s=60)).groups
    assert {(e.dp_group, e.dp_rank) for e in group.engines} == {("moe", 0), ("moe", 1)}
    found = engines(bus)
    for name in ("e1", "e0"):
        tokens = generate(found[name].endpoint, 12)
        assert tokens == moe.greedy(moe.weights, PROMPT, 12)
    new = perturbed(moe.weights, 5)

    async def update() -> None:
        async with TrainerAgent(bus.address) as trainer:
            await trainer.wait_for_engines(2)
            assert await trainer.update_weights(list(new.items())) == 1

    asyncio.run(update())
    for name in ("e0", "e1"):
        assert generate(found[name].endpoint, 12) == moe.greedy(new, PROMPT, 12)
    pages = [CoreStatusReader(tmp_path / f"page{rank}").read() for rank in range(2)]
    assert [page.rank for page in pages] == [0, 1]
    for rank in started:
        rank.signal(signal.SIGTERM)
    assert [rank.wait() for rank in started] == [0, 0]


@pytest.mark.ci
def test_ranks_sleep_and_wake_together(bus: Bus, moe: Checkpoint, tmp_path: Path) -> None:
    """Of either level, with an update in between; afterwards each serves it."""
    ranks(bus, moe, tmp_path)
    found = engines(bus)
    new = moe.weights

    async def sleep(level: SleepLevel) -> None:
        async with TrainerAgent(bus.address) as trainer:
            await trainer.wait_for_engines(2)
            async with trainer.asleep(level=level):
                await trainer.update_weights(list(new.items()))

    for level in (1, 2):
        new = perturbed(moe.weights, 20 + level)
        asyncio.run(sleep(level))
        for name in ("e1", "e0"):
            assert generate(found[name].endpoint, 12) == moe.greedy(new, PROMPT, 12)


@pytest.mark.ci
def test_a_rank_that_is_stopped_alone_takes_its_peers_with_it(
    bus: Bus, moe: Checkpoint, tmp_path: Path
) -> None:
    """They exit as for a dead engine, and say which rank has left."""
    first, second = ranks(bus, moe, tmp_path)
    assert second.stop() == 0
    assert "rank 1 of DP group moe has left" in first.wait_event("engine_died")["reason"]
    assert first.process.wait(PATIENCE_S) == 4


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--dp-size", "2", "--dp-master", "127.0.0.1:1", "--dp-group", "m"), "--dp-rank"),
        (("--dp-size", "2", "--dp-rank", "0", "--dp-group", "m"), "--dp-master"),
        (("--dp-size", "2", "--dp-rank", "0", "--dp-master", "127.0.0.1:1"), "--dp-group"),
        (("--dp-rank", "0"), "--dp-size"),
        (
            ("--dp-size=2", "--dp-rank=2", "--dp-master=127.0.0.1:1", "--dp-group=m"),
            "dp_rank=2",
        ),
        (("--dp-size=2", "--dp-rank=0", "--dp-master=nowhere", "--dp-group=m"), "dp_master"),
        (("--dp-size=8", "--dp-rank=0", "--dp-master=h:1", "--dp-group=m"), "4 experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_do_not_fit_are_refused(
    moe: Checkpoint, options: tuple[str, ...], word: str
) -> None:
    """By name, before anything is started."""
    with wavebus("sidecar", "--model", str(moe.folder), *options) as sidecar:
        assert sidecar.wait() == 2
    assert word in sidecar.all_text()
    assert "Traceback" not in sidecar.all_text()
