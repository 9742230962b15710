"""What CI asks of pytest: fewer tests, a second run of those that fail, and a record.

``WAVEBUS_SAMPLE``, a commit, leaves out tests that are marked ``ci`` or ``one_in`` and that
:mod:`tests.support.sampling` does not choose. With ``WAVEBUS_SAMPLE_ALL=1``, for the newest vLLM,
this holds for all tests, unless an adapter to vLLM has changed: then none is left out.

A change of more than ``LARGE`` files touches nearly every test: CI runs half of what it touches.
Whoever makes such a change runs ``make slow`` and ``make mutants``.

``WAVEBUS_CI``, a folder, has each test that fails named at once, and run once more, alone, when the
others have ended. Those that pass then are flaky: they fail nobody. The folder's files ``sampled``,
``flaky`` and ``passed`` are what ``.ci/run`` prints at its end, and what mutants need not run
again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.support.sampling import ROOT, Touch, changed_files, is_sampled

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PARTS: Final = 3  # of the tests marked `ci`
LARGE: Final = 300  # changed files
MOST_AGAIN: Final = 40
FOLDER: Final = "WAVEBUS_CI"
LAST: Final = "WAVEBUS_CI_LAST"  # of the second run: there is no third
VARIABLES: Final = ("WAVEBUS_SAMPLE", "WAVEBUS_SAMPLE_ALL", FOLDER, LAST)


def without_ci(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a pytest that runs all it is asked for, and once."""
    return {name: value for name, value in environment.items() if name not in VARIABLES}


def record(file: str, lines: Iterable[str]) -> None:
    """Add lines to a file of CI's folder, if there is one."""
    if folder := os.environ.get(FOLDER):
        with (Path(folder) / file).open("a", encoding="utf-8") as opened:
            opened.writelines(f"{line}\n" for line in lines)


def recorded(file: str) -> list[str]:
    """The lines of a file of CI's folder."""
    path = Path(os.environ.get(FOLDER, "")) / file
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def pytest_configure(config: pytest.Config) -> None:
    if commit := os.environ.get("WAVEBUS_SAMPLE"):
        config.pluginmanager.register(Sample(commit))
    if os.environ.get(FOLDER) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondRuns(config))


class Sample:
    """Leaves out what is not sampled."""

    def __init__(self, commit: str, root: Path = ROOT) -> None:
        self._commit = commit
        self._changed = changed_files(commit, root)
        self._touch = Touch(self._changed, root)
        self._is_large = len(self._changed) > LARGE
        self._all = os.environ.get("WAVEBUS_SAMPLE_ALL") == "1"

    @pytest.hookimpl(trylast=True)  # after -m and -k
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        kept: list[pytest.Item] = []
        left: list[pytest.Item] = []
        counts: Counter[tuple[str, str]] = Counter()
        for item in items:
            kind, why = self._why(item)
            (kept if why else left).append(item)
            if kind:
                counts[kind, "all"] += 1
                counts[kind, why] += 1
        items[:] = kept
        if left:
            config.hook.pytest_deselected(items=left)
        worker = getattr(config, "workerinput", {}).get("workerid", "gw0")
        if worker == "gw0":
            half = ", half of it" if self._is_large else ""
            record(
                "sampled",
                (
                    f"{kind}: {number - counts[kind, '']} of {number} run: "
                    f"{counts[kind, 'sampled']} by the commit's hash, "
                    f"{counts[kind, 'touched']} for what {len(self._changed)} files touch{half}"
                    for (kind, which), number in counts.items()
                    if which == "all"
                ),
            )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """That none was chosen is no mistake here."""
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    def _why(self, item: pytest.Item) -> tuple[str, str]:
        """Of which kind a test is, empty if all of them run, and why this one runs, if it does."""
        if mark := item.get_closest_marker("one_in"):
            parts, files = mark.args
            touched = not self._changed.isdisjoint(files)
            kind = item.path.parent.name
        elif self._all or item.get_closest_marker("ci"):
            parts, kind = PARTS, "newest vLLM" if self._all else "marked ci"
            touched = self._touch.touches(item.nodeid.partition("::")[0])
            touched = touched or (self._all and self._touch.adapters_changed)
        else:
            return "", "not sampled"
        if is_sampled(item.nodeid, self._commit, parts):
            return kind, "sampled"
        if touched and self._is_large:
            touched = is_sampled(item.nodeid, self._commit, 2)
        return kind, "touched" if touched else ""


class SecondRuns:
    """Runs what failed once more, and tells what is flaky."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, list[pytest.TestReport]] = {}
        self._passed: set[str] = set()
        self._flaky: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, []).append(report)
            self._name_failure(report)
        elif report.passed and report.when == "call":
            self._passed.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """xdist's workers have ended, and the closing lines are not written yet."""
        stopped = session.shouldstop or session.shouldfail or os.environ.get(LAST)
        only_tests = session.exitstatus == pytest.ExitCode.TESTS_FAILED and not stopped
        if only_tests and 0 < len(self._failed) <= MOST_AGAIN:
            reporter = session.config.pluginmanager.get_plugin("terminalreporter")
            assert reporter is not None
            again = self._run_again(session.config)
            reporter.write_sep("=", f"once more, alone: {len(self._failed)} that failed")
            reporter.write(again.stdout)
            if again.returncode == 0 and self._failed.keys() == set(self._flaky):
                session.exitstatus = pytest.ExitCode.OK
            for test in self._flaky:
                for report in self._failed[test]:
                    kind = "failed" if report in reporter.stats.get("failed", ()) else "error"
                    reporter.stats[kind].remove(report)
                    if not reporter.stats[kind]:
                        del reporter.stats[kind]
                    reporter.stats.setdefault("flaky", []).append(report)
        record("flaky", self._flaky)
        if os.environ.get("WAVEBUS_SAMPLE_ALL") != "1":  # mutants run on the older vLLM
            record("passed", sorted(self._passed - self._failed.keys()))

    def _name_failure(self, report: pytest.TestReport) -> None:
        """A run that is ended from outside, as by CI's time limit, never prints its summary."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reason = report.longreprtext.strip().rpartition("\n")[2]
        reporter.ensure_newline()
        reporter.write_line(f"{report.when} of {report.nodeid} failed: {reason}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self._flaky:
            terminalreporter.write_sep("_", f"FLAKY {test}")
            for report in self._failed[test]:
                terminalreporter.line(report.longreprtext)
                for name, text in report.sections:
                    terminalreporter.write_sep("-", name)
                    terminalreporter.line(text)

    def _run_again(self, config: pytest.Config) -> subprocess.CompletedProcess[str]:
        """Alone: this process has ended all others of its own, and waits."""
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            done = subprocess.run(
                [*command, *self._failed],
                cwd=config.rootpath,
                env={**without_ci(os.environ), FOLDER: folder, LAST: "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            passed = Path(folder) / "passed"
            told = passed.read_text(encoding="utf-8").splitlines() if passed.is_file() else []
            self._flaky = [test for test in self._failed if test in told]
        return done
