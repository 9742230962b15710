"""The trainer of ``bench transfer``: a process that makes a model, and sends it on command.

``python -m trainer_agent.bench.transfer ADDRESS GROUP BACKEND FOLDER SHAPE AMOUNT HOW LOOP``. SHAPE
is ``megabytes`` (a few large tensors) or ``tensors`` (many small ones), and AMOUNT is how many. HOW
is ``packed``, or ``lent``, where the model lies in shared memory and is sent from there. The
program writes the model into FOLDER and says its size, waits for an engine that has loaded it, says
so, and then answers, by lines on stdin:

- ``memcpy``: how long it takes to copy as many bytes from one buffer to another.
- ``update``: how long one update took, and when its parts were, in seconds on
  ``time.monotonic()``'s clock, which all processes of a host share.

The other benches measure their updates with :class:`MeasuredAgent` and :func:`bus_update`, too.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

import torch

import bus.log
from bus.runtime import event_loop
from bus.runtime.json_lines import read_commands, write_answer
from trainer_agent.agent import TrainerAgent
from trainer_agent.demo.policy import Policy, PolicyConfig, save_checkpoint
from trainer_agent.weights.shared_memory import share_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.runtime.event_loop import LoopChoice
    from bus.weight_transfer.base import Sender
    from trainer_agent.options import How
    from trainer_agent.weights.source import Weights


async def bus_update(
    agent: MeasuredAgent, weights: Weights, *, how: How = "paused", clear_cache: bool = True
) -> dict[str, Any]:
    """What it took, and when its parts were, in seconds on ``time.monotonic()``'s clock.

    ``receive_ms``: from when the first chunk left to the last one's ack.
    """
    timed = agent.timed
    timed.begin()
    since_s = time.monotonic()
    await agent.update_weights(weights, how=how, clear_cache=clear_cache)
    until_s = time.monotonic()
    report = agent.last_update
    assert report is not None, "an update has just been made"
    return {
        "since_s": since_s,
        "until_s": until_s,
        "transfer_ms": timed.transfer_ms(),
        "receive_ms": timed.receive_ms(),
        "commit_ms": report.commit_ms,
        "window_ms": report.paused_ms,
        "interrupted": report.interrupted,
        "chunks": report.chunks,
        "verified": report.verified,
        "calls": [
            *(("put", *span) for span in timed.puts),
            *(("send", *span) for span in timed.transfers),
        ],
    }


Shape: TypeAlias = Literal["megabytes", "tensors"]


BOOT_S: Final = 600.0

_FLOAT_BYTES: Final = 4

_HEAD_DIM: Final = 64

_BIG_LAYERS: Final = 2

_TENSORS_PER_LAYER: Final = 9  # beside those of its experts

_TENSORS_PER_EXPERT: Final = 3

_TENSORS_OUTSIDE: Final = 3

_MANY_PER_LAYER: Final = 1000


def few_large(megabytes: int) -> PolicyConfig:
    """A dense model of about so many megabytes, nearly all of them in two layers."""
    floats = megabytes * 1_000_000 / _FLOAT_BYTES / _BIG_LAYERS
    # Four matrices of attention and three of twice that size: ten squares of the width.
    hidden = max(1, round((floats / 10) ** 0.5 / _HEAD_DIM)) * _HEAD_DIM
    inner = max(1, round((floats - 4 * hidden**2) / (3 * hidden)))
    return PolicyConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=_BIG_LAYERS,
        num_heads=hidden // _HEAD_DIM,
        num_kv_heads=hidden // _HEAD_DIM,
        head_dim=_HEAD_DIM,
    )


def many_small(tensors: int) -> PolicyConfig:
    """A mixture of experts with about so many tensors, each of some hundred bytes."""
    layers = max(1, tensors // _MANY_PER_LAYER)
    per_layer = (tensors - _TENSORS_OUTSIDE) / layers - _TENSORS_PER_LAYER
    return PolicyConfig(
        hidden_size=16,
        num_layers=layers,
        num_heads=1,
        head_dim=16,
        experts=max(2, round(per_layer / _TENSORS_PER_EXPERT)),
        expert_size=8,
    )


MODELS: Final = {"megabytes": few_large, "tensors": many_small}


class TimedSender:
    """A sender, when each of its puts and transfers was, and when the last chunk was acked."""

    def __init__(self, sender: Sender) -> None:
        self.inner = sender
        self.puts: list[tuple[float, float]] = []
        self.transfers: list[tuple[float, float]] = []
        self.acked_s = 0.0
        self._queued_s: dict[int, float] = {}

    def begin(self) -> None:
        """What comes next is another update."""
        self.puts.clear()
        self.transfers.clear()

    def transfer_ms(self) -> float:
        """From when the first chunk left to when the last one was acked; and what putting took
        before that, while the engine still served."""
        left_s = self.transfers[0][0]
        before_s = sum(min(until, left_s) - since for since, until in self.puts if since < left_s)
        return (self.acked_s - left_s + before_s) * 1000

    def receive_ms(self) -> float:
        """From when the first chunk left to when the last one was acked."""
        return (self.acked_s - self.transfers[0][0]) * 1000

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        since_s = time.monotonic()
        handle = self.inner.put(seq, tensors)
        self.puts.append((since_s, time.monotonic()))
        return handle

    def queue(self, seq: int) -> None:
        self._queued_s[seq] = time.monotonic()
        self.inner.queue(seq)

    def transfer(self, seq: int) -> None:
        since_s = self._queued_s.pop(seq, None) or time.monotonic()
        self.inner.transfer(seq)
        self.transfers.append((since_s, time.monotonic()))

    def on_taken(self, seq: int) -> None:
        self.acked_s = time.monotonic()
        self.inner.on_taken(seq)


class MeasuredAgent(TrainerAgent):
    """A trainer's agent that notes when it put chunks, and when the last one was acked."""

    def __init__(self, broker: str, *, group: str, backend: str, **options: Any) -> None:
        super().__init__(broker, group=group, backend=backend, **options)
        self.timed = TimedSender(self._transport.sender)
        self._transport.sender = cast("Sender", self.timed)


class MemoryCopy:
    """What an update is compared with: two buffers of its size, both touched before."""

    def __init__(self, size_bytes: int) -> None:
        self._source = torch.ones(size_bytes, dtype=torch.uint8)
        self._target = torch.zeros_like(self._source).fill_(1)

    def took_ms(self) -> float:
        since_s = time.monotonic()
        self._target.copy_(self._source)
        return (time.monotonic() - since_s) * 1000


async def drive(
    broker: str, group: str, backend: str, folder: Path, shape: Shape, amount: int, *, lent: bool
) -> None:
    """Make the model, hold the group and do what is asked, until stdin ends."""
    model = Policy(MODELS[shape](amount))
    save_checkpoint(model, folder)
    if lent:
        share_memory(model)
    sizes = [weight.numel() * weight.element_size() for weight in model.parameters()]
    copy = MemoryCopy(sum(sizes))
    write_answer(size_bytes=sum(sizes), tensors=len(sizes))
    async with MeasuredAgent(broker, group=group, backend=backend, packed=not lent) as agent:
        await agent.wait_for_engines(1, timeout_s=BOOT_S)
        write_answer(ready=True)
        async for command in read_commands():
            if command == "memcpy":
                write_answer(memcpy_ms=copy.took_ms())
            else:
                write_answer(**await _update(agent, model))


async def _update(agent: MeasuredAgent, model: Policy) -> dict[str, Any]:
    agent.timed.begin()
    since_s = time.monotonic()
    await agent.update_weights(model, how="paused")
    until_s = time.monotonic()
    report = agent.last_update
    assert report is not None, "an update has just been made"
    return {
        "since_s": since_s,
        "until_s": until_s,
        "puts": agent.timed.puts,
        "transfer_ms": agent.timed.transfer_ms(),
        "pause_ms": report.pause_ms,
        "paused_ms": report.paused_ms,
    }


if __name__ == "__main__":
    bus.log.configure(json=True)
    torch.set_num_threads(1)  # a core for the trainer, one for the engine
    address, group_name, backend_name, target, kind_of_model, count, how, kind = sys.argv[1:]
    driving = drive(
        *(address, group_name, backend_name, Path(target), cast("Shape", kind_of_model)),
        int(count),
        lent=how == "lent",
    )
    event_loop.run(driving, loop=cast("LoopChoice", kind))
