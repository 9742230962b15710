"""Each guarantee, broken on purpose, makes the suite that stands for it fail.

A mutant is a patch: a header that names the guarantee and the suite, then a unified
diff. It is applied to a copy of the packages, and the suite is run there. A suite that
passes proves nothing about the guarantee: the mutant has survived, and this test fails.

Which schedules meet a mutant changes with every change of the protocol. Where few of a property
do, its suite names an example of the same rule behind it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from _pytest.config import default_plugins

from tests.support.ci import recorded, without_ci
from tests.support.fork_server import Template, run_forked

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
PATCHES: Final = sorted(HERE.glob("*.patch"))
COPIED: Final = (
    *("bus", "sidecar", "trainer_agent", "lab"),
    *("tests", "examples", "pyproject.toml"),
)
# Two thirds of a suite's processor time are imports. So each is forked from a process that has
# imported what is not wavebus.
TEMPLATE: Final = Template(
    (
        *("pytest", *(f"_pytest.{name}" for name in default_plugins)),
        *(entry.module for entry in entry_points(group="pytest11")),
        *("hypothesis.strategies", "aiohttp.web", "aiohttp.test_utils", "safetensors.torch"),
        *("anyio.abc", "anyio.to_thread", "click.testing", "msgpack", "msgspec", "numpy"),
        *("structlog", "torch.distributed", "zmq.asyncio"),
    )
)
# Compiled modules are copied too: Python uses those whose source is as old and as long.
LEFT: Final = shutil.ignore_patterns("mutants", "gpu", "*.pyc.*")
AT_ONCE: Final = 4  # many of them wait
CI_PARTS: Final = 10  # of which CI runs one
LIMIT_S: Final = 300.0
WHOLE_LIMIT_S: Final = 900.0  # of many suites at once
SHARE: Final = "0.4"  # of a model's examples
# Fails the run when anything but the copy would be imported. A counterexample is not shrunk: nobody
# reads it, and shrinking can take minutes.
GUARD: Final = """
import json
from importlib.util import find_spec
from pathlib import Path

from hypothesis import Phase, settings

settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None)
settings.load_profile("mutants")


def pytest_sessionstart():
    here = Path(__file__).resolve().parent
    for name in ("bus", "sidecar", "trainer_agent", "lab", "tests"):
        found = find_spec(name)
        places = [found.origin] if found.origin else list(found.submodule_search_locations)
        for place in places:
            assert here in Path(place).resolve().parents, place
    (here / "guarded").touch()


def pytest_collection_modifyitems(items):
    if text := (Path(__file__).parent / "chosen.json").read_text(encoding="utf-8"):
        chosen = [(word, tuple(paths)) for word, paths in json.loads(text)["suites"].items()]
        passed = set(json.loads(text)["passed"])
        items[:] = [
            item
            for item in items
            if item.nodeid not in passed
            and any(word in item.nodeid and item.nodeid.startswith(paths) for word, paths in chosen)
        ]
"""


@dataclass(frozen=True)
class Run:
    """How a suite ended in a copy."""

    code: int
    output: str


@dataclass(frozen=True)
class Header:
    """What a patch says of itself."""

    breaks: str
    suite: tuple[str, ...]


def header_of(patch: Path) -> Header:
    fields: dict[str, str] = {}
    for line in patch.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        key, _, value = line[2:].partition(": ")
        fields[key] = value
    return Header(fields["breaks"], tuple(fields["suite"].split()))


PROPERTIES: Final = ("tests/model/", "tests/chaos/test_schedules.py")


def files_of(patch: Path) -> frozenset[str]:
    """The patch, what it breaks, and the files of its suite."""
    text = patch.read_text(encoding="utf-8")
    broken = re.findall(r"^\+\+\+ b/(\S+)", text, re.MULTILINE)
    suite = [each.partition("::")[0] for each in header_of(patch).suite]
    return frozenset({str(patch.relative_to(ROOT)), *broken, *suite})


def all_suites(patches: list[Path]) -> tuple[tuple[str, ...], str]:
    """The files of all suites, and for the guard what each of them chooses: paths, and a word; and
    which tests have passed already, in this run of CI."""
    chosen: dict[str, list[str]] = {}
    for suite in {header_of(patch).suite for patch in patches}:
        paths, word = (suite[:-2], suite[-1]) if "-k" in suite else (suite, "")
        assert "-k" not in paths, f"-k and one word end a suite: {suite}"
        chosen.setdefault(word, []).extend(paths)
    files = {path.split("::")[0] for paths in chosen.values() for path in paths}
    return tuple(sorted(files)), json.dumps({"suites": chosen, "passed": recorded("passed")})


def copy_packages(folder: Path) -> None:
    """Lay the packages out in a folder."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=LEFT)
        else:
            shutil.copy(source, target)


def run_suite(
    whole: Path,
    folder: Path,
    suite: tuple[str, ...],
    patch: Path | None = None,
    *,
    chosen: str = "",
    limit_s: float = LIMIT_S,
) -> Run:
    """Break a copy of the packages, and run the suite there, or what is ``chosen`` of it."""
    # Links are enough: a patched file is a new one, and nothing else is written.
    shutil.copytree(whole, folder, copy_function=os.link, dirs_exist_ok=True)
    if patch is not None:
        applied = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", str(patch)],
            cwd=folder,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        if applied.returncode:
            return Run(-1, f"the patch does not apply any more:\n{applied.stderr}")
    (folder / "mutant_guard.py").write_text(GUARD, encoding="utf-8")
    # A file, as it may be larger than what the environment takes.
    (folder / "chosen.json").write_text(chosen, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "mutant_guard"]
    # The template has imported plugins without rewriting their asserts.
    command += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", *suite]
    environment = {
        **without_ci(os.environ),
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "WAVEBUS_MODEL_SHARE": SHARE,
    }
    try:
        done = run_forked(
            command, env=environment, cwd=folder, timeout_s=limit_s, template=TEMPLATE
        )
    except subprocess.TimeoutExpired:
        return Run(-1, f"no end within {limit_s} s")
    if not (folder / "guarded").exists():
        return Run(-1, f"the copy was not what was imported:\n{done.stdout}\n{done.stderr}")
    return Run(done.returncode, f"{done.stdout[-3000:]}\n{done.stderr[-1000:]}")


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Run]]]:
    """What was chosen, begun some at a time; each test waits for its own."""
    whole = tmp_path_factory.mktemp("whole")
    copy_packages(whole)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun: dict[str, Future[Run]] = {}
        items = [each for each in request.session.items if isinstance(each, pytest.Function)]
        names = {each.originalname for each in items if each.path == Path(__file__)}
        patches: list[Any] = [
            each.callspec.params["patch"]
            for each in items
            if each.originalname == test_the_mutant_is_caught.__name__
        ]
        if test_the_suites_pass_on_what_is_not_broken.__name__ in names:
            # By themselves, these are all of them.
            files, chosen = all_suites(patches or PATCHES)
            suite = ("-n", "2", "--dist", "worksteal", *files)
            folder = tmp_path_factory.mktemp("copy")
            begun[""] = pool.submit(
                run_suite, whole, folder, suite, chosen=chosen, limit_s=WHOLE_LIMIT_S
            )
        for patch in patches:
            suite = header_of(patch).suite
            folder = tmp_path_factory.mktemp("copy")
            begun[patch.stem] = pool.submit(run_suite, whole, folder, suite, patch)
        yield begun
        for future in begun.values():
            future.cancel()


def test_the_suites_pass_on_what_is_not_broken(runs: dict[str, Future[Run]]) -> None:
    """Or they would kill every mutant, and prove nothing."""
    run = runs[""].result()
    nothing_left = run.code == pytest.ExitCode.NO_TESTS_COLLECTED and recorded("passed")
    assert run.code == 0 or nothing_left, run.output


def test_a_suite_is_told_of_more_tests_than_an_environment_holds(tmp_path: Path) -> None:
    """CI's fast part passes some 6,000, whose names are half a megabyte."""
    copy_packages(tmp_path / "whole")
    suite = "tests/unit/support/test_sampling.py"
    passed = [f"tests/unit/test_another.py::test_{number:050}" for number in range(20_000)]
    chosen = json.dumps({"suites": {"": [suite]}, "passed": passed})
    run = run_suite(tmp_path / "whole", tmp_path / "copy", (suite,), chosen=chosen)
    assert run.code == 0, run.output


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param(patch, id=patch.stem, marks=pytest.mark.one_in(CI_PARTS, files_of(patch)))
        for patch in PATCHES
    ],
)
def test_the_mutant_is_caught(runs: dict[str, Future[Run]], patch: Path) -> None:
    """The suite that stands for the guarantee fails, by its tests and not by an accident."""
    run = runs[patch.stem].result()
    header = header_of(patch)
    assert run.code != 0, f"survived: {header.breaks}\n{run.output}"
    assert run.code == 1, f"{' '.join(header.suite)} did not run:\n{run.output}"


def test_most_guarantees_of_the_machines_stand_in_properties() -> None:
    """At least half of the mutants that break a machine of the protocol are caught by properties of
    all that happens, in models and schedules, and not by examples."""
    machines = [p for p in PATCHES if "\n+++ b/bus/_protocol/" in p.read_text(encoding="utf-8")]
    suites = [header_of(patch).suite[0] for patch in machines]
    by_property = [each for each in suites if each.startswith(PROPERTIES)]
    assert 2 * len(by_property) >= len(machines) >= 14
