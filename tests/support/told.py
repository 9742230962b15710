"""A line at the end of a run for each test that has recorded some figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Pytest's hook: a conftest has it by importing it."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            told = getattr(report, "user_properties", None)
            if told and report.when == "call":
                terminalreporter.write_line(", ".join(f"{key} {value}" for key, value in told))
