"""Receives over a transport of vLLM's own, and discards what comes.

A trainer may have entered its broadcast when its update is refused. Its NCCL kernel ends only if
all ranks of the communicator enter the same broadcast. So the workers do, with a copy of vLLM's
engine whose model discards what is loaded.

The broadcast runs in a thread and on a stream of its own. If the trainer is not there, the worker
goes on when its time is over; closing the transport then aborts the communicator, and with it the
worker's kernel.
"""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import torch

from bus.weight_transfer.formats import transfer_failed

if TYPE_CHECKING:
    from collections.abc import Iterable


class DiscardingModel:
    """In place of the model that vLLM's engine loads into."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Does nothing with the tensors."""


_DISCARDS = DiscardingModel()  # one, as vLLM's engine keeps what it knows by model


def checked(update_info: Any) -> Any:
    """Returns vLLM's typed ``update_info``, if it gives the size of every tensor.

    Raises:
        EngineError: a dtype or a shape is unknown, and so is how much comes.
    """
    for dtype, shape in zip(update_info.dtype_names, update_info.shapes, strict=True):
        if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
            raise transfer_failed(f"dtype {dtype!r} is unknown, so the size of what comes is, too")
        if any(type(length) is not int or length < 0 for length in shape):
            raise transfer_failed(f"shape {shape!r} is no shape")
    return update_info


def drain(engine: Any, original: Any, update_info: Any, timeout_s: float) -> None:
    """Receives what the trainer sends, and discards it.

    Args:
        engine: the guarded engine in this worker.
        original: its ``super()``, which has the methods of vLLM's own class.
        update_info: what the trainer sends.
        timeout_s: how long to wait, in seconds.

    Raises:
        EngineError: the trainer was not there in time, or the broadcast failed.
    """
    discarding = copy.copy(engine)
    discarding.model = _DISCARDS
    receive = super(original.__thisclass__, discarding).receive_weights
    failed: list[Exception] = []

    def run() -> None:
        try:
            _receive(receive, update_info, engine.device)
        except Exception as error:  # noqa: BLE001 - the worker's thread raises it
            failed.append(error)

    thread = threading.Thread(target=run, name="wavebus-drain", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise transfer_failed(f"the sender has not sent all within {timeout_s:g} s")
    if failed:
        error = failed[0]
        raise transfer_failed(f"the broadcast failed: {type(error).__name__}: {error}") from error


def _receive(receive: Any, update_info: Any, device: torch.device) -> None:
    if device.type == "cpu":
        receive(update_info)
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        receive(update_info)
    stream.synchronize()
    torch.cuda.empty_cache()  # what a stream has freed is kept for that stream
