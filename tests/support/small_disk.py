"""A journal on a disk that is full after 4000 bytes. Run as a script: ``small_disk.py FOLDER``.

Prints how many errors its owner was told of.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from bus.journal.writer import DEFAULT_BYTES, JournalWriter
from bus.protocol.broker.config import BrokerConfig
from bus.testing.clock import SimScheduler

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
    errors: list[OSError] = []
    writer = JournalWriter(
        Path(sys.argv[1]),
        limit_bytes=DEFAULT_BYTES,
        boot=1,
        config=BrokerConfig(),
        scheduler=SimScheduler(),
        on_failure=errors.append,
    )
    for index in range(20):
        writer.on_received(float(index), b"e0#1", bytes(1000), "")
        writer.flush()
    writer.close()
    sys.stdout.write(f"{len(errors)}\n")
