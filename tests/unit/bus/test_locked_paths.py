"""What dead processes have left is removed, and what others have made is left alone."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bus._locked_paths import LockedFolder, sweep
from bus._weight_transfer.formats import SHM_FOLDER
from tests.support.users import as_nobody

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder that everybody can read, and in which only root can remove anything."""
    folder = Path(tempfile.mkdtemp(dir=SHM_FOLDER))
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


def test_what_is_locked_stays(tmp_path: Path) -> None:
    """And what is not, goes."""
    left, used = tmp_path / "left", tmp_path / "used"
    left.touch()
    with used.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sweep([left, used, tmp_path / "gone"], Path.unlink) == ["left"]
    assert not left.exists()
    assert used.exists()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_can_not_be_removed_is_left(closed: Path, kind: str) -> None:
    """Another user may make a file of that name that all can read and only that user can remove."""
    stranger = closed / "wavebus-x"
    stranger.touch(0o644) if kind == "file" else stranger.mkdir(0o755)
    closed.chmod(0o555)
    with as_nobody():
        assert sweep([stranger], Path.unlink if kind == "file" else Path.rmdir) == []
    assert stranger.exists()


def test_a_pipe_is_not_waited_for_and_a_link_not_followed(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.touch()
    link.symlink_to(target)
    os.mkfifo(pipe)
    assert sweep([link, pipe], Path.unlink) == ["pipe"]
    assert target.exists()
    assert link.is_symlink()


def test_a_folder_is_made_beside_one_of_another_user(closed: Path) -> None:
    (closed / "made-1-x").mkdir(0o755)
    closed.chmod(0o1777)
    with as_nobody():
        made = LockedFolder("made-", closed)
        assert made.path.is_dir()
        made.close()
    assert (closed / "made-1-x").is_dir() is (os.geteuid() == 0)
