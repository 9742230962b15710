"""Settings of all tests."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Generator

# torch's stores ask the DNS for the names of both their ends: where it answers nobody, each
# question would take 5 s, here and in every process that a test starts.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


# On a loaded machine an example of a property, or what it is made of, may be held up for seconds.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """CI runs a part of some tests, and runs again what fails."""
    if os.environ.get("WAVEBUS_SAMPLE") or os.environ.get("WAVEBUS_CI"):
        config.pluginmanager.import_plugin("tests.support.ci")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failed test's report what the processes have logged that it may have used."""
    report = yield
    procs = sys.modules.get("tests.support.procs")
    if report.failed and procs is not None:
        for proc in procs.KNOWN:
            report.sections.append((f"Log of {' '.join(proc.argv[2:6])}", proc.all_text()))
    return report
