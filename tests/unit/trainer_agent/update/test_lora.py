"""An adapter on the trainer's side: what it may be, and how it lies on tmpfs."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bus.errors import EngineError, UsageError, WavebusError
from bus.lora import CONFIG_FILE, WEIGHTS_FILE, AdapterFolder
from bus.messages import NackCode
from bus.weight_transfer.allocation import ALONE, NO_RANK
from bus.weight_transfer.formats import SHM_FOLDER, decode, encode
from bus.weight_transfer.shm import ShmSender, sweep
from sidecar.transfer.lora import LoraReceiver
from tests.support.adapters import folders
from trainer_agent.update.lora import (
    Adapter,
    WrittenAdapter,
    adapter_tensors,
    config_text,
    send_adapter,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

A, B = (f"base_model.model.layers.0.q_proj.lora_{half}.weight" for half in "AB")
TENSORS = {A: torch.arange(12.0).view(2, 6), B: torch.arange(8.0).view(2, 4).T}
CONFIG: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": {"q_proj"}}


@pytest.fixture
def written() -> Iterator[WrittenAdapter]:
    made = WrittenAdapter(Adapter("mine", TENSORS, CONFIG))
    yield made
    made.close()


def path_of(written: WrittenAdapter) -> Path:
    return Path(SHM_FOLDER) / decode(written.handle, AdapterFolder).folder


def test_it_lies_as_peft_saves_it(written: WrittenAdapter) -> None:
    """In a folder of its owner's alone, which goes when it is closed."""
    folder = path_of(written)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert json.loads((folder / CONFIG_FILE).read_text()) == {
        **CONFIG,
        "target_modules": ["q_proj"],
    }
    stored = load_file(folder / WEIGHTS_FILE)
    assert stored.keys() == TENSORS.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in TENSORS.items())
    written.close()
    assert not folder.exists()


def test_a_cancelled_update_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is cancelled while a thread writes the adapter."""
    begun, may_end = threading.Event(), threading.Event()

    def slow_save(*_: Any, **__: Any) -> None:
        begun.set()
        assert may_end.wait(30.0)

    async def scenario() -> None:
        before = folders()
        bus: Any = SimpleNamespace()
        adapter = Adapter("mine", TENSORS, CONFIG)
        sending = asyncio.create_task(
            send_adapter(adapter, bus, bus, bus, label="", verify="sample")
        )
        await asyncio.to_thread(begun.wait, 30.0)
        sending.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert folders() == before

    monkeypatch.setattr("trainer_agent.update.lora.save_file", slow_save)
    asyncio.run(scenario())


def test_a_nan_of_an_adapter_is_found() -> None:
    """As in any update, where its sums are made."""
    adapter = Adapter("mine", {**TENSORS, B: torch.full((4, 2), float("nan"))}, CONFIG)
    adapter.sums("sample")
    assert adapter.plan.nonfinite == B


def test_an_engine_reads_it(written: WrittenAdapter) -> None:
    """And keeps what it has read, whatever becomes of the folder."""
    receiver = LoraReceiver()
    receiver.open(written.handle, NO_RANK)
    assert receiver.config["target_modules"] == ["q_proj"]
    metas = Adapter("mine", TENSORS, CONFIG).plan.manifest.chunk(0)
    received = receiver.receive(metas, written.handle)
    (path_of(written) / WEIGHTS_FILE).write_bytes(b"\0" * 4096)
    written.close()
    assert [name for name, _ in received] == [A, B]
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in received)


def _without_folder(written: WrittenAdapter) -> None:
    written.close()


def _other_config(written: WrittenAdapter) -> None:
    (path_of(written) / CONFIG_FILE).write_text("{}")


@pytest.mark.parametrize(
    ("fault", "text"),
    [(_without_folder, "run on one host"), (_other_config, "not what was written")],
)
def test_what_is_not_there_is_refused_when_it_is_opened(
    written: WrittenAdapter, fault: Callable[[WrittenAdapter], None], text: str
) -> None:
    fault(written)
    with pytest.raises(EngineError, match=text) as refused:
        LoraReceiver().open(written.handle, NO_RANK)
    assert refused.value.code is NackCode.TRANSFER_FAILED


def _short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _mangled(path: Path) -> None:
    path.write_bytes(b"\xff" * 16)


@pytest.mark.parametrize("fault", [_short, _mangled, Path.unlink])
def test_a_file_that_is_broken_is_not_received(
    written: WrittenAdapter, fault: Callable[[Path], None]
) -> None:
    receiver = LoraReceiver()
    receiver.open(written.handle, NO_RANK)
    fault(path_of(written) / WEIGHTS_FILE)
    with pytest.raises(EngineError, match=WEIGHTS_FILE) as refused:
        receiver.receive(Adapter("mine", TENSORS, CONFIG).plan.manifest.chunk(0), written.handle)
    assert refused.value.code is NackCode.TRANSFER_FAILED


def test_another_folder_than_was_opened_is_refused(written: WrittenAdapter) -> None:
    receiver = LoraReceiver()
    receiver.open(written.handle, NO_RANK)
    other = encode(AdapterFolder("wavebus-lora-other", "0" * 64))
    with pytest.raises(EngineError, match="not the one that was opened"):
        receiver.receive((), other)


def test_tensors_of_a_module_by_the_names_of_a_checkpoint() -> None:
    """PEFT has the adapter's name in them; the other parameters are not taken."""
    layer = nn.Module()
    layer.lora_A = nn.ModuleDict({"default": nn.Linear(6, 2, bias=False)})
    layer.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})
    layer.base_layer = nn.Linear(6, 4)
    model = nn.ModuleDict({"q_proj": layer})
    found = adapter_tensors(model)
    assert list(found) == ["q_proj.lora_A.weight", "q_proj.lora_B.weight"]
    layer.lora_A["second"] = nn.Linear(6, 2, bias=False)
    with pytest.raises(UsageError, match="stands twice"):
        adapter_tensors(model)


@pytest.mark.parametrize("source", [{}, nn.Linear(2, 2)])
def test_a_source_without_an_adapter(source: Any) -> None:
    with pytest.raises(UsageError, match="lora_A and lora_B"):
        adapter_tensors(source)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"r": 0}, "r must be given"),
        ({"r": -1}, "r=-1"),
        ({"r": True}, "r=True"),
        ({"r": "8"}, "r='8'"),
        ({"lora_alpha": None}, "lora_alpha must"),
        ({"lora_alpha": "16"}, "lora_alpha='16'"),
        ({"target_modules": []}, "target_modules must"),
        ({"x": object()}, "no place in JSON"),
        ({"x": "a" * 1024 * 1024}, "at most"),
    ],
)
def test_a_config_that_is_none(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        config_text({**CONFIG, **change})


def test_a_config_that_is_no_dict() -> None:
    with pytest.raises(UsageError, match="a dict"):
        config_text("r=8")  # type: ignore[arg-type]


def test_what_can_not_be_written_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = torch.zeros(2, 6).to_sparse()
    with pytest.raises(WavebusError, match="can't write the adapter"):
        WrittenAdapter(Adapter("mine", {A: sparse, B: TENSORS[B]}, CONFIG))
    assert folders() == []


def _leave_one_behind(queue: multiprocessing.Queue[Sequence[str]]) -> None:
    left = path_of(WrittenAdapter(Adapter("mine", TENSORS, CONFIG)))
    queue.put([left.name] if left.is_dir() else [])  # from here on any trainer may clear it away
    queue.close()
    queue.join_thread()
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize("by", ["adapter", "ring"])
def test_folders_of_a_killed_trainer_are_swept(written: WrittenAdapter, by: str) -> None:
    """By the next one, whatever it sends; a living one's is not."""
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[Sequence[str]] = context.Queue()
    process = context.Process(target=_leave_one_behind, args=(queue,))
    process.start()
    [left] = queue.get(timeout=60)
    process.join(60)
    if by == "ring":
        ring = ShmSender()
        ring.open(64, ALONE)
        ring.close()
    else:
        WrittenAdapter(Adapter("mine", TENSORS, CONFIG)).close()
    assert not (Path(SHM_FOLDER) / left).exists()
    assert path_of(written).is_dir()
    assert left not in sweep()
