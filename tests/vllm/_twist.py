"""A loader that puts rows of a query projection in each other's places, once a test says so, by a
plugin of the tests. What it is given was compared with what was sent before."""

from __future__ import annotations

import sys
from typing import Any, Final

TWIST: Final = "wavebus_tests_twist"
TENSOR: Final = "model.layers.0.self_attn.q_proj.weight"
HEAD_ROWS: Final = 32


def register() -> None:
    """vLLM calls this in every process."""
    if "vllm.v1.worker.worker_base" in sys.modules:
        from vllm.v1.worker import worker_base  # noqa: PLC0415 - only where there is a worker

        setattr(worker_base.WorkerBase, TWIST, _twist)


def _twist(worker: Any, on: bool) -> None:
    engine = worker.weight_transfer_engine
    load = type(engine)._load_tensors

    def twisted(received: list[tuple[str, Any]]) -> None:
        load(
            engine,
            [(name, t.roll(HEAD_ROWS, 0) if name == TENSOR else t) for name, t in received],
        )

    if on:
        engine._load_tensors = twisted
    else:
        engine.__dict__.pop("_load_tensors", None)
