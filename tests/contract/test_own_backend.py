"""A user's own backend: the one of the examples keeps the contract, and bad ones are told."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bus._manifest import TensorMeta
from bus._weight_transfer.registry import (
    BackendRegistry,
    make_receiver,
    make_sender,
    register_receiver,
    register_sender,
)
from bus.errors import EngineError, UsageError
from bus.messages import NackCode
from sidecar._transfer.verification import check_delivered
from tests.contract.transfer_suite import TransferContract
from tests.support.procs import ROOT

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLE = ROOT / "examples" / "own_backend.py"


def example() -> Any:
    """The example as a module."""
    name = "own_backend_of_the_examples"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class TestFiles(TransferContract):
    """Files in a shared folder, by the classes of the example."""

    backend = "files"

    @pytest.fixture(autouse=True)
    def _registered(self) -> None:
        example().register()


@pytest.mark.ci
def test_the_example_runs() -> None:
    """As its first lines say; it checks by itself what the engine then generates."""
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr
    assert "version 1" in ended.stdout


@pytest.mark.parametrize("register", [register_sender, register_receiver])
def test_names_that_can_not_be_taken(register: Any) -> None:
    """Wavebus's own, and what is no name."""
    with pytest.raises(UsageError, match="wavebus's own"):
        register("shm", object)
    with pytest.raises(UsageError, match="backend=''"):
        register("", object)


def test_an_unknown_one_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"choose one of shm"):
        make_sender("carrier pigeon")
    with pytest.raises(EngineError, match=r"there are: shm") as missing:
        make_receiver("carrier pigeon")
    assert missing.value.code is NackCode.BACKEND_MISSING


def test_installed_packages_offer_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By entry points; one that can't be imported is told with its package's line."""
    info = tmp_path / "pigeons-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeons\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[a.group]\npigeons = pigeons_of_tests:Pigeon\nghosts = ghosts_of_tests:Ghost\n"
    )
    (tmp_path / "pigeons_of_tests.py").write_text("class Pigeon: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    backends: BackendRegistry[object] = BackendRegistry("a.group", {"own": object})
    backends.register("mine", list)
    assert backends.names() == ("own", "mine", "ghosts", "pigeons")
    found = backends.find("pigeons")
    assert found is not None
    assert type(found()).__name__ == "Pigeon"
    assert backends.find("nobody") is None
    with pytest.raises(UsageError, match=r"ghosts_of_tests:Ghost.*ModuleNotFoundError"):
        backends.find("ghosts")


W = TensorMeta("w", "float32", (2, 3))
V = TensorMeta("v", "float32", (3,))


@pytest.mark.parametrize(
    ("received", "tensor"),
    [
        ([("w", torch.zeros(1, 3)), ("v", torch.zeros(3))], "w"),  # it would broadcast
        ([("w", torch.zeros(2, 3)), ("v", torch.zeros(3).bfloat16())], "v"),
        ([("w", torch.zeros(2, 3)), ("x", torch.zeros(3))], "v"),
        ([("v", torch.zeros(3)), ("w", torch.zeros(2, 3))], "w"),
        ([("w", torch.zeros(2, 3))], "v"),
        ([("w", torch.zeros(2, 3)), ("v", torch.zeros(3)), ("v", torch.zeros(3))], ""),
    ],
)
def test_other_tensors_than_announced_are_refused(
    received: list[tuple[str, torch.Tensor]], tensor: str
) -> None:
    """Before anything is loaded, by the tensor's name."""
    with pytest.raises(EngineError, match="delivered") as refused:
        check_delivered("mine", (W, V), received)
    assert (refused.value.code, refused.value.tensor) == (NackCode.TRANSFER_FAILED, tensor)
