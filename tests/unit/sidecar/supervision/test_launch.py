"""Ports, folders and guards of processes that a sidecar starts."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from bus._locked_paths import LockedFolder
from sidecar._supervision.launch import free_port

if TYPE_CHECKING:
    from pathlib import Path

MAKES_ONE = """
import sys
from pathlib import Path
from bus._locked_paths import LockedFolder
folder = LockedFolder("held-", Path(sys.argv[1]))
(folder.path / "page").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_whose_maker_was_killed_goes_with_the_next(tmp_path: Path) -> None:
    """One whose maker lives does not, nor does another's."""
    (tmp_path / "other").mkdir()
    living = LockedFolder("held-", tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", MAKES_ONE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as maker:
        assert maker.stdout is not None
        left = maker.stdout.readline().strip()
        maker.send_signal(signal.SIGKILL)
        maker.wait()
    assert {str(path) for path in tmp_path.glob("held-*")} == {str(living.path), left}
    new = LockedFolder("held-", tmp_path)
    assert set(tmp_path.iterdir()) == {tmp_path / "other", living.path, new.path}
    for folder in (living, new, new):
        folder.close()
    assert set(tmp_path.iterdir()) == {tmp_path / "other"}


def test_a_free_port_is_free_and_below_those_of_outgoing_connections() -> None:
    port = free_port()
    assert 21_000 <= port < 32_000
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
