"""Engines that offload keys and values to memory and to disk, while weights are updated: each token
is the one of its version, wherever its keys and values were found."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm._kv import (
    BLOCK,
    BLOCKS,
    FEW_BLOCKS,
    HITS,
    LENGTH,
    PREFILL_AND_DECODE,
    RUNNING,
    WAITING,
    Served,
    checkpoint_in,
    nixl,
    run,
)
from tests.vllm._vllm import require_vllm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]

PLENTY_BYTES = 64 << 20
# In the memory before the disk, so that what is found has often been on the disk alone.
FEW_BYTES = 40 * 32 << 10
LEASE_S = 24
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None,
    reason="the wheels nixl and nixl-cu12 are not installed here",
)


def offloading(disk: Path | None = None) -> dict[str, Any]:
    """To memory alone, or to memory and this folder."""
    extra: dict[str, Any] = {
        "spec_module_path": "tests.support.offload_spec",
        "spec_name": "LateCPUSpec",
        "cpu_bytes_to_use": PLENTY_BYTES,
    }
    if disk is not None:
        tiers = [{"type": "fs", "root_dir": str(disk), "n_read_threads": 1, "n_write_threads": 1}]
        extra |= {
            "spec_name": "LateTieringSpec",
            "cpu_bytes_to_use": FEW_BYTES,
            "secondary_tiers": tiers,
        }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def both() -> dict[str, Any]:
    """NIXL between engines, and offload to each one's memory."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [nixl(LEASE_S), offloading()]},
    }


@dataclass
class Store:
    """Engines that offload, and the folder of their disk; ``other`` is of another run, and has that
    folder, too."""

    served: Served
    disk: Path
    other: Served | None = None

    @property
    def name(self) -> str:
        """An engine that finds nothing but what it has offloaded."""
        return self.served.asked[0]


@pytest.fixture(
    scope="module",
    params=[
        "memory",
        "disk",
        pytest.param("pair", marks=[needs_nixl, pytest.mark.slow]),
        pytest.param("pipeline", marks=pytest.mark.slow),
    ],
)
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    """``pipeline``: of two workers, with steps behind the one that is on its way."""
    folder = tmp_path_factory.mktemp("store")
    disk = folder / "disk"
    asked = "pd" if request.param == "pair" else "e"
    sidecars = PREFILL_AND_DECODE if asked == "pd" else [("--name", "e")]
    connector = {"disk": offloading(disk), "pair": both()}.get(request.param, offloading())
    workers = ("--pipeline-parallel-size", "2") if request.param == "pipeline" else ()
    with contextlib.ExitStack() as stack:
        how = (checkpoint_in(folder), asked, sidecars, connector, *FEW_BLOCKS, *workers)
        found = Store(Served(stack, folder / "one", *how), disk)
        if request.param == "disk":
            found.other = Served(stack, folder / "other", *how)
            found.other.wait()
        found.served.wait()
        yield found


def prompt_of(blocks: int, seed: int) -> tuple[int, ...]:
    """Of so many, and a token of another one."""
    draw = random.Random(seed)
    return tuple(draw.randrange(2, 60) for _ in range(blocks * BLOCK + 1))


async def until(true: Callable[[], Any]) -> None:
    """Ask until it is so; vLLM tells nobody."""
    while not await true():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("store", ["disk"], indirect=True)
def test_two_runs_share_nothing_on_one_disk(store: Store) -> None:
    """Their versions have the same number and different weights. What one run has on the disk, it
    finds there itself."""
    one, two, prompt = store.served, store.other, prompt_of(3, seed=40)
    assert two is not None

    async def hits(served: Served, http: Any) -> float:
        """How many tokens a request finds on the disk."""
        before = await served.metric(http, HITS)
        assert served.check(prompt, await served.answer(http, prompt)) == {max(served.weights)}
        return await served.metric(http, HITS) - before

    async def evict(served: Served, http: Any) -> None:
        for seed in range(4):
            await served.decode(http, prompt_of(BLOCKS - 2, seed), tokens=1)

    async def main() -> None:
        async with one.clients() as (agent, http), two.clients() as (other, _):
            version = await one.update(agent)
            while max(two.weights) < version:
                await two.update(other, seed=1000 + len(two.weights))
            known = {*store.disk.rglob("*.bin")}
            assert await hits(one, http) == 0
            await until(lambda: holds_more(known, 3))
            assert await hits(two, http) == 0
            await until(lambda: holds_more(known, 6))
            for served in (one, two):
                await evict(served, http)
                assert await hits(served, http) == 3 * BLOCK

    async def holds_more(known: set[Path], count: int) -> bool:
        return len({*store.disk.rglob("*.bin")} - known) >= count

    run(main())


@pytest.mark.parametrize(
    "clear_cache",
    [
        pytest.param(False, id="keep"),
        pytest.param(True, id="clear", marks=pytest.mark.slow),
    ],
)
def test_a_request_that_waits_for_room_over_a_commit_finds_nothing_older(
    store: Store, clear_cache: bool
) -> None:
    """The connector has looked it up when it came, by hashes of the version before."""
    served, name = store.served, store.name
    waits, holds = prompt_of(10, seed=50 + clear_cache), prompt_of(7, seed=52 + clear_cache)

    async def main() -> None:
        async with served.clients() as (agent, http):
            left = LENGTH - len(holds)
            while True:
                await served.decode(http, waits, name=name)
                holding = asyncio.create_task(served.decode(http, holds, name=name, tokens=left))
                await until(lambda: served.metric(http, RUNNING, name))
                waiting = asyncio.create_task(served.decode(http, waits, name=name))
                await until(lambda: served.metric(http, WAITING, name))
                version = await served.update(agent, how="staged", clear_cache=clear_cache)
                if not waiting.done():
                    break
                await holding  # the update took longer: once more
            assert served.check(waits, await waiting) == {version}
            assert len((await holding)["weight_versions"]) == 2
            again = await served.decode(http, waits, name=name)
            assert served.check(waits, again) == {version}

    run(main())


@pytest.mark.parametrize(
    ("how", "clear_cache", "updates"),
    [
        pytest.param("staged", True, 3, id="staged-clear-3"),
        pytest.param("paused", False, 3, id="paused-keep-3"),
        pytest.param("staged", True, 20, id="staged-clear-20", marks=pytest.mark.slow),
        pytest.param("staged", False, 20, id="staged-keep-20", marks=pytest.mark.slow),
        pytest.param("paused", True, 20, id="paused-clear-20", marks=pytest.mark.slow),
        pytest.param("paused", False, 20, id="paused-keep-20", marks=pytest.mark.slow),
    ],
)
def test_each_token_is_of_its_version_under_load(
    store: Store,
    how: str,
    clear_cache: bool,
    updates: int,
    request: pytest.FixtureRequest,
) -> None:
    """Five clients; no engine is excluded, and nobody turned away. Much was found in the store."""
    served = store.served

    async def main() -> None:
        async with served.clients() as (agent, http):
            before = await served.metric(http, HITS, store.name)
            found = await served.update_under_load(
                agent, http, updates, seed=10 + updates, clear_cache=clear_cache, how=how
            )
            found["hits"] = int(await served.metric(http, HITS, store.name) - before)
            request.node.user_properties += found.items()  # in a report, `--junitxml`
            assert found["tokens"]
            assert found["hits"]
            assert bool(found["over_a_commit"]) is clear_cache

    run(main())
