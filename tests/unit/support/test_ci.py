"""CI runs a test that failed once more, and only one that fails twice fails it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ci import FOLDER, LARGE, MOST_AGAIN, without_ci
from tests.support.sampling import is_sampled
from tests.unit.support._repository import Repository

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

SAMPLED = """
import pytest

@pytest.mark.ci
@pytest.mark.parametrize("number", range(30))
def test_ci(number):
    pass

def test_other():
    pass

@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.one_in(10, {f"{n}.patch"})) for n in range(30)]
)
def test_mutant(number):
    pass
"""
CONFTEST = """
from pathlib import Path
from tests.support.ci import Sample

def pytest_configure(config):
    here = Path(__file__).parent
    config.pluginmanager.register(Sample((here / "commit").read_text(), here))
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


def test_a_failure_is_named_before_the_others_end(project: Path) -> None:
    """A run that CI ends at its time limit prints no summary."""
    _, output, _ = run(project, "test_broken or many")
    assert "call of test_it.py::test_broken failed: test_it.py" in output.partition("FAILURES")[0]


def a_project(folder: Path, changed: str, others: int = 0) -> str:
    """The last commit, 13 hours after the first, changes one file and adds others."""
    (folder / "ci").mkdir()
    repository = Repository(folder)
    markers = "[pytest]\nmarkers =\n    ci\n    one_in\n"
    repository.commit({"tests/test_it.py": SAMPLED, "conftest.py": CONFTEST, "pytest.ini": markers})
    text = f"{SAMPLED}\n" if changed.endswith(".py") else "x"
    more = {f"more/{number}.txt": "" for number in range(others)}
    commit = repository.commit({changed: text, **more}, hours=13)
    (folder / "commit").write_text(commit)
    return commit


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_a_sample_may_be_empty(tmp_path: Path, options: tuple[str, ...]) -> None:
    """As it is of a file of few tests."""
    commit = a_project(tmp_path, "README.md")
    names = (f"tests/test_it.py::test_mutant[{number}]" for number in range(10, 30))
    left = next(name for name in names if not is_sampled(name, commit, 10))
    code, output, files = run(tmp_path, f"test_mutant and {left[-3:-1]}", *options)
    assert code == 0, output
    assert files["sampled"][0].startswith("tests: 0 of 1 run")


@pytest.mark.parametrize("options", [(), ("-n", "2")])
@pytest.mark.parametrize(
    ("changed", "others"),
    [("README.md", 0), ("tests/test_it.py", 0), ("tests/test_it.py", LARGE), ("3.patch", 0)],
)
def test_a_sample_is_run_and_counted(
    tmp_path: Path, options: tuple[str, ...], changed: str, others: int
) -> None:
    commit = a_project(tmp_path, changed, others)
    code, output, files = run(tmp_path, "test", *options, "-rA")
    assert code == 0, output
    ran = set(re.findall(r"^PASSED (\S+)", output, re.MULTILINE))

    def sample(name: str, parts: int) -> set[str]:
        names = [f"tests/test_it.py::{name}[{number}]" for number in range(30)]
        return {each for each in names if is_sampled(each, commit, parts)}

    ci, mutants = sample("test_ci", 3), sample("test_mutant", 10)
    by_hash = [len(ci), len(mutants)]
    if changed == "3.patch":
        mutants.add("tests/test_it.py::test_mutant[3]")
    if others:
        ci |= sample("test_ci", 2)
    elif changed.endswith(".py"):
        ci = {f"tests/test_it.py::test_ci[{number}]" for number in range(30)}
    assert ran == {*ci, *mutants, "tests/test_it.py::test_other"}
    assert files["sampled"] == [
        f"{kind}: {len(names)} of 30 run: {hashed} by the commit's hash, "
        f"{len(names) - hashed} for what {1 + others} files touch{', half of it' if others else ''}"
        for kind, names, hashed in zip(("marked ci", "tests"), (ci, mutants), by_hash, strict=True)
    ]
