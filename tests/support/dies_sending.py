"""A trainer that is killed in the middle of an update, just before it broadcasts a chunk, and
after every engine has applied the first one.

Run as a script: ``dies_sending.py BROKER WEIGHTS CHUNK``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from safetensors.torch import load_file

from bus._weight_transfer.gloo import GlooSender
from trainer_agent import SyncTrainerAgent

_transfer = GlooSender.transfer
applied = threading.Event()


def transfer(self: GlooSender, seq: int) -> None:
    """The engines wait in the broadcast already, or are about to."""
    if seq == int(sys.argv[3]):
        applied.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    _transfer(self, seq)


def taken(_self: GlooSender, _seq: int) -> None:
    applied.set()


if __name__ == "__main__":
    GlooSender.transfer = transfer  # type: ignore[method-assign]
    GlooSender.on_taken = taken  # type: ignore[assignment, method-assign]
    with SyncTrainerAgent(sys.argv[1], name="trainer", backend="gloo", chunk_bytes=20_000) as agent:
        agent.wait_for_engines(2)
        agent.update_weights(load_file(sys.argv[2]), how="paused")
