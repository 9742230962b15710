"""One rank of a DP group whose other rank is on another host: votes, and a resume of all ranks.

Run as ``python -m tests.integration._lease_rank RANK MASTER OWN_ADDRESS PAGE``. Prints ``paused``,
then ``resumed N`` after each resume; ends with its standard input.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sidecar._lease_agreement import LeaseAgreement, RankLease
from sidecar._shared_pages.pause_lease import PauseLeasePage

if TYPE_CHECKING:
    from sidecar._shared_pages.pause_lease import PauseLease

dist: Any = torch.distributed
TIMEOUT = timedelta(seconds=60)
PORT = 29511


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Core:
    """Paused with its peer rank; its resume is a collective, as vLLM's is."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self.resumes = 0
        self.is_resuming = False
        self.is_paused = self.is_complete = True

    def pause(self) -> None:
        raise AssertionError("it is paused")

    def prepare(self, lease: PauseLease) -> None:
        """Nothing was begun."""

    def quarantine(self) -> None:
        say("quarantined")

    def resume(self) -> None:
        self.is_resuming = True
        self._gloo.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
        self.is_paused = self.is_complete = self.is_resuming = False
        self.resumes += 1
        say("resumed", self.resumes)


def main() -> None:
    rank, master, own, path = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    store = dist.TCPStore(master, PORT, 2, is_master=rank == 0, timeout=TIMEOUT)
    settings = dist.ProcessGroupGloo._Options()
    settings._timeout = TIMEOUT
    settings._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, 2, settings)
    page = PauseLeasePage.make(path)
    lease = RankLease(Core(gloo), page, LeaseAgreement(rank, 2, store), say)

    def exchange() -> None:
        while True:
            lease.exchange()
            time.sleep(0.05)

    def look() -> None:
        while True:
            if lease.is_due():
                lease.look()
            time.sleep(0.05)

    for work in (exchange, look):
        threading.Thread(target=work, daemon=True).start()
    say("paused")
    sys.stdin.read()
    os._exit(0)  # threads use the store still


if __name__ == "__main__":
    main()
