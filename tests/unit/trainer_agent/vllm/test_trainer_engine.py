"""wavebus's trainer engine with a sender that takes long: an interrupt ends whatever it waits for,
although another thread receives the signal."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from bus._weight_transfer.registry import register_receiver, register_sender
from bus._weight_transfer.shm import ShmReceiver, ShmSender
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.interrupts import waits_for_a_future
from tests.support.serving import an_engine
from tests.vllm._vllm import require_vllm
from trainer_agent import SyncTrainerAgent
from trainer_agent._bus_thread import event_loop_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.checkpoints import Checkpoint

require_vllm()
pytestmark = pytest.mark.filterwarnings("default")

LONG_S = 30.0  # nobody waits for it, unless an interrupt is not heard


class Slow:
    """Interrupts the main thread in the call ``where``, once that waits for it, and takes long."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.main = threading.get_ident()
        self.closed, self.returned = threading.Event(), threading.Event()
        self.was_closed = False

    def call(self, name: str) -> None:
        if name != self.where or self.returned.is_set():
            return
        self.closed.clear()
        while not waits_for_a_future(self.main):
            self.closed.wait(0.01)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        self.was_closed = self.closed.wait(LONG_S)
        self.returned.set()


class SlowSender(ShmSender):
    """Of a collective: it meets engines, and sends with them."""

    is_collective: ClassVar[bool] = True
    slow: ClassVar[Slow]

    def meet(self) -> None:
        self.slow.call("meet")

    def transfer(self, seq: int) -> None:  # noqa: ARG002 - of all senders
        self.slow.call("transfer")

    def close(self) -> None:
        super().close()
        self.slow.closed.set()


@contextlib.asynccontextmanager
async def a_group(checkpoint: Checkpoint) -> AsyncIterator[str]:
    async with a_broker() as (_, broker), an_engine(checkpoint, broker, "e0"):
        yield broker


def send(agent: SyncTrainerAgent, weights: Any) -> None:
    info = agent.init_info()
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

    source = agent.source(weights)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=agent.client(), source=source)
    engine.send_weights()


@pytest.mark.parametrize("where", ["meet", "transfer"])
def test_an_interrupt_ends_every_wait(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sender is closed, so that engines that wait for it give up, too."""
    slow = Slow(where)
    monkeypatch.setattr(SlowSender, "slow", slow, raising=False)
    register_sender("slow", SlowSender)
    register_receiver("slow", ShmReceiver)
    checkpoint = make_checkpoint(tmp_path, seed=3)
    weights = perturbed(checkpoint.weights, 1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            event_loop_thread() as portal,
            portal.wrap_async_context_manager(a_group(checkpoint)) as broker,
            SyncTrainerAgent(broker, backend="slow", verify="off") as agent,
        ):
            agent.wait_for_engines(1)
            with pytest.raises(KeyboardInterrupt):
                send(agent, weights)
            assert slow.returned.wait(2 * LONG_S)
            assert slow.was_closed
            send(agent, weights)  # what was interrupted is undone
            assert agent.last_update is not None
    finally:
        signal.signal(signal.SIGINT, before)
