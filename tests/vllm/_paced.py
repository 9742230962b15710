"""Engine steps as long as those of a real model, put into vLLM's core by a plugin of the tests.

A tiny model on a CPU makes a thousand tokens before a client on two busy cores has read
four: then nothing is in the middle of a request any more. A core that rests after each
step leaves the processors to whoever reads.
"""

from __future__ import annotations

import os
import time
from typing import Any

REST_MS = "WAVEBUS_TESTS_REST_MS"


def register() -> None:
    """vLLM calls this in every process; a core rests if the environment says so."""
    rest_s = float(os.environ.get(REST_MS, "0")) / 1000
    if not rest_s:
        return
    from vllm.v1.engine.core import EngineCoreProc  # noqa: PLC0415 - only where it is wanted

    core: Any = EngineCoreProc
    step = core._process_engine_step

    def paced(self: Any) -> bool:
        executed: bool = step(self)
        if executed:
            time.sleep(rest_s)
        return executed

    core._process_engine_step = paced
