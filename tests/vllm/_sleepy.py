"""Sleep on a CPU, by a plugin of the tests: vLLM's own does nothing there.

What sleeps is gone: floating point parameters and KV caches become not-a-number, so that
whoever uses them before they are back, or after level 2 without an update, is found out.
Memory is not given back; that is seen on GPUs.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


def register() -> None:
    """vLLM calls this in every process."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - only where there is a vLLM

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: PLC0415

    platform: Any = type(current_platform)
    platform.is_sleep_mode_available = lambda _self: True
    worker: Any = CPUWorker
    worker._maybe_get_memory_pool_context = lambda _self, tag: contextlib.nullcontext(tag)
    worker.sleep = _sleep
    worker.wake_up = _wake_up


def _sleep(worker: Any, level: int = 1) -> None:
    weights, cache = list(_weights(worker)), list(_cache(worker))
    _tell_connector("unregister_kv_caches")
    worker.wavebus_asleep = {"weights", "kv_cache"}
    worker.wavebus_kept = [each.clone() for each in weights] if level == 1 else []
    for each in (*weights, *cache):
        each.fill_(float("nan"))


def _wake_up(worker: Any, tags: list[str] | None = None) -> None:
    woken: set[str] = getattr(worker, "wavebus_asleep", set()) & set(
        tags or ("weights", "kv_cache")
    )
    worker.wavebus_asleep = getattr(worker, "wavebus_asleep", set()) - woken
    if "weights" in woken and worker.wavebus_kept:
        for each, kept in zip(_weights(worker), worker.wavebus_kept, strict=True):
            each.copy_(kept)
        worker.wavebus_kept = []
    if "kv_cache" in woken:
        for each in _cache(worker):
            each.zero_()
        _tell_connector("restore_kv_caches")


def _tell_connector(what: str) -> None:
    """As a worker on a GPU does, where vLLM's connectors can be told (0.33)."""
    from vllm.distributed import kv_transfer  # noqa: PLC0415 - only where there is a vLLM

    if kv_transfer.has_kv_transfer_group():
        getattr(kv_transfer.get_kv_transfer_group(), what, lambda: None)()


def _weights(worker: Any) -> Iterator[torch.Tensor]:
    for parameter in worker.model_runner.model.parameters():
        if parameter.is_floating_point():
            yield parameter.data


def _cache(worker: Any) -> Iterator[torch.Tensor]:
    for each in worker.model_runner.kv_caches:
        yield from each if isinstance(each, list | tuple) else [each]
