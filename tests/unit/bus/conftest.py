"""Logs of the machines are not what these tests read."""

from __future__ import annotations

import pytest

import bus.log


@pytest.fixture(autouse=True, scope="session")
def _quiet_logs() -> None:
    bus.log.configure(level="critical", json=True)
