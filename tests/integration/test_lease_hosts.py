"""Two ranks on two hosts, here network namespaces, end a pause whose lease is over as one.

The hosts share no network but one link, and each rank's page is its own. Needs root, for the
namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from sidecar._shared_pages.pause_lease import PauseLease, PauseLeasePage, deadline_ns, lease_path
from tests.integration.conftest import TIMES
from tests.support.checkpoints import Checkpoint, make_checkpoint
from tests.support.hosts import Host, two_hosts
from tests.support.procs import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LEASE_MS = 1000.0


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with two_hosts() as made:
        yield made


@contextlib.contextmanager
def rank(number: int, hosts: list[Host], page: Path) -> Iterator[subprocess.Popen[str]]:
    """The process of one rank, on its host."""
    module = ("-m", "tests.integration._lease_rank")
    words = [str(number), hosts[0].address, hosts[number].address, str(page)]
    process = subprocess.Popen(
        hosts[number].command(sys.executable, *module, *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:  # closes its pipes
        try:
            yield process
        finally:
            process.kill()


def lines_until(process: subprocess.Popen[str], last: str) -> list[str]:
    """What a rank says, up to this line."""
    assert process.stdout is not None
    found: list[str] = []
    while last not in found:
        line = process.stdout.readline()
        assert line, f"the rank has ended after {found}"
        found.append(line.strip())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sidecars", ["live", "one is dead"])
def test_ranks_on_two_hosts_resume_once_and_together(
    hosts: list[Host], tmp_path: Path, sidecars: str
) -> None:
    """Trainer and broker are gone, so nobody renews: also if a sidecar is gone with them."""
    folders = [tmp_path / str(number) for number in range(2)]
    pages = [lease_path(folder / "core.page") for folder in folders]
    for folder in folders:
        folder.mkdir()
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(rank(number, hosts, pages[number])) for number in range(2)]
        for each in ranks:
            lines_until(each, "paused")
        dead = subprocess.Popen(["true"])
        dead.wait()
        for number, path in enumerate(pages):
            writer = dead.pid if sidecars == "one is dead" and number else os.getpid()
            lease = PauseLease(
                number + 1, "u1", deadline_ns(LEASE_MS), writer, "moe", 3, "", (), False, False
            )
            with PauseLeasePage.open(path) as page:
                page.write_lease(lease)
        said = [lines_until(each, "resumed 1") for each in ranks]
        assert all("quarantined" not in line for each in said for line in each)
        for path in pages:
            with PauseLeasePage.open(path) as page:
                end = page.outcome()
                assert end is not None
                assert end.state == "resumed"
        for each in reversed(ranks):  # and no second time; rank 0 has the store
            assert each.stdin is not None
            each.stdin.close()
            assert each.stdout is not None
            assert "resumed 2" not in each.stdout.read()


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("moe"), seed=8, experts=4)


ASK = """
import sys
from tests.integration.test_killed import generate
print(len(generate(sys.argv[1])))
"""


@pytest.mark.slow
def test_embedded_ranks_on_two_hosts_generate_again(hosts: list[Host], moe: Checkpoint) -> None:
    """With their sidecars; the broker and the trainer are killed in a pause of both."""
    first, _ = hosts
    wavebus = (sys.executable, "-m", "bus._cli.main")
    with contextlib.ExitStack() as stack:
        listen = ("--listen", f"tcp://{first.address}:*", *TIMES)
        broker = stack.enter_context(first.start(*wavebus, "broker", *listen))
        address = broker.first_line()
        for number, host in enumerate(hosts):
            which = (
                "--dp-rank",
                str(number),
                "--dp-master",
                f"{first.address}:29513",
                "--host",
                host.address,
            )
            words = ("--dp-size", "2", "--dp-group", "moe", *which, "--model", str(moe.folder))
            bus = ("--broker", address)
            rank = host.start(*wavebus, "sidecar", *bus, "--engine", "embedded", *words)
            stack.enter_context(rank)
        for _ in range(2):
            broker.wait_event("peer_joined", role="engine")
        script = ROOT / "tests" / "support" / "held_pause.py"
        shown = first.start(*wavebus, "status", "--broker", address, "--json")
        stack.enter_context(shown)
        assert shown.process.stdout is not None
        status = json.loads(shown.process.stdout.read())
        endpoints = [each["endpoint"] for each in status["groups"][0]["engines"]]
        trainer = stack.enter_context(first.start(sys.executable, str(script), address))
        assert trainer.first_line() == "paused"
        broker.kill()
        trainer.kill()
        assert len(endpoints) == 2
        for endpoint in endpoints:
            asks = stack.enter_context(first.start(sys.executable, "-c", ASK, endpoint))
            assert asks.first_line() == "8"
