"""The files that a chunk's announcement passes are those that `docs/architecture.md` lists."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bus._protocol.core.effects import Send
from bus._protocol.core.instructions import Ask
from bus._protocol.engine.calls import Job
from bus.messages import Envelope, WeightChunkMeta
from bus.operations import ReceiveChunk
from sidecar import Sidecar
from sidecar.embedded import EmbeddedEngine
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bus/", "sidecar/", "trainer_agent/", "lab/")
KIND = "WEIGHT_CHUNK_META"
LIMIT_S = 60.0


class Passed:
    """While in its block, records which files a chunk's announcement passes.

    Attributes:
        files: those with a function that gets the announcement as an argument.
        touched: those with any function that runs within such a call.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.touched: set[str] = set()
        self._handles: set[bytes] = set()
        self._here = threading.local()  # its `depth`: how many calls within the outermost such call

    def __enter__(self) -> Self:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        depth = getattr(self._here, "depth", 0)
        if event == "return" and depth:
            self._here.depth = depth - 1
        if event != "call":
            return
        file = Path(frame.f_code.co_filename)
        shown = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else ""
        ours = shown.startswith(PACKAGES)
        if ours and self._gets_it(frame):
            self.files.add(shown)
        elif not depth:
            return
        self._here.depth = depth + 1
        if ours:
            self.touched.add(shown)

    def _gets_it(self, frame: FrameType) -> bool:
        code, values = frame.f_code, frame.f_locals
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return any(self._carries(values.get(name)) for name in names if name != "self")

    def _carries(self, value: Any) -> bool:
        match value:
            case WeightChunkMeta(handle=handle) | ReceiveChunk(handle=handle):
                self._handles.add(handle)
                return True
            case Envelope(kind=kind):
                return bool(kind == KIND)
            case bytes():
                return value in self._handles or KIND.encode() in value
            case Send(message=inner) | Ask(message=inner) | Job(call=inner):
                return self._carries(inner)
            case list() | tuple():
                return any(map(self._carries, value))
        return False


def page() -> str:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    return text.split("## A chunk's way, file by file")[1].split("\n## ")[0]


def files_in(rows: Iterable[str]) -> set[str]:
    """The files that rows name, but for those in brackets, which are named before."""
    named = re.findall(r"`([\w/]+\.py)`", re.sub(r"\([^)]*\)", "", "\n".join(rows)))
    every = [str(p.relative_to(ROOT)) for each in PACKAGES for p in (ROOT / each).rglob("*.py")]
    found = {name: [each for each in every if f"/{each}".endswith(f"/{name}")] for name in named}
    assert [name for name, files in found.items() if len(files) != 1] == []
    return {file for files in found.values() for file in files}


def test_the_page_lists_the_files_that_a_chunk_passes(tmp_path: Path) -> None:
    """From a trainer to an embedded engine, in one process."""
    checkpoint = make_checkpoint(tmp_path, seed=1)

    async def scenario() -> Passed:
        async with (
            a_broker() as (_, address),
            Sidecar(EmbeddedEngine(checkpoint.folder, host=None), broker=address),
            TrainerAgent(address) as agent,
        ):
            await agent.wait_for_engines(1)
            with Passed() as passed:
                await agent.update_weights(checkpoint.weights, how="paused")
        return passed

    found = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    passed = found.files
    receiver = {file for file in passed if file.startswith("bus/_weight_transfer/")}
    assert receiver
    rows = page().splitlines()
    way = files_in(row for row in rows[: rows.index("| engine | files | all |")] if "|" in row)
    [embedded] = (row for row in rows if row.startswith("| embedded |"))
    assert passed - receiver == way | files_in([embedded])
    assert f"These are {len(way)} files." in page()
    assert embedded.endswith(f"| {len(way | files_in([embedded])) + 1} |")
    [touched] = re.findall(r"code of (\d+) files runs", page())
    assert int(touched) - 3 <= len(found.touched) <= int(touched), sorted(found.touched)


def test_no_way_is_longer_than_30_files() -> None:
    counts = [int(count) for count in re.findall(r"\| (\d+) \|$", page(), re.MULTILINE)]
    assert len(counts) == 3
    assert max(counts) <= 30
