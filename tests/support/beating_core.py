"""The process of an engine core, as far as its status page shows it.

Run as a script: ``beating_core.py PAGE``. It writes that it runs, until it is killed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from sidecar._shared_pages.core_status import CoreStatusPage

if __name__ == "__main__":
    page = CoreStatusPage(Path(sys.argv[1]))
    page.beat()
    sys.stdout.write("beats\n")
    sys.stdout.flush()
    while True:
        time.sleep(0.02)
        page.beat()
