"""A weight transfer backend of your own: one class and one registration on each side.

This one puts every chunk into a file of a folder that trainer and engines share, such as
a network mount: slow, and it works where nothing else does. Run it; it needs no GPU:

python examples/own_backend.py

Here trainer, sidecar and engine are one process, which registers both ends in code. Engines
that `wavebus sidecar` or vLLM starts find your receiver as an entry point instead: see
bus/_weight_transfer/registry.py.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load, save

from bus.errors import EngineError
from bus.messages import NackCode
from bus.weight_transfer import Receiver, Sender, decode, encode, register_receiver, register_sender
from lab.demo.policy import make_policy, save_checkpoint
from lab.network import PolicyConfig
from sidecar import Sidecar
from sidecar.embedded import EmbeddedEngine, SamplingParams
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.weight_transfer import RankAssignment, TensorMeta, World

# -- what the two ends say to each other over the bus: small, and typed --------------


@dataclass(frozen=True)
class Folder:
    path: str


@dataclass(frozen=True)
class File:
    name: str


# -- the trainer's end ----------------------------------------------------------------


class FileSender(Sender):
    """Writes chunks; never more than ``prefetch_depth`` of them lie there."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def open(self, chunk_bytes: int, world: World) -> bytes:  # noqa: ARG002 - files take what they need
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="weights-")
        return encode(Folder(self._folder.name))

    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        # Names travel with the bus; here a tensor's place in the chunk is enough.
        blob = save({str(place): tensor.contiguous() for place, tensor in enumerate(tensors)})
        self._path(seq).write_bytes(blob)
        return encode(File(self._path(seq).name))

    def on_taken(self, seq: int) -> None:
        self._path(seq).unlink()

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _path(self, seq: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"chunk-{seq}"


# -- the engine's end -----------------------------------------------------------------


class FileReceiver(Receiver):
    """Reads chunks. What it raises reaches the trainer with the engine's name."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def open(self, params: bytes, place: RankAssignment) -> None:  # noqa: ARG002 - all are equal here
        self._folder = Path(decode(params, Folder).path)
        if not self._folder.is_dir():
            raise EngineError(
                f"{self._folder} is not here: mount it on every engine's host",
                code=NackCode.TRANSFER_FAILED,
            )

    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        assert self._folder is not None
        blob = (self._folder / Path(decode(handle, File).name).name).read_bytes()
        found = load(blob)
        return [(meta.name, found[str(place)]) for place, meta in enumerate(tensors)]

    def close(self) -> None:
        self._folder = None


def register() -> None:
    """Both ends; a name that wavebus doesn't use itself."""
    register_sender("files", FileSender)
    register_receiver("files", FileReceiver)


# -- and how it is used ---------------------------------------------------------------

PROMPT = (1, 3, 4, 5)


async def greedy(engine: EmbeddedEngine) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return [token async for delta in engine.generate(PROMPT, params) for token in delta.token_ids]


async def serve_and_update(broker: str, folder: Path) -> None:
    torch.manual_seed(0)
    old, new = make_policy(PolicyConfig()), make_policy(PolicyConfig())
    for name, policy in (("old", old), ("new", new)):
        for weight in policy.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        save_checkpoint(policy, folder / name)
    engine, fresh = EmbeddedEngine(folder / "old"), EmbeddedEngine(folder / "new")
    await fresh.start()
    async with (
        Sidecar(engine, broker=broker, group="policy"),
        TrainerAgent(broker, group="policy", backend="files") as agent,
    ):
        await agent.wait_for_engines(1)
        before = await greedy(engine)
        version = await agent.update_weights(new)
        after, expected = await greedy(engine), await greedy(fresh)
    await fresh.close()
    print(f"version 0: {before}")
    print(f"version {version}: {after}")
    if after != expected or after == before:
        sys.exit(f"a fresh engine with the new weights says {expected}")


def main() -> None:
    register()
    command = [sys.executable, "-m", "bus._cli.main", "broker", "--listen", "tcp://127.0.0.1:*"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker,  # noqa: S603
    ):
        assert broker.stdout is not None
        try:
            asyncio.run(serve_and_update(broker.stdout.readline().strip(), Path(folder)))
        finally:
            broker.terminate()


if __name__ == "__main__":
    main()
