"""The same bus of real processes as the integration tests'; and what the long runs did, told at
their end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.integration.conftest import bus, checkpoint

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

__all__ = ["bus", "checkpoint"]


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """A line for each test that has recorded some figures."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            told = getattr(report, "user_properties", None)
            if told and report.when == "call":
                terminalreporter.write_line(", ".join(f"{key} {value}" for key, value in told))
