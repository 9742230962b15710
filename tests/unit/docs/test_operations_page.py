"""What the page of operations shows can be used as it stands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from bus._cli.main import run

PAGE = Path(__file__).resolve().parents[3] / "docs/operations.md"
FILES = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("text", FILES)
def test_its_settings_file_is_one_of_each_command_that_has_a_table(
    text: str, tmp_path: Path
) -> None:
    """A key or a table that no command has would be refused."""
    file = tmp_path / "wavebus.toml"
    file.write_text(text, encoding="utf-8")
    commands = [name for name, value in tomllib.loads(text).items() if isinstance(value, dict)]
    assert commands
    for name in commands:
        assert run(["--config", str(file), name, "--help"]) == 0


def test_it_shows_a_settings_file() -> None:
    assert FILES
