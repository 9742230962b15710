"""Pipeline parallelism on a CPU, by a plugin of the tests: in vLLM 0.32 a worker that is not the
first has no memory for what the one before it hands on, since that is made in the dry run which a
CPU leaves out."""

from __future__ import annotations

import functools
from typing import Any


def register() -> None:
    """vLLM calls this in every process."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - only where there is a vLLM

    if not current_platform.is_cpu():
        return
    from vllm.distributed import parallel_state  # noqa: PLC0415
    from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: PLC0415

    worker: Any = CPUWorker
    load_model = worker.load_model
    if load_model.__module__ == __name__:
        return

    @functools.wraps(load_model, assigned=())
    def load_and_make_room(self: Any, *args: Any, **options: Any) -> None:
        load_model(self, *args, **options)
        if not parallel_state.get_pp_group().is_first_rank:
            runner = self.model_runner
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )

    worker.load_model = load_and_make_room
