"""CI runs a test that failed once more, and only one that fails twice fails it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ci import FOLDER, MOST_AGAIN, without_ci

ROOT = Path(__file__).resolve().parents[3]
# A test that fails the first time only leaves a file.
TESTS = """
from pathlib import Path
import pytest

@pytest.fixture
def broken_once():
    once("setup")

def once(name):
    left = Path(__file__).with_name(f"{name}.failed")
    if not left.exists():
        left.touch()
        raise AssertionError(f"{name} fails the first time")

def test_passes():
    pass

def test_flaky():
    once("flaky")

def test_flaky_setup(broken_once):
    pass

@pytest.mark.skipif("Path(__file__).with_name('skips.failed').exists()", reason="failed once")
def test_skips():
    once("skips")

def test_broken():
    assert False, "it is broken"

@pytest.mark.parametrize("number", range(100))
def test_many(number):
    once(f"many{number}")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.support.ci"]\n')
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "ci").mkdir()
    return tmp_path


def run(project: Path, names: str, *options: str) -> tuple[int, str, dict[str, list[str]]]:
    """Exit code, output and what was recorded of tests whose names these words choose."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "-k", names],
        cwd=project,
        env={**without_ci(os.environ), FOLDER: str(project / "ci"), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    files = {path.name: path.read_text().splitlines() for path in (project / "ci").iterdir()}
    return done.returncode, done.stdout, files


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_one_that_passes_the_second_time_is_named_and_fails_nobody(
    project: Path, options: tuple[str, ...]
) -> None:
    code, output, files = run(project, "passes or flaky", *options)
    assert code == 0, output
    assert sorted(files["flaky"]) == ["test_it.py::test_flaky", "test_it.py::test_flaky_setup"]
    assert files["passed"] == ["test_it.py::test_passes"]
    assert re.search("1 passed, (102 deselected, )?2 flaky in", output.splitlines()[-1])
    assert "flaky fails the first time" in output  # why it failed is told all the same


def test_one_that_fails_twice_fails_all(project: Path) -> None:
    code, output, files = run(project, "passes or test_flaky or broken")
    assert code == 1, output
    assert "test_it.py::test_flaky" in files["flaky"]
    assert "test_it.py::test_broken" not in files["flaky"]
    assert "1 failed, 1 passed" in output.splitlines()[-1]
    assert output.count("it is broken") >= 2


def test_one_that_does_not_pass_the_second_time_has_failed(project: Path) -> None:
    code, output, files = run(project, "skips")
    assert code == 1, output
    assert files["flaky"] == []


def test_a_run_that_was_cut_short_has_failed(project: Path) -> None:
    code, output, files = run(project, "flaky", "-x")
    assert code == 1, output
    assert files["flaky"] == []


def test_where_many_fail_none_is_flaky(project: Path) -> None:
    code, output, files = run(project, "many")
    assert code == 1, output
    assert MOST_AGAIN < 100
    assert files["flaky"] == []
