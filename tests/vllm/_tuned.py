"""What two busy cores need of vLLM, put into its processes by a plugin of the tests.

- A core may rest after each step, as long as a real model's step takes: a tiny model makes
  a thousand tokens before its client has read four, and then nothing is in the middle of a
  request any more.
- Whoever waits for a message through shared memory sleeps between two looks. vLLM only
  yields for the first second, so that four workers and cores in lockstep take two processors
  from each other, and from everybody else.
- Experts may do without adapters: with ``--enable-lora`` vLLM chooses kernels for them that a CPU
  does not have, even if adapters are for other modules alone.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

REST_MS = "WAVEBUS_TESTS_REST_MS"
PLAIN_EXPERTS = "WAVEBUS_TESTS_PLAIN_EXPERTS"
LOOK_AGAIN_S = 0.0001


def register() -> None:
    """vLLM calls this in every process."""
    _sleep_while_waiting()
    rest_s = float(os.environ.get(REST_MS, "0")) / 1000
    if rest_s:
        _rest_after_steps(rest_s)
    if os.environ.get(PLAIN_EXPERTS) == "1":
        _keep_experts_plain()


def _keep_experts_plain() -> None:
    from vllm.model_executor.layers.fused_moe import config  # noqa: PLC0415 - as below

    kind: Any = config.FusedMoEConfig
    init = kind.__init__

    def plain(self: Any, *args: Any, **fields: Any) -> None:
        init(self, *args, **{**fields, "is_lora_enabled": False})

    kind.__init__ = plain


def _sleep_while_waiting() -> None:
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415

    module: Any = shm_broadcast
    module.sched_yield = functools.partial(time.sleep, LOOK_AGAIN_S)


def _rest_after_steps(rest_s: float) -> None:
    from vllm.v1.engine.core import EngineCoreProc  # noqa: PLC0415 - only where it is wanted

    core: Any = EngineCoreProc
    step = core._process_engine_step

    def paced(self: Any) -> bool:
        executed: bool = step(self)
        if executed:
            time.sleep(rest_s)
        return executed

    core._process_engine_step = paced
