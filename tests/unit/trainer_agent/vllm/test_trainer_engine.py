"""wavebus's trainer engine between a client and a sender that take long: an interrupt ends whatever
it waits for, although another thread receives the signal."""

from __future__ import annotations

import signal
import threading
from typing import Any, ClassVar

import pytest
import torch

from bus._weight_transfer.allocation import ALONE
from bus._weight_transfer.base import Sender
from bus._weight_transfer.registry import register_sender
from tests.support.interrupts import waits_for_a_future
from tests.vllm._vllm import require_vllm
from trainer_agent._weights.source import PairSource

require_vllm()
pytestmark = pytest.mark.filterwarnings("default")

LONG_S = 30.0  # nobody waits for it, unless an interrupt is not heard
WEIGHTS = {name: torch.ones(16) for name in "abc"}


class Slow:
    """Interrupts the main thread in the call ``where``, once that waits for it, and takes long."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.main = threading.get_ident()
        self.closed, self.returned = threading.Event(), threading.Event()
        self.was_closed = False

    def call(self, name: str) -> None:
        if name != self.where:
            return
        while not waits_for_a_future(self.main):
            self.closed.wait(0.01)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        self.was_closed = self.closed.wait(LONG_S)
        self.returned.set()


class SlowClient:
    """Of engines that do all they are asked."""

    def __init__(self, slow: Slow) -> None:
        self._slow = slow

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self._slow.call(name)


class SlowSender(Sender):
    """Of a collective: it meets engines, and sends with them."""

    is_collective: ClassVar[bool] = True
    slow: ClassVar[Slow]

    def open(self, chunk_bytes: int, world: Any) -> bytes:  # noqa: ARG002 - of all senders
        return b""

    def meet(self) -> None:
        self.slow.call("meet")

    def put(self, seq: int, tensors: Any) -> bytes:  # noqa: ARG002 - of all senders
        return b"handle"

    def transfer(self, seq: int) -> None:  # noqa: ARG002 - of all senders
        self.slow.call("transfer")

    def close(self) -> None:
        self.slow.closed.set()


def send(info: Any, client: Any) -> None:
    from trainer_agent._vllm.trainer_engine import (  # noqa: PLC0415 - after require_vllm
        WavebusTrainerEngine,
    )

    engine = WavebusTrainerEngine.trainer_init(info, client=client, source=PairSource(WEIGHTS))
    engine.send_weights()


@pytest.mark.parametrize(
    "where", ["init_weight_transfer_engine", "meet", "update_weights", "transfer"]
)
def test_an_interrupt_ends_every_wait(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender is closed, so that engines that wait for it give up, too."""
    from trainer_agent._vllm.trainer_engine import (  # noqa: PLC0415 - after require_vllm
        WavebusTrainerInitInfo,
    )

    slow = Slow(where)
    monkeypatch.setattr(SlowSender, "slow", slow, raising=False)
    register_sender("slow", SlowSender)
    worlds = [ALONE]
    info = WavebusTrainerInitInfo(
        rank=0,
        transport="slow",
        chunk_bytes=64,
        buffers=2,
        packed=True,
        device="",
        verify="off",
        plan=lambda: worlds.pop() if worlds else None,
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            send(info, SlowClient(slow))
        assert slow.returned.wait(2 * LONG_S)
        assert slow.was_closed
    finally:
        signal.signal(signal.SIGINT, before)
