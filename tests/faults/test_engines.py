"""An engine that is killed, and restarts, between two calls of a gateway's client, cell by cell."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pytest
from safetensors.torch import load_file, save_file

from bus._runtime.status_client import fetch_status
from tests.faults.test_clients import Load
from tests.faults.test_faults import ALL
from tests.support.broadcasts import described
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.http_fleet import Fleet, fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from torch import Tensor

LIMIT_S = 240.0
PATHS: Final = {
    "pause": "/pause?mode=keep",
    "start": "/start_weight_update",
    "finish": "/finish_weight_update",
    "resume": "/resume",
    "sleep": "/sleep?level=1",
    "wake": "/wake_up?tags=weights",
}
KINDS: Final = {
    "paused": ("pause", "init", "start", "update", "finish", "resume"),
    "staged": ("init", "start", "update", "finish"),
    "folder": ("pause", "folder", "folder", "resume"),
    "asleep": ("pause", "sleep", "wake", "resume"),
}
# An engine was in the communicator that was opened for these calls.
REFUSED: Final = {"init": ("update", "finish"), "start": ("update", "finish")}


@dataclass(frozen=True, slots=True)
class EngineCell:
    """The calls of a client, after how many an engine is killed, and which later ones fail."""

    kind: str
    count: int

    def __str__(self) -> str:
        return f"{self.kind}-after-{self.count}-{self.calls[self.count - 1]}"

    @property
    def calls(self) -> tuple[str, ...]:
        return KINDS[self.kind]

    @property
    def refused(self) -> tuple[str, ...]:
        return REFUSED.get(self.calls[self.count - 1], ())


CELLS: Final = tuple(
    EngineCell(kind, count) for kind, calls in KINDS.items() for count in range(1, len(calls))
)
_SHARED: Final = ("paused-after-4-update", "staged-after-2-start", "folder-after-2-folder")
SHARE: Final = tuple(each for each in CELLS if str(each) in (*_SHARED, "asleep-after-2-sleep"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=1)


@contextlib.asynccontextmanager
async def engine(served: Fleet, checkpoint: Checkpoint) -> AsyncIterator[None]:
    """A third engine, in a process that the end of the block kills."""
    arguments = (str(checkpoint.folder), served.broker, "killed")
    program = (sys.executable, "-m", "tests.support.broadcast_engine", *arguments)
    process = await asyncio.create_subprocess_exec(*program)
    try:
        await until_engines(served, 3)
        yield
    finally:
        process.kill()
        await process.wait()


async def until_engines(served: Fleet, count: int) -> None:
    """Waits until the broker knows so many."""
    status = await fetch_status(served.broker, timeout_s=LIMIT_S)
    while len(status.groups[0].engines) != count:
        await asyncio.sleep(0.1)
        status = await fetch_status(served.broker, timeout_s=LIMIT_S)


async def call(
    served: Fleet, name: str, new: Mapping[str, Tensor], folder: Path, *, refused: bool = False
) -> tuple[int, str]:
    """The answer to a call; one of an update that is to be refused is made without a broadcast."""
    client = served.client
    if name == "init":
        return await client.init()
    if name == "folder":
        return await client.call("/update_weights", {"weight_dir": str(folder)})
    if name == "update" and refused:
        return await client.call("/update_weights", {"update_info": described(new)})
    return await (client.update(new) if name == "update" else client.call(PATHS[name]))


@pytest.mark.ci
@pytest.mark.parametrize("cell", CELLS if ALL else SHARE, ids=str)
def test_an_engine_that_restarts(cell: EngineCell, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """No call fails but those that need the lost engine; none hangs. The next update has all."""
    base = load_file(checkpoint.folder / "model.safetensors")
    first, after = (perturbed(base, seed) for seed in (11, 12))
    save_file(first, tmp_path / "model.safetensors")

    async def scenario() -> None:
        async with fleet(checkpoint) as served, Load(served, checkpoint) as load:
            async with engine(served, checkpoint):
                for name in cell.calls[: cell.count]:
                    status, text = await call(served, name, first, tmp_path)
                    assert status == 200, (name, text)
            await until_engines(served, 2)
            async with engine(served, checkpoint):
                for name in cell.calls[cell.count :]:
                    refused = name in cell.refused
                    status, text = await call(served, name, first, tmp_path, refused=refused)
                    assert status == (409 if refused else 200), (name, text)
                for name in KINDS["staged"]:
                    status, text = await call(served, name, after, tmp_path)
                    assert status == 200, (name, text)
                await served.assert_serve(after)
                version = await served.engines[0].version()
                shown = await fetch_status(served.broker, timeout_s=LIMIT_S)
                assert {each.version for each in shown.groups[0].engines} == {version}
        committed = dict.fromkeys(range(1, version), first)
        load.check({0: checkpoint.weights, **committed, version: after})

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
