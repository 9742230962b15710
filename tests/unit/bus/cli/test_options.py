"""Wrong values of options are refused with the option's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bus._cli.main import run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["status", "--broker", "nonsense"], "'--broker': 'nonsense': an address looks like"),
        (["why", "--broker", ""], "'--broker': '': an address looks like"),
        (["routes", "--broker", "tcp://127.0.0.1:77777"], "'--broker': 'tcp://127.0.0.1:77777'"),
        (["broker", "--listen", "7710"], "'--listen': '7710': an address looks like"),
        (["status", "--timeout-s", "nan"], "'--timeout-s': 'nan' is not a finite number"),
        (["demo", "--seconds", "inf"], "'--seconds': 'inf' is not a finite number"),
        (["sidecar", "--attach", "nonsense"], "'--attach': 'nonsense': a URL looks like"),
        (["doctor", "--attach", "http://x:99999"], "'--attach': 'http://x:99999': a URL looks"),
        (["routes", "--router", "127.0.0.1:30000"], "'--router': '127.0.0.1:30000': a URL looks"),
        (["demo", "--picture", "/none/x.png"], "'--picture': /none/x.png: no such folder"),
        (["bench", "gap", "--picture", "/none/x.png"], "'--picture': /none/x.png: no such folder"),
        (["bench", "gap", "--logs", "/proc/none"], "--logs: /proc/none: No such file or directory"),
        (["broker", "--journal", ""], "'--journal': the path is empty"),
        (["journal", "show", __file__, "--since", "nan"], "'--since': 'nan': give seconds"),
    ],
)
def test_the_option_is_named(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2, before anything is done."""
    assert run(words) == 2
    assert told in capsys.readouterr().err


def test_the_environment_variable_of_a_wrong_value_is_refused_likewise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WAVEBUS_BROKER", "nonsense")
    assert run(["status"]) == 2
    assert "'--broker': 'nonsense'" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["[1, 2]", "{ a = 1 }", "2026-03-01", "true"])
def test_a_wrong_type_in_the_settings_file_is_refused_likewise(
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wavebus.toml").write_text(f"[status]\ntimeout-s = {value}\n", encoding="utf-8")
    assert run(["status"]) == 2
    assert "'--timeout-s': " in capsys.readouterr().err
