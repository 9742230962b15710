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
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
PATCHES: Final = sorted(HERE.glob("*.patch"))
COPIED: Final = ("bus", "sidecar", "trainer_agent", "tests", "pyproject.toml")
# Compiled modules are copied too: Python uses those whose source is as old and as long.
LEFT: Final = shutil.ignore_patterns("mutants", "gpu", "*.pyc.*")
AT_ONCE: Final = 3  # many of them wait
LIMIT_S: Final = 300.0
WHOLE_LIMIT_S: Final = 900.0  # of many suites at once
SHARE: Final = "0.4"  # of a model's examples
# Fails the run when anything but the copy would be imported. A counterexample is not shrunk: nobody
# reads it, and shrinking can take minutes.
GUARD: Final = """
import json
import os
from importlib.util import find_spec
from pathlib import Path

from hypothesis import Phase, settings

settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None)
settings.load_profile("mutants")


def pytest_sessionstart():
    here = Path(__file__).resolve().parent
    for name in ("bus", "sidecar", "trainer_agent", "tests"):
        found = find_spec(name)
        places = [found.origin] if found.origin else list(found.submodule_search_locations)
        for place in places:
            assert here in Path(place).resolve().parents, place
    (here / "guarded").touch()


def pytest_collection_modifyitems(items):
    if text := os.environ["WAVEBUS_MUTANTS_CHOSEN"]:
        chosen = [(word, tuple(paths)) for word, paths in json.loads(text).items()]
        items[:] = [
            item
            for item in items
            if any(word in item.nodeid and item.nodeid.startswith(paths) for word, paths in chosen)
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


def all_suites() -> tuple[tuple[str, ...], str]:
    """The files of all suites, and for the guard what each of them chooses: paths, and a word."""
    chosen: dict[str, list[str]] = {}
    for suite in {header_of(patch).suite for patch in PATCHES}:
        paths, word = (suite[:-2], suite[-1]) if "-k" in suite else (suite, "")
        assert "-k" not in paths, f"-k and one word end a suite: {suite}"
        chosen.setdefault(word, []).extend(paths)
    files = {path.split("::")[0] for paths in chosen.values() for path in paths}
    return tuple(sorted(files)), json.dumps(chosen)


def run_suite(
    folder: Path,
    suite: tuple[str, ...],
    patch: Path | None = None,
    *,
    chosen: str = "",
    limit_s: float = LIMIT_S,
) -> Run:
    """Copy the packages, break them, and run the suite there, or what is ``chosen`` of it."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=LEFT)
        else:
            shutil.copy(source, target)
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
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "mutant_guard"]
    command += ["-p", "no:cacheprovider", *suite]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(folder),
                "PYTHONDONTWRITEBYTECODE": "1",
                "WAVEBUS_MODEL_SHARE": SHARE,
                "WAVEBUS_MUTANTS_CHOSEN": chosen,
            },
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
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
    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun: dict[str, Future[Run]] = {}
        for item in request.session.items:
            if not isinstance(item, pytest.Function) or item.path != Path(__file__):
                continue
            what: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
            folder = tmp_path_factory.mktemp("copy")
            if item.originalname == test_the_suites_pass_on_what_is_not_broken.__name__:
                files, chosen = all_suites()
                suite = ("-n", "2", "--dist", "worksteal", *files)
                begun[""] = pool.submit(
                    run_suite, folder, suite, chosen=chosen, limit_s=WHOLE_LIMIT_S
                )
            elif "patch" in what:
                patch = what["patch"]
                suite = header_of(patch).suite
                begun[patch.stem] = pool.submit(run_suite, folder, suite, patch)
        yield begun
        for future in begun.values():
            future.cancel()


def test_the_suites_pass_on_what_is_not_broken(runs: dict[str, Future[Run]]) -> None:
    """Or they would kill every mutant, and prove nothing."""
    run = runs[""].result()
    assert run.code == 0, run.output


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_the_mutant_is_caught(runs: dict[str, Future[Run]], patch: Path) -> None:
    """The suite that stands for the guarantee fails, by its tests and not by an accident."""
    run = runs[patch.stem].result()
    header = header_of(patch)
    assert run.code != 0, f"survived: {header.breaks}\n{run.output}"
    assert run.code == 1, f"{' '.join(header.suite)} did not run:\n{run.output}"


def test_most_guarantees_of_the_machines_stand_in_properties() -> None:
    """At least half of the mutants that break a machine of the protocol are caught by properties of
    all that happens, in models and schedules, and not by examples."""
    machines = [p for p in PATCHES if "\n+++ b/bus/protocol/" in p.read_text(encoding="utf-8")]
    suites = [header_of(patch).suite[0] for patch in machines]
    by_property = [each for each in suites if each.startswith(PROPERTIES)]
    assert 2 * len(by_property) >= len(machines) >= 14
