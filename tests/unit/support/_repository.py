"""A project under git, for tests of what its commits choose."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Repository:
    """Commits are made at chosen times."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self._git("init", "-q")

    def commit(self, files: dict[str, str], *, hours: float = 0) -> str:
        """Write files, commit so many hours after the commit before, and return its hash."""
        self.now += timedelta(hours=hours)
        for name, text in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
        self._git("add", ".")
        self._git("commit", "-q", "-m", "x")
        return self._git("rev-parse", "HEAD").strip()

    def _git(self, *arguments: str) -> str:
        when = self.now.isoformat()
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *who, *arguments],
            cwd=self.root,
            env={"PATH": "/usr/bin:/bin", "GIT_COMMITTER_DATE": when, "HOME": str(self.root)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
