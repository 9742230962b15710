"""A worker receives, and what comes reaches no model."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar.vllm.plugin.worker.native_drain import checked, drain


class Model:
    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def load_weights(self, tensors: list[Any]) -> None:
        self.loaded += tensors


class Engine:
    """As vLLM's: it receives, and loads into its model, one tensor after the other."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.model = Model()
        self.sent = threading.Semaphore(0)
        self.received: list[str] = []

    def receive_weights(self, update_info: Any) -> None:
        for name in update_info.names:
            self.sent.acquire()
            if name == "broken":
                raise ValueError("broken")
            self.model.load_weights([(name, torch.zeros(1))])
            self.received.append(name)


class Guarded(Engine):
    def receive_weights(self, update_info: Any) -> None:
        raise AssertionError(f"that loads {update_info}")

    def original(self) -> Any:
        return super()


def info(*names: str, dtype: str = "float32", shape: object = (2, 3)) -> Any:
    dtypes, shapes = [dtype] * len(names), [shape] * len(names)
    return SimpleNamespace(names=list(names), dtype_names=dtypes, shapes=shapes)


def test_all_is_received_and_nothing_is_loaded() -> None:
    engine = Guarded()
    model = engine.model
    engine.sent.release(2)
    drain(engine, engine.original(), info("a", "b"), 60.0)
    assert engine.received == ["a", "b"]
    assert model.loaded == []
    assert engine.model is model


def test_what_comes_too_late_reaches_no_model_either() -> None:
    engine = Guarded()
    with pytest.raises(EngineError, match=r"0\.01 s") as raised:
        drain(engine, engine.original(), info("a"), 0.01)
    assert raised.value.code is NackCode.TRANSFER_FAILED
    [late] = [each for each in threading.enumerate() if each.name == "wavebus-drain"]
    engine.sent.release()
    late.join(60.0)
    assert engine.received == ["a"]
    assert engine.model.loaded == []


def test_a_broadcast_that_fails_says_so() -> None:
    engine = Guarded()
    engine.sent.release()
    with pytest.raises(EngineError, match="ValueError: broken"):
        drain(engine, engine.original(), info("broken"), 60.0)


@pytest.mark.parametrize(
    "described", [info("a", dtype="float99"), info("a", dtype="nn"), info("a", shape=(2, -1))]
)
def test_what_has_no_size_is_not_received(described: Any) -> None:
    with pytest.raises(EngineError):
        checked(described)
    assert checked(info("a")).names == ["a"]
