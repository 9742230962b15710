"""A journal that a limit of its process refuses for a while: ``small_disk.py FOLDER LIMIT``.

LIMIT is ``size``: files end at 4000 bytes; or ``files``: no file can be opened. It holds from after
the third record until after the 20th, and is seen a second time meanwhile. Prints as JSON how many
errors the journal's owner was told of, and how many records were lost.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from bus._journal.writer import LEAST_BYTES, JournalWriter
from bus._protocol.core.config import BrokerConfig
from tests.sim.clock import SimScheduler

RECORDS = 20
SIZE_BYTES = 1000


def main(folder: Path, limit: str) -> None:
    """Write the records, a flush after each."""
    clock = SimScheduler()
    errors: list[OSError] = []
    lost: list[int] = []
    writer = JournalWriter(
        folder,
        limit_bytes=LEAST_BYTES,
        boot=1,
        config=BrokerConfig(),
        scheduler=clock,
        on_failure=errors.append,
        on_recovery=lost.append,
    )
    kind, value = {
        "size": (resource.RLIMIT_FSIZE, 4000),
        "files": (resource.RLIMIT_NOFILE, 0),
    }[limit]
    before = resource.getrlimit(kind)

    def fill(first: int, last: int) -> None:
        for index in range(first, last):
            writer.on_received(float(index), b"e0#1", bytes(SIZE_BYTES), "")
            writer.flush()

    fill(0, 3)
    resource.setrlimit(kind, (value, before[1]))
    fill(3, RECORDS)
    clock.run_for(1500.0)  # it tries again, for nothing
    resource.setrlimit(kind, before)
    clock.run_for(1500.0)
    fill(RECORDS, RECORDS + 2)
    writer.close()
    sys.stdout.write(json.dumps({"errors": len(errors), "lost": lost}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
