"""The settings file: what stands at its top holds for all, a table for its command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest

from bus._settings import load
from bus.errors import UsageError
from tests.support.users import NOBODY


def options(*flags: str) -> dict[str, Any]:
    return {each.strip("-"): click.Option([each]) for each in flags}


OPTIONS: dict[str, Any] = {
    **options("--broker", "--group", "--log-level"),
    "json": click.Option(["--json", "as_json"]),
    "update": click.Option(["--update"], multiple=True),
    "run": options("--group", "--name"),
}
COMMANDS = ("sidecar", "broker")


def all_options() -> set[str]:
    return {*OPTIONS, "name", "listen"}


def written(folder: Path, text: str) -> Path:
    path = folder / "some.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_top_is_for_every_command_that_has_the_option(tmp_path: Path) -> None:
    """Also for subcommands; options that it lacks are another command's."""
    path = written(tmp_path, 'broker = "b"\ngroup = "g"\nlisten = 7\n')
    assert load(path, "sidecar", OPTIONS, COMMANDS, all_options) == {
        "broker": "b",
        "group": "g",
        "run": {"group": "g"},
    }


def test_a_table_goes_before_the_top(tmp_path: Path) -> None:
    """And a subcommand's table before its command's top."""
    path = written(
        tmp_path,
        'group = "g"\n[sidecar]\ngroup = "s"\n[sidecar.run]\ngroup = "r"\nname = "n"\n',
    )
    assert load(path, "sidecar", OPTIONS, COMMANDS, all_options) == {
        "group": "s",
        "run": {"group": "r", "name": "n"},
    }


def test_dashes_and_underscores_are_the_same(tmp_path: Path) -> None:
    """Keys are the long options without their dashes in front."""
    path = written(tmp_path, '[sidecar]\nlog-level = "debug"\n')
    assert load(path, "sidecar", OPTIONS, COMMANDS, all_options)["log_level"] == "debug"


def test_values_are_text_by_parameter_name(tmp_path: Path) -> None:
    """So the command checks them as it checks flags. A list is one for an option that allows it."""
    path = written(tmp_path, '[sidecar]\njson = true\nupdate = ["u1", "u2"]\ngroup = [1]\n')
    assert load(path, "sidecar", OPTIONS, COMMANDS, all_options) == {
        "as_json": "True",
        "update": ["u1", "u2"],
        "group": "[1]",
        "run": {},
    }


def test_one_value_of_an_option_that_allows_several(tmp_path: Path) -> None:
    path = written(tmp_path, '[sidecar]\nupdate = "u1"\n')
    assert load(path, "sidecar", OPTIONS, COMMANDS, all_options)["update"] == ["u1"]


def test_another_commands_table_is_not_read(tmp_path: Path) -> None:
    """What stands there is its own affair."""
    path = written(tmp_path, "[broker]\nwhatever = 1\n")
    assert load(path, "sidecar", OPTIONS, COMMANDS, all_options) == {"run": {}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[sidecar]\ngruop = 1\n", r"sidecar has no option 'gruop'"),
        ("[sidecar.run]\ngruop = 1\n", r"sidecar.run has no option 'gruop'"),
        ("[sidcar]\ngroup = 1\n", r"\[sidcar\] names no command; commands are: broker, sid"),
        ("[sidecar]\nas-json = true\n", "options are: broker, group, json, log-level, run, update"),
        ('gruop = "policy"\n', "no command has the option 'gruop'"),
        ("[sidecar\n", "some.toml"),
        ("x = \n", "some.toml"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_the_key(
    tmp_path: Path, text: str, told: str
) -> None:
    """A typo must not pass in silence."""
    with pytest.raises(UsageError, match=told):
        load(written(tmp_path, text), "sidecar", OPTIONS, COMMANDS, all_options)


def test_a_top_level_key_may_be_another_commands_option(tmp_path: Path) -> None:
    """Or that of a command whose package is missing here, which nobody can tell from a typo."""
    path = written(tmp_path, 'listen = "here"\n')
    assert load(path, "sidecar", OPTIONS, COMMANDS, all_options) == {"run": {}}
    path = written(tmp_path, 'strange = "there"\n')
    assert load(path, "sidecar", OPTIONS, COMMANDS, lambda: None) == {"run": {}}


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Missing, a folder, or no text."""
    with pytest.raises(UsageError, match="No such file"):
        load(tmp_path / "none.toml", "sidecar", OPTIONS, COMMANDS, all_options)
    with pytest.raises(UsageError, match="directory"):
        load(tmp_path, "sidecar", OPTIONS, COMMANDS, all_options)
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"bad\.toml"):
        load(tmp_path / "bad.toml", "sidecar", OPTIONS, COMMANDS, all_options)


def test_the_default_file_is_read_where_it_is_and_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file that nobody asked for is nothing wrong."""
    monkeypatch.chdir(tmp_path)
    assert load(None, "sidecar", OPTIONS, COMMANDS, all_options) == {}
    (tmp_path / "wavebus.toml").write_text('broker = "here"\n', encoding="utf-8")
    assert load(None, "sidecar", OPTIONS, COMMANDS, all_options)["broker"] == "here"


def test_a_file_of_another_user_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may put one into a shared folder; one's own, and root's, are read as they are."""
    path = tmp_path / "wavebus.toml"
    path.write_text('group = "theirs"\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = {"group": "theirs", "run": {"group": "theirs"}}
    assert load(None, "sidecar", OPTIONS, COMMANDS, all_options) == found
    if os.geteuid() == 0:
        os.chown(path, NOBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    with pytest.raises(UsageError, match=r"another user.*--config wavebus\.toml"):
        load(None, "sidecar", OPTIONS, COMMANDS, all_options)
    assert load(Path("wavebus.toml"), "sidecar", OPTIONS, COMMANDS, all_options) == found
